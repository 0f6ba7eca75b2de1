"""A batch: like instructions that run as one NumPy operation, and access to their operands.

Registers of one width are the rows of one array (registers, lanes). If the registers of a batch's operand are
consecutive rows, the operand is a slice without a copy. `execution.schedule` lays out registers so that the
results of each batch are. Special registers (%tid, %ctaid, %laneid, ...: PTX ISA manual, "Special Registers")
are computed when an instruction first reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ..machine.machine_state import Machine
from ..ptx.dtypes import DTYPES, Array, Mask
from ..ptx.fault import EmulatorError
from ..ptx.program import (
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
)


def special(machine: Machine, name: str) -> Any:
    """Return special register `name`: one number for each lane, or one for all. Raises EmulatorError."""
    word, _, axis = name.partition(".")
    if axis in ("x", "y", "z") and word in ALONG_AXES:
        return ALONG_AXES[word](machine, "xyz".index(axis))
    if name in OTHERS:
        return OTHERS[name](machine)
    raise EmulatorError(f"the emulator has no special register {name}")


def _thread(machine: Machine, i: int) -> Array:
    below = int(np.prod(machine.block[:i]))
    found: Array = machine.thread_of_lane[: machine.lanes_per_block] // below % machine.block[i]
    return np.tile(found, machine.blocks)


def _blocks(machine: Machine) -> Array:
    return machine.first + np.arange(machine.blocks)


def _block(machine: Machine, i: int) -> Array:
    """Return each block's index in the grid along axis i."""
    across = int(np.prod(machine.grid[:i]))
    return _blocks(machine) // across % machine.grid[i]


def _cluster(machine: Machine, i: int) -> int:
    return machine.cluster if i == 0 else 1


def _each(machine: Machine, of_blocks: Array) -> Array:
    return np.repeat(of_blocks, machine.lanes_per_block)


def _lane(machine: Machine) -> Array:
    return machine.thread_of_lane % 32


def _bit(machine: Machine) -> Array:
    return np.uint64(1) << _lane(machine).astype(np.uint64)


