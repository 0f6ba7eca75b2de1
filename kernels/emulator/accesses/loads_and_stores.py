"""ld and st for every state space and width, with checks that a GPU does not make.

Before anything moves, each access must be aligned to its width, lie inside an array or inside shared memory,
read no unwritten shared memory, and race with no other warp. PTX ISA manual, "Data Movement and Conversion
Instructions: ld, st".
"""

from __future__ import annotations

import numpy as np

from ..base.addresses import addresses_of, lanes_of, of_all_lanes, space_of
from ..base.instruction_batch import Batch
from ..base.instruction_registry import Run, unit
from ..machine.machine_state import Machine
from ..ptx.dtypes import DTYPES, SIZES, Array, Mask
from ..ptx.program import Address, Symbol
from ..synchronization.atomic_ordering import AtomicOrder
from . import race_faults as races
from .access import Access, AccessKind, gather, rows_of


@unit("ld", order="load", counted="load")
def load(batch: Batch) -> Run:
    """ld{.space}{.v2|.v4}.kind d, [a]: the destination may be wider than the kind."""
    opcode = batch.first.opcode
    kind = opcode[-1]
    width, count = SIZES[kind], batch.first.vector
    write = batch.targets(0, kind)
    operand = batch.first.operands[1]
    if isinstance(operand, Address) and isinstance(operand.base, Symbol) and operand.base.space == "param":
        return _parameter(batch, kind)
    address, space = batch.address(1), space_of(opcode)

    def run(machine: Machine, mask: Mask) -> None:
        lanes = lanes_of(machine, mask)
        addresses = addresses_of(address(machine), len(batch), lanes, machine)
        access = Access(machine, batch, addresses, width * count, lanes, "reads")
        data = fetch(access, space)  # (n, lanes, bytes) uint8
        values = np.moveaxis(data.view(DTYPES[kind]), -1, 0)  # (items, n, lanes)
        write(machine, of_all_lanes(values, machine, lanes), mask)

    return run


@unit("st", order="store", results=0, counted="store")
def store(batch: Batch) -> Run:
    """st{.space}{.v2|.v4}.kind [a], b: of a wider source, the low bits are stored."""
    opcode = batch.first.opcode
    width, count = SIZES[opcode[-1]], batch.first.vector
    address, read, space = batch.address(0), batch.sources(1, opcode[-1]), space_of(opcode)
    releases = len(batch) == 1 and batch.first.number in batch.program.flow.releases

    def run(machine: Machine, mask: Mask) -> None:
        lanes = lanes_of(machine, mask)
        addresses = addresses_of(address(machine), len(batch), lanes, machine)
        values = np.broadcast_to(read(machine), (count, len(batch), machine.lanes))[:, :, lanes]
        data = np.ascontiguousarray(np.moveaxis(values, 0, -1)).view(np.uint8)  # (n, lanes, bytes)
        released = releases and machine.state(AtomicOrder).has_updated(addresses[0], lanes)
        kind: AccessKind = "updates" if released else "writes"  # a store that releases a lock is an atomic
        put(Access(machine, batch, addresses, width * count, lanes, kind), space, data)
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


def fetch(access: Access, space: str) -> Array:
    """Check loads and return their bytes, (instructions, lanes, width) uint8."""
    machine, width = access.machine, access.width
    access.check_alignment()
    space, access = access.in_space(space)
    if space == "mixed":
        data = np.empty((*access.addresses.shape, width), np.uint8)
        for i, some in access.parts_by_space():
            data[i, some] = fetch(access.part(i, some), "generic")[0]
        return data
    if space == "shared":
        guesses = access.batch.program.flow.loads_checked_by_cas
        if guesses and any(one.number in guesses for one in access.batch.instructions):
            access.kind = "guesses"
        return gather(machine.shared, races.in_shared_memory(access, *access.shared_places()), width)
    if space == "local":
        return gather(machine.local, access.local_offsets(), width)
    access.count(shared=False)
    only, apart = machine.memory.find(access.addresses, width)[0]
    if only is not None and apart is None:  # one buffer holds all addresses
        for i in range(len(access.batch)) if only.watched else ():
            machine.instruction = access.batch.instructions[i]
            races.in_global_memory(access.part(i), only)
        return only.read(access.addresses - only.start, width)
    data = np.empty((*access.addresses.shape, width), np.uint8)
    for i in range(len(access.batch)):
        part = access.part(i)
        machine.instruction = part.batch.first
        for buffer, where, there in part.by_buffer():
            if buffer.watched:
                races.in_global_memory(there, buffer)
            data[i, where] = buffer.read(there.addresses[0] - buffer.start, width)
    return data


def put(access: Access, space: str, data: Array) -> None:
    """Check stores and write data (instructions, lanes, width) uint8; "updates" release a lock."""
    machine, width = access.machine, access.width
    machine.memory.changes += 1
    access.check_alignment()
    space, access = access.in_space(space)
    if space == "mixed":
        for i, some in access.parts_by_space():
            put(access.part(i, some), "generic", data[i : i + 1, some])
    elif space == "shared":
        flat = races.in_shared_memory(access, *access.shared_places(), data)
        rows, shift = rows_of(machine.shared, width), width.bit_length() - 1
        values = data.view(rows.dtype)[..., 0]
        rows[flat >> shift] = values
        if (lost := np.asarray(rows[flat >> shift] != values)).any():
            races.in_one_step(access, lost, f"byte {access.first(lost)} of shared memory")
    elif space == "local":
        rows, shift = rows_of(machine.local, width), width.bit_length() - 1
        rows[access.local_offsets() >> shift] = data.view(rows.dtype)[..., 0]
    else:
        access.count(shared=False)
        for i in range(len(access.addresses)):
            _put_global(access.part(i), data[i])


def _put_global(access: Access, data: Array) -> None:
    machine, instruction = access.machine, access.batch.first
    machine.instruction = instruction
    for buffer, some, there in access.by_buffer():
        values = data[some]
        if not buffer.writable:
            machine.fault("read-only memory", f"the kernel writes to {buffer.name}, which is read-only")
        if buffer.watched:
            decided = access.batch.program.flow.stores_decided_by_loads
            there.kind = "settles" if instruction.number in decided else "writes"
            races.in_global_memory(there, buffer, values)
        offset = there.addresses[0] - buffer.start
        buffer.write(offset, values)
        if (lost := (buffer.read(offset, access.width) != values).any(axis=-1)).any():
            first = int(offset[np.argmax(lost)])
            races.in_one_step(there, lost, f"{buffer.element(first)} of {buffer.name}")
