"""Atomic operations: read a cell of memory, combine it with an operand, write it back, return the old value.

The lanes of a cell act one after another, in lane order; a GPU may choose any order. The order decides which
old values they return, and the result of float sums, exch and cas. Cells are independent. So the emulator
either updates all cells at once, as often as the busiest cell has lanes, or does all updates of one cell by a
running sum (`numpy.ufunc.accumulate`), whichever takes fewer steps.

Source: PTX ISA manual, "Parallel Synchronization and Communication Instructions: atom, red".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..ptx.dtypes import Array
from .floats import through_32
from .operations import Function, pairwise
from .rounding import SMALLEST_NORMAL, flushing
from .warp_operations import REDUCTIONS

# These words change nothing here, but a global float32 sum flushes subnormal numbers.
QUALIFIERS = {"relaxed", "acquire", "release", "acq_rel", "cta", "cluster", "gpu", "sys", "noftz"}
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
    "add": ("u32", "s32", "u64", "s64", "f32", "f64", "f16", "bf16", "f16x2", "bf16x2"),
    **dict.fromkeys(("min", "max"), ("u32", "s32", "u64", "s64")),
    **dict.fromkeys(("and", "or", "xor", "exch"), ("b32", "b64")),
    "cas": ("b16", "b32", "b64"),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
}


@functools.cache
def atomic(opcode: tuple[str, ...]) -> Atomic | None:
    """Return what `atom...` or `red...` does, or None if it is unknown.

    The operand of `atom d, [a], b` is `b`. `atom.cas d, [a], b, c` compares the cell with `b`; its operand is
    `c`. Packed halves (f16x2) are cells of 32 bits.
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
    if "16" in kind:
        one = kind.removesuffix("x2")
        add: Function = np.add if one == "f16" else through_32(one, np.add)
        if kind.endswith("x2"):
            kind, add = "b32", pairwise(one, add)
        return Atomic(name, kind, lambda old, operand, compare: add(old, operand))
    if kind == "f32" and "global" in words:
        flushed = flushing(np.add)
        return Atomic(name, kind, lambda old, operand, compare: flushed(old, operand), np.add, flushes=True)
    ufunc: Function = REDUCTIONS[name]
    return Atomic(name, kind, lambda old, operand, compare: ufunc(old, operand), REDUCTIONS[name])


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
