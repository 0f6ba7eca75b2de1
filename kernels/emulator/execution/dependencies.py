"""Dependencies among the instructions of a basic block, as levels: equal levels are independent.

The level of an instruction is one more than the highest level that it depends on: registers are written
before they are read and read before they are overwritten, and accesses to memory keep their order.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..base.instruction_registry import InstructionUnit, OrderingClass
from ..ptx.operands import (
    Address,
    Immediate,
    Label,
    Operand,
    Pair,
    Register,
    Special,
    Symbol,
    Vector,
    registers_in,
)
from ..ptx.program import PtxInstruction

SPACES = ("global", "shared", "local")


class Levels:
    """Finds the levels of the instructions of one basic block, in order."""

    def __init__(self) -> None:
        self.written: dict[tuple[str, int], int] = {}  # the level of a register's last write
        self.read: dict[tuple[str, int], int] = {}  # the highest level that has read it since
        # The level of the last store to each space, and its likeness.
        self.stores: dict[str, tuple[int, object]] = dict.fromkeys(SPACES, (-1, None))
        self.loads = dict.fromkeys(SPACES, -1)  # the highest level of a load since then
        self.floor = 0  # the level after the last barrier
        self.highest = -1

    def add(self, instruction: PtxInstruction, unit: InstructionUnit) -> int:
        """Return the level of the next instruction."""
        written = {(register.file, register.row) for register in written_by(unit, instruction)}
        read = {(register.file, register.row) for register in registers_of(instruction)}
        if instruction.guard is None:
            # A result is no input, unless a guard may leave its old value.
            rest = instruction.operands[unit.results :]
            inputs = {(item.file, item.row) for operand in rest for item in registers_in(operand)}
            read -= written - inputs
        level = self.floor
        for register in read:
            level = max(level, self.written.get(register, -1) + 1)
        for register in written:
            level = max(level, self.written.get(register, -1) + 1, self.read.get(register, -1) + 1)
        level = max(level, self._memory(instruction, unit.order))
        for register in read:
            self.read[register] = max(self.read.get(register, -1), level)
        for register in written:
            self.written[register] = level
            self.read.pop(register, None)
        self._remember(instruction, unit.order, level)
        self.highest = max(self.highest, level)
        if unit.order in ("barrier", "sync"):
            self.floor = level + 1
        return level

    def _memory(self, instruction: PtxInstruction, order: OrderingClass) -> int:
        if order == "pure":
            return 0
        if order in ("barrier", "sync"):
            return self.highest + 1
        like = likeness(instruction)
        level = 0
        for space in _spaces(instruction) if order != "fence" else SPACES:
            stored, name = self.stores[space]
            alike = order == "store" and name == like
            level = max(level, stored + (0 if alike else 1))
            if order != "load":
                level = max(level, self.loads[space] + 1)
        return level

    def _remember(self, instruction: PtxInstruction, order: OrderingClass, level: int) -> None:
        if order == "pure":
            return
        for space in _spaces(instruction) if order in ("load", "store") else SPACES:
            if order == "load":
                self.loads[space] = max(self.loads[space], level)
            else:
                self.stores[space] = (level, likeness(instruction) if order == "store" else None)
                self.loads[space] = -1


def _spaces(instruction: PtxInstruction) -> tuple[str, ...]:
    words = " ".join(instruction.opcode)
    named = tuple(space for space in SPACES if space in words)
    if instruction.opcode[0] == "ld" and instruction.opcode[1] in ("param", "const"):
        return ("local",)
    return named or SPACES  # a generic address may point anywhere


def registers_of(instruction: PtxInstruction) -> Iterator[Register]:
    """Yield all registers of an instruction, its guard included."""
    for operand in instruction.operands:
        yield from registers_in(operand)
    if instruction.guard is not None:
        yield instruction.guard


def written_by(unit: InstructionUnit, instruction: PtxInstruction) -> Iterator[Register]:
    """Yield the registers that an instruction writes."""
    for operand in instruction.operands[: unit.results]:
        if not isinstance(operand, Address):
            yield from registers_in(operand)


def likeness(instruction: PtxInstruction) -> tuple[object, ...]:
    """Return what all instructions of one batch have in common."""
    guard = instruction.guard
    return (
        instruction.opcode,
        (guard.row, instruction.negated) if guard else None,
        tuple(_shape(operand) for operand in instruction.operands),
    )


def _shape(operand: Operand) -> object:
    if isinstance(operand, Register):
        return (operand.file, operand.negated)
    if isinstance(operand, Vector):
        return tuple(_shape(item) for item in operand.items)
    if isinstance(operand, Pair):
        return ("pair", _shape(operand.first), _shape(operand.second))
    if isinstance(operand, Address):
        return ("address", _shape(operand.base), tuple(_shape(item) for item in operand.more))
    if isinstance(operand, Special | Label):
        return operand.name
    assert isinstance(operand, Immediate | Symbol)
    return type(operand)
