"""Undefined values: what a shuffle returns from a lane that takes no part in it.

To receive one is no mistake (the last lanes of a reduction do), but to use it is. After the first such
shuffle, each register of each lane is marked while it holds an undefined value. Arithmetic hands the mark on,
a selection only from the side that it takes. Addresses, branches and stored values must have no mark.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..base.instruction_batch import Batch
from ..base.instruction_registry import InstructionUnit
from ..machine.machine_state import Machine
from ..ptx.dtypes import Array, Lanes, Mask
from ..ptx.program import Operand, PtxInstruction, registers_in

EXCHANGES = ("shfl", "vote", "match")


class UndefinedValues:
    """The mark of each register and lane: 0, or 1 + the index of the value's origin."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        machine.has_undefined = True
        self.marks = {file: np.zeros(held.shape, np.int16) for file, held in machine.files.items()}
        self.origins: list[tuple[str, str, PtxInstruction]] = []  # kind of fault, what is wrong, the shuffle

    def mark(self, batch: Batch, index: int, lanes: Lanes, kind: str, text: str) -> None:
        """Mark the result of an instruction as undefined in these lanes."""
        instruction = batch.instructions[index]
        self.origins.append((kind, text, instruction))
        for row in self._rows(batch, instruction.operands[0]):
            row[lanes] = len(self.origins)

    def exchanged(self, batch: Batch, sources: Array, active: Lanes) -> None:
        """Hand marks on through a shuffle. sources (instructions, lanes): the lane that each one reads."""
        for i, instruction in enumerate(batch.instructions):
            taken = self._of(batch, instruction.operands[1])[sources[i]]
            taken = np.maximum(taken, self._of(batch, *instruction.operands[2:]))
            for row in self._rows(batch, instruction.operands[0]):
                row[active] = taken[active]

    def follow(self, batch: Batch, unit: InstructionUnit, mask: Mask) -> None:
        """Hand marks on through a step that is about to run; Fault if it uses an undefined value."""
        active = np.ones(self.machine.lanes, np.bool_) if mask is None else mask
        for instruction in batch.instructions:
            operands = instruction.operands
            self.use(batch, (instruction.guard,), active, instruction)
            if unit.uses:
                self.use(batch, operands[unit.results :], active, instruction)
                held: Array = np.zeros(self.machine.lanes, np.int16)
            else:
                held = self._result(batch, instruction)
            for row in self._rows(batch, *operands[: unit.results]):
                row[active] = held[active]

    def use(
        self, batch: Batch, operands: tuple[Operand | None, ...], active: Lanes, user: PtxInstruction
    ) -> None:
        """Fault if an operand is undefined in an active lane."""
        found = np.where(active, self._of(batch, *operands), 0)
        if found.any():
            lane = int(np.argmax(found != 0))
            kind, text, instruction = self.origins[int(found[lane]) - 1]
            where = f" at {user.location}" if user.location != instruction.location else ""
            who = self.machine.thread_name(lane)
            self.machine.fault(kind, f"{who} uses{where} the value that {text}", instruction)

    def _result(self, batch: Batch, instruction: PtxInstruction) -> Array:
        name, operands = instruction.opcode[0], instruction.operands
        if name == "selp":
            one, two, decides = (self._of(batch, operand) for operand in operands[1:])
            chosen = batch.reader([operands[3]], "pred")(self.machine)[0]
            return np.maximum(np.where(chosen, one, two), decides)
        if name in ("and", "or") and instruction.opcode[-1] == "pred":
            one, two = (self._of(batch, operand) for operand in operands[1:])
            a, b = (batch.reader([operand], "pred")(self.machine)[0] for operand in operands[1:])
            if name == "or":
                a, b = ~a, ~b
            # False and an undefined value is false; true or an undefined value is true.
            return np.where((one == 0) & ~a | (two == 0) & ~b, 0, np.maximum(one, two))
        return self._of(batch, *operands[1:])

    def _of(self, batch: Batch, *operands: Operand | None) -> Array:
        """Return the marks of all these operands together, (lanes,)."""
        found = np.zeros(self.machine.lanes, np.int16)
        for row in self._rows(batch, *operands):
            found = np.maximum(found, row)
        return found

    def _rows(self, batch: Batch, *operands: Operand | None) -> Iterator[Array]:
        for key in registers_in(*operands):
            yield self.marks[key[0]][batch.layout[key]]
