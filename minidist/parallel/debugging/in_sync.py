"""`assert_in_sync`: the ranks' copies of a model are equal, or the first difference is named.

Data parallelism keeps each parameter on every rank and never compares the copies. If one rank forgets to
reduce a gradient, or a layer is seeded by rank, each rank silently trains a model of its own. Comparing a
hash of all bytes costs 32 bytes; ranks exchange names and values only if hashes differ.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minidist.comm.errors import OutOfSync, described
from minidist.comm.work import Group, ranks_of
from minidist.parallel.flat.gathering import gather_equal, gather_values, raw_bytes, tensor_of


class _Entry(NamedTuple):
    """An item to compare: a tensor, or an optimizer's option as text."""

    what: str  # "parameter"
    name: str  # "0.weight"
    value: Tensor | str

    @property
    def kind(self) -> str:
        """Dtype and shape, "float32[3x4]", which have to be equal before values can be."""
        return self.value if isinstance(self.value, str) else described(self.value)

    def digest(self) -> str:
        """A hash of kind and values; zeros of either sign are equal, and so are all NaNs."""
        found = hashlib.sha256(self.kind.encode())
        if isinstance(self.value, Tensor):
            found.update(raw_bytes(_canonical(self.value)))
        return found.hexdigest()


def assert_in_sync(
    model: nn.Module,
    group: Group = None,
    *,
    gradients: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Raise an error on all ranks if their copies of a model differ; all ranks call it.

    Compares parameters and buffers element by element: 0.0 equals -0.0, and NaN equals NaN. Sends 32 (n - 1)
    bytes, and if anything differs also (n - 1) (8 + L + S). L is the size of the longest rank's list of
    names, shapes and hashes. S is the size of the first tensor that differs, 0 if a rank lacks it or has
    another shape or dtype.

    Args:
        model: this rank's copy.
        group: the ranks that hold copies; None for all.
        gradients: also compare the gradients, which have to be reduced.
        optimizer: also compare its state and its options.

    Raises:
        OutOfSync: names the first tensor that differs, by how much, and a rank whose value is not that of
            most ranks, or of the lowest rank if there is no majority.
        TypeError: `model` is not a module, or `optimizer` not a torch optimizer.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; give a torch module")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}; give a torch optimizer")
    entries = _entries(model, gradients, optimizer)
    table = {(entry.what, entry.name): (entry.kind, entry.digest()) for entry in entries}
    fingerprints = gather_equal(hashlib.sha256(repr(table).encode()).digest(), group)
    if len(set(fingerprints)) > 1:
        _explain(entries, gather_values(table, group), fingerprints, group)


def _explain(
    entries: list[_Entry], tables: list[dict[Any, Any]], fingerprints: list[bytes], group: Group
) -> None:
    """Find the first difference, the same on all ranks, and raise it."""
    ranks = ranks_of(group)
    typical = fingerprints.index(_most(fingerprints))
    names = dict.fromkeys([*tables[typical], *(name for table in tables for name in table)])
    name = next(name for name in names if len({table.get(name) for table in tables}) > 1)
    found = [table.get(name) for table in tables]
    one = found.index(_most(found))
    # Prefer a rank that lacks the tensor or has it in another shape: then there are no values to compare.
    kinds = [value and value[0] for value in found]
    differ = [index for index, value in enumerate(found) if value != found[one]]
    other = min(differ, key=lambda index: (kinds[index] == kinds[one], index))
    what = " ".join(name)
    theirs, own = found[one], found[other]
    if theirs is None or own is None:
        has, lacks = (one, other) if own is None else (other, one)
        difference = f"rank {ranks[lacks]} has no {what}, and rank {ranks[has]} has"
    elif theirs[0] != own[0]:
        difference = f"{what} is {own[0]} on rank {ranks[other]} and {theirs[0]} on rank {ranks[one]}"
    else:
        tensor = next(entry.value for entry in entries if (entry.what, entry.name) == name)
        assert isinstance(tensor, Tensor)
        copies = gather_equal(raw_bytes(tensor), group)
        values = [tensor_of(copies[index], tensor.dtype, tensor.shape) for index in (other, one)]
        difference = (
            f"{what}, {own[0]}, differs between rank {ranks[other]} and rank {ranks[one]}: "
            f"{_distance(*values)}"
        )
    others = [ranks[index] for index in differ if index != other]
    also = "".join(f"; rank {rank} differs from rank {ranks[one]} too" for rank in others)
    raise OutOfSync(f"the ranks are out of sync: {difference}{also}", rank=ranks[other], name=name[1])


def _entries(model: nn.Module, gradients: bool, optimizer: torch.optim.Optimizer | None) -> list[_Entry]:
    """The items to compare, in the model's order."""
    parameters = dict(model.named_parameters())
    entries = [_Entry("parameter", name, parameter.detach()) for name, parameter in parameters.items()]
    entries += [_Entry("buffer", name, buffer.detach()) for name, buffer in model.named_buffers()]
    if gradients:
        entries += [
            _Entry("gradient of", name, parameter.grad.detach())
            for name, parameter in parameters.items()
            if parameter.grad is not None
        ]
    if optimizer is None:
        return entries
    names = {id(parameter): name for name, parameter in parameters.items()}
    for index, options in enumerate(optimizer.param_groups):
        for key in sorted(options.keys() - {"params"}):
            value = options[key]
            text = repr(value.tolist() if isinstance(value, Tensor) else value)
            entries.append(_Entry("optimizer's", f"{key} of its group {index}", text))
        for number, parameter in enumerate(options["params"]):
            name = names.get(id(parameter), f"parameter {number} of its group {index}")
            state = optimizer.state.get(parameter, {})
            for key in sorted(state):
                value = state[key].detach() if isinstance(state[key], Tensor) else repr(state[key])
                entries.append(_Entry("optimizer's", f"{key} of {name}", value))
    return entries


def _canonical(x: Tensor) -> Tensor:
    """The same values with one kind of zero and one NaN."""
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    if not x.is_floating_point():
        return x
    if x.dtype.itemsize == 1:  # the 8-bit formats have no arithmetic of their own
        x = x.float()
    return (x + 0.0).masked_fill_(x.isnan(), torch.nan)  # -0.0 + 0.0 is 0.0


def _distance(x: Tensor, y: Tensor) -> str:
    """How two tensors of one shape and dtype differ, in words."""
    if x.is_complex() or x.is_floating_point():
        x, y = (each.to(torch.complex128 if x.is_complex() else torch.float64) for each in (x, y))
    same = (x == y) | ((x != x) & (y != y))
    differ = (~same).nonzero()
    index = tuple(differ[0].tolist())
    where = f"the first, at {list(index)}, is" if index else "it is"
    distance = (x - y if x.is_complex() else x.double() - y.double()).abs()
    largest = distance[~same & distance.isfinite()]
    most = f", by up to {float(largest.max()):.3g}" if len(largest) else ""
    return (
        f"{len(differ)} of {same.numel()} elements{most}; {where} {x[index].item()!r} and {y[index].item()!r}"
    )


def _most(values: Sequence[Any]) -> Any:
    """The most common value; among equally common ones, the value of the lowest rank."""
    return Counter(values).most_common(1)[0][0]
