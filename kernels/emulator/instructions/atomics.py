"""atom and red: atomic operations on global and shared memory.

Atomics on one place don't race with each other; a plain access beside them, with no barrier between, does.
What else they order (a lock, a flag, a counter of finished blocks) is the business of `turns`.
"""

from __future__ import annotations

import numpy as np

from ..arithmetic.atomics import Atomic, apply, atomic
from ..base.addresses import addresses_of, generic, lanes_of, space_of
from ..base.batch import Batch
from ..base.instruction_registry import Run, unit
from ..checks.debug_exceptions import fault_for_exception
from ..machine.machine import Machine
from ..memory.address_checks import aligned, blame, note, out_of_bounds, rows_of, shared_place
from ..ptx.dtypes import SIZES, Array, Mask
from ..ptx.fault import EmulatorError
from ..synchronization.atomic_ordering import AtomicOrder


@unit("atom", order="store")
def update(batch: Batch) -> Run:
    """atom{.space}.operation.kind d, [a], b{, c}: the old value goes to d."""
    return _prepare(batch, 1)


@unit("red", order="store", results=0)
def reduction(batch: Batch) -> Run:
    """red{.space}.operation.kind [a], b: as atom, with no result."""
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
        places = addresses_of(address(machine), len(batch), lanes, machine)
        operand = np.broadcast_to(one(machine), shape)[:, lanes]
        other = None if two is None else np.broadcast_to(two(machine), shape)[:, lanes]
        if other is not None:  # atom.cas d, [a], compare, new
            operand, other = other, operand
        old = np.zeros(shape, operand.dtype)
        for i in range(len(batch)):  # in order: the next may update what this one did
            machine.instruction = batch.instructions[i]
            compare = None if other is None else other[i]
            old[i, lanes] = _apply(machine, batch, i, space, places[i], operand[i], compare, found, lanes)
            if learns:
                machine.state(AtomicOrder).take(places[i], lanes)
        if write is not None:
            write(machine, old, mask)

    return run


def _apply(
    machine: Machine,
    batch: Batch,
    i: int,
    space: str,
    places: Array,
    operand: Array,
    compare: Array | None,
    found: Atomic,
    lanes: Array,
) -> Array:
    width = SIZES[found.kind]
    one = Batch([batch.instructions[i]], batch.program, batch.layout)
    aligned(machine, one, places[None], width, lanes)
    if space == "generic":
        space, places = generic(places)
    if space == "shared":
        flat = shared_place(machine, one, places[None], width, lanes, "updates")[0]
        cells = rows_of(machine.shared, width).view(operand.dtype)
        was = apply(cells, flat // width, operand, compare, found, None)
        machine.memory.changes += bool((cells[flat // width] != was).any())
        return was
    if space != "global":
        bad = np.ones((1, lanes.size), np.bool_)
        blame(machine, one, bad, lanes, "atomic", "updates memory that is neither global nor shared")
    if machine.counts is not None:
        machine.counts.global_access(machine.shape, one.instructions, places[None], width, lanes, write=True)
    old = np.zeros(places.shape, operand.dtype)
    for buffer, where in machine.memory.find(places, width):
        if buffer is not None and not buffer.writable:
            machine.fault("read-only memory", f"the kernel updates {buffer.name}, which is read-only")
        if buffer is None:
            out_of_bounds(
                machine, one, places[None], None if where is None else where[None], width, lanes, "updates"
            )
        which = slice(None) if where is None else where
        if buffer.watched and machine.memory.watch_blocks:
            note(machine, buffer, "updates", places[which], width, lanes[which])
        cells = buffer.view(width).view(operand.dtype)
        index = (places[which] - buffer.start) // width
        old[which] = apply(
            cells, index, operand[which], None if compare is None else compare[which], found, None
        )
        machine.memory.changes += bool((cells[index] != old[which]).any())
        if buffer.raises:
            raising = np.zeros(machine.lanes, np.bool_)
            raising[lanes] = True
            fault_for_exception(machine, raising)
    return old
