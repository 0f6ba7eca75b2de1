"""ld and st: every state space, every width, and the checks that a GPU does not make.

PTX ISA manual, "Data Movement and Conversion Instructions: ld, st". Checked before anything is moved: that an
access is aligned to its width, lies inside an array or inside shared memory, reads no shared memory that
nobody wrote, and races with no other warp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .batch import DTYPES, LOCAL_WINDOW, SHARED_WINDOW, Batch, size
from .operands import Address, Symbol
from .places import (
    aligned,
    any_granule,
    gather,
    generic,
    lanes_of,
    local_place,
    out_of_bounds,
    places_of,
    race,
    rows_of,
    shared_place,
    space_of,
)
from .units import Array, Mask, Run, unit

if TYPE_CHECKING:
    from .machine import Machine

CLUSTER_SHIFT = (
    24  # a shared::cluster address holds 1 + the block's rank above this bit, 0 for the block's own
)
VECTORS = {"v2": 2, "v4": 4, "v8": 8}


@unit("ld", order="load")
def load(batch: Batch) -> Run:
    """ld{.space}{.v2|.v4}.kind d, [a]: the destination may be wider than the kind."""
    opcode = batch.first.opcode
    kind = opcode[-1]
    width, count = size(kind), _count(opcode)
    write = batch.targets(0, kind)
    operand = batch.first.operands[1]
    if isinstance(operand, Address) and isinstance(operand.base, Symbol) and operand.base.space == "param":
        return _parameter(batch, kind)
    address, space = batch.address(1), space_of(opcode)

    def run(machine: Machine, mask: Mask) -> None:
        lanes = lanes_of(machine, mask)
        places = places_of(address(machine), len(batch), lanes, machine)
        data = fetch(machine, batch, space, places, width * count, lanes)  # (n, lanes, bytes) uint8
        values = np.moveaxis(data.view(DTYPES[kind]), -1, 0)  # (items, n, lanes)
        if mask is not None:
            whole = np.zeros((count, len(batch), machine.lanes), values.dtype)
            whole[:, :, lanes] = values
            values = whole
        write(machine, values, mask)

    return run


@unit("st", order="store", results=0)
def store(batch: Batch) -> Run:
    """st{.space}{.v2|.v4}.kind [a], b: of a wider source, the low bits are stored."""
    opcode = batch.first.opcode
    kind = opcode[-1]
    width, count = size(kind), _count(opcode)
    address, read, space = batch.address(0), batch.sources(1, kind), space_of(opcode)

    def run(machine: Machine, mask: Mask) -> None:
        lanes = lanes_of(machine, mask)
        places = places_of(address(machine), len(batch), lanes, machine)
        values = np.broadcast_to(read(machine), (count, len(batch), machine.lanes))[:, :, lanes]
        data = np.ascontiguousarray(np.moveaxis(values, 0, -1)).view(np.uint8)  # (n, lanes, bytes)
        assert data.shape[-1] == width * count
        put(machine, batch, space, places, data, lanes)

    return run


def _parameter(batch: Batch, kind: str) -> Run:
    write = batch.target(0, kind)
    places = [
        (op.base.name, op.offset)
        for op in batch.operands(1)
        if isinstance(op, Address) and isinstance(op.base, Symbol)
    ]

    def run(machine: Machine, mask: Mask) -> None:
        bits = b"".join(machine.parameters[name][at : at + size(kind)] for name, at in places)
        write(machine, np.frombuffer(bits, DTYPES[kind])[:, None], mask)

    return run


def _count(opcode: tuple[str, ...]) -> int:
    return next((VECTORS[word] for word in opcode if word in VECTORS), 1)


def fetch(machine: Machine, batch: Batch, space: str, places: Array, width: int, lanes: Array) -> Array:
    """Return `width` bytes at each place, (instructions, lanes, width) uint8, all checked."""
    aligned(machine, batch, places, width, lanes)
    if space == "generic":
        space, places = generic(places)
        if space == "mixed":
            return _fetch_mixed(machine, batch, places, width, lanes)
    if space == "shared":
        flat = shared_place(machine, batch, places, width, lanes, access="reads")
        return gather(machine.shared, flat, width)
    if space == "local":
        flat = local_place(machine, batch, places, width, lanes)
        return gather(machine.local, flat, width)
    if machine.counts is not None:
        machine.counts.global_access(machine, batch.instructions, places, width, lanes, write=False)
    found = machine.memory.find(places, width)
    if len(found) > 1 and len(places) > 1:  # instructions that read different arrays
        rows = [
            (Batch([one], batch.program, batch.layout), row)
            for one, row in zip(batch.instructions, places, strict=True)
        ]
        return np.concatenate([_fetch_global(machine, one, row[None], width, lanes) for one, row in rows])
    return _fetch_global(machine, batch, places, width, lanes)


def _fetch_global(machine: Machine, batch: Batch, places: Array, width: int, lanes: Array) -> Array:
    data = np.empty((*places.shape, width), np.uint8)
    for buffer, where in machine.memory.find(places, width):
        if buffer is None:
            out_of_bounds(machine, batch, places, where, width, lanes, "reads")
        offset = places - buffer.start if where is None else (places - buffer.start)[where]
        who = np.broadcast_to(lanes, places.shape)
        chosen = who if where is None else who[where]
        races = machine.memory.races(machine, buffer, offset, width, chosen, write=False)
        if races is not None and races.any():
            race(machine, batch, any_granule(races), chosen, buffer.name)
        if where is None:
            return buffer.read(offset, width)
        data[where] = buffer.read(offset, width)
    return data


def _fetch_mixed(machine: Machine, batch: Batch, places: Array, width: int, lanes: Array) -> Array:
    """Generic addresses of several state spaces at once: each by itself."""
    data = np.empty((*places.shape, width), np.uint8)
    for i, row in enumerate(places):
        for low, high in ((0, SHARED_WINDOW), (SHARED_WINDOW, LOCAL_WINDOW), (LOCAL_WINDOW, 1 << 62)):
            some = (row >= low) & (row < high)
            if some.any():
                one = Batch([batch.instructions[i]], batch.program, batch.layout)
                data[i, some] = fetch(machine, one, "generic", row[None, some], width, lanes[some])[0]
    return data


def put(machine: Machine, batch: Batch, space: str, places: Array, data: Array, lanes: Array) -> None:
    """Write data (instructions, lanes, width) uint8 at each place, all checked."""
    width = data.shape[-1]
    aligned(machine, batch, places, width, lanes)
    if space == "generic":
        space, places = generic(places)
        if space == "mixed":
            for i, row in enumerate(places):
                one = Batch([batch.instructions[i]], batch.program, batch.layout)
                for low, high in ((0, SHARED_WINDOW), (SHARED_WINDOW, LOCAL_WINDOW), (LOCAL_WINDOW, 1 << 62)):
                    some = (row >= low) & (row < high)
                    if some.any():
                        put(machine, one, "generic", row[None, some], data[i : i + 1, some], lanes[some])
            return
    if space == "shared":
        flat = shared_place(machine, batch, places, width, lanes, access="writes")
        rows = rows_of(machine.shared, width)
        rows[flat // width] = data.view(rows.dtype)[..., 0]
        return
    if space == "local":
        flat = local_place(machine, batch, places, width, lanes)
        rows = rows_of(machine.local, width)
        rows[flat // width] = data.view(rows.dtype)[..., 0]
        return
    if machine.counts is not None:
        machine.counts.global_access(machine, batch.instructions, places, width, lanes, write=True)
    for i, row in enumerate(places):
        _put_global(machine, batch, i, row, data[i], lanes)


def _put_global(machine: Machine, batch: Batch, i: int, row: Array, data: Array, lanes: Array) -> None:
    width = data.shape[-1]
    machine.instruction = batch.instructions[i]
    for buffer, where in machine.memory.find(row, width):
        if buffer is None:
            out_of_bounds(
                machine, batch, row[None], None if where is None else where[None], width, lanes, "writes"
            )
        who = lanes if where is None else lanes[where]
        offset = row - buffer.start if where is None else (row - buffer.start)[where]
        values = data if where is None else data[where]
        if not buffer.writable:
            machine.fault("read-only memory", f"the kernel writes to {buffer.name}, which is read-only")
        races = machine.memory.races(machine, buffer, offset, width, who, write=True)
        if races is not None and races.any():
            race(machine, batch, any_granule(races), who, buffer.name)
        buffer.write(offset, values)
        lost = (buffer.read(offset, width) != values).any(axis=-1)
        if lost.any():
            lane = int(who[np.argmax(lost)])
            machine.fault(
                "race",
                f"several threads write different values to {buffer.name} at once, "
                f"{machine.thread_name(lane)} among them",
            )
