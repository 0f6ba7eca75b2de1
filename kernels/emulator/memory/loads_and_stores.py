"""ld and st for every state space and width, with checks that a GPU does not make.

Before anything moves, each access must be aligned to its width, lie inside an array or inside shared memory,
read no unwritten shared memory, and race with no other warp. PTX ISA manual, "Data Movement and Conversion
Instructions: ld, st".
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..base.addresses import WINDOWS, addresses_of, generic, lanes_of, space_of
from ..base.batch import Batch
from ..base.instruction_registry import Run, unit
from ..machine.machine import Machine
from ..ptx.dtypes import DTYPES, SIZES, VECTORS, Array, Mask
from ..ptx.operands import Address, Symbol
from ..synchronization.atomic_ordering import AtomicOrder
from .address_checks import (
    Access,
    aligned,
    gather,
    local_offsets,
    note,
    out_of_bounds,
    rows_of,
    several_write,
    shared_offsets,
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
        addresses = addresses_of(address(machine), len(batch), lanes, machine)
        data = fetch(machine, batch, space, addresses, width * count, lanes)  # (n, lanes, bytes) uint8
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
        addresses = addresses_of(address(machine), len(batch), lanes, machine)
        values = np.broadcast_to(read(machine), (count, len(batch), machine.lanes))[:, :, lanes]
        data = np.ascontiguousarray(np.moveaxis(values, 0, -1)).view(np.uint8)  # (n, lanes, bytes)
        assert data.shape[-1] == width * count
        released = releases and machine.state(AtomicOrder).has_updated(addresses[0], lanes)
        put(machine, batch, space, addresses, data, lanes, "updates" if released else "writes")
        if released:
            machine.state(AtomicOrder).update(addresses[0], lanes)

    return run


def _parameter(batch: Batch, kind: str) -> Run:
    write = batch.target(0, kind)
    addresses = [
        (op.base.name, op.offset)
        for op in batch.operands(1)
        if isinstance(op, Address) and isinstance(op.base, Symbol)
    ]

    def run(machine: Machine, mask: Mask) -> None:
        bits = b"".join(machine.parameters[name][at : at + SIZES[kind]] for name, at in addresses)
        write(machine, np.frombuffer(bits, DTYPES[kind])[:, None], mask)

    return run


def _count(opcode: tuple[str, ...]) -> int:
    return next((VECTORS[word] for word in opcode if word in VECTORS), 1)


def fetch(machine: Machine, batch: Batch, space: str, addresses: Array, width: int, lanes: Array) -> Array:
    """Check loads and return their bytes, (instructions, lanes, width) uint8."""
    aligned(machine, batch, addresses, width, lanes)
    if space == "generic":
        space, addresses = generic(addresses)
        if space == "mixed":
            data = np.empty((*addresses.shape, width), np.uint8)
            for i, one, some in _by_space(batch, addresses):
                data[i, some] = fetch(
                    machine, one, "generic", addresses[i : i + 1, some], width, lanes[some]
                )[0]
            return data
    if space == "shared":
        guesses = any(id(one) in batch.program.flow.guesses for one in batch.instructions)
        flat = shared_offsets(machine, batch, addresses, width, lanes, "guesses" if guesses else "reads")
        return gather(machine.shared, flat, width)
    if space == "local":
        flat = local_offsets(machine, batch, addresses, width, lanes)
        return gather(machine.local, flat, width)
    if machine.counts is not None:
        machine.counts.global_access(machine.shape, batch.instructions, addresses, width, lanes, write=False)
    found = machine.memory.find(addresses, width)
    if len(found) > 1 and len(addresses) > 1:  # instructions that read different arrays
        rows = (
            _fetch_global(machine, batch.alone(i), row[None], width, lanes) for i, row in enumerate(addresses)
        )
        return np.concatenate(list(rows))
    return _fetch_global(machine, batch, addresses, width, lanes)


def _fetch_global(machine: Machine, batch: Batch, addresses: Array, width: int, lanes: Array) -> Array:
    data = np.empty((*addresses.shape, width), np.uint8)
    for buffer, where in machine.memory.find(addresses, width):
        if buffer is None:
            out_of_bounds(machine, batch, addresses, where, width, lanes, "reads")
        for i, row in enumerate(addresses if buffer.watched else ()):
            which = slice(None) if where is None else where[i]
            if len(batch) == len(addresses):
                machine.instruction = batch.instructions[i]
            note(machine, buffer, "reads", row[which], width, lanes[which])
        offset = addresses - buffer.start if where is None else (addresses - buffer.start)[where]
        if where is None:
            return buffer.read(offset, width)
        data[where] = buffer.read(offset, width)
    return data


def _by_space(batch: Batch, addresses: Array) -> Iterator[tuple[int, Batch, Array]]:
    """Yield (row, batch of its instruction, lanes) of generic addresses for each state space in use."""
    for i, row in enumerate(addresses):
        one = batch.alone(i)
        for low, high in WINDOWS:
            some = (row >= low) & (row < high)
            if some.any():
                yield i, one, some


def put(
    machine: Machine,
    batch: Batch,
    space: str,
    addresses: Array,
    data: Array,
    lanes: Array,
    access: Access = "writes",
) -> None:
    """Check stores and write data (instructions, lanes, width) uint8; "updates" release a lock."""
    width = data.shape[-1]
    machine.memory.changes += 1
    aligned(machine, batch, addresses, width, lanes)
    if space == "generic":
        space, addresses = generic(addresses)
        if space == "mixed":
            for i, one, some in _by_space(batch, addresses):
                some_data = data[i : i + 1, some]
                put(machine, one, "generic", addresses[i : i + 1, some], some_data, lanes[some])
            return
    if space == "shared":
        flat = shared_offsets(machine, batch, addresses, width, lanes, access, data)
        rows, shift = rows_of(machine.shared, width), width.bit_length() - 1
        values = data.view(rows.dtype)[..., 0]
        rows[flat >> shift] = values
        if (lost := np.asarray(rows[flat >> shift] != values)).any():
            first = int(np.argmax(lost))
            machine.instruction = batch.instructions[first // lanes.size % len(batch)]
            what = f"byte {int(addresses.reshape(-1)[first])} of shared memory"
            several_write(machine, lanes, first % lanes.size, what)
        return
    if space == "local":
        flat = local_offsets(machine, batch, addresses, width, lanes)
        rows, shift = rows_of(machine.local, width), width.bit_length() - 1
        rows[flat >> shift] = data.view(rows.dtype)[..., 0]
        return
    if machine.counts is not None:
        machine.counts.global_access(machine.shape, batch.instructions, addresses, width, lanes, write=True)
    for i, row in enumerate(addresses):
        _put_global(machine, batch, i, row, data[i], lanes)


def _put_global(machine: Machine, batch: Batch, i: int, row: Array, data: Array, lanes: Array) -> None:
    width = data.shape[-1]
    machine.instruction = batch.instructions[i]
    for buffer, where in machine.memory.find(row, width):
        if buffer is None:
            out_of_bounds(machine, batch, row[None], where, width, lanes, "writes")
        which = slice(None) if where is None else where
        who, there, values = lanes[which], row[which], data[which]
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
