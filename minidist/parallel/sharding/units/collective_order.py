"""The order of the collectives in a pass, the same on all ranks whatever parts of the model each one uses.

If ranks gathered units as they happen to need them, their collectives would no longer match as soon as one
rank skips a unit. So the order is settled once, from what all ranks did in the first pass. Each rank then
keeps to it, and takes part for the others when it has no use for a unit itself.

Source: Zhao et al. 2023, "PyTorch FSDP", section 3.3 (execution order, backward and forward prefetching).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from minidist import comm
from minidist.comm.errors import CollectiveError
from minidist.comm.work import Group, ranks_of
from minidist.parallel.sharding.units.units import Unit, UnitCollective
from minidist.parallel.training.recompute import recomputed_in


class CollectiveOrder(NamedTuple):
    """The order of the collectives in a forward and a backward pass."""

    forward: Sequence[Unit]  # in the order in which they are gathered
    calls: Sequence[int]  # for each unit's number, how often a forward pass calls it
    backward: Sequence[UnitCollective]  # with prefetching, a gather comes when the unit before it is needed
    settled: bool = False  # the ranks ran it so; otherwise it is the order in which the model lists its parts


def expected(units: Sequence[Unit]) -> CollectiveOrder:
    """The order before the first pass: as the model lists its parts. That pass settles the backward order."""
    return CollectiveOrder(units, [1] * len(units), [])


def settle(units: Sequence[Unit], ahead: bool, device: torch.device, group: Group) -> CollectiveOrder:
    """After a forward pass, what all ranks together did: an all-gather of 24 bytes a unit. A collective."""
    own = torch.tensor([[(u.first, u.last, u.calls) for u in units]], device=device)
    ranks = comm.all_gather(own, group=group).tolist()  # (ranks, units, 3)
    calls = [max(rank[u.number][2] for rank in ranks) for u in units]
    gathered = [u for u in units if u.buckets or not u.number]
    place = {event: at for at, event in enumerate(_merged({_events(rank) for rank in ranks}, gathered))}
    times = {u: (place[2 * u.number], place[2 * u.number + 1]) for u in gathered}
    forward = sorted(gathered, key=lambda u: times[u][0])
    backward = _backward(units[0], {u: times[u] for u in gathered[1:]}, ahead)
    return CollectiveOrder(forward, calls, backward, settled=True)


def _events(rank: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """One rank's events in order: unit n begins with its first call, 2 n, and ends with its last, 2 n + 1."""
    times = [(unit[end], 2 * n + end) for n, unit in enumerate(rank) if unit[2] for end in (0, 1)]
    return tuple(event for _, event in sorted(times))


def _merged(orders: set[tuple[int, ...]], units: Sequence[Unit]) -> list[int]:
    """Merge the ranks' orders into one. Ranks may call different units, such as experts.

    Where the orders leave a choice, or contradict each other, the unit that is listed first comes first. A
    unit that no rank has called yet comes next to its neighbour in the list, a sibling if there is one.
    """
    merged: list[int] = []
    while orders := {order for order in orders if order}:
        heads = sorted({order[0] for order in orders})
        free = [head for head in heads if not any(head in order[1:] for order in orders)]
        merged.append((free or heads)[0])
        orders = {tuple(event for event in order if event != merged[-1]) for order in orders}
    known = {unit.number for unit in units if 2 * unit.number in merged}
    for at, (before, unit) in enumerate(pairwise(units), 1):
        if unit.number not in known:
            after = next((other for other in units[at:] if other.number in known), units[0])
            if _shared(unit, after) > _shared(unit, before):
                place = merged.index(2 * after.number)
            else:  # after the unit before, or at its begin if this one lies in it
                lies_in = _shared(unit, before) == len(before.name.split(".")) or before is units[0]
                place = merged.index(2 * before.number + (not lies_in)) + 1
            merged[place:place] = 2 * unit.number, 2 * unit.number + 1
    return merged


def _shared(a: Unit, b: Unit) -> int:
    """How many steps of two units' names are the same, from the root on."""
    steps = zip(a.name.split("."), b.name.split("."), strict=False)
    return sum(1 for _ in takewhile(lambda step: step[0] == step[1], steps))


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


def backward_order(units: Sequence[Unit], whole: Sequence[Unit], ahead: bool) -> list[UnitCollective]:
    """After a forward pass of a part: the backward order, as this rank and so every rank ran it.

    whole: the units that stay gathered.
    """
    return _backward(units[0], {u: (u.first, u.last) for u in units if u.calls and u not in whole}, ahead)


def _backward(root: Unit, times: dict[Unit, tuple[int, int]], ahead: bool) -> list[UnitCollective]:
    """Reverse the forward pass: a unit's backward pass begins where its last call ended.

    A recomputed part calls its units before their backward passes: they are gathered together, where it ends.
    """
    needed = {unit: last for unit, (_, last) in times.items()}
    for part in recomputed_in(root.module):
        modules = {*part.modules()} - {part}
        inside = [unit for unit in times if unit.module in modules]
        for unit in inside:
            unit.recomputed = True
            needed[unit] = max(needed[other] for other in inside)
    events: list[tuple[int, UnitCollective]] = []
    for unit, (first, _) in times.items():
        events += [(needed[unit], ("gather", unit)), (first, ("reduce", unit))]
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
