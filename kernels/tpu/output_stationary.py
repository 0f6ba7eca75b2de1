"""The output-stationary dataflow: a tile of c stays in the array, a moves right, and b moves down.

PE (r, c) keeps c[i, j]. In one cycle it meets a[i, p] from the left and b[p, j] from above, in the next a[i,
p + 1] and b[p + 1, j], and so on through all of k: no sum leaves before it is finished. SCALE-Sim (Samajdar
et al., 2018) has this dataflow and the weight-stationary one, under the same names.

Then the h rows of the tile drain through the bottom edge, one wave per row. Wave d enters at the top, picks
up the sum of row d on its way, and carries it down one PE per cycle. With one register for the sum, the next
tile can start only behind the last wave. With two ("double buffering"), a finished sum moves to the second
register when the first wave passes, and the next tile starts at once.
"""

from __future__ import annotations

from ..rung import Array
from .array import NO_COMMAND, ArrayMachine, Masked, Port, Registers, shift_right


class OutputStationary(ArrayMachine):
    """Sums stay; commands are (tile, column of a) on both edges and (tile, row to drain) on the left edge."""

    stationary = "m"

    def __init__(self, a: Array, b: Array, rows: int, cols: int, double_buffered: bool) -> None:
        super().__init__(a, b, rows, cols, double_buffered)
        self.top, self.drain = Port(cols), Port(rows)
        # Marks that move right: move your sum to the second register; put your sum onto the wave.
        self.finish, self.take_up = self.marks(), self.marks()
        self.results = Registers(self.shape, self.dtype)
        # With one register, "finished" is another name for the sums at work.
        self.finished = Registers(self.shape, self.dtype) if self.double_buffered else self.sums
        self.tile, self.column = -1, self.k  # the tile that streams, and the column of a that is next
        self.drained, self.drain_row = 0, 0  # tiles drained, and the row of the drain that is next

    @property
    def busy(self) -> bool:
        """Whether work is left."""
        return self.drained < self.tiles or self.drain.busy() or self.bottom.busy()

    def issue(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the controller's commands in this cycle: (tile, column of a) and (tile, row to drain)."""
        stream = drain = NO_COMMAND
        streamed = self.column == self.k
        if self.drain_row > 0 or (self.drained == self.tile and streamed):
            drain = self.drained, self.drain_row
        # With two registers a tile may start with the drain of the one before it, with one only after it.
        free = self.drained > self.tile or (self.double_buffered and drain[0] == self.tile)
        if streamed and free and self.tile < self.tiles - 1:
            self.tile, self.column = self.tile + 1, 0
        if self.column < self.k:
            stream = self.tile, self.column
            self.column += 1
        if drain != NO_COMMAND:
            self.drain_row += 1
            if self.drain_row == self.heights[self.drained]:
                self.drained, self.drain_row = self.drained + 1, 0
        return stream, drain

    def clock(self) -> None:
        """Advance all registers by one cycle."""
        stream, drain = self.issue()
        self.left.walk(stream)
        self.top.walk(stream)
        self.drain.walk(drain)
        self.bottom.walk((int(self.drain.tile[-1]), int(self.drain.index[-1])))

        # A finished sum moves aside before a new tile's product is added.
        if self.double_buffered:
            shift_right(self.finish, self.drain.index == 0)
            if self.finish.any():
                self.finished.take(self.sums, self.finish)

        # a moves right, b moves down.
        i = self.tile_rows[self.left.tile] + self.left.number
        self.read_a(i, self.left.index, (self.left.tile >= 0) & (i < self.m))
        self.a.shift_right(self.a_in)
        j = self.tile_cols[self.top.tile] + self.top.number
        self.read_b(self.top.index, j, (self.top.tile >= 0) & (j < self.n))
        self.b.shift_down(self.b_in)
        self.multiply_add()
        self.drain_results()

    def drain_results(self) -> None:
        """Move the waves of finished sums down by one PE; row d puts its sums onto wave d."""
        self.results.shift_down()
        shift_right(self.take_up, self.drain.index == self.drain.number)
        if self.take_up.any():
            self.results.take(self.finished, self.take_up)
        self.collect(self.tile_rows[self.bottom.tile] + self.bottom.index, self.results)

    def extra_registers(self) -> tuple[Masked | None, Masked | None]:
        """Return the finished sums that wait, if there are registers for them, and those that move."""
        return (self.finished.masked() if self.double_buffered else None), self.results.masked()
