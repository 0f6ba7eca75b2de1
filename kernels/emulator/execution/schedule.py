"""Turn a program into steps: batches of like, independent instructions that run as one NumPy operation.

NumPy costs time per call, so fewer calls are better. Within a basic block, instructions of one level
(`dependencies`) and of one kind form a batch. The 64 multiply-adds of an 8 x 8 thread tile become one step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..base.batch import Batch, RegisterLayout, Source
from ..base.instruction_registry import InstructionUnit, Run, find
from ..instructions import arithmetic
from ..ptx.fault import EmulatorError
from ..ptx.operands import Pair, Register
from ..ptx.program import Program, PtxInstruction
from .dependencies import Levels, likeness, registers_of, written_by

BATCH_LANES = 1 << 15  # largest lanes times instructions of a step, so that operands fit the L2 cache
CONTROL = ("bra", "ret", "exit", "trap")
LOOKS = {"atom", "volatile", "relaxed", "acquire", "test_wait", "nanosleep"}


@dataclass(frozen=True, slots=True)
class BatchStep:
    """A batch that is ready to run."""

    run: Run
    guard: Source | None  # reads which lanes the instructions' guard lets run
    batch: Batch

    @property
    def instructions(self) -> Sequence[PtxInstruction]:
        """The instructions of the batch."""
        return self.batch.instructions


@dataclass(frozen=True, slots=True)
class BasicBlock:
    """A basic block: steps, then a branch, an exit, or the next block."""

    steps: tuple[BatchStep, ...]
    control: PtxInstruction | None
    batch: Batch | None  # of the control instruction
    guard: Source | None  # of the control instruction
    target: int  # the branch's target
    next: int  # the instruction after the block
    looks: bool  # reads what other lanes may write: a loop around it may be waiting for them


@dataclass(frozen=True)
class Code:
    """A program in steps, with batches sized for some number of lanes."""

    blocks: dict[int, BasicBlock]  # by the index of their first instruction
    registers: dict[str, int]


def compile_steps(program: Program, lanes: int) -> Code:
    """Return the steps of `program` for `lanes` lanes; EmulatorError for an unknown instruction."""
    largest = max(1, BATCH_LANES // lanes)
    planned = []
    for start, end in _basic_blocks(program):
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
                _assign_rows(list(registers_of(instruction)), layout, counts)
        if control is not None:
            _assign_rows(list(registers_of(control)), layout, counts)
    blocks = {
        start: _block(program, layout, end, batches, control) for start, end, batches, control in planned
    }
    return Code(blocks, counts)


def _assign_rows(registers: Sequence[Register], layout: RegisterLayout, counts: dict[str, int]) -> None:
    for register in registers:
        if (register.file, register.row) not in layout:
            layout[register.file, register.row] = counts.get(register.file, 0)
            counts[register.file] = counts.get(register.file, 0) + 1


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
        steps.append(BatchStep(unit.prepare(batch), _guard(batch), batch))
    looks = any(LOOKS & {*one.opcode} for step in steps for one in step.instructions)
    if control is None:
        return BasicBlock(tuple(steps), None, None, None, -1, end, looks)
    batch = Batch([control], program, layout)
    target = batch.label(0) if control.opcode[0] == "bra" else -1
    return BasicBlock(tuple(steps), control, batch, _guard(batch), target, end, looks)


def _guard(batch: Batch) -> Source | None:
    guard = batch.first.guard
    if guard is None:
        return None
    read = batch.reader([Register(guard.file, guard.row, guard.name, batch.first.negated)], "pred")
    return lambda machine: read(machine)[0]


def _unit(instruction: PtxInstruction) -> InstructionUnit:
    two = instruction.opcode[0] == "setp" and isinstance(instruction.operands[0], Pair)
    found = find(instruction.opcode) or arithmetic.unit_of(instruction.opcode, 2 if two else 1)
    if found is None:
        where = f"{instruction.location}: " if instruction.location else ""
        raise EmulatorError(
            f"{where}the emulator does not know the instruction {instruction.name} [{instruction.text}]"
        )
    return found


def _basic_blocks(program: Program) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each run of instructions that can only be entered at its start."""
    count = len(program.instructions)
    starts = {0, *program.labels.values()}
    for i, instruction in enumerate(program.instructions):
        if instruction.opcode[0] in CONTROL:
            starts.add(i + 1)
    bounds = sorted(start for start in starts if start < count)
    yield from zip(bounds, [*bounds[1:], count], strict=True)


def _batches(body: list[PtxInstruction], largest: int) -> list[tuple[InstructionUnit, list[PtxInstruction]]]:
    """Group the instructions of a basic block into batches, in an order that respects dependencies."""
    levels = Levels()
    groups: dict[tuple[int, object], list[tuple[InstructionUnit, list[PtxInstruction]]]] = {}
    for instruction in body:
        unit = _unit(instruction)
        level = levels.add(instruction, unit)
        alone = unit.order in ("fence", "barrier", "sync")
        key = (level, instruction if alone else likeness(instruction))
        batches = groups.setdefault(key, [])
        if not batches or len(batches[-1][1]) == largest:
            batches.append((unit, []))
        batches[-1][1].append(instruction)
    return [batch for key in sorted(groups, key=lambda key: key[0]) for batch in groups[key]]
