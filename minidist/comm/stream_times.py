"""When a call on CUDA tensors ran, by events in the GPU's queue (its stream).

NCCL's `wait` does not wait: it tells the stream to, and returns. So the clock of the process sees only
launches. An event in the stream notes when the GPU gets there. Source: NVIDIA, CUDA Driver API, Event
Management.
"""

from __future__ import annotations

from typing import Any

import torch


class StreamTimes:
    """Events of torch's current stream around a call: where it began, and where its result was waited for."""

    def __init__(self) -> None:
        self._began, self._asked, self._ended = _event(), None, None

    def asks(self) -> None:
        """Note that the stream now has to wait for the call."""
        self._asked = _event()

    def ends(self) -> StreamTimes:
        """Note that the stream goes on from here when the call is complete; return this."""
        self._ended = _event()
        return self

    def seconds(self) -> tuple[float, float]:
        """Return the GPU's seconds from the call to its end, and those in which its stream only waited.

        The process waits until the GPU is there.
        """
        return _between(self._began, self._ended), _between(self._asked, self._ended)

    def since(self, anchor: Any) -> tuple[float, float]:
        """Return the seconds from the event `anchor` of the same GPU to the call, and to its end."""
        return _between(anchor, self._began), _between(anchor, self._ended)


def anchor() -> Any:
    """Return an event that the GPU has reached by now, to compare its clock with the process's."""
    event = _event()
    event.synchronize()
    return event


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _between(first: Any, last: Any) -> float:
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3  # from milliseconds
