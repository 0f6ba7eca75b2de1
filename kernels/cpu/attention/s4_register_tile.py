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

from functools import partial

from ...attention_rung import AttentionRung
from .support.parts import forward

RUNG = AttentionRung.of_file(
    __name__,
    idea="Both products in the matmul ladder's register tile, and vectors of powers for the softmax.",
    dtypes=("float32",),
    compute=partial(forward, skip=False, cores="one"),
    cores="one",
)
