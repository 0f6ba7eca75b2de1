"""Trace a step on all ranks: who computes, who waits for whom, and what is sent.

Each rank records slices of time; rank 0 gathers them on one clock, saves them for Perfetto and draws them.

| File | Holds |
|---|---|
| record_events.py | what a rank records: slices of its modules' passes and of its calls |
| clocks.py | the offset of each rank's clock |
| all_ranks.py | the slices of all ranks: messages, waits, shares of the time |
| perfetto.py | the file |
| plot.py | the picture |
| tracer.py | `trace` |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minidist._lazy import lazy

if TYPE_CHECKING:
    from minidist.scale.trace.tracer import Tracer as Tracer
    from minidist.scale.trace.tracer import trace as trace

__getattr__, __dir__, __all__ = lazy(__name__)
