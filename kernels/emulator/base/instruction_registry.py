"""The registry of instructions: what each does, and how the scheduler may move it within its basic block.

A unit says what instructions of one name do. Its `prepare` gets a `Batch` of like instructions (one, or
several independent ones that run as one NumPy operation) and returns the function that runs them:

    @unit("ldmatrix", order="load", counted="ldmatrix")
    def ldmatrix(batch: Batch) -> Run:
        address, write = batch.address(1), batch.targets(0, "b32")  # resolved once, when code is prepared
        def run(machine: Machine, mask: Mask) -> None:              # mask: lanes that run; None is all
            rows = address(machine)                                 # (instructions, lanes), bytes
            ...
            write(machine, words, mask)                             # (items, instructions, lanes)
        return run

`order` says what the scheduler may do with the instruction:
- "pure": only reads and writes registers; moves freely among instructions that it does not depend on
- "load": reads memory; moves among loads, but not past stores to the same space
- "store": writes memory; stays in order with loads and stores of its space, and like ones run together
- "fence": stays in order with every access to memory, one at a time
- "barrier": nothing moves past it, not even arithmetic, one at a time

Any unit may hold lanes back: its `run` returns the lanes that pass (a bool array; None is all). The others
run it again when something has changed (`machine.events`). A unit must not write for a lane that it holds.
Units that act lane by lane and have no result are written as `unit_of_lanes`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from ..machine.machine_state import Machine
from ..ptx.dtypes import Lanes, Mask
from .addresses import lanes_of, of_lanes
from .instruction_batch import Batch

Run: TypeAlias = "Callable[[Machine, Mask], Lanes | None]"
Act: TypeAlias = "Callable[..., Lanes | None]"
OrderingClass: TypeAlias = Literal["pure", "load", "store", "fence", "barrier"]


@dataclass(frozen=True)
class InstructionUnit:
    """The record of all instructions of one name: what they do, and all else that depends on the name."""

    order: OrderingClass
    prepare: Callable[[Batch], Run]
    results: int = 1  # how many operands it writes: the first ones, as PTX names results first
    counted: str = "integer"  # the class under which a profile counts it; MEMORY gets its state space, too
    uses: bool = False  # its operands must not be undefined; others hand an undefined value on
    missed: str = "deadlock"  # the kind of fault if lanes that it waits for never come


MEMORY = ("load", "store", "atomic")
_UNITS: dict[tuple[str, ...], InstructionUnit] = {}


def unit(
    *names: str,
    order: OrderingClass,
    results: int = 1,
    counted: str = "integer",
    uses: bool | None = None,
    missed: str = "deadlock",
) -> Callable[[Callable[[Batch], Run]], Callable[[Batch], Run]]:
    """Register the decorated `prepare` for all instructions that begin with one of `names`.

    Instructions that are not pure use their operands, unless `uses` says otherwise.
    """

    def register(prepare: Callable[[Batch], Run]) -> Callable[[Batch], Run]:
        must = order != "pure" if uses is None else uses
        for name in names:
            record = InstructionUnit(order, prepare, results, counted, must, missed)
            _UNITS[tuple(name.split("."))] = record
        return prepare

    return register


def unit_of_lanes(
    *names: str, order: OrderingClass, counted: str, operands: tuple[str, ...] = (), missed: str = "deadlock"
) -> Callable[[Act], Act]:
    """Register a function of (machine, lanes, operands...) for instructions that run one at a time.

    `lanes` are the numbers of the lanes that run. An operand is an "address", a "constant", or is read as a
    kind; it comes as (lanes,), a constant as an int. There is no result. The function may return which of the
    lanes pass, (lanes,).
    """

    def register(act: Act) -> Act:
        def prepare(batch: Batch) -> Run:
            def reader(index: int, kind: str) -> Callable[[Machine, Any], Any]:
                if kind == "constant":
                    value = batch.constant(index)
                    return lambda machine, lanes: value
                read = batch.address(index) if kind == "address" else batch.source(index, kind)
                return lambda machine, lanes: of_lanes(read(machine), machine, lanes)

            reads = [reader(index, kind) for index, kind in enumerate(operands)]

            def run(machine: Machine, mask: Mask) -> Lanes | None:
                lanes = lanes_of(machine, mask)
                passed = act(machine, lanes, *(read(machine, lanes) for read in reads))
                if passed is None:
                    return None
                everyone = np.ones(machine.lanes, np.bool_)
                everyone[lanes] = passed
                return everyone

            return run

        unit(*names, order=order, results=0, counted=counted, missed=missed)(prepare)
        return act

    return register


def find(opcode: tuple[str, ...]) -> InstructionUnit | None:
    """Return the unit with the longest prefix that `opcode` begins with, or None."""
    for length in range(len(opcode), 0, -1):
        if found := _UNITS.get(opcode[:length]):
            return found
    return None
