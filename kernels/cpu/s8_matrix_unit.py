"""Rung 8: rung 7 with the matrix unit: pairs of bf16 numbers, or whole tiles of them, in one instruction.

The idea: a bf16 number has the range of a float32 and half its bits, so a register holds twice as many.
VDPBF16PS (Zen 4 and 5, some Xeons) multiplies two vectors of pairs and adds both products to float32: twice
the work of a fused multiply-add. With AMX (Xeons since 2023) a register is a tile: one instruction
multiplies 16 x 32 numbers by 32 x 16. `support/bf16_instructions.py` finds out by trying what this CPU has.

`matmul(a, b, mode=...)` says how float32 numbers become bf16 while they are packed. "bf16" rounds them: 8
bits are left. "bf16x3" cuts each in two parts and adds up three products, "bf16x6" in three parts and six
products: as exact as float32 (`support/bf16_product.py`). All cores share the work as in rung 7.

The unit takes subnormal numbers for 0 and gives 0 for them; parts of numbers below 1e-33 are subnormal.
"bf16" rounds to infinity from 3.3962e38 on. Infinities and NaN travel as in float32: where a result of the
other modes is not finite, rung 6's loops compute the product again.

Measured: on one core of a busy Zen 5, in turns, with packing, rung 6 takes 1.8 to 2 times as long as "bf16"
at 512, 1024 and 2048, and torch's product of bf16 tensors 0.97 to 1.05 times as long as ours. That is 0.85
of what VDPBF16PS alone reaches, 566 GFLOP/s. "bf16x3" takes 1.5 times as long as rung 6 and "bf16x6" 3
times: with pairs three products cost more than one of float32. A tile does 16 times the work of a vector, and
then the second cache limits the loop: see docs/measurements.md.

Source: Intel, Architecture Instruction Set Extensions Programming Reference, VDPBF16PS and chapter 3 (AMX).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import torch_tensors
from ..rung import Array, OperandT, Rung, torch_of
from .support import one_thread, thread_pool
from .support.bf16_instructions import matrix_unit, require_matrix_unit
from .support.bf16_posting import ROUNDED, address_of, cut, own_memory, post, strip_width
from .support.block_sizes import memory
from .support.caches import caches
from .support.compiling import compiled

if TYPE_CHECKING:
    from .support import atomic, bf16_product, board, shared_packing

# The parts into which each mode cuts a float32, and a bound for the relative error of what it leaves out.
MODES = {"bf16": (1, 2.0**-8), "bf16x3": (2, 2.0**-15), "bf16x6": (3, 2.0**-22)}
ELEMENT = 2  # bytes of a bf16 number: how the board tells this rung's products from those of rung 7
LEAST_WORK = 600_000  # multiply-adds per thread
SHARED = 2**25  # bytes of packed b at a time, and a quarter of the last cache, at most
PATIENCE = thread_pool.PATIENCE


@compiled(
    "C",
    uses=("atomic", "bf16_product", "board", "shared_packing"),
    variant=matrix_unit,
    nogil=True,
    boundscheck=False,
)
def _work(space: Array, at: int, seen: int, leads: int) -> int:
    """Take parts of products posted after number `seen`, as rung 7 does; `space` is this thread's memory."""
    while True:
        seen = board.join(at, seen, ELEMENT, leads, PATIENCE)
        if seen <= 0:
            return seen
        how, packs, down, across, _ = board.cut(at, space)
        parts, size = how % 4, 2 if how >= 4 else 4
        a, b = (*board.where(at, 0), size), (*board.where(at, 1), size)
        out, packed_b = board.array(at, 2, space), board.number(at, board.SHARED)
        rounded = board.number(at, ROUNDED), board.number(at, ROUNDED + 1), board.number(at, ROUNDED + 2)
        bf16_product.pack_together(b, packed_b, at, packs, parts, board.address(space))
        tile = bf16_product.ROWS, bf16_product.COLUMNS
        part = board.take(at, down * across, leads)
        while part >= 0:
            shape = bf16_product.height(out.shape[0]), out.shape[1]
            i0, i1, j0, j1, tiles = shared_packing.place(part, shape, tile, (down, across), 0)
            rows = out[i0:i1]
            bf16_product.multiply(a, i0, packed_b, rows, rounded, j0, j1, space, tiles, parts)
            if parts > 1 and not bf16_product.all_finite(rows[:, j0:j1]):
                atomic.store(board.number(at, board.FLAGS) + 8 * packs * bf16_product.depths(b[1]), 1)
            part = board.take(at, down * across, leads)
        board.leave(at)
        if leads:
            board.close(at, PATIENCE)
            return 0


