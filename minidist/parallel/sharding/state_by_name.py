"""The training state on this rank by the parameters' names: as checkpoints of any layout read it.

A share begins and ends in the middle of parameters. Other layouts can read it all the same: this rank's
elements of each parameter are cut into boxes (flat/ranges.py), which are views into the share, and its
optimizer state in the same way. Whatever every rank has whole is one box.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from minidist.parallel.contract.tensor_boxes import TensorBox, cut_chunks, optimizer_boxes, whole_box
from minidist.parallel.contract.training_state import load_groups, loadable_tensors, put_in_lists
from minidist.parallel.flat.bucket_layout import ParameterRange
from minidist.parallel.sharding.optimizer.optimizer_slices import SCALARS, OptimizerSlice
from minidist.parallel.sharding.sharded import Sharded

# Gradients, once they are complete.


def _gradients(shared: Sharded) -> Iterator[tuple[OptimizerSlice, ParameterRange, Tensor]]:
    """Each slice with a gradient, a range of a parameter in it, and that range's gradient."""
    shared.gradients()  # from here on the slices have them
    for each in shared.slices.all:
        grad = each.tensor.grad
        if grad is None:
            continue
        lengths = [*map(len, each.ranges)]
        parts = [grad] if each.bucket is None else torch.split(grad.view(-1), lengths)
        yield from ((each, span, part) for span, part in zip(each.ranges, parts, strict=True))


def counted_gradients(shared: Sharded) -> Iterator[tuple[str, Tensor]]:
    """This rank's elements in a sum over all ranks that counts each element of the gradients once.

    They come with their parameters' first names.
    """
    for each, span, part in _gradients(shared):
        if shared.set_of_slice(each).counts_here:
            yield shared.names[shared.parameter_of(each, span)], part


def gradient_boxes(shared: Sharded) -> Iterator[TensorBox]:
    """The gradients that this rank's update uses, all or a share, as boxes named "gradient.NAME"."""
    for each, span, part in _gradients(shared):
        parameter = shared.parameter_of(each, span)
        name = f"gradient.{shared.names[parameter]}"
        if each.bucket is None:
            yield whole_box(name, part.to_dense() if part.is_sparse else part)
        else:
            yield from cut_chunks(name, tuple(parameter.shape), span.start, part)


# The state.


def state_boxes(shared: Sharded) -> Iterator[TensorBox]:
    """Boxes of what is whole, and of this rank's part of the rest, in the same order on its replicas.

    Parameters, in the precision in which they are updated, and buffers are named "model.NAME", under each
    of a parameter's names, as in a state_dict. Tensors of the optimizer's state are named
    "optimizer.NAME.KEY", by the first name.
    """
    slices, parameters = shared.slices, shared.parameters
    buckets = shared.value_buckets()
    for bucket in buckets:
        if not bucket.values.frees:  # else its parameters are views only during a pass
            bucket.values.refuse_reassigned()
    in_shares = {
        parameter
        for bucket in buckets
        for parameter in bucket.parameters
        if bucket.values.frees or slices.master not in (None, bucket.layout.dtype)
    }
    masters = {each.value: each.tensor for each in slices.all if each.bucket is None}
    aliases: dict[Tensor, list[str]] = {}
    parameter: Tensor
    for name, value in loadable_tensors(shared.model).items():
        if value in in_shares and not value.numel():  # it is in no share
            yield whole_box("model." + name, torch.empty(value.shape, dtype=value.dtype))
        elif value in in_shares:
            aliases.setdefault(value, []).append("model." + name)
        else:
            yield whole_box("model." + name, masters.get(value, value).detach())
    for bucket in buckets:
        is_frozen = bucket.values.frees and bucket.gradients is None
        for start, span in bucket.layout.ranges() if is_frozen else ():
            parameter = parameters[span.param_index]
            for alias in aliases[parameter]:
                values = bucket.values.shard[start : start + len(span)]
                yield from cut_chunks(alias, tuple(parameter.shape), span.start, values)
    given = set()  # names of scalars: this rank may have several slices of one parameter
    for each, span, tensor, state in slices.by_parameter():
        parameter = shared.parameter_of(each, span)
        shape = tuple(parameter.shape)
        for alias in aliases.get(parameter, []):
            yield from cut_chunks(alias, shape, span.start, tensor)
        for box in optimizer_boxes(shared.names[parameter], state):
            key = box.name.rpartition(".")[2]
            if each.has_cut(key, box.tensor):
                yield from cut_chunks(box.name, shape, span.start, box.tensor)
            elif box.name not in given:
                given.add(box.name)
                yield box


