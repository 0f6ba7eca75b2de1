"""A product in one thread: rung 6, and rung 7 for a product too small for two threads.

They share it, so Numba compiles it once for both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...rung import Array
from .compiling import compiled

if TYPE_CHECKING:
    from . import small_products


@compiled("AAAC", uses=("small_products",), nogil=True, boundscheck=False)
def multiply_alone(
    a: Array, b: Array, out: Array, space: Array, height: int, width: int, near: int, far: int
) -> None:
    """out (m, n) = a (m, k) b (k, n), packed into `space` or where they lie: see `small_products.py`."""
    small_products.multiply_alone(a, b, out, space, height, width, near, far)
