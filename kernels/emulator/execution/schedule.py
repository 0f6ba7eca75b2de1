"""Turn a program into steps: batches of like, independent instructions that run as one NumPy operation.

NumPy costs time per call, so fewer calls are better. Within a basic block, instructions of one level and of
one kind form a batch. The 64 multiply-adds of an 8 x 8 thread tile become one step.

The level of an instruction is one more than the highest level that it depends on: registers are written
before they are read and read before they are overwritten, and accesses to memory keep their order. So
instructions of equal level are independent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..base.instruction_batch import Batch, RegisterLayout, Source
from ..base.instruction_registry import MEMORY, InstructionUnit, OrderingClass, Run, find
from ..instructions import arithmetic
from ..ptx.fault import EmulatorError
from ..ptx.program import (
    CONTROL,
    Address,
    Immediate,
    Label,
    Operand,
    Pair,
    Program,
    PtxInstruction,
    Register,
    RegisterKey,
    Special,
    Symbol,
    Vector,
    registers_in,
)

SPACES = ("global", "shared", "local")


class Levels:
    """Finds the levels of the instructions of one basic block, in order.

    A state space is like a register: loads read it, and stores write it, like ones together. Fences and
    barriers write all spaces.
    """

    def __init__(self) -> None:
        self.written: dict[object, int] = {}  # the level of the last write of a register or to a space
        self.read: dict[object, int] = {}  # the highest level that has read it since
        self.stored: dict[str, object] = {}  # by space: what the stores of that level have in common
        self.floor = 0  # the level after the last barrier
        self.highest = -1

    def add(self, instruction: PtxInstruction, unit: InstructionUnit) -> int:
        """Return the level of the next instruction."""
        written: set[object] = {*written_by(unit, instruction)}
        read: set[object] = {*registers_of(instruction)}
        if instruction.guard is None:
            # A result is no input, unless a guard may leave its old value.
            read -= written - {*registers_in(*instruction.operands[unit.results :])}
        spaces = _spaces(instruction, unit.order)
        (read if unit.order == "load" else written).update(spaces)
        like = likeness(instruction) if unit.order == "store" else None
        alike = {space for space in spaces if like is not None and self.stored.get(space) == like}
        level = self.highest + 1 if unit.order == "barrier" else self.floor
        for key in read:
            level = max(level, self.written.get(key, -1) + 1)
        for key in written:
            level = max(level, self.written.get(key, -1) + (key not in alike), self.read.get(key, -1) + 1)
        for key in read:
            self.read[key] = max(self.read.get(key, -1), level)
        for key in written:
            self.written[key] = level
            self.read.pop(key, None)
        if unit.order != "load":
            self.stored.update(dict.fromkeys(spaces, like))
        self.highest = max(self.highest, level)
        if unit.order == "barrier":
            self.floor = level + 1
        return level


def _spaces(instruction: PtxInstruction, order: OrderingClass) -> tuple[str, ...]:
    """Return the state spaces that an instruction may access."""
    if order == "pure":
        return ()
    words = " ".join(instruction.opcode)
    named = tuple(space for space in SPACES if space in words)
    if instruction.opcode[0] == "ld" and instruction.opcode[1] in ("param", "const"):
        return ("local",)
    # A generic address may point anywhere.
    return named if named and order in ("load", "store") else SPACES


def registers_of(instruction: PtxInstruction) -> Iterator[RegisterKey]:
    """Yield all registers of an instruction, its guard included."""
    return registers_in(*instruction.operands, instruction.guard)


def written_by(unit: InstructionUnit, instruction: PtxInstruction) -> Iterator[RegisterKey]:
    """Yield the registers that an instruction writes."""
    results = instruction.operands[: unit.results]
    return registers_in(*(operand for operand in results if not isinstance(operand, Address)))


def likeness(instruction: PtxInstruction) -> tuple[object, ...]:
    """Return what all instructions of one batch have in common."""
    shapes = tuple(_shape(operand) for operand in instruction.operands)
    return instruction.opcode, instruction.guard, shapes


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


BATCH_LANES = 1 << 15  # largest lanes times instructions of a step, so that operands fit the L2 cache
COUNTED_SPACES = ("shared", "local", "param", "const")
LOOKS = {"atom", "volatile", "relaxed", "acquire", "nanosleep"}


@dataclass(frozen=True, slots=True)
class BatchStep:
    """A batch that is ready to run."""

    run: Run
    guard: Source | None  # reads which lanes the instructions' guard lets run
    batch: Batch
    unit: InstructionUnit
    counted: str  # the class of its instructions in a profile

    @property
    def instructions(self) -> Sequence[PtxInstruction]:
        """The instructions of the batch."""
        return self.batch.instructions


@dataclass(frozen=True, slots=True)
class BasicBlock:
    """A basic block: steps, then a branch, an exit, or the next block."""

    steps: tuple[BatchStep, ...]
    control: Batch | None  # of the control instruction
    guard: Source | None  # of the control instruction
    target: int  # the branch's target
    next: int  # the instruction after the block
    looks: bool  # reads what other lanes may write: a loop around it may be waiting for them


@dataclass(frozen=True)
class Code:
    """A program in steps, with batches up to some size."""

    blocks: dict[int, BasicBlock]  # by the index of their first instruction
    registers: dict[str, int]


def batch_size(lanes: int) -> int:
    """Return the instructions in a batch for so many lanes: a power of two, as each size is compiled anew."""
    return 1 << max(1, BATCH_LANES // lanes).bit_length() - 1


def compile_steps(program: Program, largest: int) -> Code:
    """Return the steps of `program`, each of `largest` instructions; EmulatorError for an unknown one."""
    planned = []
    for start, end in program.basic_blocks:
        body = list(program.instructions[start:end])
        control = body.pop() if body and body[-1].opcode[0] in CONTROL else None
        planned.append((start, end, _batches(body, largest), control))
    layout: RegisterLayout = {}
    counts: dict[str, int] = {}
    for _, _, batches, control in planned:
        for unit, batch in batches:
            # Column by column, as vectors are written: the first items of all instructions come first.
            columns = [list(written_by(unit, instruction)) for instruction in batch]
            for column in zip(*columns, strict=True):
                _assign_rows(column, layout, counts)
        for _, batch in batches:
            for instruction in batch:
                _assign_rows(registers_of(instruction), layout, counts)
        if control is not None:
            _assign_rows(registers_of(control), layout, counts)
    blocks = {
        start: _block(program, layout, end, batches, control) for start, end, batches, control in planned
    }
    return Code(blocks, counts)


def _assign_rows(registers: Iterable[RegisterKey], layout: RegisterLayout, counts: dict[str, int]) -> None:
    for key in registers:
        if key not in layout:
            layout[key] = counts.get(key[0], 0)
            counts[key[0]] = layout[key] + 1


def _block(
    program: Program,
    layout: RegisterLayout,
    end: int,
    batches: list[tuple[InstructionUnit, list[PtxInstruction]]],
    control: PtxInstruction | None,
) -> BasicBlock:
    steps = []
    for unit, instructions in batches:
        batch = Batch(instructions, program, layout)
        steps.append(BatchStep(unit.prepare(batch), _guard(batch), batch, unit, _counted(unit, batch)))
    looks = any(LOOKS & {*one.opcode} for step in steps for one in step.instructions)
    if control is None:
        return BasicBlock(tuple(steps), None, None, -1, end, looks)
    batch = Batch([control], program, layout)
    target = batch.label(0) if control.opcode[0] == "bra" else -1
    return BasicBlock(tuple(steps), batch, _guard(batch), target, end, looks)


def _counted(unit: InstructionUnit, batch: Batch) -> str:
    """Return the class under which a batch is counted: of accesses to memory with the state space."""
    words = batch.first.opcode
    spaces = (space for space in COUNTED_SPACES if any(word.startswith(space) for word in words))
    return f"{unit.counted} {next(spaces, 'global')}" if unit.counted in MEMORY else unit.counted


def _guard(batch: Batch) -> Source | None:
    if batch.first.guard is None:
        return None
    read = batch.reader([batch.first.guard], "pred")
    return lambda machine: read(machine)[0]


def _unit(instruction: PtxInstruction) -> InstructionUnit:
    found = find(instruction.opcode) or arithmetic.unit_of(instruction.opcode)
    if found is None:
        where = f"{instruction.location}: " if instruction.location else ""
        raise EmulatorError(
            f"{where}the emulator does not know the instruction {instruction.name} [{instruction.text}]"
        )
    return found


def _batches(body: list[PtxInstruction], largest: int) -> list[tuple[InstructionUnit, list[PtxInstruction]]]:
    """Group the instructions of a basic block into batches, in an order that respects dependencies."""
    levels = Levels()
    groups: dict[tuple[int, object], list[tuple[InstructionUnit, list[PtxInstruction]]]] = {}
    for instruction in body:
        unit = _unit(instruction)
        level = levels.add(instruction, unit)
        alone = unit.order in ("fence", "barrier")
        key = (level, instruction if alone else likeness(instruction))
        batches = groups.setdefault(key, [])
        if not batches or len(batches[-1][1]) == largest:
            batches.append((unit, []))
        batches[-1][1].append(instruction)
    return [batch for key in sorted(groups, key=lambda key: key[0]) for batch in groups[key]]
