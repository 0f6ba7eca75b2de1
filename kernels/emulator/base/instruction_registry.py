"""The registry of instructions: for each, how it may be moved within its block, and what prepares it.

A unit says what instructions of one name do. Its `prepare` gets a `Batch` of like instructions (one, or
several that do not depend on each other and run as one NumPy operation) and returns what runs them:

    @unit("ldmatrix", order="load")
    def ldmatrix(batch: Batch) -> Run:
        address, write = batch.address(1), batch.targets(0, "b32")  # resolved once, when code is prepared
        def run(machine: Machine, mask: Mask) -> None:              # mask: lanes that run; None is all
            rows = address(machine)                                 # (instructions, lanes), bytes
            ...
            write(machine, words, mask)                             # (items, instructions, lanes)
        return run

`order` says what the scheduler may do:
- "pure": it only reads and writes registers; moved freely among what it does not depend on;
- "load": it reads memory; moved among loads, not past stores to the same space;
- "store": it writes memory; stays in order with loads and stores of its space, like ones run together;
- "fence": stays in order with everything that touches memory, one at a time;
- "barrier": nothing, not even arithmetic, moves past it, one at a time;
- "sync": the same, for what makes lanes wait for each other.

Any unit may hold lanes back: its `run` returns the lanes that pass (a bool array; None is all), and others
come again when something has changed (`machine.events`). Before it lets a lane pass it must not write for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..machine.machine import Machine
from ..ptx.dtypes import Mask
from .batch import Batch

Run: TypeAlias = "Callable[[Machine, Mask], NDArray[np.bool_] | None]"
OrderingClass: TypeAlias = Literal["pure", "load", "store", "fence", "barrier", "sync"]


@dataclass(frozen=True)
class InstructionUnit:
    """What instructions that begin with `prefix` do."""

    prefix: tuple[str, ...]
    order: OrderingClass
    prepare: Callable[[Batch], Run]
    # Registers that it writes: the first so many operands. (An instruction of PTX names its results first.)
    results: int = 1


_UNITS: dict[tuple[str, ...], InstructionUnit] = {}


def unit(
    *names: str, order: OrderingClass, results: int = 1
) -> Callable[[Callable[[Batch], Run]], Callable[[Batch], Run]]:
    """Register the decorated `prepare` for all instructions that begin with one of `names`."""

    def register(prepare: Callable[[Batch], Run]) -> Callable[[Batch], Run]:
        for name in names:
            prefix = tuple(name.split("."))
            _UNITS[prefix] = InstructionUnit(prefix, order, prepare, results)
        return prepare

    return register


def find(opcode: tuple[str, ...]) -> InstructionUnit | None:
    """Return the unit whose prefix is the longest that `opcode` begins with, None where there is none."""
    for length in range(len(opcode), 0, -1):
        if found := _UNITS.get(opcode[:length]):
            return found
    return None
