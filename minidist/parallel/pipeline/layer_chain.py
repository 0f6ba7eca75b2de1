"""Find the layers at which a pipeline can cut a model.

If a model is nothing but the chain of its `layers`, a pipeline runs the layers alone. Any other model is
traced on an example (layer_trace.py), and each stage runs the model's own `forward` (model_stage.py).

A `forward` that does more than call one layer after the other would silently be trained as another model. To
tell, it is called once with an object that no function can compute with, and each layer only notes its call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from minidist._names import unknown
from minidist.parallel.contract.kept_attributes import attributes_of
from minidist.parallel.contract.layout import Layout
from minidist.parallel.pipeline.layer_trace import BrokenChain, trace_layers
from minidist.parallel.pipeline.model_stage import LayerTrace

LISTS = nn.ModuleList, nn.Sequential
CALL = "_compiled_call_impl"
"""The attribute that a module's call looks for first, before hooks."""


class _Passed:
    """The object that goes from layer to layer; no function can compute with it."""

    def __init__(self, what: str) -> None:
        self.what = what


def find_chain(model: nn.Module, layout: Layout, layers: str | None, example: Any) -> LayerTrace | None:
    """How the model calls the layers of a list; None if it is the chain of its `layers` and nothing else.

    layers: the list's name; None to find it. example: a batch as the model takes it; None for the model's
    `dummy_inputs`, which transformers' language models have.

    Raises:
        ValueError: no such list, too few layers, no example, or a model that does not call the layers one
            after the other.
    """
    refused = ""
    if layers in (None, "layers"):
        try:
            check_layers(model, layout)
            return None
        except ValueError as error:
            refused = str(error)
    if example is None and getattr(model, "main_input_name", "") == "input_ids":
        example = getattr(model, "dummy_inputs", None)
    remedy = (
        "give example=, a batch with which the model runs once, to find what it computes beside its layers"
    )
    if example is None and layers is None:
        raise ValueError(f"{refused}; or {remedy}")
    name = _list_of(model, layers)
    if example is None:
        raise ValueError(
            f"layers is {name!r}, and nothing says how a {type(model).__name__} is called; {remedy}"
        )
    _check_parts(layout, len(model.get_submodule(name)))  # type: ignore[arg-type]
    try:
        return trace_layers(model, name, example)
    except BrokenChain as problem:
        raise ValueError(
            f"pp is {layout.pp}, and a {type(model).__name__} cannot be cut between its {name}, which have "
            f"to be called in order, each with what the one before gave: {problem}; name another list with "
            "layers=, or use dp or tp"
        ) from problem


def _list_of(model: nn.Module, name: str | None) -> str:
    """The name of the list of layers; ValueError if there is none of that name, or several to choose from."""
    lists = {each: part for each, part in model.named_modules() if each and isinstance(part, LISTS)}
    if name is not None and not isinstance(name, str):
        raise TypeError(f"layers is a {type(name).__name__}; give the list's name, such as 'model.layers'")
    if name is not None and name not in lists:
        raise unknown("list of layers", name, lists or ["none: the model has no nn.ModuleList"])
    if name is not None:
        return name
    outer = [each for each in lists if not any(each.startswith(f"{other}.") for other in lists)]
    found = [each for each in outer if isinstance(lists[each], nn.ModuleList)] or outer
    if len(found) != 1:
        raise ValueError(
            f"a {type(model).__name__} has {len(found)} lists of layers{', ' * bool(found)}"
            f"{', '.join(found)}; "
            "give layers=, the name of the nn.ModuleList or nn.Sequential to cut, or use dp or tp"
        )
    return str(found[0])


def _check_parts(layout: Layout, layers: int) -> None:
    """ValueError if there are fewer layers than parts of the pipeline."""
    parts = layout.pp * layout.chunks
    if parts > layers:
        raise ValueError(
            f"pp is {layout.pp} with chunks={layout.chunks}, {parts} parts, and the model has {layers} "
            f"layers; give each part at least one"
        )


def check_layers(model: nn.Module, layout: Layout) -> None:
    """ValueError if a pipeline cannot cut the model into its stages, or the model is more than its layers."""
    layers = _layers_of(model, f"pp is {layout.pp}, and ")
    outside = [name for name in model.state_dict(keep_vars=True) if not name.startswith("layers.")]
    if outside:
        raise ValueError(
            f"pp is {layout.pp}, and the model's {outside[0]} is in none of its `layers`; a pipeline's "
            "stages have layers alone: move it into one, or use dp or tp"
        )
    _check_parts(layout, len(layers))
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
    if not isinstance(layers, LISTS):
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
            raise BrokenChain(f"{name} is called after the last one")
        if layer is not layers[index]:
            raise BrokenChain(f"{name} is called where layers.{index} is next")
        if kwargs or len(args) != 1:
            raise BrokenChain(f"{name} is called with {len(args) + len(kwargs)} arguments and should get one")
        if args[0] is not chain[-1]:
            raise BrokenChain(f"{name} is called with {_described(args[0])} and should get {chain[-1].what}")
        given = _Passed(f"what layers.{index} gave")
        chain.append(given)
        return given

    put_back, forward = attributes_of(model), model.forward
    try:
        for part in model.modules():
            part.__dict__[CALL] = part.forward
        for layer in layers:
            direct = partial(called, layer)
            layer.__dict__.update({CALL: direct, "forward": direct})
        with torch.random.fork_rng(devices=[]):
            result = forward(begin)
    except BrokenChain as broken:
        return str(broken)
    except Exception as error:
        said = str(error).strip().splitlines()
        kind = f"{type(error).__name__}{': ' + said[0] if said else ''}"
        return f"it computes with {chain[-1].what} itself ({kind})"
    finally:
        put_back()
    if len(chain) <= len(layers):
        return f"layers.{len(chain) - 1} is not called"
    if result is not chain[-1]:
        return f"it returns {_described(result)} and not {chain[-1].what}"
    return ""


def _described(value: object) -> str:
    return value.what if isinstance(value, _Passed) else f"a {type(value).__name__}"
