"""A trace as a JSON file of Chrome's trace events, which Perfetto opens.

A process is a rank, a thread is a lane. Slices are complete events (X); messages are flow events from the
sender's slice (s) to the receiver's (f). Times are microseconds from the start, rounded to nanoseconds.

Source: "Trace Event Format", Google 2016, which perfetto.dev/docs links under "JSON trace format".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from minidist.scale.trace.all_ranks import AllRanks, RankTrace
from minidist.scale.trace.record_events import AUTOGRAD, MAIN, Slice

MESSAGE = "message"
"""Name and category of the arrows."""
PROCESS = 1000
"""Rank 0's process number; Perfetto takes process 0 for the kernel."""


def document(trace: AllRanks) -> dict[str, Any]:
    """The file's JSON object."""
    start = trace.start
    events: list[dict[str, Any]] = []
    arrivals: dict[int, list[Slice]] = defaultdict(list)
    for arrow in trace.arrows:
        arrivals[arrow.destination].append(arrow.arrival)
    lanes = [_lanes(rank) for rank in trace.ranks]
    for rank in trace.ranks:
        events += _of_rank(rank, lanes[rank.rank], arrivals[rank.rank], start)
    for number, arrow in enumerate(trace.arrows, 1):
        common = {"name": MESSAGE, "cat": MESSAGE, "id": number}
        sent, received = arrow.sent, arrow.arrival
        # One nanosecond before the slice's end, since at the end itself the slice is over.
        end = max(_nanoseconds(received.start - start), _nanoseconds(received.end - start) - 1)
        ends = (
            (arrow.source, sent.lane, {"ph": "s", "ts": _nanoseconds(sent.start - start) / 1e3}),
            (arrow.destination, received.lane, {"ph": "f", "bp": "e", "ts": end / 1e3}),
        )
        events += [common | own | {"pid": PROCESS + r, "tid": lanes[r][lane]} for r, lane, own in ends]
    about = {
        "made_by": "minidist trace",
        "layout": trace.layout,
        "ranks": len(trace.ranks),
        "bytes_moved_to_gather": trace.bytes_moved,
        "clock_offset_us": [each.offset * 1e6 for each in trace.ranks],
        "clock_error_us": [each.error * 1e6 for each in trace.ranks],
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _of_rank(
    rank: RankTrace, lanes: dict[str, int], arrivals: list[Slice], start: float
) -> Iterator[dict[str, Any]]:
    """The events that name a rank and its lanes, and its slices."""
    place = ", ".join(f"{axis} {at}" for axis, at in rank.place.items())
    name = f"rank {rank.rank}" + (f" ({place})" if place else "")
    pid = PROCESS + rank.rank
    yield _named("process_name", pid, pid, name=name)
    yield _named("process_sort_index", pid, pid, sort_index=rank.rank + 1)
    for number, (lane, tid) in enumerate(lanes.items(), 1):
        yield _named("thread_name", pid, tid, name=lane)
        yield _named("thread_sort_index", pid, tid, sort_index=number)
    for each in sorted([*rank.slices, *arrivals], key=lambda each: (each.start, -each.end)):
        begun, ended = _nanoseconds(each.start - start), _nanoseconds(each.end - start)
        args = dict(each.args)
        if "called" in args:
            args["called_us"] = _nanoseconds(args.pop("called") - start) / 1e3
        yield {
            "name": f"{each.name} {each.kind}" if each.kind in ("backward", "recompute") else each.name,
            "cat": each.kind,
            "ph": "X",
            "ts": begun / 1e3,
            "dur": (ended - begun) / 1e3,
            "pid": pid,
            "tid": lanes[each.lane],
            "args": args,
        }


def _lanes(rank: RankTrace) -> dict[str, int]:
    """A number for each lane: threads, then background lanes. The main thread has the process's number."""
    order = (MAIN, AUTOGRAD, "thread", "background", "messages")

    def position(lane: str) -> tuple[int, int, str]:
        return next((i for i, name in enumerate(order) if lane.startswith(name)), len(order)), len(lane), lane

    pid = PROCESS + rank.rank
    ordered = sorted({each.lane for each in rank.slices} - {MAIN}, key=position)
    return {MAIN: pid} | {lane: 100 * pid + number for number, lane in enumerate(ordered, 1)}


def _named(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
