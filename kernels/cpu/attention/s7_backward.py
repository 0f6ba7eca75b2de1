"""Attention, rung 7: the backward pass, which computes the weights again.

The idea: backward needs the weights, which forward never had in one place. To keep them would be queries x
keys numbers again. Computing them a second time costs one more product than the four that the gradients need,
and no memory but the logarithm of each query's sum. `support/backward_pass.py` does that block by block,
with all five products in the register tile. The forward pass is rung 6.

Measured: torch takes 2.5 times as long, and 2.8 times if causal, with 8 heads of 1024 positions of 64 (CPU
time on one core of a busy machine).

Source: Dao, Fu, Ermon, Rudra and Re, FlashAttention, 2022, section 3.1, "Recomputation".
"""

from __future__ import annotations

from ...attention_rung import AttentionRung
from ...rung import Array
from .support.parts import backward, forward


def compute(q: Array, k: Array, v: Array, out: Array, logs: Array, heads: int, causal: int) -> None:
    """Fill out with softmax(q k^T / sqrt(width)) v, and logs."""
    forward(q, k, v, out, logs, heads, causal, skip=True, cores="all")


RUNG = AttentionRung.of_file(
    __name__,
    idea="Backward computes the weights again, block by block, so nothing of queries x keys is ever kept.",
    dtypes=("float32",),
    compute=compute,
    cores="all",
    gradients=backward,
)
