"""Check that a model is the chain of its layers, since a pipeline runs the layers alone.

`model.forward` may do more than call one layer after the other: apply a function between two layers, skip
one, or call one twice. A pipeline would then silently train another model. So `forward` is called once with
an object that no function can compute with, while each layer only notes that it was called.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from minidist.parallel.contract.layout import Layout

CALL = "_compiled_call_impl"
"""The attribute that a module's call looks for first, before hooks."""


class _Broken(Exception):
    """The chain is broken; the message says how."""


class _Passed:
    """The object that goes from layer to layer; no function can compute with it."""

    def __init__(self, what: str) -> None:
        self.what = what


def check_layers(model: nn.Module, layout: Layout) -> None:
    """ValueError if a pipeline cannot cut the model into its stages, or the model is more than its layers."""
    layers = _layers_of(model, f"pp is {layout.pp}, and ")
    outside = [name for name in model.state_dict(keep_vars=True) if not name.startswith("layers.")]
    if outside:
        raise ValueError(
            f"pp is {layout.pp}, and the model's {outside[0]} is in none of its `layers`; a pipeline's "
            "stages have layers alone: move it into one, or use dp or tp"
        )
    parts = layout.pp * layout.chunks
    if parts > len(layers):
        raise ValueError(
            f"pp is {layout.pp} with chunks={layout.chunks}, {parts} parts, and the model has {len(layers)} "
            f"layers; give each part at least one"
        )
    require_chain(model)


def require_chain(model: nn.Module) -> None:
    """Check that `model.forward(x)` calls each of `model.layers` once, with the output of the one before.

    Needs no data, runs no layer and no hook, and leaves the model as it was.

    Raises:
        ValueError: the model has no `layers`, or does something else; says what.
    """
    layers = _layers_of(model)
    if getattr(model.forward, "__func__", None) is nn.Module.forward:
        return  # the model defines no forward that could do anything else
    problem = _problem(model, [*layers])
    if problem:
        raise ValueError(
            f"a {type(model).__name__}'s forward is not the chain of its `layers`, which is all that a "
            f"pipeline runs: {problem}; put what happens before, between or after layers into a layer of its "
            "own"
        )


def _layers_of(model: nn.Module, reason: str = "") -> nn.ModuleList | nn.Sequential:
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleList | nn.Sequential):
        raise ValueError(
            f"{reason}a {type(model).__name__} has no `layers`, an nn.ModuleList of functions from tensor to "
            "tensor, that a pipeline could cut; give it one, or use dp or tp"
        )
    return layers


def _problem(model: nn.Module, layers: Sequence[nn.Module]) -> str:
    """Say in words where the chain breaks; empty if it does not."""
    begin = _Passed("the model's input")
    chain: list[_Passed] = [begin]

    def called(layer: nn.Module, *args: Any, **kwargs: Any) -> _Passed:
        index = len(chain) - 1
        name = f"layers.{next(i for i, each in enumerate(layers) if each is layer)}"
        if index == len(layers):
            raise _Broken(f"{name} is called after the last one")
        if layer is not layers[index]:
            raise _Broken(f"{name} is called where layers.{index} is next")
        if kwargs or len(args) != 1:
            raise _Broken(f"{name} is called with {len(args) + len(kwargs)} arguments and should get one")
        if args[0] is not chain[-1]:
            raise _Broken(f"{name} is called with {_described(args[0])} and should get {chain[-1].what}")
        given = _Passed(f"what layers.{index} gave")
        chain.append(given)
        return given

    before = [(part, dict(part.__dict__)) for part in model.modules()]
    own = {id(layer) for layer in layers}
    forward = model.forward
    try:
        for part, _ in before:
            if id(part) not in own:
                part.__dict__[CALL] = part.forward
        for layer in layers:
            direct = partial(called, layer)
            layer.__dict__.update({CALL: direct, "forward": direct})
        with torch.random.fork_rng(devices=[]):
            result = forward(begin)
    except _Broken as broken:
        return str(broken)
    except Exception as error:
        said = str(error).strip().splitlines()
        kind = f"{type(error).__name__}{': ' + said[0] if said else ''}"
        return f"it computes with {chain[-1].what} itself ({kind})"
    finally:
        for part, attributes in before:
            part.__dict__.clear()
            part.__dict__.update(attributes)
    if len(chain) <= len(layers):
        return f"layers.{len(chain) - 1} is not called"
    if result is not chain[-1]:
        return f"it returns {_described(result)} and not {chain[-1].what}"
    return ""


def _described(value: object) -> str:
    return value.what if isinstance(value, _Passed) else f"a {type(value).__name__}"
