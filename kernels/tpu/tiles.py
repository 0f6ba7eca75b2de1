"""A model of AMX, the matrix unit in a CPU: eight tile registers, the memory that they reach, and the cycles.

`TileUnit` executes the instructions that `kernels/cpu/support/tile_registers.py` issues, one method for
each, on memory that it is given. It refuses what the CPU refuses (a signal there is an error with a
sentence here), and it counts loads, stores, products and cycles. So the loop of rung 8 runs where
there is no unit.

A load keeps its port busy for 8 cycles, a product the unit for 16. A loaded tile can be used
after 20 cycles, a sum after 52: with one tile of sums a product takes 52 cycles, with four under way 16. The
CPU runs ahead of what waits, and renames tiles, so a load waits for its port alone.

Source: Intel 64 and IA-32 Architectures Optimization Reference Manual, chapter 20.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..rung import Array

TILES, ROWS, ROW_BYTES = 8, 16, 64
LOAD, LOADED = 8, 20  # cycles that a load's port is busy, and until the tile can be used
PRODUCT, SUMMED = 16, 52  # the same of a product


class TileUnit:
    """Eight tiles, and the arrays that loads and stores may touch.

    `permission` says whether the program has asked Linux for tiles.
    """

    def __init__(self, memory: Sequence[Array], permission: bool = True) -> None:
        self.memory, self.permission = memory, permission
        self.loads = self.stores = self.products = 0
        self._sizes: list[tuple[int, int]] = []  # (rows, bytes a row) of each tile; none: not configured
        self._tiles = [np.zeros((ROWS, ROW_BYTES), np.uint8) for _ in range(TILES)]
        self._ready = [0] * TILES  # the cycle in which each tile can be used
        self._port = self._unit = 0  # the cycles in which loads and stores, and products, can go on

    @property
    def cycles(self) -> int:
        """Cycles until the last result is there."""
        return max(self._port, *self._ready)

    @property
    def released(self) -> bool:
        """Whether no tile is configured: then Linux has nothing to save for this thread."""
        return not self._sizes

    def configure(self, configuration: bytes) -> None:
        """Set up and clear the tiles from 64 bytes: the palette, and the rows and bytes a row of each."""
        if not self.permission:
            raise PermissionError("no permission: ask Linux for tiles first, with arch_prctl(0x1023, 18)")
        rows, widths = list(configuration[48:56]), np.frombuffer(configuration[16:32], np.uint16).tolist()
        if len(configuration) != 64 or configuration[0] != 1 or max(rows) > ROWS or max(widths) > ROW_BYTES:
            raise ValueError(
                f"palette {configuration[0]}, rows {rows}, bytes {widths}: give palette 1, 16 x 64"
            )
        self._sizes = list(zip(rows, widths, strict=True))
        for tile in self._tiles:
            tile[...] = 0

    def release(self) -> None:
        """Give the tiles back."""
        self._sizes = []

    def zero(self, tile: int) -> None:
        """Fill a tile with zeros."""
        self._size(tile)
        self._tiles[tile] = np.zeros((ROWS, ROW_BYTES), np.uint8)
        self._ready[tile] = 0

    def load(self, tile: int, address: int, stride: int) -> None:
        """Read a tile's rows from memory, `stride` bytes apart."""
        rows, width = self._size(tile)
        loaded = np.zeros((ROWS, ROW_BYTES), np.uint8)
        for row in range(rows):
            loaded[row, :width] = self._bytes(address + row * stride, width)
        self._tiles[tile] = loaded
        self.loads += 1
        self._port, self._ready[tile] = self._port + LOAD, self._port + LOADED

    def store(self, tile: int, address: int, stride: int) -> None:
        """Write a tile's rows to memory."""
        rows, width = self._size(tile)
        for row in range(rows):
            self._bytes(address + row * stride, width)[...] = self._tiles[tile][row, :width]
        self.stores += 1
        self._port = max(self._port, self._ready[tile]) + ROWS

    def multiply(self, c: int, a: int, b: int) -> None:
        """Add to the float32 tile c the products of tile a (M x 2 K) and tile b (K x 2 N, rows in pairs)."""
        (m, n_bytes), (a_rows, a_bytes), (k, b_bytes) = self._size(c), self._size(a), self._size(b)
        if a_rows != m or a_bytes != 4 * k or b_bytes != n_bytes:
            raise ValueError(
                f"tile {a} has {a_rows} rows of {a_bytes} bytes, {b} has {k} of {b_bytes}, {c} has {m} of "
                f"{n_bytes}: a row of a needs as many words as b has rows"
            )
        x, y = (_wide(self._tiles[tile]) for tile in (a, b))
        sums = self._tiles[c].view(np.float32)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            for p in range(k):
                for half in range(2):
                    sums += x[:, 2 * p + half, None] * y[p, half::2]
        sums[np.abs(sums) < np.finfo(np.float32).tiny] = 0
        self.products += 1
        start = max(self._unit, *(self._ready[tile] for tile in (a, b, c)))
        self._unit, self._ready[c] = start + PRODUCT, start + SUMMED

    def _size(self, tile: int) -> tuple[int, int]:
        if not self._sizes:
            raise RuntimeError(f"tile {tile} is used, but no tile is configured: configure the tiles first")
        return self._sizes[tile]

    def _bytes(self, address: int, count: int) -> Array:
        for array in self.memory:
            begin = array.ctypes.data
            if begin <= address and address + count <= begin + array.nbytes:
                view: Array = array.reshape(-1).view(np.uint8)[address - begin : address - begin + count]
                return view
        raise IndexError(f"bytes {address:#x} to {address + count:#x} lie outside the memory of this unit")


def _wide(tile: Array) -> Array:
    """The bf16 numbers of a tile as float32, (16, 32); subnormal ones count as 0."""
    numbers: Array = (tile.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    numbers[np.abs(numbers) < np.finfo(np.float32).tiny] = 0
    return numbers
