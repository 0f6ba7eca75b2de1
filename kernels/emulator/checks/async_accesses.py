"""What is checked before the copy engine or wgmma uses shared memory.

They begin what runs beside the threads, so their faults name the thread that began it: data that is not there
yet, a race with what another agent does, and a missing fence between the proxies.
"""

from __future__ import annotations

import numpy as np

from ..machine.machine import Machine
from ..ptx.dtypes import Array
from .async_proxy import Proxies


def fault_for_race(
    machine: Machine, races: Array, granules: Array, agents: Array, what: str, lane: int
) -> None:
    """Fault where there are races: granules (n, m), of which agents (n,) use a row each."""
    if races.any():
        row, column = divmod(int(np.argmax(races)), races.shape[-1])
        text = machine.clocks.explain(int(granules[row, column]), int(agents[row]))
        machine.fault_at("race", f"lets {what} shared memory {text}, with no barrier between them", lane)


def fault_for_missing_data(machine: Machine, granules: Array, what: str, lane: int) -> None:
    """Fault where nobody wrote yet, or a copy is under way."""
    if (machine.clocks.written[granules] == 0).any():
        machine.fault_at("unwritten shared memory", f"lets {what} shared memory that nobody wrote", lane)
    if machine.clocks.any_pending and machine.clocks.pending[granules].any():
        text = f"lets {what} shared memory that an asynchronous copy still fills"
        machine.fault_at("async copy read before it was waited for", text, lane)


def fault_for_missing_fence(
    machine: Machine, granules: Array, reader: int, clock: Array, what: str, lane: int
) -> None:
    """Fault where a thread stored last, and `clock`, what the reader knows, has no fence since."""
    if machine.state(Proxies).hidden(granules, reader, clock).any():
        text = f"lets {what} what a thread stored, with no fence.proxy.async in between"
        machine.fault_at("missing fence", text, lane)
