"""Attention, rung 5: rung 4 on all cores.

The idea: the queries of a head do not depend on each other, nor do heads. A part is some 250 queries of one
head, which go through all its keys; cores take parts from a common counter, so a core that is busy elsewhere
takes fewer. Each packs the keys that its part goes through for itself: a few percent of the part's work, for
which no core waits for another.
"""

from __future__ import annotations

from ...attention_rung import AttentionRung
from ...rung import Array
from .support.parts import forward


def compute(q: Array, k: Array, v: Array, out: Array, logs: Array, heads: int, causal: int) -> None:
    """Fill out with softmax(q k^T / sqrt(width)) v, and logs."""
    forward(q, k, v, out, logs, heads, causal, skip=False, cores="all")


RUNG = AttentionRung.of_file(
    __name__,
    idea="All cores take parts of the queries from a common counter.",
    dtypes=("float32",),
    compute=compute,
    cores="all",
)
