"""Which lanes run, and where their addresses point: state spaces, generic addresses, blocks of a cluster."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..machine.machine_state import Machine
from ..ptx.dtypes import Array, Lanes, Mask

# A generic address below SHARED_WINDOW is global. Addresses of shared and local memory begin at the windows.
SHARED_WINDOW = 1 << 60
LOCAL_WINDOW = 1 << 61
WINDOWS = ((0, SHARED_WINDOW), (SHARED_WINDOW, LOCAL_WINDOW), (LOCAL_WINDOW, 1 << 62))
CLUSTER_SHIFT = 24  # a shared::cluster address holds 1 + the block's rank above this bit, 0 for the own block


def space_of(opcode: tuple[str, ...]) -> str:
    """Return the state space that an opcode names, or "generic"."""
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


def active_lanes(machine: Machine, mask: Mask) -> Lanes:
    """Return which lanes run."""
    return np.ones(machine.lanes, np.bool_) if mask is None else mask


def word(flags: Array) -> Array:
    """Return flags (..., 32) as the bits of one uint32 for each warp, (..., 1)."""
    packed = np.packbits(flags, axis=-1, bitorder="little")
    return packed.view(np.dtype("<u4"))


def awaited(members: Array, active: Array) -> Array:
    """Return (..., 32): for each active lane, a bit for each lane that it names and that is not active.

    A `.sync` instruction waits for those of them that have not ended.
    """
    return np.where(active, members & ~word(active), np.uint32(0))


def whole_warps(machine: Machine, mask: Mask) -> Array:
    """Return the numbers of the lanes that run; Fault if only a part of some warp does."""
    if mask is None:
        return np.arange(machine.lanes)
    here = mask.reshape(-1, 32)
    parts = here.any(axis=1) & ~here.all(axis=1)
    if parts.any():
        warp = int(np.argmax(parts))
        machine.fault_at(
            "divergence",
            f"and {int(here[warp].sum()) - 1} more of its warp run an instruction that needs all 32 threads",
            32 * warp + int(np.argmax(here[warp])),
        )
    return np.flatnonzero(mask)


def of_every_lane(machine: Machine, values: Array) -> Array:
    """Return the operand values (1, lanes or 1) of one instruction for all lanes."""
    return np.broadcast_to(values, (1, machine.lanes))[0]


def of_lanes(values: Array, machine: Machine, lanes: Array) -> Array:
    """Return the operand values (1, lanes or 1) of one instruction for some lanes."""
    return of_every_lane(machine, values)[lanes]


def addresses_of(address: Array, count: int, lanes: Array, machine: Machine) -> Array:
    """Return the addresses of the lanes that run, (instructions, lanes)."""
    addresses = np.broadcast_to(address, (count, machine.lanes))
    return addresses if lanes.size == machine.lanes else addresses[:, lanes]


def of_all_lanes(values: Array, machine: Machine, lanes: Array) -> Array:
    """Return registers (items, instructions, some lanes) for all lanes, 0 in the others."""
    if lanes.size == machine.lanes:
        return values
    every: Array = np.zeros((*values.shape[:-1], machine.lanes), values.dtype)
    every[..., lanes] = values
    return every


def groups(major: Array, minor: Array) -> Iterator[tuple[tuple[int, int], Array]]:
    """Yield each pair of numbers (n,), at most 32 bits, that there is, and where it is."""
    code = major << 32 | minor
    for one in np.unique(code):
        yield (int(one) >> 32, int(one) & 0xFFFFFFFF), np.flatnonzero(code == one)


def generic(addresses: Array) -> tuple[str, Array]:
    """Return the state space of generic addresses ("mixed" for several) and the addresses in it."""
    low, high = int(addresses.min()), int(addresses.max())
    if high < SHARED_WINDOW:
        return "global", addresses
    if low >= LOCAL_WINDOW:
        return "local", addresses - LOCAL_WINDOW
    if low >= SHARED_WINDOW and high < LOCAL_WINDOW:
        return "shared", addresses - SHARED_WINDOW
    return "mixed", addresses


def in_shared_window(machine: Machine, addresses: Array, lanes: Array) -> Array:
    """Return shared addresses (..., lanes) of shared or generic ones; Fault for one that points elsewhere."""
    if not (addresses >= SHARED_WINDOW).any():
        return addresses
    outside = (addresses < SHARED_WINDOW) | (addresses >= LOCAL_WINDOW)
    if outside.any():
        first = int(np.argmax(outside.any(axis=tuple(range(outside.ndim - 1)))))
        text = "passes an address that does not point to shared memory"
        machine.fault_at("wrong memory", text, int(lanes[first]))
    return addresses - SHARED_WINDOW


def shared_blocks(machine: Machine, addresses: Array, lanes: Array) -> tuple[Array, Array]:
    """Return (block, offset) of shared addresses: in the lane's own block, or another of its cluster."""
    block = machine.block_of_lane if lanes.size == machine.lanes else machine.block_of_lane[lanes]
    if int(addresses.max()) >> CLUSTER_SHIFT == 0:
        return block, addresses
    rank = addresses >> CLUSTER_SHIFT
    there = block // machine.cluster * machine.cluster + rank - 1
    return np.where(rank > 0, there, block), addresses & ((1 << CLUSTER_SHIFT) - 1)