def settings(shared: Sharded) -> dict[str, Any]:
    """The state that is not a tensor: the optimizer's groups by names of parameters, and its numbers.

    A list, as LBFGS keeps, has None in the place of a tensor. "order", if known, has the names in the
    order in which gradients come: a list for each time that parameters were dealt to buckets.
    """
    optimizer = shared.slices.optimizer
    states = [
        (shared.parameter_of(each, span), state) for each, span, _, state in shared.slices.by_parameter()
    ]
    numbers: dict[str, dict[str, Any]] = {}
    for parameter, state in states:
        if own := {key: _numbers(value) for key, value in state.items() if not isinstance(value, Tensor)}:
            numbers[shared.names[parameter]] = own
    groups = zip(optimizer.param_groups, shared.group_names, strict=True)
    settings = {"groups": [{**group, "params": [*names]} for group, names in groups], "state": numbers}
    if shared.orders is not None:
        parameters = shared.parameters
        settings["order"] = [[shared.names[parameters[index]] for index in order] for order in shared.orders]
    return settings


def load_settings(
    shared: Sharded, settings: Mapping[str, Any], state: Mapping[str, Mapping[str, Any]]
) -> None:
    """Take the groups of `settings`, make the saved run's buckets, and make room for the optimizer state.

    A state that was saved before any backward pass, usually empty, is kept whole until the first one
    makes the buckets. state: for each parameter the keys of its optimizer state, each with its whole
    shape and dtype.
    """
    slices = shared.slices
    load_groups(slices.optimizer.param_groups, shared.group_names, settings["groups"])
    slices.optimizer.state.clear()
    shared.make_buckets(settings.get("order"), {*state, *settings["state"]})
    wholes: dict[tuple[str, str], Tensor] = {}  # one for all slices of a parameter, until `loaded`

    def empty(parameter: Tensor, device: torch.device, elements: int | None) -> dict[str, Any]:
        """Loaded numbers, and tensors to load into; those of the parameter's shape get `elements`."""
        name = shared.names[parameter]
        values: dict[str, Any] = deepcopy(settings["state"].get(name, {}))
        for key, (shape, dtype) in state.get(name, {}).items():
            if elements is not None and key not in SCALARS and tuple(shape) == tuple(parameter.shape):
                values[key] = slices.memory.zeros(elements, dtype, device)
            else:
                whole = torch.zeros(shape, dtype=dtype, device=device if shape else "cpu")
                values[key] = wholes.setdefault((name, key), whole)
        return put_in_lists(values)

    slices.apart()
    for each in slices.all:
        (span,) = each.ranges
        elements = len(span) if each.cuts else None
        if values := empty(shared.parameter_of(each, span), each.tensor.device, elements):
            slices.optimizer.state[each.tensor] = values


def loaded(shared: Sharded) -> None:
    """Join slices whose state agrees, and let all ranks compute with the loaded values. A collective."""
    if shared.slices.reload() or not shared.residency.whole_parameters:
        shared.publish()


def _numbers(value: Any) -> Any:
    """What is no tensor in a value of the optimizer's state."""
    return (
        [None if isinstance(each, Tensor) else each for each in value] if isinstance(value, list) else value
    )
