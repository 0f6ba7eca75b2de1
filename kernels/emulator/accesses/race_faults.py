"""Every access passes by here; one that races with an earlier access becomes a fault.

What happened before what is known to `machine.races_in_shared_memory` (the clocks of all warps) and to
`races_in_global_memory` (the last accesses to each element). They tell which accesses are unordered; this
file asks them, and words the fault.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from ..machine.global_memory import Buffer
from ..machine.machine_state import Machine
from ..ptx.dtypes import Array
from ..synchronization.block_barriers import Barriers
from .access import Access, gather
from .races_in_global_memory import History

BARRIER = "with no barrier between them: call cuda.syncthreads() in between"


def in_shared_memory(access: Access, block: Array, offset: Array, values: Array | None = None) -> Array:
    """Note an access at these places, and return its offsets in the shared memory of all blocks.

    Fault for a race with another warp, for data that an asynchronous copy still brings or that nobody wrote.
    A write of what is there already (`values`) is no race.
    """
    machine, clocks, verb = access.machine, access.machine.clocks, access.verb
    access.count(shared=True)
    granules = clocks.granules(block, offset, access.width)
    agents = clocks.agents_of_lanes
    agents = agents if access.lanes.size == machine.lanes else agents[access.lanes]
    if clocks.any_pending and (pending := np.any(clocks.pending[granules], axis=-1)).any():
        kind = "async copy read before it was waited for" if verb == "reads" else "overwrites a pending copy"
        access.blame(pending, kind, f"{verb} shared memory that an asynchronous copy still fills")
    if access.kind != "writes" and (unwritten := clocks.last_write[granules] == 0).any():
        bad = np.any(unwritten, axis=-1)
        at = int(offset.reshape(-1)[np.argmax(bad)])
        access.blame(
            bad, "unwritten shared memory", f"{access.at} byte {at} of shared memory that nobody wrote"
        )
    flat: Array = block * machine.shared_pitch + offset

    def same() -> Array:
        return np.asarray((gather(machine.shared, flat, access.width) == values).all(axis=-1))[..., None]

    by = access.batch.instructions if len(access.batch) > 1 else ()
    if access.kind == "writes":
        races = clocks.write(granules, agents, by, same)
    else:
        found = {"reads": clocks.read, "guesses": clocks.guess, "updates": clocks.update}[access.kind]
        races = found(granules, agents, by)
    if races.any():
        _blame(access, races, f"{verb} shared memory {clocks.explain(races, granules, agents)}, {BARRIER}")
    return flat


def of_copies(access: Access, granules: Array, agents: Array) -> None:
    """Note what copies that threads begin will write to shared memory; Fault for a race."""
    clocks = access.machine.clocks
    races = clocks.write(granules, agents, access.batch.instructions)
    if races.any():
        text = clocks.explain(races, granules, agents)
        _blame(access, races, f"copies to shared memory {text}, with no barrier between them")


def of_engine(machine: Machine, races: Array, granules: Array, agents: Array, what: str, lane: int) -> None:
    """Fault for a race of the copy engine or of wgmma. granules: (n, m); agents (n,) use one row each."""
    if races.any():
        text = machine.clocks.explain(races, granules, agents)
        machine.fault_at("race", f"lets {what} shared memory {text}, with no barrier between them", lane)


def in_global_memory(access: Access, buffer: Buffer, values: Array | None = None) -> None:
    """Note the access of one instruction, with the values that it writes; Fault for a race."""
    machine, (addresses,), lanes = access.machine, access.addresses, access.lanes
    same = None
    if values is not None:
        same = np.asarray((buffer.read(addresses - buffer.start, access.width) == values).all(axis=-1))
    buffer.history = buffer.history or History(buffer.start, buffer.bytes.size)
    conflict = buffer.history.note(access, same)
    if conflict is None:
        return
    lane, offset = int(lanes[conflict.index]), int(addresses[conflict.index]) - buffer.start
    instructions = machine.program.instructions
    where = instructions[conflict.instruction - 1].location if conflict.instruction else None
    block, warp = divmod(conflict.warp, machine.warps_per_block)
    other = f"warp {warp} of {machine.block_name(block - machine.first)}"
    earlier = f"{other} {'wrote' if conflict.wrote else 'reads'}{f' at {where}' if where else ''}"
    between = "and blocks run in no order: use an atomic, or a launch for each step"
    if block == machine.first + int(machine.block_of_lane[lane]):
        between = BARRIER
    races = np.arange(lanes.size) == conflict.index
    what = f"{buffer.element(offset)} of {buffer.name}"
    _blame(access, races[None, :, None], f"{access.verb} {what}, which {earlier}, {between}")


def in_one_step(access: Access, lost: Array, what: str) -> NoReturn:
    """Fault for threads that write different values to `what` at once; `lost`: where they are lost."""
    text = f"and others write different values to {what} at once: use an atomic, or let one of them write"
    access.blame(lost, "race", text)


def _blame(access: Access, races: Array, text: str) -> NoReturn:
    """Fault for the first of these races (..., granules), or its cause: a barrier that only some came to."""
    bad = np.any(races, axis=-1)
    machine, lane = access.machine, int(access.lanes[int(np.argmax(bad)) % access.lanes.size])
    block = int(machine.block_of_lane[lane])
    if (met := machine.state(Barriers).first_mixed(block)) is not None:
        machine.fault(
            "barrier not reached by all threads",
            f"some threads of {machine.block_name(block)} came to this barrier while others were at another, "
            f"and so {machine.thread_name(lane)} {text}",
            met,
        )
    access.blame(bad, "race", text)
