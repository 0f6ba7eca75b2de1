"""ld and st: every state space, every width, and the checks that a GPU does not make.

PTX ISA manual, "Data Movement and Conversion Instructions: ld, st". Checked before anything is moved: that an
access is aligned to its width, lies inside an array or inside shared memory, reads no shared memory that
nobody wrote, and races with no other warp.
"""

from __future__ import annotations

import numpy as np

from ..base.addresses import LOCAL_WINDOW, SHARED_WINDOW, addresses_of, generic, lanes_of, space_of
from ..base.batch import Batch
from ..base.instruction_registry import Run, unit
from ..machine.global_memory import Buffer
from ..machine.machine import Machine
from ..ptx.dtypes import DTYPES, SIZES, VECTORS, Array, Mask
from ..ptx.operands import Address, Symbol
from ..synchronization.atomic_ordering import AtomicOrder
from .address_checks import (
    Access,
    aligned,
    gather,
    local_place,
    note,
    out_of_bounds,
    rows_of,
    several_write,
    shared_place,
)


@unit("ld", order="load")
def load(batch: Batch) -> Run:
    """ld{.space}{.v2|.v4}.kind d, [a]: the destination may be wider than the kind."""
    opcode = batch.first.opcode
    kind = opcode[-1]
    width, count = SIZES[kind], _count(opcode)
    write = batch.targets(0, kind)
    operand = batch.first.operands[1]
    if isinstance(operand, Address) and isinstance(operand.base, Symbol) and operand.base.space == "param":
        return _parameter(batch, kind)
    address, space = batch.address(1), space_of(opcode)

    def run(machine: Machine, mask: Mask) -> None:
        lanes = lanes_of(machine, mask)
        places = addresses_of(address(machine), len(batch), lanes, machine)
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
    width, count = SIZES[kind], _count(opcode)
    address, read, space = batch.address(0), batch.sources(1, kind), space_of(opcode)
    releases = len(batch) == 1 and id(batch.first) in batch.program.flow.releases

    def run(machine: Machine, mask: Mask) -> None:
        lanes = lanes_of(machine, mask)
        places = addresses_of(address(machine), len(batch), lanes, machine)
        values = np.broadcast_to(read(machine), (count, len(batch), machine.lanes))[:, :, lanes]
        data = np.ascontiguousarray(np.moveaxis(values, 0, -1)).view(np.uint8)  # (n, lanes, bytes)
        assert data.shape[-1] == width * count
        over = releases and machine.state(AtomicOrder).are_over(places[0], lanes)
        put(machine, batch, space, places, data, lanes, "updates" if over else "writes")
        if over:
            machine.state(AtomicOrder).take(places[0], lanes)

    return run


def _parameter(batch: Batch, kind: str) -> Run:
    write = batch.target(0, kind)
    places = [
        (op.base.name, op.offset)
        for op in batch.operands(1)
        if isinstance(op, Address) and isinstance(op.base, Symbol)
    ]

    def run(machine: Machine, mask: Mask) -> None:
        bits = b"".join(machine.parameters[name][at : at + SIZES[kind]] for name, at in places)
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
        guesses = any(id(one) in batch.program.flow.guesses for one in batch.instructions)
        flat = shared_place(machine, batch, places, width, lanes, "guesses" if guesses else "reads")
        return gather(machine.shared, flat, width)
    if space == "local":
        flat = local_place(machine, batch, places, width, lanes)
        return gather(machine.local, flat, width)
    if machine.counts is not None:
        machine.counts.global_access(machine.shape, batch.instructions, places, width, lanes, write=False)
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
        if buffer.watched:
            _note_reads(machine, batch, buffer, places, where, width, lanes)
        offset = places - buffer.start if where is None else (places - buffer.start)[where]
        if where is None:
            return buffer.read(offset, width)
        data[where] = buffer.read(offset, width)
    return data


def _note_reads(
    machine: Machine,
    batch: Batch,
    buffer: Buffer,
    places: Array,
    where: Array | None,
    width: int,
    lanes: Array,
) -> None:
    """Note reads, and fault where they race."""
    for i, row in enumerate(places):
        which = slice(None) if where is None else where[i]
        if len(batch) == len(places):
            machine.instruction = batch.instructions[i]
        note(machine, buffer, "reads", row[which], width, lanes[which])


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


def put(
    machine: Machine,
    batch: Batch,
    space: str,
    places: Array,
    data: Array,
    lanes: Array,
    access: Access = "writes",
) -> None:
    """Write data (instructions, lanes, width) uint8 at each place, all checked.

    access: "updates" for a store that counts as an atomic, since it releases a lock.
    """
    width = data.shape[-1]
    machine.memory.changes += 1
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
        flat = shared_place(machine, batch, places, width, lanes, access, data)
        rows, shift = rows_of(machine.shared, width), width.bit_length() - 1
        values = data.view(rows.dtype)[..., 0]
        rows[flat >> shift] = values
        if (lost := np.asarray(rows[flat >> shift] != values)).any():
            first = int(np.argmax(lost))
            machine.instruction = batch.instructions[first // lanes.size % len(batch)]
            several_write(
                machine, lanes, first % lanes.size, f"byte {int(places.reshape(-1)[first])} of shared memory"
            )
        return
    if space == "local":
        flat = local_place(machine, batch, places, width, lanes)
        rows, shift = rows_of(machine.local, width), width.bit_length() - 1
        rows[flat >> shift] = data.view(rows.dtype)[..., 0]
        return
    if machine.counts is not None:
        machine.counts.global_access(machine.shape, batch.instructions, places, width, lanes, write=True)
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
        there = row if where is None else row[where]
        values = data if where is None else data[where]
        if not buffer.writable:
            machine.fault("read-only memory", f"the kernel writes to {buffer.name}, which is read-only")
        offset = there - buffer.start
        if buffer.watched:
            settles = id(batch.instructions[i]) in batch.program.flow.settles
            note(machine, buffer, "settles" if settles else "writes", there, width, who, values)
        buffer.write(offset, values)
        if (lost := (buffer.read(offset, width) != values).any(axis=-1)).any():
            first = int(np.argmax(lost))
            several_write(machine, who, first, f"{buffer.element(int(offset[first]))} of {buffer.name}")
