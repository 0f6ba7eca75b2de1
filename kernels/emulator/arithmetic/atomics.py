"""Atomic operations: read a cell of memory, combine it with an operand, write it back, return what it was.

Lanes take their turns in order; a GPU promises none, so this is one that it may choose. Each cell sees its
lanes one after another, which matters for the old values that they return, and wherever the operation depends
on the order (float sums, exch, cas). Cells don't matter to each other. So either all cells take a turn at
once, as often as the busiest has lanes, or one cell takes all its turns at once, by a running sum
(`numpy.ufunc.accumulate`), whichever is fewer steps.

Source: PTX ISA manual, "Parallel Synchronization and Communication Instructions: atom, red".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..base.ptx_types import DTYPES, Array, Function, pairwise
from .half_precision import through_32
from .rounding import SMALLEST_NORMAL, flushing

# Of these words only the place has a meaning here, and of `.noftz` it is the absence.
QUALIFIERS = {"relaxed", "acquire", "release", "acq_rel", "cta", "cluster", "gpu", "sys", "noftz"}
QUALIFIERS |= {"global", "shared", "shared::cta", "shared::cluster"}


@dataclass(frozen=True, slots=True)
class Atomic:
    """An atomic operation on cells of one kind of number."""

    name: str  # "add", "min", "max", "and", "or", "xor", "exch", "cas", "inc" or "dec"
    kind: str  # of a cell, of the operands, and of the result
    combine: Callable[[Array, Array, Array], Array]  # (old, operand, compare) -> new
    accumulate: np.ufunc | None = None  # the same of old and operand, where NumPy can run it over an array
    flushes: bool = False  # subnormal float32 operands and results become zeros

    @property
    def dtype(self) -> Any:
        """The dtype of the memory and of the operands."""
        return DTYPES[self.kind]


def _swap(old: Array, operand: Array, compare: Array) -> Array:
    new: Array = np.where(old == compare, operand, old)
    return new


def _increment(old: Array, operand: Array, compare: Array) -> Array:
    new: Array = np.where(old >= operand, old.dtype.type(0), old + old.dtype.type(1))
    return new


def _decrement(old: Array, operand: Array, compare: Array) -> Array:
    new: Array = np.where((old == 0) | (old > operand), operand, old - old.dtype.type(1))
    return new


UFUNCS: dict[str, np.ufunc] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
OTHERS: dict[str, Callable[[Array, Array, Array], Array]] = {
    "exch": lambda old, operand, compare: operand,
    "cas": _swap,
    "inc": _increment,
    "dec": _decrement,
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
    """Return what `atom...` or `red...` does, or None where that is unknown here.

    `atom d, [a], b` has one operand, `b`. Of `atom.cas d, [a], b, c` the operand is `c`, and `b` is what the
    cell is compared with. Packed halves (f16x2) are cells of 32 bits.
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
    ufunc: Function = UFUNCS[name]
    return Atomic(name, kind, lambda old, operand, compare: ufunc(old, operand), UFUNCS[name])


def apply(
    memory: Array,  # (cells,), of the atomic's dtype; written to
    index: Array,  # which cell each lane means
    operand: Array,
    compare: Array | None,  # for cas: what a cell must hold to be overwritten
    operation: Atomic,
    active: Array | None,  # lanes that take part; None is all
) -> Array:
    """Carry the operation out for all active lanes, and return what each of them found; 0 for the others.

    Shapes broadcast; lanes are counted in C order.
    """
    found = [x for x in (index, operand, compare, active) if x is not None]
    shape = np.broadcast_shapes(*(x.shape for x in found))
    lanes = slice(None) if active is None else np.flatnonzero(np.broadcast_to(active, shape))

    def flat(x: Array) -> Array:
        lined: Array = np.broadcast_to(x, shape).reshape(-1)[lanes]
        return lined

    cells, operands = flat(index), flat(operand)
    compares = operands if compare is None else flat(compare)
    old = np.zeros(shape, memory.dtype)
    if cells.size:
        old.reshape(-1)[lanes] = _in_turns(memory, cells, operands, compares, operation)
    return old


def _in_turns(memory: Array, cells: Array, operands: Array, compares: Array, operation: Atomic) -> Array:
    order = np.argsort(cells, kind="stable")
    ordered = cells[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    counts = np.diff(np.append(starts, cells.size))
    old = np.empty(cells.size, memory.dtype)
    if operation.accumulate is not None and starts.size < counts.max():
        for start, count in zip(starts, counts, strict=True):
            turns = order[start : start + count]
            chain = _chain(memory[cells[turns[0]]], operands[turns], operation)
            old[turns], memory[cells[turns[0]]] = chain[:-1], chain[-1]
        return old
    # The lanes of each turn: those that are the first, the second, ... of their cell.
    turn_of = np.arange(cells.size) - np.repeat(starts, counts)
    by_turn = order[np.argsort(turn_of, kind="stable")]
    ends = np.cumsum(np.bincount(turn_of))
    for lanes in np.split(by_turn, ends[:-1]):
        found = memory[cells[lanes]]
        old[lanes] = found
        memory[cells[lanes]] = operation.combine(found, operands[lanes], compares[lanes])
    return old


def _chain(first: Array, operands: Array, operation: Atomic) -> Array:
    """Return what a cell holds before and after each of its turns."""
    assert operation.accumulate is not None
    values = np.concatenate(([first], operands))
    chain: Array = operation.accumulate.accumulate(values, dtype=values.dtype)
    both = np.concatenate((values, chain))
    if operation.flushes and ((np.absolute(both) < SMALLEST_NORMAL) & (both != 0)).any():
        for turn, value in enumerate(operands):
            chain[turn + 1] = operation.combine(chain[turn], value, value)
    return chain
