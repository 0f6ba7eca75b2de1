"""Records when calls of the communication API begin, are waited for, and end; on a GPU, by its own clock."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch

from minidist.comm import ledgers, stream_times
from minidist.comm.ledgers import Call
from minidist.comm.stream_times import StreamTimes
from minidist.scale.tracing.slices import CALLS, Slice

MESSAGES = ("send", "recv")


@dataclass
class Noted:
    """A call with its times."""

    call: Call
    thread: int
    begun: float
    returned: float
    at_once: bool  # asynchronous: the caller went on
    complete: bool  # when the call returned
    waits: list[tuple[int, float, float]] = field(default_factory=list)  # thread, from, until
    ran: tuple[float | None, float | None] = (None, None)  # from, until, if it ran in its own thread
    stream_times: StreamTimes | None = None  # of a call on CUDA tensors

    @property
    def in_background(self) -> bool:
        """Whether the call went on while its caller did something else."""
        return self.at_once and not self.complete


class Calls:
    """Records the communication API's calls between `open` and `close`, as a `ledgers.Watcher`."""

    def __init__(self) -> None:
        self.noted: list[Noted] = []
        self._by_call: dict[int, Noted] = {}
        self._earlier: list[tuple[Call, int, float, float]] = []  # waits for calls from before `open`
        self._closed = 0.0
        self._anchor: Any = None  # an event of the GPU's clock, at the time `_anchored`
        self._anchored = 0.0

    def open(self) -> None:
        """Start recording."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._anchor, self._anchored = stream_times.anchor(), time.perf_counter()
        ledgers.watchers.append(self)

    def close(self) -> None:
        """Stop recording."""
        ledgers.watchers.remove(self)
        self._closed = time.perf_counter()

    def called(self, call: Call, begun: float, returned: float, at_once: bool, complete: bool) -> None:
        """Record a call that has returned."""
        noted = Noted(call, get_ident(), begun, returned, at_once, complete)
        self.noted.append(noted)
        self._by_call[id(call)] = noted  # `noted` keeps the call alive, so the id stays unique

    def waited(
        self, call: Call, begun: float, ended: float, began: float | None, completed: float | None
    ) -> None:
        """Record a wait for an asynchronous call, and when that call ran."""
        noted = self._by_call.get(id(call))
        if noted is None:
            self._earlier.append((call, get_ident(), begun, ended))
        else:
            noted.waits.append((get_ident(), begun, ended))
            noted.ran = began, completed
            noted.stream_times = call.stream_times

    def slices(self) -> tuple[dict[int, list[Slice]], list[Slice], list[Slice]]:
        """The slices in which each thread waited, and the collectives and messages in the background."""
        held: dict[int, list[Slice]] = defaultdict(list)
        background: tuple[list[Slice], list[Slice]] = [], []
        for number, each in enumerate(self.noted):
            call = each.call
            kind = call.name if call.name in MESSAGES else CALLS[0]
            args = {"number": number, "called": each.begun, **_described(call)}
            if each.stream_times is not None and self._anchor is not None:
                start, end = (self._anchored + t for t in each.stream_times.since(self._anchor))
                background[kind in MESSAGES].append(Slice("", kind, call.name, start, end, args))
                continue
            if not each.in_background:
                end = each.waits[0][2] if each.waits and not each.at_once else each.returned
                held[each.thread].append(Slice("", kind, call.name, each.begun, end, args))
                continue
            began, completed = each.ran
            start = each.begun if began is None else began
            if completed is None:
                completed = each.waits[-1][2] if each.waits else self._closed
                args["end"] = "when it was waited for" if each.waits else "not within the trace"
            background[kind in MESSAGES].append(Slice("", kind, call.name, start, completed, args))
            for thread, begun, ended in each.waits:
                held[thread].append(_wait(call, begun, ended, {"number": number}))
        for call, thread, begun, ended in self._earlier:
            held[thread].append(_wait(call, begun, ended, {"of": "a call from before"}))
        return held, *background


def _wait(call: Call, begun: float, ended: float, args: dict[str, Any]) -> Slice:
    return Slice("", "wait", f"wait for {call.name}", begun, ended, args)


def _described(call: Call) -> dict[str, Any]:
    """Return the ledger's facts about a call."""
    found: dict[str, Any] = {
        "algorithm": call.algorithm,
        "dtype": call.dtype,
        "shape": [*call.shape],
        "group": [*call.group],
        "bytes_sent": call.bytes_sent,
        "bytes_on_wire": call.bytes_on_wire,
        "waited_us": round(call.waited * 1e6, 3),
    }
    if call.message is not None:
        found["message"] = [*call.message]
    return found