def compute(a: Array, b: Array, out: Array, mode: str = "bf16") -> None:
    """Fill out (m, n) with a (m, k) times b (k, n): all float32, or a, b and perhaps out bf16 (as uint16)."""
    require_matrix_unit()
    narrow, narrow_out = a.dtype.itemsize == 2, out.dtype.itemsize == 2
    parts = 1 if narrow else MODES[mode][0]
    if out.strides[0] < out.strides[1]:  # Fortran order: compute the transposed product
        a, b, out = b.T, a.T, out.T
    (m, k), n = a.shape, b.shape[1]
    width = strip_width(k, parts, min(SHARED, (caches().l3 or SHARED) // 4))
    threads = max(1, min(thread_pool.threads(), m * n * k // LEAST_WORK))
    own, sums, finite = own_memory(), out, True
    # Sums of several depths wait until they can be rounded.
    if narrow_out and cut(m, n, k, parts, threads).depths > 1:
        sums = memory("sums of bf16 numbers", "f", m * n)[0, : m * n].reshape(m, n)
    together = threads > 1 and thread_pool.begin(threads - 1)
    board, at = (thread_pool.board, thread_pool.address()) if together else (own.board, own.at)
    try:
        for j in range(0, n, width):
            strip, into = (b, sums) if n <= width else (b[:, j : j + width], sums[:, j : j + width])
            how = cut(m, strip.shape[1], k, parts, threads)
            start, marks = own.packed_b(how.words, how.pieces)
            seats = min(threads, how.down * how.across) if together else 1
            rounded = (address_of(out[:, j:]), *out.strides) if narrow_out else (0, 0, 0)
            numbers = seats, how.packs, how.down, how.across, parts + 4 * narrow, start, start + 4 * how.words
            post(board, (a, strip, into), (ELEMENT, *numbers, *rounded))
            if together:
                thread_pool.wake(seats - 1, thread_pool.serve)
            _work(own.space, at, int(board[thread_pool.BELL]) - 1, 1)
            if together:
                thread_pool.clear()
            finite = finite and not marks[how.pieces]
    finally:
        if together:
            thread_pool.end()
    if not finite:
        one_thread.compute(a, b, out)


def _help(seen: int) -> int:
    """Work in a worker for what is posted after product number `seen`, until nothing is for a while."""
    return _work(own_memory().space, thread_pool.address(), seen, 0)


thread_pool.HELP[ELEMENT] = _help


@dataclasses.dataclass(frozen=True)
class MatrixUnitRung(Rung):
    """A rung that also takes bf16 numbers, and cuts float32 ones as its mode says."""

    def matmul(self, a: OperandT, b: OperandT, out: OperandT | None = None, mode: str = "bf16") -> OperandT:
        """Multiply as every rung does; a, b and out are float32 or bf16, of NumPy or CPU tensors of torch.

        `mode`, for float32 alone, is "bf16", "bf16x3" or "bf16x6". NumPy's bf16 is `ml_dtypes.bfloat16`, or
        the bits as uint16. `out` may be float32 if a and b are bf16. Gradients are not recorded. Raises
        RuntimeError where the CPU has no bf16 products, ValueError for an unknown mode, TypeError for a
        tensor that requires a gradient (minidist.model.matmul computes it), and else what every rung raises.
        """
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}: pass {', '.join(map(repr, MODES))}")
        require_matrix_unit()
        step, torch = _with(mode), torch_of(a, b)
        if torch is None:
            return Rung.matmul(step, a, b, out)
        x, y, c = torch_tensors.operands(torch, a, b, out, step)
        if 0 in (x.shape[1], *c.shape):
            c.zero_()  # an empty sum, or nothing
        else:
            step.compute(*(torch_tensors.as_array(torch, tensor) for tensor in (x, y, c)))
        result: OperandT = c
        return result

    def sums(self, dtype: str) -> str:
        """Return "float32"."""
        return "float32"

    @functools.cached_property
    def _dtypes(self) -> tuple[np.dtype[Any], ...]:
        return *super()._dtypes, np.dtype(np.uint16)

    def _matrix(self, name: str, x: Any) -> Array:
        return _bits(super()._matrix(name, x))

    def _fill(self, a: Array, b: Array, out: Array) -> None:
        self.compute(a, b, _bits(out))

    def _takes_out(self, dtype: str, out: str) -> bool:
        return dtype != "float32" and out in ("float32", "bfloat16", "uint16")


def _bits(x: Array) -> Array:
    """x, with bf16 numbers as their bits."""
    return x.view(np.uint16) if x.itemsize == 2 else x


RUNG = MatrixUnitRung.of_file(
    __name__,
    idea="Pairs of bf16 numbers, or whole tiles of them, are multiplied and added in one instruction.",
    dtypes=("bfloat16", "float32"),
    compute=compute,
    cores="all",
    aligned=False,
    factors=MODES["bf16"][1],
)


@functools.cache
def _with(mode: str) -> MatrixUnitRung:
    """The rung that multiplies in this mode."""
    return dataclasses.replace(RUNG, compute=functools.partial(compute, mode=mode), factors=MODES[mode][1])
