"""Where an access goes, and whether it may: state spaces, bounds, alignment, races, and who is to blame."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NoReturn

import numpy as np

from .batch import LOCAL_WINDOW, SHARED_WINDOW, Batch
from .units import Array, Mask

if TYPE_CHECKING:
    from .machine import Machine

CLUSTER_SHIFT = (
    24  # a shared::cluster address holds 1 + the block's rank above this bit, 0 for the block's own
)
Access = Literal["reads", "writes", "updates"]


def space_of(opcode: tuple[str, ...]) -> str:
    """Return the state space that an opcode names, "generic" where it names none."""
    for word in opcode:
        if word.startswith("shared"):
            return "shared"
        if word in ("global", "const"):
            return "global"
        if word in ("local", "param"):
            return "local"
    return "generic"


def lanes_of(machine: Machine, mask: Mask) -> Array:
    """Return the numbers of the lanes that run."""
    return np.arange(machine.lanes) if mask is None else np.flatnonzero(mask)


def places_of(address: Array, count: int, lanes: Array, machine: Machine) -> Array:
    """The addresses of the lanes that run, (instructions, lanes)."""
    places = np.broadcast_to(address, (count, machine.lanes))
    return places if lanes.size == machine.lanes else places[:, lanes]


def generic(places: Array) -> tuple[str, Array]:
    """Return the state space that generic addresses lie in ("mixed": several) and the addresses there."""
    low, high = int(places.min()), int(places.max())
    if high < SHARED_WINDOW:
        return "global", places
    if low >= LOCAL_WINDOW:
        return "local", places - LOCAL_WINDOW
    if low >= SHARED_WINDOW and high < LOCAL_WINDOW:
        return "shared", places - SHARED_WINDOW
    return "mixed", places


def shared_blocks(machine: Machine, places: Array, lanes: Array) -> tuple[Array, Array]:
    """Return (block, offset) of shared addresses: of the lane's own block, or of another of its cluster."""
    block = machine.block_of_lane[lanes]
    rank = places >> CLUSTER_SHIFT
    if not rank.any():
        return np.broadcast_to(block, places.shape), places
    there = block // machine.cluster * machine.cluster + rank - 1
    return np.where(rank > 0, there, block), places & ((1 << CLUSTER_SHIFT) - 1)


def shared_place(
    machine: Machine, batch: Batch, places: Array, width: int, lanes: Array, access: Access
) -> Array:
    """Check an access to shared memory, note it, and return its place in the shared memory of all blocks."""
    block, offset = shared_blocks(machine, places, lanes)
    if int(offset.min()) < 0 or int(offset.max()) + width > machine.shared_size:
        outside = (offset < 0) | (offset + width > machine.shared_size)
        at = int(offset.reshape(-1)[np.argmax(outside)])
        blame(
            machine,
            batch,
            outside,
            lanes,
            "out of bounds",
            f"{access} {width} bytes at byte {at} of shared memory, "
            f"of which the block has {machine.shared_size}",
        )
    if machine.counts is not None:
        machine.counts.shared_access(machine, batch.instructions, places, width, lanes)
    clocks = machine.clocks
    granules = clocks.granules(block, offset, width)
    agents = np.broadcast_to(clocks.agents_of_lanes()[lanes], places.shape)
    if clocks.any_pending and (pending := any_granule(clocks.pending[granules])).any():
        kind = (
            "async copy read before it was waited for" if access == "reads" else "overwrites a pending copy"
        )
        text = f"{access} shared memory that an asynchronous copy still fills"
        blame(machine, batch, pending, lanes, kind, text)
    by = batch.instructions if len(batch) == places.shape[0] else ()
    if access != "writes" and (unwritten := clocks.written[granules] == 0).any():
        bad = any_granule(unwritten)
        at = int(offset.reshape(-1)[np.argmax(bad)])
        text = f"{access} {width} bytes at byte {at} of shared memory that nobody wrote"
        blame(machine, batch, bad, lanes, "unwritten shared memory", text)
    note = {"reads": clocks.read, "writes": clocks.write, "updates": clocks.update}[access]
    races = note(granules, agents, by)
    if races.any():
        first = int(np.argmax(races))
        agent = int(agents.reshape(-1)[first // races.shape[-1]])
        text = clocks.explain(int(granules.reshape(-1)[first]), agent)
        text = f"{access} shared memory {text}, with no barrier between them"
        blame(machine, batch, any_granule(races), lanes, "race", text)
    flat: Array = block * machine.shared_pitch + offset
    return flat


def local_place(machine: Machine, batch: Batch, places: Array, width: int, lanes: Array) -> Array:
    """Check an access to local memory, and return its place in the local memory of all lanes."""
    size_of_local = machine.program.local
    outside = (places < 0) | (places + width > size_of_local)
    if outside.any():
        at = int(places.reshape(-1)[np.argmax(outside)])
        text = f"uses {width} bytes at byte {at} of local memory, of which a thread has {size_of_local}"
        blame(machine, batch, outside, lanes, "out of bounds", text)
    flat: Array = lanes * machine.local.shape[1] + places
    return flat


def rows_of(memory: Array, width: int) -> Array:
    """Return memory as one row of items of `width` bytes."""
    return memory.reshape(-1).view(f"V{width}" if width > 8 else f"u{width}")


def gather(memory: Array, places: Array, width: int) -> Array:
    """Return `width` bytes at each place, aligned to them: (..., width) uint8."""
    found: Array = rows_of(memory, width)[places // width][..., None].view(np.uint8)
    return found


def any_granule(flags: Array) -> Array:
    """Reduce what was found of each granule to the access that it belongs to."""
    return np.asarray(flags.any(axis=-1))


def aligned(machine: Machine, batch: Batch, places: Array, width: int, lanes: Array) -> None:
    """Fault unless every access lies on a multiple of its width."""
    if width > 1 and (odd := (places & (width - 1)) != 0).any():
        at = int(places.reshape(-1)[np.argmax(odd)])
        text = (
            f"makes an access of {width} bytes, which must lie on a multiple of {width}, "
            f"and {at:#x} is {at % width} past one"
        )
        blame(machine, batch, odd, lanes, "misaligned", text)


def out_of_bounds(
    machine: Machine, batch: Batch, places: Array, where: Array | None, width: int, lanes: Array, verb: str
) -> NoReturn:
    """Fault for addresses that lie in no array."""
    bad = np.ones(places.shape, np.bool_) if where is None else where
    at = int(places.reshape(-1)[np.argmax(bad)])
    blame(machine, batch, bad, lanes, "out of bounds", f"{verb} {width} bytes at {machine.memory.near(at)}")


def race(machine: Machine, batch: Batch, bad: Array, lanes: Array, name: str) -> NoReturn:
    """Fault for a race in global memory."""
    text = f"uses an element of {name} that another warp wrote, with no barrier between them"
    blame(machine, batch, bad, lanes, "race", text)


def blame(machine: Machine, batch: Batch, bad: Array, lanes: Array, kind: str, text: str) -> NoReturn:
    """Fault at the first instruction and thread of `bad` (instructions, lanes)."""
    first = int(np.argmax(bad))
    if bad.ndim == 2 and len(batch) == bad.shape[0]:
        machine.instruction = batch.instructions[first // bad.shape[1]]
    lane = int(np.broadcast_to(lanes, bad.shape).reshape(-1)[first])
    machine.fault(kind, f"{machine.thread_name(lane)} {text}")
