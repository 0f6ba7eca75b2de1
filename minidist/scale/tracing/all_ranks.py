"""The trace of all ranks: who waited for whom, which share of the time went into what, and tables of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, NamedTuple

from minidist.scale.tracing.slices import AUTOGRAD, CALLS, COMPUTE, MAIN, Slice

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STATES = (*COMPUTE[:3], "backward_weight", "optimizer", "other", "communication", "idle")
"""What a rank may be at, at any time: computing, of several kinds; other work, such as the loss, filling
buckets, and Python's own; held up by a call under way; or by one that another rank has not come to yet."""


class Stretch(NamedTuple):
    """Some time in which a rank was in one state."""

    state: str
    start: float
    end: float


class Arrow(NamedTuple):
    """A message, from the slice that sent it to the one that received it."""

    source: int
    sent: Slice
    destination: int
    received: Slice

    @property
    def arrival(self) -> Slice:
        """The part of the receiving slice since it was sent, which the file has, too: arrows end there."""
        # A viewer takes an arrow to lead from the slice that begins first, and receives are posted ahead.
        start = min(max(self.received.start, self.sent.start + 1e-9), self.received.end)
        name = f"message from rank {self.source}"
        args = {"bytes": self.sent.args["bytes_sent"]}
        return Slice(self.received.lane, "message", name, start, self.received.end, args)


@dataclass
class RankTrace:
    """One rank's part, in the time of rank 0's clock."""

    rank: int
    place: dict[str, int]  # among those that share the work, for each axis of more than one rank: {"dp": 0}
    slices: list[Slice]
    offset: float = 0.0  # seconds that its clock was behind rank 0's at the beginning
    error: float = 0.0  # by how many this may be wrong

    @property
    def calls(self) -> list[Slice]:
        """The calls through the door, in the ledger's order."""
        return sorted(
            (each for each in self.slices if each.kind in CALLS), key=lambda each: each.args["number"]
        )

    @property
    def instructions(self) -> list[Slice]:
        """The pipeline's, in order."""
        return [each for each in self.slices if each.kind == "instruction"]

    @property
    def bytes_sent(self) -> int:
        """What the other ranks got from this one."""
        return sum(each.args["bytes_sent"] for each in self.calls)

    @property
    def step(self) -> Slice:
        """All that was traced."""
        return next(each for each in self.slices if each.kind == "span" and each.name == "step")


@dataclass
class Trace:
    """What all ranks did, in the time of rank 0's clock.

    Attributes:
        ranks: each one's slices.
        layout: of the engine; "" where there was none.
        bytes_moved: to gather it, over all ranks.
        arrows: messages, with both ends.
        meetings: for each rank and call when the last of the ranks came that it needs: by rank and the call's
            number in its ledger.
    """

    ranks: list[RankTrace]
    layout: str
    bytes_moved: int
    arrows: list[Arrow]
    meetings: dict[tuple[int, int], float]

    @property
    def start(self) -> float:
        """When the first rank began."""
        return min(each.step.start for each in self.ranks)

    @property
    def end(self) -> float:
        """When the last rank was done."""
        return max(each.step.end for each in self.ranks)

    @cached_property
    def timelines(self) -> list[list[Stretch]]:
        """For each rank what it was at, from `start` to `end`, without gaps."""
        return [self._timeline(each) for each in self.ranks]

    def shares(self, rank: int) -> dict[str, float]:
        """Of the time from `start` to `end`: "compute", "other", "communication" and "idle"; in all 1."""
        found = dict.fromkeys(("compute", "other", "communication", "idle"), 0.0)
        whole = self.end - self.start
        for state, start, end in self.timelines[rank]:
            found[state if state in found else "compute"] += (end - start) / whole if whole else 0.0
        return found

    def table(self) -> str:
        """A text table: a line for each rank."""
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

    def save(self, path: str | PathLike[str]) -> None:
        """Write it as a Chrome trace, which Perfetto opens; see perfetto.py."""
        from minidist.scale.tracing.perfetto import save

        save(self, path)

    def plot(self, path: str | PathLike[str] | None = None) -> Axes:
        """Draw it as a Gantt chart; see plot.py."""
        from minidist.scale.tracing.plot import plot

        return plot(self, path)

    def _timeline(self, of: RankTrace) -> list[Stretch]:
        """Of the slices that are open at a time the one that began last says what the rank was at."""
        found = [Stretch("idle", self.start, of.step.start)]
        borders = defaultdict[float, tuple[list[Slice], list[Slice]]](lambda: ([], []))
        for each in of.slices:
            if each.lane in (MAIN, AUTOGRAD) and each.end > each.start:
                borders[each.start][0].append(each)
                borders[each.end][1].append(each)
        open_: list[Slice] = []
        before = of.step.start
        for now in sorted(borders):
            if open_ and now > before:
                found += self._states(of.rank, open_, before, now)
            begun, ended = borders[now]
            open_ = [each for each in open_ if not any(each is other for other in ended)]
            open_ += sorted(begun, key=lambda each: -each.end)
            before = now
        found.append(Stretch("idle", of.step.end, self.end))
        return _joined(found)

    def _states(self, rank: int, open_: Sequence[Slice], start: float, end: float) -> list[Stretch]:
        """What a rank was at in a time in which these slices were open, and none began or ended."""
        inner = open_[-1]
        if inner.kind in CALLS or inner.kind == "wait":
            came = min(end, max(start, self.meetings.get((rank, inner.args.get("number", -1)), start)))
            return [Stretch("idle", start, came), Stretch("communication", came, end)]
        kinds = [each.args["kind"] if each.kind == "instruction" else each.kind for each in reversed(open_)]
        if "backward_weight" in kinds:
            return [Stretch("backward_weight", start, end)]
        state = next((kind.removesuffix("_input") for kind in kinds if kind.startswith(COMPUTE)), "other")
        return [Stretch(state, start, end)]


def _joined(stretches: Iterable[Stretch]) -> list[Stretch]:
    """Without empty ones, and with those of one state that follow each other as one."""
    found: list[Stretch] = []
    for each in stretches:
        if each.end <= each.start:
            continue
        if found and found[-1].state == each.state:
            found[-1] = found[-1]._replace(end=each.end)
        else:
            found.append(each)
    return found


def matched(ranks: Sequence[RankTrace]) -> tuple[list[Arrow], dict[tuple[int, int], float]]:
    """The messages, and when the last rank came to each call; see `Trace`.

    Messages between two ranks with one tag in one group arrive in the order in which they are sent; and the
    members of a group make its collectives in one order.
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
