"""The matrix unit of a CPU, with arrays in place of addresses (lesson 6): AMX, or its model.

    unit = Tiles()               # the model; here() gives this CPU's unit, where it has one
    unit.configure(16)           # eight tiles of 16 rows, of 64 bytes each, full of zeros
    unit.load(4, a, 0, 32)       # tile 4: the 16 x 64 bytes of a that begin at a[0, 32]
    unit.multiply(0)             # tile 0 += tile 4 times tile 6; 1: 4 and 7; 2: 5 and 6; 3: 5 and 7
    unit.store(0, c, 16, 0)      # tile 0 goes to c, from c[16, 0] on
    unit.release()

Tiles 0 to 3 hold sums, 4 and 5 hold a, 6 and 7 hold b, as in rung 8 of the CPU's ladder.
"""

from __future__ import annotations

from collections.abc import Callable
from time import process_time
from typing import Any
from unittest import mock

import numpy as np

from minidist.kernels import rung
from minidist.kernels.cpu.support import tile_registers
from minidist.kernels.cpu.support.bf16_instructions import AMX, matrix_unit
from minidist.kernels.tpu.tiles import ROW_BYTES, ROWS, TileUnit

MODES = {"float32": None, "bf16x6": "bf16x6", "bf16x3": "bf16x3", "bf16": "bf16"}


class Tiles:
    """The model of the unit; `counts` has its loads, stores, products and cycles."""

    name = "a model of AMX"

    def __init__(self) -> None:
        self.counts = self._unit = TileUnit([])
        self.rows = ROWS

    def __repr__(self) -> str:
        return "unit"

    def configure(self, rows: int) -> None:
        """Set up eight tiles of so many rows; all are full of zeros then."""
        self.rows = rows
        self._unit.configure(tile_registers.configuration(rows))

    def zero(self, tile: int) -> None:
        """Fill a tile of sums with zeros."""
        self._unit.zero(_one_of(tile, range(4), "zero"))

    def load(self, tile: int, array: np.ndarray, i: int, j: int) -> None:
        """Fill a tile from the elements of `array` that begin at [i, j]."""
        self._unit.load(_one_of(tile, range(4, 8), "load"), *self._place(array, i, j))

    def multiply(self, tile: int) -> None:
        """Add to a tile of sums: the product of tile 4 + tile // 2 and tile 6 + tile % 2."""
        _one_of(tile, range(4), "multiply")
        try:
            self._unit.multiply(tile, 4 + tile // 2, 6 + tile % 2)
        except ValueError as error:
            raise ValueError(f"{error}; configure({ROWS}) makes tiles that fit") from None

    def store(self, tile: int, array: np.ndarray, i: int, j: int) -> None:
        """Write a tile of sums to `array`, from [i, j] on."""
        self._unit.store(_one_of(tile, range(4), "store"), *self._place(array, i, j))

    def release(self) -> None:
        """Give the tiles back."""
        self._unit.release()

    def _place(self, array: np.ndarray, i: int, j: int) -> tuple[int, int]:
        """An element's address, and the bytes from a row to the next; the unit may touch this array then."""
        bottom, right = i + self.rows, j + ROW_BYTES // array.itemsize
        if min(i, j) < 0 or bottom > array.shape[0] or right > array.shape[1]:
            raise IndexError(
                f"a tile that begins at [{i}, {j}] needs rows to {bottom} and columns to {right}, and the "
                f"array has {array.shape[0]} x {array.shape[1]}; b in pairs has twice the columns of b"
            )
        if not array.flags.c_contiguous:
            raise ValueError(
                "the rows of an array have to lie one after the other: np.ascontiguousarray makes one"
            )
        if not any(array is each for each in self._unit.memory):
            self._unit.memory = [*self._unit.memory, array]
        return array.ctypes.data + i * array.strides[0] + j * array.itemsize, array.strides[0]


class OfThisCPU(Tiles):
    """The unit itself: each method is one instruction."""

    name = AMX

    def __init__(self) -> None:
        super().__init__()
        self._unit = _Instructions()  # type: ignore[assignment]


class _Instructions:
    """As `TileUnit`, with the CPU's own instructions, each compiled when it is first used."""

    def __init__(self) -> None:
        self.memory: list[np.ndarray] = []
        self._compiled: dict[str, Callable[..., None]] = {}

    def configure(self, configuration: bytes) -> None:
        if configuration != tile_registers.configuration():
            raise ValueError("this unit's tiles have 16 rows")
        self._call("begin_tiles")

    def zero(self, tile: int) -> None:
        self._call(f"zero{tile}")

    def load(self, tile: int, address: int, stride: int) -> None:
        self._call(f"load{tile}", address, stride)

    def multiply(self, tile: int, a: int, b: int) -> None:
        self._call(f"add{tile}")

    def store(self, tile: int, address: int, stride: int) -> None:
        self._call(f"store{tile}", address, stride)

    def release(self) -> None:
        self._call("end_tiles")

    def _call(self, name: str, *place: int) -> None:
        if name not in self._compiled:
            from numba import njit

            instruction = getattr(tile_registers, name)
            on_memory = njit(lambda address, stride: instruction(address, stride))
            self._compiled[name] = on_memory if place else njit(lambda: instruction())
        self._compiled[name](*place)


def _one_of(tile: int, tiles: range, what: str) -> int:
    if tile not in tiles:
        raise ValueError(f"{what} takes tiles {tiles[0]} to {tiles[-1]}, not {tile}")
    return tile


def here() -> Tiles:
    """This CPU's unit, or its model where the CPU has none."""
    return OfThisCPU() if matrix_unit() == AMX else Tiles()


def gigaflops(n: int, rounds: int = 5) -> dict[str, float | None]:
    """Rates of an n x n float32 product on one core, by mode; None where this CPU has no bf16 products."""
    from numba import config

    a, b = np.random.default_rng(0).random((2, n, n), np.float32)
    rates: dict[str, float | None] = {}
    with mock.patch.object(config, "NUMBA_NUM_THREADS", 1):
        for name, mode in MODES.items():
            if mode and not matrix_unit():
                rates[name] = None
                continue
            matmul: Any = rung("s8_matrix_unit" if mode else "s6_register_tile").matmul
            more = {"mode": mode} if mode else {}
            matmul(a, b, **more)  # compiles
            best = np.inf
            for _ in range(rounds):
                start = process_time()
                matmul(a, b, **more)
                best = min(best, process_time() - start)
            rates[name] = 2 * n**3 / best / 1e9
    return rates


def mistakes(a: np.ndarray, b: np.ndarray) -> dict[str, np.ndarray]:
    """What sums that go on, pairs that are none, and exchanged tiles make of a (m, k) times b (k, n)."""
    right, (m, k), n = a @ b, a.shape, b.shape[1]
    blocks = right.reshape(m // 32, 32, n // 32, 32).swapaxes(1, 2)
    on = blocks.reshape(-1, 32, 32).cumsum(0).reshape(blocks.shape).swapaxes(1, 2).reshape(m, n)
    rows = b.reshape(k // 2, n, 2).swapaxes(1, 2).reshape(k, n)  # what rows side by side stand for as pairs
    crossed = right.reshape(m // 32, 2, 16, n // 32, 2, 16).swapaxes(1, 4).reshape(m, n)
    return {
        "Each block of c has the sums of the blocks before it: zero tiles 0 to 3 before each.": on,
        "b is not in pairs: a word of its tile has neighbours of a row, not of a column.": a @ rows,
        "Tiles 1 and 2 are exchanged: tile t is row t // 2 and column t % 2 of the four.": crossed,
    }