ALONG_AXES: dict[str, Callable[[Machine, int], Any]] = {
    "%tid": _thread,
    "%ntid": lambda machine, i: machine.block[i],
    "%ctaid": lambda machine, i: _each(machine, _block(machine, i)),
    "%nctaid": lambda machine, i: machine.grid[i],
    "%cluster_ctaid": lambda machine, i: _each(machine, _block(machine, i) % _cluster(machine, i)),
    "%cluster_nctaid": _cluster,
    "%clusterid": lambda machine, i: _each(machine, _block(machine, i) // _cluster(machine, i)),
    "%nclusterid": lambda machine, i: machine.grid[i] // _cluster(machine, i),
}
OTHERS: dict[str, Callable[[Machine], Any]] = {
    "%laneid": _lane,
    "%warpid": lambda machine: machine.thread_of_lane // 32,
    "%nwarpid": lambda machine: machine.warps_per_block,
    "%cluster_ctarank": lambda machine: _each(machine, _blocks(machine) % machine.cluster),
    "%cluster_nctarank": lambda machine: machine.cluster,
    "%is_explicit_cluster": lambda machine: machine.cluster > 1,
    "%smid": lambda machine: _each(machine, _blocks(machine)),  # as if each block had its own multiprocessor
    "%nsmid": lambda machine: int(np.prod(machine.grid)),
    "%gridid": lambda machine: 0,
    "%dynamic_smem_size": lambda machine: machine.launch.shared,
    "%total_smem_size": lambda machine: machine.shared_size,
    "WARP_SZ": lambda machine: 32,
    "%lanemask_eq": _bit,
    "%lanemask_lt": lambda machine: _bit(machine) - np.uint64(1),
    "%lanemask_le": lambda machine: 2 * _bit(machine) - np.uint64(1),
    "%lanemask_gt": lambda machine: ~(2 * _bit(machine) - np.uint64(1)),
    "%lanemask_ge": lambda machine: ~(_bit(machine) - np.uint64(1)),
}


Source: TypeAlias = "Callable[[Machine], Array]"
Target: TypeAlias = "Callable[[Machine, Any, Mask], None]"
LaneRows: TypeAlias = "slice | Array"
RegisterLayout: TypeAlias = dict[RegisterKey, int]  # to the row in the machine


@dataclass(frozen=True, eq=False)
class Batch:
    """Like instructions (same opcode, guard and kinds of operands) that do not depend on each other."""

    instructions: Sequence[PtxInstruction]
    program: Program
    layout: RegisterLayout

    @property
    def first(self) -> PtxInstruction:
        """The first instruction; all share its opcode, guard and kinds of operands."""
        return self.instructions[0]

    def __len__(self) -> int:
        return len(self.instructions)

    def alone(self, i: int) -> Batch:
        """Return the batch of instruction i alone."""
        return Batch([self.instructions[i]], self.program, self.layout)

    def has(self, index: int) -> bool:
        """Return whether the instructions have an operand `index`."""
        return index < len(self.first.operands)

    def operands(self, index: int) -> list[Operand]:
        """Return operand `index` of each instruction."""
        return [instruction.operands[index] for instruction in self.instructions]

    def items(self, index: int) -> list[Operand]:
        """Return the items of vector operand `index`: the first of each instruction, the second, ..."""
        items = [one.items if isinstance(one, Vector) else (one,) for one in self.operands(index)]
        return [operand for column in zip(*items, strict=True) for operand in column]

    def constant(self, index: int) -> int:
        """Return the value of operand `index`, which must be a constant."""
        operand = self.first.operands[index]
        if not isinstance(operand, Immediate):
            raise EmulatorError(f"operand {index} is no constant: {self.first.text}")
        return operand.value

    def source(self, index: int, kind: str) -> Source:
        """Return a function that reads operand `index` as `kind`: (instructions or 1, lanes)."""
        return self.reader(self.operands(index), kind)

    def sources(self, index: int, kind: str) -> Source:
        """Return a function that reads vector operand `index`: (items, instructions, lanes)."""
        flat, count = self.items(index), len(self)
        read = self.reader(flat, kind, collapse=False)
        return lambda machine: read(machine).reshape(len(flat) // count, count, -1)

    def target(self, index: int, kind: str) -> Target:
        """Return a function that writes operand `index` from values (instructions or 1, lanes)."""
        return self.writer(self.operands(index), kind)

    def second_target(self, index: int) -> Target | None:
        """Return a function that writes the predicate of operand `index`, a pair; None if it is no pair."""
        seconds = [operand.second for operand in self.operands(index) if isinstance(operand, Pair)]
        return self.writer(seconds, "pred") if seconds else None

    def targets(self, index: int, kind: str) -> Target:
        """Return a function that writes vector operand `index` from values (items, instructions, lanes)."""
        flat = self.items(index)
        write = self.writer(flat, kind)
        return lambda machine, value, mask: write(machine, value.reshape(len(flat), -1), mask)

    def address(self, index: int) -> Source:
        """Return a function that reads address operand `index`: int64 (instructions or 1, lanes or 1)."""
        operands = [operand for operand in self.operands(index) if isinstance(operand, Address)]
        if len(operands) != len(self.instructions):
            raise EmulatorError(f"operand {index} is no address: {self.first.text}")
        bases = [operand.base for operand in operands]
        kind = "u32" if isinstance(bases[0], Register) and bases[0].file == "b32" else "s64"
        base = self.reader(bases, kind)
        offsets = np.array([operand.offset for operand in operands], np.int64)[:, None]
        if (offsets == offsets[0]).all():
            offsets = offsets[:1]
        if kind == "s64":
            if not offsets.any():
                return base
            return lambda machine: base(machine) + offsets
        return lambda machine: base(machine).astype(np.int64) + offsets

    def rows(self, registers: Sequence[Register], collapse: bool = True) -> tuple[str, LaneRows]:
        """Return the registers' width and their rows: a slice if the rows are consecutive."""
        file = registers[0].file
        rows = [self.layout[register.file, register.row] for register in registers]
        if collapse and len(set(rows)) == 1:
            return file, slice(rows[0], rows[0] + 1)
        if rows == list(range(rows[0], rows[0] + len(rows))):
            return file, slice(rows[0], rows[0] + len(rows))
        return file, np.array(rows)

    def reader(self, operands: Sequence[Operand], kind: str, collapse: bool = True) -> Source:
        """Return a function that reads these operands as `kind`, one a row; equal ones as one row."""
        kinds = {type(operand) for operand in operands}
        if kinds == {Register}:
            registers = [operand for operand in operands if isinstance(operand, Register)]
            if len({(register.file, register.negated) for register in registers}) == 1:
                return self._registers(registers, kind, collapse)
        if kinds <= {Immediate, Symbol}:
            values = np.array([self._constant(operand, kind) for operand in operands]).reshape(-1, 1)
            if collapse and (values == values[0]).all():
                values = values[:1]
            return lambda machine: values
        if kinds == {Special} and len(set(operands)) == 1 and collapse:
            return self._special(operands[0], kind)
        single = [self.reader([operand], kind) for operand in operands]

        def stacked(machine: Machine) -> Array:
            return np.concatenate(
                [np.broadcast_to(one(machine), (1, machine.lanes)) for one in single], axis=0
            )

        return stacked

    def _registers(self, registers: Sequence[Register], kind: str, collapse: bool) -> Source:
        file, rows = self.rows(registers, collapse)
        dtype = DTYPES[kind]
        if file == "pred":
            if registers[0].negated:
                return lambda machine: ~machine.files["pred"][rows]
            if kind == "pred":
                return lambda machine: machine.files["pred"][rows]
            return lambda machine: machine.files["pred"][rows].astype(dtype)
        if int(file[1:]) == 8 * dtype.itemsize:
            view = (file, dtype.str)
            return lambda machine: machine.views[view][rows]
        # A narrower kind takes the register's low bits; a wider one extends them by the kind's sign.
        through = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{min(int(file[1:]) // 8, dtype.itemsize)}")
        return lambda machine: (
            machine.files[file][rows].astype(through).astype(f"u{dtype.itemsize}").view(dtype)
        )

    def _constant(self, operand: Operand, kind: str) -> Any:
        dtype = DTYPES[kind]
        if isinstance(operand, Symbol):
            return dtype.type(operand.offset)
        assert isinstance(operand, Immediate)
        if operand.kind:
            bits = np.dtype("u4" if operand.kind == "f32" else "u8").type(operand.value)
            number = bits.view(np.float32 if operand.kind == "f32" else np.float64)
            if dtype.kind == "f":
                return dtype.type(number)
            return bits.astype(f"u{dtype.itemsize}").view(dtype)
        if kind == "pred":
            return np.bool_(operand.value)
        if dtype.kind == "f":
            return dtype.type(operand.value)
        low = operand.value % (1 << 8 * dtype.itemsize)
        return np.array(low, f"u{dtype.itemsize}").view(dtype)[()]

    def _special(self, operand: Operand, kind: str) -> Source:
        assert isinstance(operand, Special)
        name, dtype = operand.name, DTYPES[kind]

        def value(machine: Machine) -> Array:
            found = machine.specials.get((name, kind))
            if found is None:
                found = np.atleast_2d(np.asarray(special(machine, name)).astype(dtype))
                machine.specials[name, kind] = found
            return found

        return value

    def writer(self, operands: Sequence[Operand], kind: str) -> Target:
        """Return a function that writes these registers, one a row. Rows of operands `_` are dropped."""
        if isinstance(operands[0], Pair):
            return self.writer([operand.first for operand in operands if isinstance(operand, Pair)], kind)
        kept = [i for i, operand in enumerate(operands) if isinstance(operand, Register)]
        if len(kept) != len(operands):
            if not kept:
                return lambda machine, value, mask: None
            write = self.writer([operands[i] for i in kept], kind)
            return lambda machine, value, mask: write(
                machine, np.broadcast_to(value, (len(operands), machine.lanes))[kept], mask
            )
        file, rows = self.rows(
            [operand for operand in operands if isinstance(operand, Register)], collapse=False
        )
        dtype = DTYPES[kind]
        view = (file, "|b1" if file == "pred" else dtype.str)
        if file != "pred" and int(file[1:]) != 8 * dtype.itemsize:
            wide = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{int(file[1:]) // 8}")
            narrow = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{dtype.itemsize}")
            direct = self._write((file, wide.str), rows)
            return lambda machine, value, mask: direct(
                machine, np.ascontiguousarray(value).view(narrow).astype(wide), mask
            )
        return self._write(view, rows)

    @staticmethod
    def _write(view: tuple[str, str], rows: LaneRows) -> Target:
        if isinstance(rows, slice):

            def to_slice(machine: Machine, value: Any, mask: Mask) -> None:
                if mask is None:
                    machine.views[view][rows] = value
                else:
                    np.copyto(machine.views[view][rows], value, where=mask)

            return to_slice

        def to_rows(machine: Machine, value: Any, mask: Mask) -> None:
            registers = machine.views[view]
            registers[rows] = value if mask is None else np.where(mask, value, registers[rows])

        return to_rows

    def label(self, index: int) -> int:
        """Return the instruction (its index in the program) that label operand `index` names."""
        operand = self.first.operands[index]
        if isinstance(operand, Label):
            for scope in (*reversed(operand.scopes), ""):
                if (found := self.program.labels.get(scope + operand.name)) is not None:
                    return found
        raise EmulatorError(f"no such label: {self.first.text}")
