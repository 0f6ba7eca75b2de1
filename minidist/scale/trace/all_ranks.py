"""The slices of all ranks on one clock: messages, who waited for whom, and shares of the time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from minidist.scale.trace.record_events import AUTOGRAD, CALLS, COMPUTE, MAIN, Slice

STATES = (*COMPUTE[:3], "backward_weight", "optimizer", "other", "communication", "idle")
"""States of a rank: several kinds of computation; other work, such as the loss, buckets and Python itself;
waiting for a call in progress (communication); waiting for another rank to make the call (idle)."""


class Stretch(NamedTuple):
    """A stretch of time in which a rank was in one state."""

    state: str
    start: float
    end: float


class Arrow(NamedTuple):
    """A message, with the slices that sent and received it."""

    source: int
    sent: Slice
    destination: int
    received: Slice

    @property
    def arrival(self) -> Slice:
        """The part of the receiving slice after the send; the file has it, and arrows end there."""
        # A viewer assumes that an arrow leads from the slice that begins first; receives are posted early.
        start = min(max(self.received.start, self.sent.start + 1e-9), self.received.end)
        name = f"message from rank {self.source}"
        args = {"bytes": self.sent.args["bytes_sent"]}
        return Slice(self.received.lane, "message", name, start, self.received.end, args)


@dataclass
class RankTrace:
    """One rank's slices, in rank 0's time."""

    rank: int
    place: dict[str, int]  # its coordinate along each axis of more than one rank: {"dp": 0}
    slices: list[Slice]
    offset: float = 0.0  # seconds that its clock was behind rank 0's at the beginning
    error: float = 0.0  # by how many seconds the offset may be wrong

    @property
    def calls(self) -> list[Slice]:
        """The calls of the communication API, in the ledger's order."""
        calls = (each for each in self.slices if each.kind in CALLS)
        return sorted(calls, key=lambda each: each.args["number"])

    @property
    def instructions(self) -> list[Slice]:
        """The pipeline's instructions, in order."""
        return [each for each in self.slices if each.kind == "instruction"]

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sent."""
        return sum(each.args["bytes_sent"] for each in self.calls)

    @property
    def step(self) -> Slice:
        """The slice of everything that was traced."""
        return next(each for each in self.slices if each.kind == "span" and each.name == "step")


@dataclass
class AllRanks:
    """The slices of all ranks, in rank 0's time."""

    ranks: list[RankTrace]
    layout: str  # of the engine; "" if there was none
    bytes_moved: int  # to gather the slices, over all ranks
    arrows: list[Arrow]
    meetings: dict[tuple[int, int], float]  # by rank and call number: when the last rank came to the call

    @property
    def start(self) -> float:
        """When the first rank began."""
        return min(each.step.start for each in self.ranks)

    @property
    def end(self) -> float:
        """When the last rank ended."""
        return max(each.step.end for each in self.ranks)

    @cached_property
    def timelines(self) -> list[list[Stretch]]:
        """For each rank its states from `start` to `end`, without gaps."""
        return [self._timeline(each) for each in self.ranks]

    def shares(self, rank: int) -> dict[str, float]:
        """Shares of the time from `start` to `end`: "compute", "other", "communication" and "idle"."""
        found = dict.fromkeys(("compute", "other", "communication", "idle"), 0.0)
        whole = self.end - self.start
        for state, start, end in self.timelines[rank]:
            found[state if state in found else "compute"] += (end - start) / whole if whole else 0.0
        return found

    def table(self) -> str:
        """A text table with a line for each rank."""
        names = [" ".join(f"{axis}{at}" for axis, at in each.place.items()) for each in self.ranks]
        wide = max(4, *(len(name) + 2 for name in names))
        lines = [
            f"{'rank':>4}  {'':<{wide}}{'compute':>8}{'other':>8}{'comm.':>8}{'idle':>8}{'calls':>8}"
            f"{'bytes sent':>14}"
        ]
        for each, name in zip(self.ranks, names, strict=True):
            shares = "".join(f"{share:>8.1%}" for share in self.shares(each.rank).values())
            lines.append(f"{each.rank:>4}  {name:<{wide}}{shares}{len(each.calls):>8}{each.bytes_sent:>14,}")
        return "\n".join(lines)

    def _timeline(self, of: RankTrace) -> list[Stretch]:
        """A rank's states; at any time the open slice that began last determines the state."""
        found = [Stretch("idle", self.start, of.step.start)]
        ends = defaultdict[float, tuple[list[Slice], list[Slice]]](lambda: ([], []))
        for each in of.slices:
            if each.lane in (MAIN, AUTOGRAD) and each.end > each.start:
                ends[each.start][0].append(each)
                ends[each.end][1].append(each)
        open_: list[Slice] = []
        before = of.step.start
        for now in sorted(ends):
            if open_ and now > before:
                found += self._states(of.rank, open_, before, now)
            begun, ended = ends[now]
            open_ = [each for each in open_ if not any(each is other for other in ended)]
            open_ += sorted(begun, key=lambda each: -each.end)
            before = now
        found.append(Stretch("idle", of.step.end, self.end))
        joined: list[Stretch] = []  # neighbours of the same state are one, and empty stretches are none
        for stretch in (stretch for stretch in found if stretch.end > stretch.start):
            if joined and joined[-1].state == stretch.state:
                joined[-1] = joined[-1]._replace(end=stretch.end)
            else:
                joined.append(stretch)
        return joined

    def _states(self, rank: int, open_: Sequence[Slice], start: float, end: float) -> list[Stretch]:
        """A rank's states while these slices were open and none began or ended."""
        inner = open_[-1]
        if inner.kind in CALLS or inner.kind == "wait":
            came = min(end, max(start, self.meetings.get((rank, inner.args.get("number", -1)), start)))
            return [Stretch("idle", start, came), Stretch("communication", came, end)]
        kinds = [each.args["kind"] if each.kind == "instruction" else each.kind for each in reversed(open_)]
        if "backward_weight" in kinds:
            return [Stretch("backward_weight", start, end)]
        state = next((kind.removesuffix("_input") for kind in kinds if kind.startswith(COMPUTE)), "other")
        return [Stretch(state, start, end)]


