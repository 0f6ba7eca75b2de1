"""The parts that both dataflows of a systolic array share: tiles, commands, and registers that shift.

The array has rows x cols processing elements (PEs). Operand a enters at the left edge and moves one PE to the
right in each cycle; b enters at the top edge and moves down; results leave at the bottom edge. A PE reads
only its neighbours, never memory (Kung and Leiserson, Systolic Arrays (for VLSI), 1978).

Operands meet because they enter *skewed*: row 1 gets in the next cycle what row 0 gets in this one. Here the
skew is not computed from the cycle number; it moves too. A controller at the top left corner issues commands.
A command walks down the left edge (or along the top edge), one port per cycle, and tells each port what to
read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..rung import Array

Masked = np.ma.MaskedArray[Any, Any]
NO_COMMAND = (-1, -1)
REGISTERS = ("a", "b", "sums", "a_in", "b_in", "c_out", "c")  # of a frame, in every dataflow


@dataclass(frozen=True, eq=False)
class Frame:
    """All registers of the array in one cycle, as copies; empty registers are masked (shown as --).

    A cycle has two halves: all registers take over what their neighbours held, then each PE with both
    operands multiplies them and adds the product to its sum. A frame shows the end of the cycle.
    """

    cycle: int  # from 0
    tile: int | None  # the tile whose operands enter PE (0, 0) in this cycle, from 0
    a: Masked  # (rows, cols), moving right
    b: Masked  # (rows, cols): the weights that stay (weight-stationary), or moving down (output-stationary)
    sums: Masked  # (rows, cols): moving down (weight-stationary), or those that stay (output-stationary)
    # (rows, cols), the second register of double buffering: the next tile's weights, which shift in from the
    # top (weight-stationary), or finished sums (output-stationary); None if there is only one register.
    waiting: Masked | None
    results: Masked | None  # (rows, cols): finished sums moving down (output-stationary), else None
    active: Array  # (rows, cols), bool: the PEs that multiply and add in this cycle
    a_in: Masked  # (rows,): read from memory at the left edge in this cycle
    b_in: Masked  # (cols,): read from memory at the top edge
    c_out: Masked  # (cols,): sums that leave at the bottom edge
    c: Masked  # (m, n): the result so far, after c_out was added

    def __str__(self) -> str:
        what = "no tile enters" if self.tile is None else f"tile {self.tile} enters"
        parts = [f"cycle {self.cycle}: {what}, {int(self.active.sum())} of {self.active.size} PEs active"]
        for name in ("a_in", "b_in", "a", "b", "sums", "waiting", "results", "c_out"):
            value = getattr(self, name)
            if value is not None:
                parts.append(f"{name:8}{str(value).replace(chr(10), chr(10) + ' ' * 8)}")
        return "\n".join(parts)


class Registers:
    """A value in each PE of the array, or at each port of an edge, and whether there is one: `held`."""

    def __init__(self, shape: int | tuple[int, int], dtype: np.dtype[Any]) -> None:
        self.values, self.held = np.zeros(shape, dtype), np.zeros(shape, bool)

    def masked(self) -> Masked:
        """Return a copy of the values, in which those of empty registers are masked."""
        return np.ma.MaskedArray(self.values.copy(), mask=~self.held)

    def read(self, memory: Array, rows: Array, columns: Array, wanted: Array) -> int:
        """Let the ports of an edge where `wanted` holds read memory[rows, columns]; return how many do."""
        self.values[...] = 0
        self.values[wanted] = memory[rows[wanted], columns[wanted]]
        self.held = wanted
        return int(np.count_nonzero(wanted))

    def shift_right(self, entering: Registers) -> None:
        """Give each PE what its left neighbour held; `entering` (rows,) comes in at the left edge."""
        shift_right(self.values, entering.values)
        shift_right(self.held, entering.held)

    def shift_down(self, entering: Registers | None = None) -> None:
        """Give each PE what the PE above it held; `entering` (cols,) comes in at the top edge, or nothing."""
        for mine, new in self._beside(entering):
            mine[1:] = mine[:-1]
            mine[0] = new

    def shift_some_down(self, entering: Registers, where: Array) -> None:
        """Do so in the PEs `where` it holds, (rows, cols); the others keep what they have."""
        for mine, new in self._beside(entering):
            np.copyto(mine[1:], mine[:-1].copy(), where=where[1:])
            np.copyto(mine[0], new, where=where[0])

    def take(self, other: Registers, where: Array) -> None:
        """Move what the other registers hold into these `where` it holds, (rows, cols)."""
        for mine, new in self._beside(other):
            np.copyto(mine, new, where=where)
        other.values[where] = 0
        other.held[where] = False

    def _beside(self, other: Registers | None) -> tuple[tuple[Array, Any], ...]:
        new, held = (other.values, other.held) if other else (0, False)
        return (self.values, new), (self.held, held)


class Port:
    """The ports of one edge: the command (tile, index) that each obeys in this cycle, -1 for none."""

    def __init__(self, ports: int) -> None:
        self.tile = np.full(ports, -1)
        self.index = np.full(ports, -1)
        self.number = np.arange(ports)

    def walk(self, command: tuple[int, int]) -> None:
        """Move each command on by one port; `command` enters at the first."""
        self.tile[1:] = self.tile[:-1]
        self.index[1:] = self.index[:-1]
        self.tile[0], self.index[0] = command

    def busy(self) -> bool:
        """Return whether a command has ports ahead of it."""
        return bool((self.tile[:-1] >= 0).any())


class ArrayMachine(ABC):
    """An array at work on a (m, k) times b (k, n), both in the dtype of the sums.

    `step()` is one cycle, and `busy` says whether another is needed; nothing is computed ahead. Cycles count
    until the last command has crossed the whole array, even if the last tile fills only a part of it.
    """

    stationary: ClassVar[str]  # the dimension that the array's rows hold, "k" or "m"

    def __init__(self, a: Array, b: Array, rows: int, cols: int, double_buffered: bool) -> None:
        self.operands = a, b
        self.shape = rows, cols
        self.double_buffered = double_buffered
        (self.m, self.k), self.n = a.shape, b.shape[1]
        self.dtype = a.dtype
        # Tiles: blocks of columns outside, blocks of the stationary dimension inside.
        size = self.k if self.stationary == "k" else self.m
        tiles = [(s, j) for j in range(0, self.n, cols) for s in range(0, size, rows)] if a.size else []
        self.tile_rows = np.array([s for s, _ in tiles], int)  # where each starts in the stationary dimension
        self.tile_cols = np.array([j for _, j in tiles], int)  # its first column of c
        self.heights = np.minimum(rows, size - self.tile_rows)
        self.tiles = len(tiles)
        self.left, self.bottom = Port(rows), Port(cols)
        self.a, self.b, self.sums = (Registers(self.shape, self.dtype) for _ in range(3))
        self.product, self.active = np.zeros(self.shape, self.dtype), self.marks()
        self.a_in, self.b_in = Registers(rows, self.dtype), Registers(cols, self.dtype)
        self.c_out, self.c = Registers(cols, self.dtype), Registers((self.m, self.n), self.dtype)
        self.cycles = self.multiply_adds = 0
        self.a_reads = self.b_reads = self.c_reads = self.c_writes = 0

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether work is left: a command to issue, or one still under way."""

    def step(self) -> None:
        """Advance by one cycle."""
        # inf * 0 is a result, as in NumPy's product: no warning.
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            self.clock()
        self.cycles += 1

    @abstractmethod
    def clock(self) -> None:
        """Shift all registers and compute; each dataflow defines this."""

    def frames(self) -> Iterator[Frame]:
        """Step until the work is done, and yield the state in each cycle."""
        while self.busy:
            self.step()
            yield self.frame()

    def frame(self) -> Frame:
        """Return copies of what the registers hold."""
        waiting, results = self.extra_registers()
        shown = {name: getattr(self, name).masked() for name in REGISTERS}
        tile, active = int(self.left.tile[0]), self.active.copy()
        cycle, entering = self.cycles - 1, None if tile < 0 else tile
        return Frame(cycle=cycle, tile=entering, waiting=waiting, results=results, active=active, **shown)

    @abstractmethod
    def extra_registers(self) -> tuple[Masked | None, Masked | None]:
        """Return a frame's `waiting` and `results`."""

    def marks(self) -> Array:
        """Return a mark for each PE, (rows, cols), none of them set."""
        return np.zeros(self.shape, bool)

    def multiply_add(self) -> None:
        """Let each PE that holds both operands add their product to its sum."""
        np.logical_and(self.a.held, self.b.held, out=self.active)
        np.multiply(self.a.values, self.b.values, out=self.product)
        # A PE without work must not add 0 * inf: hence the mask.
        np.add(self.sums.values, self.product, out=self.sums.values, where=self.active)
        self.sums.held |= self.active
        self.multiply_adds += int(np.count_nonzero(self.active))

    def read_a(self, i: Array, p: Array, wanted: Array) -> None:
        """Read a[i, p] from memory at each port of the left edge where `wanted` holds, (rows,) each."""
        self.a_reads += self.a_in.read(self.operands[0], i, p, wanted)

    def read_b(self, p: Array, j: Array, wanted: Array) -> None:
        """Read b[p, j] from memory at each port of the top edge where `wanted` holds, (cols,) each."""
        self.b_reads += self.b_in.read(self.operands[1], p, j, wanted)

    def collect(self, i: Array, results: Registers) -> None:
        """Add what leaves at the bottom edge to rows i of c, where a later tile of k adds to earlier ones."""
        values, held = results.values[-1], results.held[-1]
        columns = self.bottom.number[held]
        where = i[held], self.tile_cols[self.bottom.tile[held]] + columns
        self.c_reads += int(np.count_nonzero(self.c.held[where]))
        self.c_writes += len(columns)
        self.c.values[where] += values[held]
        self.c.held[where] = True
        self.c_out.values, self.c_out.held = values, held


def shift_right(registers: Array, entering: Array) -> None:
    """Give each PE what its left neighbour held; `entering` (rows,) comes in at the left edge."""
    registers[:, 1:] = registers[:, :-1]
    registers[:, 0] = entering
