"""The weight-stationary dataflow: a tile of b stays in the array, a moves right, and sums move down.

This is the TPU's (Jouppi et al., In-Datacenter Performance Analysis of a Tensor Processing Unit, ISCA 2017,
section 2). PE (r, c) keeps b[p, j] while all rows of a pass by: it takes the sum of the PE above, adds a[i,
p] * b[p, j], and hands it down. At the bottom of column c, c[i, j] comes out, summed over the tile's rows of
b; accumulators below the array add it to the sums of earlier tiles.

The weights shift in from the top, last row first, so a tile of h rows arrives in h cycles. With one register
in each PE, the next tile can follow only behind the last row of a. With two ("double buffering") it shifts
into the second while the first is at work. A mark travels with each tile's first row of a, and a PE that it
reaches switches to its second register. So the switch crosses the array as a wave; if a has at least as many
rows as the array, no PE waits between two tiles.
"""

from __future__ import annotations

import numpy as np

from ..rung import Array
from .array import NO_COMMAND, ArrayMachine, Masked, Port, Registers, shift_right


class WeightStationary(ArrayMachine):
    """Weights stay; commands are (tile, row of a) on the left edge, (tile, step of its load) on the top."""

    stationary = "k"

    def __init__(self, a: Array, b: Array, rows: int, cols: int, double_buffered: bool) -> None:
        super().__init__(a, b, rows, cols, double_buffered)
        self.top = Port(cols)
        self.switch = self.marks()  # the mark that moves right with a tile's first row of a
        self.row_numbers = np.arange(rows)[:, None]
        # With one register, "next" is another name for the weights in use.
        self.next_b = Registers(self.shape, self.dtype) if self.double_buffered else self.b
        self.tile, self.row = -1, self.m  # the tile that streams, and the row of a that is next
        self.loaded, self.load_step = 0, 0  # tiles loaded, and the step of the load under way

    @property
    def busy(self) -> bool:
        """Whether work is left."""
        return self.tile < self.tiles - 1 or self.row < self.m or self.left.busy() or self.bottom.busy()

    def issue(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the controller's commands in this cycle: (tile, row of a), (tile, step of its load)."""
        stream = load = NO_COMMAND
        if self.row == self.m and self.loaded > self.tile + 1:
            self.tile, self.row = self.tile + 1, 0
        # With two registers a load may start with the stream of the tile before it, with one only after it.
        free = self.loaded <= self.tile + 1 and (self.double_buffered or self.row == self.m)
        if self.load_step > 0 or (self.loaded < self.tiles and free):
            load = self.loaded, self.load_step
            self.load_step += 1
            if self.load_step == self.heights[self.loaded]:
                self.loaded, self.load_step = self.loaded + 1, 0
        if self.row < self.m:
            stream = self.tile, self.row
            self.row += 1
        return stream, load

    def clock(self) -> None:
        """Advance all registers by one cycle."""
        stream, load = self.issue()
        self.left.walk(stream)
        self.top.walk(load)
        self.bottom.walk((int(self.left.tile[-1]), int(self.left.index[-1])))

        # a moves right, and with it the mark of a new tile.
        commanded = self.left.tile >= 0
        p = self.tile_rows[self.left.tile] + self.left.number
        self.read_a(self.left.index, p, commanded & (p < self.k))
        self.a.shift_right(self.a_in)
        shift_right(self.switch, self.left.index == 0)
        if self.double_buffered and self.switch.any():
            self.b.take(self.next_b, self.switch)
        self.shift_weights()

        self.sums.shift_down()
        self.multiply_add()
        self.collect(self.bottom.index, self.sums)

    def shift_weights(self) -> None:
        """Shift the weights of a load down by one PE, in the columns that a load has reached."""
        commanded = self.top.tile >= 0
        p = self.tile_rows[self.top.tile] + self.heights[self.top.tile] - 1 - self.top.index
        j = self.tile_cols[self.top.tile] + self.top.number
        self.read_b(p, j, commanded & (j < self.n))
        if commanded.any():
            # In step s, rows 0 to s move; the index is -1 where there is no load. The rows below keep their
            # weights: the tile before may still need them.
            self.next_b.shift_some_down(self.b_in, self.row_numbers <= self.top.index)

    def extra_registers(self) -> tuple[Masked | None, Masked | None]:
        """Return the weights of the next tile, if there is a register for them."""
        return (self.next_b.masked() if self.double_buffered else None), None
