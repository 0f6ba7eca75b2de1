"""atom and red: atomic operations on global and shared memory.

Atomics on one address don't race with each other, but they race with unordered plain accesses.
`synchronization.atomic_ordering` handles what else they order: locks, flags, counters of finished blocks.
"""

from __future__ import annotations

import linecache

import numpy as np

from ..arithmetic.atomics import Atomic, apply, atomic
from ..base.addresses import addresses_of, lanes_of, space_of
from ..base.batch import Batch
from ..base.instruction_registry import Run, unit
from ..machine.machine import Machine
from ..memory import races
from ..memory.access import Access, rows_of
from ..ptx.dtypes import SIZES, Array, Mask
from ..ptx.fault import EmulatorError
from ..synchronization.atomic_ordering import AtomicOrder


@unit("atom", order="store", counted="atomic")
def update(batch: Batch) -> Run:
    """atom{.space}.operation.kind d, [a], b{, c}: the old value goes to d."""
    return _prepare(batch, 1)


@unit("red", order="store", results=0, counted="atomic")
def reduction(batch: Batch) -> Run:
    """red{.space}.operation.kind [a], b: as atom, without a result."""
    return _prepare(batch, 0)


def _prepare(batch: Batch, first: int) -> Run:
    found = atomic(batch.first.opcode)
    if found is None:
        raise EmulatorError(f"the emulator does not know the instruction {batch.first.name}")
    kind, space = found.kind, space_of(batch.first.opcode)
    address, one = batch.address(first), batch.source(first + 1, kind)
    two = batch.source(first + 2, kind) if batch.has(first + 2) else None
    write = batch.target(0, kind) if first else None
    learns = batch.program.flow.learns

    def run(machine: Machine, mask: Mask) -> None:
        lanes = lanes_of(machine, mask)
        shape = (len(batch), machine.lanes)
        addresses = addresses_of(address(machine), len(batch), lanes, machine)
        operand = np.broadcast_to(one(machine), shape)[:, lanes]
        other = None if two is None else np.broadcast_to(two(machine), shape)[:, lanes]
        if other is not None:  # atom.cas d, [a], compare, new
            operand, other = other, operand
        old = np.zeros(shape, operand.dtype)
        access = Access(machine, batch, addresses, SIZES[kind], lanes, "updates")
        for i in range(len(batch)):  # in order: the next may update the same address
            machine.instruction = batch.instructions[i]
            compare = None if other is None else other[i]
            old[i, lanes] = _apply(access.part(i), space, operand[i], compare, found)
            if learns:
                machine.state(AtomicOrder).update(addresses[i], lanes)
        if write is not None:
            write(machine, old, mask)

    return run


def _apply(access: Access, space: str, operand: Array, compare: Array | None, found: Atomic) -> Array:
    """Update the cells at the addresses of one instruction, and return what each lane found there."""
    machine, width = access.machine, access.width
    access.check_alignment()
    space, access = access.in_space(space)
    if space == "shared":
        index = races.in_shared_memory(access, *access.shared_places())[0] // width
        cells = rows_of(machine.shared, width).view(operand.dtype)
        was = apply(cells, index, operand, compare, found)
        machine.memory.changes += bool((cells[index] != was).any())
        return was
    if space != "global":
        everywhere = np.ones(access.addresses.shape, np.bool_)
        access.blame(everywhere, "atomic", "updates memory that is neither global nor shared")
    if machine.counts is not None:
        instructions, addresses, lanes = access.batch.instructions, access.addresses, access.lanes
        machine.counts.global_access(machine.shape, instructions, addresses, width, lanes, write=True)
    old = np.zeros(operand.shape, operand.dtype)
    for buffer, where in machine.memory.find(access.addresses[0], width):
        if buffer is not None and not buffer.writable:
            machine.fault("read-only memory", f"the kernel updates {buffer.name}, which is read-only")
        if buffer is None:
            access.out_of_bounds(where)
        which = slice(None) if where is None else where
        there = access.part(0, which)
        if buffer.watched and machine.memory.watch_blocks:
            races.in_global_memory(there, buffer)
        cells = buffer.view(width).view(operand.dtype)
        index = (there.addresses[0] - buffer.start) // width
        compares = None if compare is None else compare[which]
        old[which] = apply(cells, index, operand[which], compares, found)
        machine.memory.changes += bool((cells[index] != old[which]).any())
        if buffer.raises:
            location = access.batch.first.location
            line = linecache.getline(location.file, location.line).strip() if location else ""
            text = f"the kernel raises an exception{f': {line}' if line else ''}"
            machine.fault("exception", text, lanes=np.isin(np.arange(machine.lanes), access.lanes))
    return old