def matched(ranks: Sequence[RankTrace]) -> tuple[list[Arrow], dict[tuple[int, int], float]]:
    """Find the messages, and when the last rank came to each call; see `AllRanks`.

    Messages between two ranks with the same tag and group arrive in the order of their sends, and all members
    of a group make its collectives in the same order.
    """
    sent: dict[tuple[int, ...], list[Slice]] = defaultdict(list)
    received: dict[tuple[int, ...], list[Slice]] = defaultdict(list)
    together: dict[tuple[tuple[int, ...], int], list[tuple[int, Slice]]] = defaultdict(list)
    for one in ranks:
        counts: dict[tuple[int, ...], int] = defaultdict(int)
        for each in one.calls:
            group = tuple(each.args["group"])
            if each.kind == "collective":
                together[group, counts[group]].append((one.rank, each))
                counts[group] += 1
            else:
                (sent if each.kind == "send" else received)[tuple(each.args["message"])].append(each)
    arrows = [
        Arrow(key[0], first, key[1], second)
        for key, sends in sent.items()
        for first, second in zip(sends, received.get(key, ()), strict=False)
    ]
    meetings = {(each.destination, each.received.args["number"]): each.sent.start for each in arrows}
    for (group, _), calls in together.items():
        if len(calls) == len(group) and len({each.name for _, each in calls}) == 1:
            last = max(each.args["called"] for _, each in calls)
            meetings.update({(rank, each.args["number"]): last for rank, each in calls})
    return sorted(arrows, key=lambda arrow: arrow.sent.start), meetings
