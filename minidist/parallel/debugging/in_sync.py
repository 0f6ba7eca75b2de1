"""Are the ranks' copies of a model still the same? Fingerprints are compared, and the first difference named.

Data parallelism holds each parameter on every rank, and nothing in it ever compares the copies: a gradient
that one rank forgot to reduce, or a layer seeded by rank, goes on unseen while each rank trains a model of
its own. A hash of all bytes costs 32 bytes of communication; only where hashes differ are names and values
exchanged.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.comm.errors import OutOfSync
from minidist.comm.work import Group, ranks_of


@dataclass(frozen=True)
class _Entry:
    """What is compared: a tensor, or an optimizer's option as text."""

    what: str  # "parameter"
    name: str  # "0.weight"
    value: Tensor | str

    @property
    def kind(self) -> str:
        """What has to be equal before values can be: "float32[3x4]"."""
        if isinstance(self.value, str):
            return self.value
        shape = "x".join(map(str, self.value.shape)) or "scalar"
        return f"{str(self.value.dtype).removeprefix('torch.')}[{shape}]"

    def digest(self) -> str:
        """A hash of kind and values; zeros of either sign are equal, and so are all NaNs."""
        found = hashlib.sha256(self.kind.encode())
        if isinstance(self.value, Tensor):
            found.update(_bytes(_canonical(self.value)))
        return found.hexdigest()


def assert_in_sync(
    model: nn.Module,
    group: Group = None,
    *,
    gradients: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Fail on all ranks where their copies of a model differ; to be called by all of them.

    Parameters and buffers are compared, element by element: 0.0 and -0.0 are equal, and NaN equals NaN.
    Sends 32 (n - 1) bytes where all is equal; else also (n - 1) (8 + L + S), where L are the bytes of the
    longest rank's list of names, shapes and hashes, and S those of the first tensor that differs, 0 where a
    rank lacks it or has it in another shape or dtype.

    Args:
        model: this rank's copy.
        group: the ranks that hold copies; None for all.
        gradients: compare the gradients too, as they are after they have been reduced.
        optimizer: compare its state and its options too.

    Raises:
        OutOfSync: names the rank and the first tensor that differ, and by how much. "The rank" is one that
            has another value than most, or than the lowest where there is no majority.
        TypeError: `model` is no module, or `optimizer` no torch optimizer.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; give a torch module")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}; give a torch optimizer")
    entries = _entries(model, gradients, optimizer)
    rows = [[entry.what, entry.name, entry.kind, entry.digest()] for entry in entries]
    text = json.dumps(rows).encode()
    ranks = ranks_of(group)
    fingerprints = _gather(hashlib.sha256(text).digest(), group)
    if len(set(fingerprints)) > 1:
        _explain(entries, text, fingerprints, ranks, group)


def _explain(
    entries: list[_Entry], text: bytes, fingerprints: list[bytes], ranks: tuple[int, ...], group: Group
) -> None:
    """Find the first difference, the same on all ranks, and raise it."""
    lengths = [int.from_bytes(size, "little") for size in _gather(len(text).to_bytes(8, "little"), group)]
    texts = _gather(text.ljust(max(lengths)), group)
    # For each rank, in its order: what is compared, and its kind and digest.
    tables = [
        {(what, name): (kind, digest) for what, name, kind, digest in json.loads(text)} for text in texts
    ]
    typical = fingerprints.index(_most(fingerprints))
    names = dict.fromkeys([*tables[typical], *(name for table in tables for name in table)])
    name = next(name for name in names if len({table.get(name) for table in tables}) > 1)
    found = [table.get(name) for table in tables]
    one = found.index(_most(found))
    # First a rank that lacks it, or has it in another shape: there are no values to compare, then.
    kinds = [value and value[0] for value in found]
    differ = [place for place, value in enumerate(found) if value != found[one]]
    other = min(differ, key=lambda place: (kinds[place] == kinds[one], place))
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
        copies = _gather(_bytes(tensor), group)
        values = [_numbers(copies[place], tensor) for place in (other, one)]
        difference = (
            f"{what}, {own[0]}, differs between rank {ranks[other]} and rank {ranks[one]}: "
            f"{_distance(*values)}"
        )
    others = [ranks[place] for place in differ if place != other]
    also = "".join(f"; rank {rank} differs from rank {ranks[one]} too" for rank in others)
    raise OutOfSync(f"the ranks are out of sync: {difference}{also}", rank=ranks[other], name=name[1])


def _entries(model: nn.Module, gradients: bool, optimizer: torch.optim.Optimizer | None) -> list[_Entry]:
    """All that is compared, in the model's order."""
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
    for place, options in enumerate(optimizer.param_groups):
        for key in sorted(options.keys() - {"params"}):
            value = options[key]
            text = repr(value.tolist() if isinstance(value, Tensor) else value)
            entries.append(_Entry("optimizer's", f"{key} of its group {place}", text))
        for number, parameter in enumerate(options["params"]):
            name = names.get(id(parameter), f"parameter {number} of its group {place}")
            state = optimizer.state.get(parameter, {})
            for key in sorted(state):
                value = state[key].detach() if isinstance(state[key], Tensor) else repr(state[key])
                entries.append(_Entry("optimizer's", f"{key} of {name}", value))
    return entries


def _canonical(x: Tensor) -> Tensor:
    """The same values with one zero and one NaN."""
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    if not x.is_floating_point():
        return x
    if x.dtype.itemsize == 1:  # the 8-bit formats have no arithmetic of their own
        x = x.float()
    return (x + 0.0).masked_fill_(x.isnan(), torch.nan)  # -0.0 + 0.0 is 0.0


def _bytes(x: Tensor) -> bytes:
    """A tensor's bytes."""
    dense = x.to_dense() if x.layout != torch.strided else x
    return dense.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _numbers(raw: bytes, like: Tensor) -> Tensor:
    """The values of a tensor's bytes; floats in a precision that their differences can be taken in."""
    x = torch.frombuffer(bytearray(raw), dtype=like.dtype).view(like.shape)
    if x.is_complex():
        return x.to(torch.complex128)
    return x.double() if x.is_floating_point() else x


def _distance(x: Tensor, y: Tensor) -> str:
    """How two tensors of one shape and dtype differ, in words."""
    same = (x == y) | ((x != x) & (y != y))
    places = (~same).nonzero()
    index = tuple(places[0].tolist())
    where = f"the first, at {list(index)}, is" if index else "it is"
    distance = (x - y if x.is_complex() else x.double() - y.double()).abs()
    largest = distance[~same & distance.isfinite()]
    most = f", by up to {float(largest.max()):.3g}" if len(largest) else ""
    return (
        f"{len(places)} of {same.numel()} elements{most}; {where} {x[index].item()!r} and {y[index].item()!r}"
    )


def _gather(data: bytes, group: Group) -> list[bytes]:
    """The same number of bytes of each rank, in the group's order."""
    x = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    gathered = bytes(comm.all_gather(x, group=group).numpy())
    return [gathered[start : start + len(data)] for start in range(0, len(gathered), len(data))]


def _most(values: Sequence[Any]) -> Any:
    """The most common value; of several, that of the lowest rank."""
    return Counter(values).most_common(1)[0][0]
