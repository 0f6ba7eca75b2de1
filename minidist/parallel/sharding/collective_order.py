"""The order of the collectives in a pass, the same on all ranks whatever parts of the model each one uses.

Ranks that gathered units as they happen to need them would talk past each other as soon as one of them skips
a unit. So the order is settled once, from what all ranks did in the first pass; each rank then keeps to it,
and takes part for the others where it has no use for a unit itself.

Source: Zhao et al. 2023, "PyTorch FSDP", section 3.3 (execution order, backward and forward prefetching).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from minidist import comm
from minidist.comm.errors import CollectiveError
from minidist.comm.work import Group, ranks_of
from minidist.parallel.sharding.units import Unit

UnitCollective = tuple[Literal["gather", "reduce"], Unit]


@dataclass(frozen=True)
class CollectiveOrder:
    """What a forward and a backward pass send.

    Attributes:
        forward: units in the order in which they are gathered.
        calls: for each unit's number, how often a forward pass calls it.
        backward: what a backward pass does; ahead, each gather as early as the unit before it is needed.
        settled: it is what the ranks did, and not the order in which the model lists its parts.
    """

    forward: Sequence[Unit]
    calls: Sequence[int]
    backward: Sequence[UnitCollective]
    settled: bool = False


def expected(units: Sequence[Unit], ahead: bool) -> CollectiveOrder:
    """Before the first pass: as the model lists its parts."""
    times = {u: (2 * u.number, 2 * u.number + 1) for u in units[1:]}
    return CollectiveOrder(units, [1] * len(units), _backward(times, ahead))


def settle(units: Sequence[Unit], ahead: bool, device: torch.device, group: Group) -> CollectiveOrder:
    """After a forward pass, what all ranks together did: an all-reduce of 24 bytes a unit. A collective."""
    own = [(-u.first if u.calls else -(2**62), u.last, u.calls) for u in units]
    together = torch.tensor(own, device=device)
    comm.all_reduce(together, "max", group=group)
    first = [-value for value in together[:, 0].tolist()]
    last, calls = together[:, 1].tolist(), together[:, 2].tolist()
    end = max(last)
    for u in units:
        if not calls[u.number]:  # on any rank: it comes after all others
            first[u.number], last[u.number] = end + 2 * u.number, end + 2 * u.number + 1
    times = {u: (first[u.number], last[u.number]) for u in units}
    forward = sorted(units, key=lambda u: times[u][0])
    return CollectiveOrder(forward, calls, _backward({u: times[u] for u in units[1:]}, ahead), settled=True)


def require_same_call(unit: Unit, group: Group) -> None:
    """See that all ranks call a unit once more than the schedule has. Sends 32 (n - 1) / n bytes.

    Raises:
        RuntimeError: others call another unit, or something else.
    """
    if len(ranks_of(group)) == 1:
        return
    numbers = torch.tensor([unit.number, -unit.number], device=unit.device)
    cause = None
    try:
        comm.all_reduce(numbers, "max", group=group)
    except CollectiveError as error:
        cause = error
    if cause is not None or numbers.tolist() != [unit.number, -unit.number]:
        raise RuntimeError(
            f"{unit} was called {unit.calls} times in one pass, and not so on all ranks at this point; let "
            "all call it as often, or make one unit of the module that calls it (units=)"
        ) from cause


def own(units: Sequence[Unit], whole: Sequence[Unit], ahead: bool) -> list[UnitCollective]:
    """After a forward pass of a part of the model: as this rank ran it, which is as all did.

    whole: the units that stay gathered.
    """
    return _backward({u: (u.first, u.last) for u in units if u.calls and u not in whole}, ahead)


def _backward(times: dict[Unit, tuple[int, int]], ahead: bool) -> list[UnitCollective]:
    """A backward pass runs the forward pass in reverse: a unit's begins where its last call ended."""
    events: list[tuple[int, UnitCollective]] = []
    for unit, (first, last) in times.items():
        events += [(last, ("gather", unit)), (first, ("reduce", unit))]
    events.sort(key=lambda event: -event[0])
    if not ahead:
        return [operation for _, operation in events]
    gathers = [operation for _, operation in events if operation[0] == "gather"]
    operations = gathers[:1]
    for _, operation in events:
        # In a gather's place stands the next one: it comes while this unit computes.
        operations += gathers[1:2] if operation[0] == "gather" else [operation]
        if operation[0] == "gather":
            gathers = gathers[1:]
    return operations
