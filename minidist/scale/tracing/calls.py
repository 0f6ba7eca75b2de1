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
from minidist.scale.tracing.slices import CALLS, Slice

MESSAGES = ("send", "recv")
FACTS = ("algorithm", "dtype", "shape", "group", "bytes_sent", "bytes_on_wire")
"""What a slice tells of its call."""


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
    stream_times: Any = None  # of a call on CUDA tensors

    def slice(self, number: int, anchor: Any, anchored: float, closed: float) -> tuple[Slice, bool]:
        """Its slice, and whether it went on in the background while its caller did something else."""
        call, start, end, more = self.call, self.begun, self.returned, {}
        background = self.stream_times is not None and anchor is not None
        if background:
            start, end = (anchored + t for t in self.stream_times.since(anchor))
        elif self.at_once and not self.complete:
            background, (began, completed) = True, self.ran
            start = start if began is None else began
            end = self.waits[-1][2] if self.waits else closed
            if completed is None:
                more = {"end": "when it was waited for" if self.waits else "not within the trace"}
            else:
                end = completed
        elif self.waits and not self.at_once:
            end = self.waits[0][2]
        args = {"number": number, "called": self.begun, **{name: getattr(call, name) for name in FACTS}}
        args |= {"waited_us": round(call.waited * 1e6, 3), **more}
        if call.message is not None:
            args["message"] = [*call.message]
        kind = call.name if call.name in MESSAGES else CALLS[0]
        return Slice("", kind, call.name, start, end, args), background


class Calls:
    """Records the communication API's calls between `open` and `close`, as a `ledgers.Watcher`."""

    def __init__(self) -> None:
        self.noted: list[Noted] = []
        self._by_call: dict[int, Noted] = {}
        self._earlier: list[tuple[int, Slice]] = []  # by thread, waits for calls from before `open`
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
            wait = _wait(call, begun, ended, {"of": "a call from before"})
            self._earlier.append((get_ident(), wait))
        else:
            noted.waits.append((get_ident(), begun, ended))
            noted.ran = began, completed
            noted.stream_times = call.stream_times

    def slices(self) -> tuple[dict[int, list[Slice]], list[Slice], list[Slice]]:
        """The slices in which each thread waited, and the collectives and messages in the background."""
        held: dict[int, list[Slice]] = defaultdict(list)
        background: tuple[list[Slice], list[Slice]] = [], []
        for number, each in enumerate(self.noted):
            own, in_background = each.slice(number, self._anchor, self._anchored, self._closed)
            (background[own.kind in MESSAGES] if in_background else held[each.thread]).append(own)
            if in_background and (each.stream_times is None or self._anchor is None):
                for thread, begun, ended in each.waits:
                    held[thread].append(_wait(each.call, begun, ended, {"number": number}))
        for thread, wait in self._earlier:
            held[thread].append(wait)
        return held, *background


def _wait(call: Call, begun: float, ended: float, args: dict[str, Any]) -> Slice:
    return Slice("", "wait", f"wait for {call.name}", begun, ended, args)
