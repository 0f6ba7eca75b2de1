"""A product in one thread: rung 6, and rung 7 for a product too small for two threads.

They share it, so Numba compiles it once for both. A small product takes a few microseconds, so what Python
does for each is little: one look-up gives a thread its memory and the sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...rung import Array
from .block_sizes import KeptByThread, blocks, memory
from .compiling import compiled

if TYPE_CHECKING:
    from . import packed_product, small_products


@compiled("AAAC", uses=("packed_product", "small_products"), nogil=True, boundscheck=False)
def _multiply(
    a: Array, b: Array, out: Array, space: Array, height: int, width: int, near: int, far: int
) -> None:
    how = small_products.way(a, b, out, near, far)
    if how:
        small_products.multiply(a, b, out, how)
    else:
        packed_product.multiply_in_blocks(a, b, out, space, height, width)


_kept = KeptByThread()  # space and sizes, by NumPy's character for the dtype


def compute(a: Array, b: Array, out: Array) -> None:
    """Fill out (m, n) with a (m, k) times b (k, n), packed or where they lie: see `small_products.py`."""
    down, right = out.strides
    if down < right:  # Fortran order: compute the transposed product
        a, b, out = b.T, a.T, out.T
    kind = out.dtype.char
    arguments = _kept.found.get(kind)
    if arguments is None:
        size = blocks(kind)
        space = memory("product", kind, size.memory + size.depth * size.width)
        arguments = _kept.found[kind] = space, size.tiles, size.width, size.near, size.far
    _multiply(a, b, out, *arguments)
