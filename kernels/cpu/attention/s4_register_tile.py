"""Attention, rung 4: both products in the register tile of the matmul ladder.

The idea: scores are a product, q k^T, and so are weights times values. Rung 3 makes them one number at a
time. Here a group of queries multiplies a block of keys, and then of values, in the tile of matmul's rung 6,
from packed panels (`support/forward_pass.py`). What is left is exp, which the C library takes longer for
than the tile for both products of a score. `support/vector_softmax.py` makes a vector of powers of 2 in a
dozen instructions. The mask saves nothing yet: what it hides is computed, and then set to zero.

Measured: rung 3 takes 16 times as long with 8 heads of 1024 positions of 64, and torch 1.9 times, both by CPU
time on one core of a busy machine.
"""

from __future__ import annotations

from ...attention_rung import AttentionRung
from ...rung import Array
from .support.parts import forward


def compute(q: Array, k: Array, v: Array, out: Array, logs: Array, heads: int, causal: int) -> None:
    """Fill out with softmax(q k^T / sqrt(width)) v, and logs."""
    forward(q, k, v, out, logs, heads, causal, skip=False, cores="one")


RUNG = AttentionRung.of_file(
    __name__,
    idea="Both products in the matmul ladder's register tile, and vectors of powers for the softmax.",
    dtypes=("float32",),
    compute=compute,
    cores="one",
)
