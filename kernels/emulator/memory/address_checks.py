"""Check accesses to memory: bounds, alignment, unwritten data, races; and word the fault."""

from __future__ import annotations

from typing import Literal, NoReturn

import numpy as np

from ..base.addresses import shared_blocks
from ..base.batch import Batch
from ..machine.global_memory import Buffer
from ..machine.machine import Machine
from ..machine.races_in_global_memory import AccessKind
from ..ptx.dtypes import Array
from ..ptx.fault import of
from ..synchronization.barriers import Barriers

Access = Literal["reads", "guesses", "writes", "updates"]  # guesses: `DataFlow`; updates: by atomics


def shared_offsets(
    machine: Machine,
    batch: Batch,
    addresses: Array,
    width: int,
    lanes: Array,
    access: Access,
    values: Array | None = None,
) -> Array:
    """Check and note an access to shared memory, and return its offsets in that of all blocks."""
    verb = "reads" if access == "guesses" else access
    block, offset = shared_blocks(machine, addresses, lanes)
    if int(offset.min()) < 0 or int(offset.max()) + width > machine.shared_size:
        outside = (offset < 0) | (offset + width > machine.shared_size)
        at = int(offset.reshape(-1)[np.argmax(outside)])
        text = f"{verb} {of(width, 'byte')} at byte {at} of shared memory, of which the block has"
        blame(
            machine, batch, outside, lanes, "out of bounds", f"{text} {machine.shared_size}{_hint(machine)}"
        )
    if machine.counts is not None:
        updates = access == "updates"
        machine.counts.shared_access(machine.shape, batch.instructions, addresses, width, lanes, updates)
    clocks = machine.clocks
    granules = clocks.granules(block, offset, width)
    agents = clocks.agents_of_lanes()
    agents = agents if lanes.size == machine.lanes else agents[lanes]
    if clocks.any_pending and (pending := np.any(clocks.pending[granules], axis=-1)).any():
        kind = "async copy read before it was waited for" if verb == "reads" else "overwrites a pending copy"
        text = f"{verb} shared memory that an asynchronous copy still fills"
        blame(machine, batch, pending, lanes, kind, text)
    by = batch.instructions if len(batch) == addresses.shape[0] > 1 else ()
    if access != "writes" and (unwritten := clocks.last_write[granules] == 0).any():
        bad = np.any(unwritten, axis=-1)
        at = int(offset.reshape(-1)[np.argmax(bad)])
        text = f"{verb} {of(width, 'byte')} at byte {at} of shared memory that nobody wrote"
        blame(machine, batch, bad, lanes, "unwritten shared memory", text)
    flat: Array = block * machine.shared_pitch + offset

    def same() -> Array:
        assert values is not None
        return np.asarray((gather(machine.shared, flat, width) == values).all(axis=-1))[..., None]

    if access == "writes":
        races = clocks.write(granules, agents, by, same)
    else:
        found = {"reads": clocks.read, "guesses": clocks.guess, "updates": clocks.update}[access]
        races = found(granules, agents, by)
    if races.any():
        first = int(np.argmax(races))
        agent = int(agents[first // races.shape[-1] % lanes.size])
        text = f"{verb} shared memory {clocks.explain(int(granules.reshape(-1)[first]), agent)}, "
        text += "with no barrier between them: call cuda.syncthreads() in between"
        blame(machine, batch, np.any(races, axis=-1), lanes, "race", text)
    return flat


def _hint(machine: Machine) -> str:
    dynamic = any(one.space == "shared" and not one.size for one in machine.program.variables.values())
    return ": pass shared=, the bytes of cuda.shared.array(0, ...)" if dynamic else ""


def local_offsets(machine: Machine, batch: Batch, addresses: Array, width: int, lanes: Array) -> Array:
    """Check an access to local memory; return its offsets in the local memory of all lanes."""
    size_of_local = machine.program.local
    outside = (addresses < 0) | (addresses + width > size_of_local)
    if outside.any():
        at = int(addresses.reshape(-1)[np.argmax(outside)])
        text = f"uses {of(width, 'byte')} at byte {at} of local memory, of which a thread has {size_of_local}"
        blame(machine, batch, outside, lanes, "out of bounds", text)
    return lanes * machine.local.shape[1] + addresses


def rows_of(memory: Array, width: int) -> Array:
    """Return memory as a flat array of items of `width` bytes."""
    return memory.reshape(-1).view(f"V{width}" if width > 8 else f"u{width}")


def gather(memory: Array, offsets: Array, width: int) -> Array:
    """Return the `width` bytes at each offset, a multiple of it: (..., width) uint8."""
    return rows_of(memory, width)[offsets >> (width.bit_length() - 1)][..., None].view(np.uint8)


def aligned(machine: Machine, batch: Batch, addresses: Array, width: int, lanes: Array) -> None:
    """Fault unless every address is a multiple of the access's width."""
    if width > 1 and int(np.bitwise_or.reduce(addresses, axis=None)) & (width - 1):
        odd = (addresses & (width - 1)) != 0
        at = int(addresses.reshape(-1)[np.argmax(odd)])
        text = (
            f"makes an access of {width} bytes, which must lie on a multiple of {width}, "
            f"and {at:#x} is {at % width} past one"
        )
        blame(machine, batch, odd, lanes, "misaligned", text)


def out_of_bounds(
    machine: Machine, batch: Batch, addresses: Array, where: Array | None, width: int, lanes: Array, verb: str
) -> NoReturn:
    """Fault for addresses outside of all arrays."""
    bad = np.broadcast_to(True if where is None else where, addresses.shape)
    at = int(addresses.reshape(-1)[np.argmax(bad)])
    text = f"{verb} {of(width, 'byte')} at {machine.memory.near(at)}"
    blame(machine, batch, bad, lanes, "out of bounds", text)


def note(
    machine: Machine,
    buffer: Buffer,
    kind: AccessKind,
    addresses: Array,
    width: int,
    lanes: Array,
    values: Array | None = None,
) -> None:
    """Note accesses (n,) by lanes (n,) to global memory, with the values written; Fault for a race."""
    same = None
    if values is not None:
        same = np.asarray((buffer.read(addresses - buffer.start, width) == values).all(axis=-1))
    number = machine.clocks.number(machine.instruction)
    conflict = buffer.past().note(
        machine.clocks, machine.memory.watch_blocks, kind, addresses, width, lanes, number, same
    )
    if conflict is None:
        return
    lane, offset = int(lanes[conflict.index]), int(addresses[conflict.index]) - buffer.start
    instructions = machine.program.instructions
    where = instructions[conflict.instruction - 1].location if conflict.instruction else None
    block, warp = divmod(conflict.warp, machine.warps_per_block)
    verb = "writes" if kind == "settles" else kind
    other = f"warp {warp} of {machine.block_name(block - machine.first)}"
    earlier = f"{other} {'wrote' if conflict.wrote else 'reads'}{f' at {where}' if where else ''}"
    what = f"{buffer.element(offset)} of {buffer.name}"
    if block == machine.first + int(machine.block_of_lane[lane]):
        between = "with no barrier between them: call cuda.syncthreads() in between"
    else:
        between = "and blocks run in no order: use an atomic, or a launch for each step"
    text = f"{verb} {what}, which {earlier}, {between}"
    _blame_barrier(machine, lane, text)
    machine.fault("race", f"{machine.thread_name(lane)} {text}")


def several_write(machine: Machine, lanes: Array, first: int, what: str) -> NoReturn:
    """Fault for threads that write different values at once; lanes[first] is one of them."""
    machine.fault(
        "race",
        f"{machine.thread_name(int(lanes[first]))} and others write different values to {what} at once: "
        "use an atomic, or let one of them write",
    )


def blame(machine: Machine, batch: Batch, bad: Array, lanes: Array, kind: str, text: str) -> NoReturn:
    """Fault at the first instruction and thread that `bad` (instructions, lanes) marks."""
    first = int(np.argmax(bad))
    if bad.ndim == 2 and len(batch) == bad.shape[0]:
        machine.instruction = batch.instructions[first // bad.shape[1]]
    lane = int(np.broadcast_to(lanes, bad.shape).reshape(-1)[first])
    if kind == "race":
        _blame_barrier(machine, lane, text)
    machine.fault(kind, f"{machine.thread_name(lane)} {text}")


def _blame_barrier(machine: Machine, lane: int, text: str) -> None:
    """Fault for the cause of a race if that is a barrier at which only some threads were."""
    block = int(machine.block_of_lane[lane])
    if (met := machine.state(Barriers).first_mixed(block)) is not None:
        machine.fault(
            "barrier not reached by all threads",
            f"some threads of {machine.block_name(block)} came to this barrier while others were at another, "
            f"and so {machine.thread_name(lane)} {text}",
            met,
        )
