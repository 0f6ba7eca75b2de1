"""Is a model the chain of its layers? A pipeline runs the layers alone, so what else happens would be lost.

`model.forward` may do more than call one layer after the other: apply a function between two of them, skip
one, or call one twice. The stages of a pipeline would then train another model, and nobody would be told. So
`forward` is called once with nothing that can be computed with, while the layers only note who called them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from minidist.parallel.contract.layout import Layout

CALL = "_compiled_call_impl"
"""What a module's call looks for first, before hooks."""


class _Broken(Exception):
    """The chain is broken, in words."""


class _Passed:
    """What goes from layer to layer: nothing that any function takes."""

    def __init__(self, what: str) -> None:
        self.what = what


def check_layers(model: nn.Module, layout: Layout) -> None:
    """ValueError where a pipeline cannot have the model's layers, or they are not all of it."""
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleList | nn.Sequential):
        raise ValueError(
            f"pp is {layout.pp}, and a {type(model).__name__} has no `layers`, an nn.ModuleList of functions "
            "from tensor to tensor, that a pipeline could cut; give it one, or use dp or tp"
        )
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
    """See that `model.forward(x)` is `model.layers`, each called once with what the one before gave.

    Needs no data, runs no layer and no hook, and leaves the model as it was.

    Raises:
        ValueError: it is not, or the model has no `layers`; with what it does instead.
    """
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleList | nn.Sequential):
        raise ValueError(
            f"a {type(model).__name__} has no `layers`, an nn.ModuleList of functions from tensor to tensor"
        )
    if getattr(model.forward, "__func__", None) is nn.Module.forward:
        return  # it has none of its own, that would do anything else
    problem = _problem(model, [*layers])
    if problem:
        raise ValueError(
            f"a {type(model).__name__}'s forward is not the chain of its `layers`, which is all that a "
            f"pipeline runs: {problem}; put what happens before, between or after layers into a layer of its "
            "own"
        )


def _problem(model: nn.Module, layers: Sequence[nn.Module]) -> str:
    """What breaks the chain, in words; empty where nothing does."""
    begin = _Passed("the model's input")
    chain = [begin]

    def called(layer: nn.Module, *args: Any, **kwargs: Any) -> _Passed:
        place = len(chain) - 1
        name = f"layers.{next(i for i, each in enumerate(layers) if each is layer)}"
        if place == len(layers):
            raise _Broken(f"{name} is called after the last one")
        if layer is not layers[place]:
            raise _Broken(f"{name} is called where layers.{place} is next")
        if kwargs or len(args) != 1:
            raise _Broken(f"{name} is called with {len(args) + len(kwargs)} arguments and should get one")
        if args[0] is not chain[-1]:
            what = args[0].what if isinstance(args[0], _Passed) else f"a {type(args[0]).__name__}"
            raise _Broken(f"{name} is called with {what} and should get {chain[-1].what}")
        given = _Passed(f"what layers.{place} gave")
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
            direct = _caller(called, layer)
            layer.__dict__.update({CALL: direct, "forward": direct})
        with torch.random.fork_rng(devices=[]):
            result = forward(begin)
    except _Broken as broken:
        return str(broken)
    except Exception as error:
        at = chain[-1].what
        said = str(error).strip().splitlines()
        return f"it computes with {at} itself ({type(error).__name__}{': ' + said[0] if said else ''})"
    finally:
        for part, attributes in before:
            part.__dict__.clear()
            part.__dict__.update(attributes)
    if len(chain) <= len(layers):
        return f"layers.{len(chain) - 1} is not called"
    if result is not chain[-1]:
        what = result.what if isinstance(result, _Passed) else f"a {type(result).__name__}"
        return f"it returns {what} and not {chain[-1].what}"
    return ""


def _caller(called: Any, layer: nn.Module) -> Any:
    return lambda *args, **kwargs: called(layer, *args, **kwargs)
