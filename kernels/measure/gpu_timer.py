"""Time work on a GPU by its own clock, even if Python takes longer to launch it than the GPU to run it.

Work for a GPU goes into a queue (a stream), and a call returns before the work is done. CUDA events in the
same queue note when the GPU passes them. The time between two of them is the GPU's, unless it waited for
Python in between, which may need longer for a launch than a small product takes. So a kernel that does
nothing for a while first holds the GPU, until all launches between the events are in the queue.

Source: NVIDIA, CUDA Driver API, Event Management.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any

LIMIT = 30.0  # seconds after which a kernel is assumed never to end
HOLD_A_CALL = 50e-6  # seconds that Python may need for a call; doubled until it is enough
LONGEST_HOLD = 50e-3
CYCLES = 1_000_000  # of the first hold, about half a millisecond, which measures cycles per second


class GpuTimer:
    """A clock for work on torch's current stream."""

    device = "cuda"  # where torch has to make what such work uses

    def __init__(self, torch: Any) -> None:
        self._cuda = torch.cuda
        # Undocumented, but torch's own tests use it. Without it, short work is timed with Python's share.
        self._sleep: Callable[[int], None] | None = getattr(torch.cuda, "_sleep", None)
        self._cycles_a_second = 0.0

    def seconds(self, program: Callable[[], object], calls: int = 1) -> float:
        """Return the GPU's seconds for one call of `program`, from `calls` of them between two events.

        Call the program once before, or you time the compiler. Raises RuntimeError if the GPU has not
        finished after half a minute.
        """
        hold = min(LONGEST_HOLD, HOLD_A_CALL * (calls + 1))
        while True:
            start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
            self._hold(hold)
            start.record()
            for _ in range(calls):
                program()
            late = self._sleep is not None and start.query()
            end.record()
            self._await(end)
            if not late or hold == LONGEST_HOLD:
                took: float = start.elapsed_time(end) / 1e3  # from milliseconds
                return took / calls
            hold = min(LONGEST_HOLD, 2 * hold)

    def wait(self) -> None:
        """Return when the GPU has finished all its work; raise RuntimeError after half a minute."""
        end = self._cuda.Event()
        end.record()
        self._await(end)

    def _hold(self, seconds: float) -> None:
        """Make the GPU do nothing for about `seconds` before the next work in the queue."""
        if self._sleep is None:
            return
        if not self._cycles_a_second:
            self._sleep(CYCLES)  # the first launch of any kernel takes longer
            start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self._sleep(CYCLES)
            end.record()
            self._await(end)
            self._cycles_a_second = CYCLES / (start.elapsed_time(end) / 1e3)
        self._sleep(int(seconds * self._cycles_a_second))

    def _await(self, event: Any) -> None:
        """Wait as event.synchronize() does, but give up on kernels that wait for each other and never end."""
        latest = time.monotonic() + LIMIT
        while not event.query():
            if time.monotonic() > latest:
                raise RuntimeError(
                    f"the GPU has not finished in {LIMIT:.0f} s: a kernel never ends, and this process can't "
                    "use the GPU any more"
                )
            time.sleep(20e-6)


def rounds(
    timer: GpuTimer, program: Callable[[], object], seconds: float, calls: int = 1, least: int = 1
) -> list[float]:
    """Return the GPU's seconds for one call of `program`, from each of several rounds of `calls`.

    A first call is not timed. The rounds go on until `seconds` have passed on the GPU, and there are `least`.
    """
    program()
    timer.wait()
    times: list[float] = []
    while len(times) < least or calls * sum(times) < seconds:
        times.append(timer.seconds(program, calls))
    return times


def find() -> GpuTimer | None:
    """Return a clock for torch's current GPU; None if torch has none."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    return GpuTimer(torch) if torch.cuda.is_available() else None
