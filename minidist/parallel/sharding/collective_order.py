"""The order of the collectives in a pass, the same on all ranks whatever parts of the model each one uses.

If ranks gathered units as they happen to need them, their collectives would no longer match as soon as one
rank skips a unit. So the order is settled once, from what all ranks did in the first pass. Each rank then
keeps to it, and takes part for the others when it has no use for a unit itself.

Source: Zhao et al. 2023, "PyTorch FSDP", section 3.3 (execution order, backward and forward prefetching).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minidist import comm
from minidist.comm.errors import CollectiveError
from minidist.comm.work import Group, ranks_of
from minidist.parallel.sharding.units import Unit, UnitCollective


@dataclass(frozen=True)
class CollectiveOrder:
    """The order of the collectives in a forward and a backward pass."""

    forward: Sequence[Unit]  # in the order in which they are gathered
    calls: Sequence[int]  # for each unit's number, how often a forward pass calls it
    backward: Sequence[UnitCollective]  # with prefetching, a gather comes when the unit before it is needed
    settled: bool = False  # it is what the ranks did, and not the order in which the model lists its parts


def expected(units: Sequence[Unit], ahead: bool) -> CollectiveOrder:
    """The order before the first pass: as the model lists its parts."""
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
    """RuntimeError unless all ranks call a unit once more than the order has. Sends 32 (n - 1) / n bytes."""
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


def require_called(units: Sequence[Unit], order: CollectiveOrder, outputs: Sequence[Tensor]) -> None:
    """RuntimeError if parameters of a unit that is never called were used: they and the outputs are NaN."""
    idle = [unit for unit in units if not order.calls[unit.number]]
    if idle and any(t.is_floating_point() and t.isnan().any() for t in outputs):
        raise RuntimeError(
            f"outputs are NaN, and {idle[0]} was never called, so that its parameters were not gathered; "
            "if the model uses a part or another method of it, leave it out of units="
        )


def own(units: Sequence[Unit], whole: Sequence[Unit], ahead: bool) -> list[UnitCollective]:
    """After a forward pass of a part: the backward order, as this rank and so every rank ran it.

    whole: the units that stay gathered.
    """
    return _backward({u: (u.first, u.last) for u in units if u.calls and u not in whole}, ahead)


def _backward(times: dict[Unit, tuple[int, int]], ahead: bool) -> list[UnitCollective]:
    """Reverse the forward pass: a unit's backward pass begins where its last call ended."""
    events: list[tuple[int, UnitCollective]] = []
    for unit, (first, last) in times.items():
        events += [(last, ("gather", unit)), (first, ("reduce", unit))]
    events.sort(key=lambda event: -event[0])
    if not ahead:
        return [operation for _, operation in events]
    gathers = [operation for _, operation in events if operation[0] == "gather"]
    operations = gathers[:1]
    for _, operation in events:
        # Each gather moves to where the one before it was: it then runs while that unit computes.
        operations += gathers[1:2] if operation[0] == "gather" else [operation]
        if operation[0] == "gather":
            gathers = gathers[1:]
    return operations
