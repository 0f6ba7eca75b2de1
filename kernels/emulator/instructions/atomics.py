"""atom and red: atomic operations on global and shared memory.

They read a cell of memory, combine it with an operand, write it back, and return the old value. The lanes of
a cell act one after another, in lane order; a GPU may choose any order. The order decides which old values
they return, and the result of float sums, exch and cas. Cells are independent. So the emulator either updates
all cells at once, as often as the busiest cell has lanes, or does all updates of one cell by a running sum
(`numpy.ufunc.accumulate`), whichever takes fewer steps.

Atomics on one address don't race with each other, but they race with unordered plain accesses.
`synchronization.atomic_ordering` handles what else they order: locks, flags, counters of finished blocks.

Source: PTX ISA manual, "Parallel Synchronization and Communication Instructions: atom, red".
"""

from __future__ import annotations

import functools
import linecache
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..accesses import race_faults as races
from ..accesses.access import Access, rows_of
from ..arithmetic.operations import operation
from ..arithmetic.rounding import SMALLEST_NORMAL, flushing
from ..base.addresses import addresses_of, lanes_of, space_of
from ..base.instruction_batch import Batch
from ..base.instruction_registry import Run, unit
from ..machine.machine_state import Machine
from ..ptx.dtypes import SIZES, Array, Mask
from ..ptx.fault import EmulatorError
from ..synchronization.atomic_ordering import AtomicOrder

# These words change nothing here, but a global float32 sum flushes subnormal numbers.
QUALIFIERS = {"relaxed", "acquire", "release", "acq_rel", "cta", "cluster", "gpu", "sys"}
QUALIFIERS |= {"global", "shared", "shared::cta", "shared::cluster"}


@dataclass(frozen=True, slots=True)
class Atomic:
    """An atomic operation on cells of one kind of number."""

    name: str  # "add", "min", "max", "and", "or", "xor", "exch", "cas", "inc" or "dec"
    kind: str  # of a cell, of the operands, and of the result
    combine: Callable[[Array, Array, Array], Array]  # (old, operand, compare) -> new
    accumulate: np.ufunc | None = None  # the same of (old, operand), if NumPy has it
    flushes: bool = False  # subnormal float32 operands and results become zeros


OTHERS: dict[str, Callable[[Array, Array, Array], Array]] = {
    "exch": lambda old, operand, compare: operand,
    "cas": lambda old, operand, compare: np.where(old == compare, operand, old),
    "inc": lambda old, operand, compare: np.where(old >= operand, 0, old + 1),
    "dec": lambda old, operand, compare: np.where((old == 0) | (old > operand), operand, old - 1),
}
KINDS: dict[str, tuple[str, ...]] = {
    "add": ("u32", "s32", "u64", "s64", "f32", "f64"),
    **dict.fromkeys(("min", "max"), ("u32", "s32", "u64", "s64")),
    **dict.fromkeys(("and", "or", "xor", "exch"), ("b32", "b64")),
    "cas": ("b16", "b32", "b64"),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
}


@functools.cache
def atomic(opcode: tuple[str, ...]) -> Atomic | None:
    """Return what `atom...` or `red...` does, or None if it is unknown.

    The operand of `atom d, [a], b` is `b`. `atom.cas d, [a], b, c` compares the cell with `b`; its operand is
    `c`.
    """
    words, kind = opcode[1:-1], opcode[-1]
    names = [word for word in words if word in KINDS]
    if opcode[0] not in ("atom", "red") or len(names) != 1 or set(words) - set(names) - QUALIFIERS:
        return None
    (name,) = names
    if kind not in KINDS[name]:
        return None
    if name in OTHERS:
        return Atomic(name, kind, OTHERS[name])
    plain = operation((name, kind))
    assert plain is not None
    ufunc: Any = plain.function
    flushes = kind == "f32" and "global" in words
    function = flushing(ufunc) if flushes else ufunc
    return Atomic(name, kind, lambda old, operand, compare: function(old, operand), ufunc, flushes)


def apply(
    memory: Array,  # (cells,), of the atomic's dtype; written to
    cells: Array,  # (lanes,): the cell of each lane
    operands: Array,
    compares: Array | None,  # for cas: the value that a cell must hold to be overwritten
    operation: Atomic,
) -> Array:
    """Carry the operation out for all lanes in order, and return what each of them found in its cell."""
    if compares is None:
        compares = operands
    order = np.argsort(cells, kind="stable")
    ordered = cells[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    counts = np.diff(np.append(starts, cells.size))
    old = np.empty(cells.size, memory.dtype)
    if operation.accumulate is not None and starts.size < counts.max():
        for start, count in zip(starts, counts, strict=True):
            lanes = order[start : start + count]
            chain = _chain(memory[cells[lanes[0]]], operands[lanes], operation)
            old[lanes], memory[cells[lanes[0]]] = chain[:-1], chain[-1]
        return old
    # Update all cells by their first lane, then by their second, ...
    nth = np.arange(cells.size) - np.repeat(starts, counts)
    ends = np.cumsum(np.bincount(nth))
    for lanes in np.split(order[np.argsort(nth, kind="stable")], ends[:-1]):
        found = memory[cells[lanes]]
        old[lanes] = found
        memory[cells[lanes]] = operation.combine(found, operands[lanes], compares[lanes])
    return old


def _chain(first: Array, operands: Array, operation: Atomic) -> Array:
    """Return what a cell holds before and after each of its updates."""
    assert operation.accumulate is not None
    values = np.concatenate(([first], operands))
    chain: Array = operation.accumulate.accumulate(values, dtype=values.dtype)
    both = np.concatenate((values, chain))
    if operation.flushes and ((np.absolute(both) < SMALLEST_NORMAL) & (both != 0)).any():
        for i, value in enumerate(operands):
            chain[i + 1] = operation.combine(chain[i], value, value)
    return chain


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
    learns = batch.program.flow.atomic_results_used

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
    access.count(shared=False)
    old = np.zeros(operand.shape, operand.dtype)
    for buffer, which, there in access.by_buffer():
        if not buffer.writable:
            machine.fault("read-only memory", f"the kernel updates {buffer.name}, which is read-only")
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
