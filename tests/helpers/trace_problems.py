"""What is wrong with a trace file: breaches of the format, and events that cannot have happened.

>>> problems(json.loads(Path("trace.json").read_text()))
[]

Slices of a lane are nested or apart. An arrow begins in a slice and ends in one, not before it began. Every
message that was received was sent, and every one that was sent was received.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from minidist.scale.trace.perfetto import PROCESS

REQUIRED: dict[str, dict[str, Any]] = {
    "X": {"name": str, "cat": str, "ts": int | float, "dur": int | float, "pid": int, "tid": int},
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
    "s": {"name": str, "cat": str, "id": int, "ts": int | float, "pid": int, "tid": int},
    "f": {"name": str, "cat": str, "id": int, "ts": int | float, "pid": int, "tid": int},
}
"""The fields that an event of each phase must have."""
NAMES = ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
"""Names of metadata events."""
TraceEvent = dict[str, Any]
Lane = tuple[int, int]


def check(document: object) -> None:
    """Raise ValueError with the first problem and the number of problems, if there are any."""
    found = problems(document)
    if found:
        more = f"; and {len(found) - 1} more" if len(found) > 1 else ""
        raise ValueError(f"the trace is not right: {found[0]}{more}")


def problems(document: object) -> list[str]:
    """The problems of a trace that was read from a file, a sentence each."""
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        return ["it is no object with a list of traceEvents"]
    found: list[str] = []
    events = []
    for index, event in enumerate(document["traceEvents"]):
        wrong = _malformed(event)
        if wrong:
            found.append(f"event {index} {wrong}")
        else:
            events.append(event)
    slices: dict[Lane, list[TraceEvent]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append(event)
    for (pid, tid), own in slices.items():
        found += _crossing(pid, tid, own)
    errors = document.get("otherData", {}).get("clock_error_us", [])
    return found + _unmatched(events, slices, errors)


def _malformed(event: object) -> str:
    """What is wrong with a single event; "" if nothing is."""
    if not isinstance(event, dict):
        return "is no object"
    required = REQUIRED.get(event.get("ph", ""))
    if required is None:
        return f"has phase {event.get('ph')!r}; known are {', '.join(REQUIRED)}"
    for name, kind in required.items():
        value: Any = event.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            return f"({event.get('name')}) has {name} {value!r}"
        if name in ("ts", "dur") and not 0 <= value < math.inf:
            return f"({event.get('name')}) has {name} {value}, which is no time"
    if event["ph"] == "M" and event["name"] not in NAMES:
        return f"names {event['name']!r}; known are {', '.join(NAMES)}"
    return ""


def _crossing(pid: int, tid: int, slices: list[TraceEvent]) -> list[str]:
    """Slices of a lane that begin inside another slice and end after it."""
    found = []
    open_: list[tuple[int, str]] = []
    for event in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
        start, end = _span(event)
        while open_ and open_[-1][0] <= start:
            open_.pop()
        if open_ and end > open_[-1][0]:
            where = f"on thread {tid} of rank {pid - PROCESS}"
            found.append(f"{where} {event['name']} ends after {open_[-1][1]}, in which it began")
        open_.append((end, event["name"]))
    return found


def _unmatched(
    events: list[TraceEvent], slices: dict[Lane, list[TraceEvent]], errors: Sequence[float]
) -> list[str]:
    """Arrows with one end, with an end outside of messages, or backwards; and messages without an arrow."""
    found = []
    arrows: dict[int, dict[str, TraceEvent]] = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            if event["ph"] in arrows[event["id"]]:
                found.append(f"two arrows have the id {event['id']}")
            arrows[event["id"]][event["ph"]] = event
    messages = {
        kind: {lane: [each for each in own if each["cat"] == kind] for lane, own in slices.items()}
        for kind in ("send", "recv")
    }
    ends: set[int] = set()  # slices that arrows begin or end in
    for number, both in arrows.items():
        for phase, kind, end in (("s", "send", "beginning"), ("f", "recv", "end")):
            if phase not in both:
                found.append(f"arrow {number} has no {end}")
                continue
            message = _message_at(both[phase], messages[kind], ends)
            if message is None:
                found.append(f"arrow {number} has its {end} in no {kind}")
            else:
                ends.add(id(message))
        found += _backwards(number, both, errors)
    for each in (each for of_kind in messages.values() for own in of_kind.values() for each in own):
        if id(each) not in ends:
            other = "received" if each["cat"] == "send" else "sent"
            who = f"rank {each['pid'] - PROCESS}"
            found.append(f"{who} has a {each['cat']} at {each['ts']} us that nobody has {other}")
    return found


def _message_at(
    event: TraceEvent, messages: dict[Lane, list[TraceEvent]], taken: set[int]
) -> TraceEvent | None:
    """The send or receive that contains the end of an arrow and of no other arrow."""
    at = round(event["ts"] * 1e3)
    for each in messages.get((event["pid"], event["tid"]), ()):
        start, end = _span(each)
        if start <= at <= end and id(each) not in taken:
            return each
    return None


def _backwards(number: int, both: dict[str, TraceEvent], errors: Sequence[float]) -> list[str]:
    """A problem if an arrow ends before it begins, by more than the clocks' error."""
    if len(both) < 2:
        return []
    ranks = [both[phase]["pid"] - PROCESS for phase in "sf"]
    apart = sum(errors[rank] for rank in ranks if 0 <= rank < len(errors))
    early = both["s"]["ts"] - both["f"]["ts"]
    if early <= apart:
        return []
    way = f"from rank {ranks[0]} to rank {ranks[1]}"
    return [f"arrow {number} {way} ends {early:.3f} us before it begins; the clocks are not aligned"]


def _span(event: TraceEvent) -> tuple[int, int]:
    """Start and end in nanoseconds."""
    start = round(event["ts"] * 1e3)
    return start, start + round(event["dur"] * 1e3)
