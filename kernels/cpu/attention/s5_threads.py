"""Attention, rung 5: rung 4 on all cores.

The idea: the queries of a head do not depend on each other, nor do heads. A part is some 250 queries of one
head, which go through all its keys; cores take parts from a common counter, so a core that is busy elsewhere
takes fewer. Each packs the keys that its part goes through for itself: a few percent of the part's work, for
which no core waits for another.
"""

from __future__ import annotations

from functools import partial

from ...attention_rung import AttentionRung
from .support.parts import forward

RUNG = AttentionRung.of_file(
    __name__,
    idea="All cores take parts of the queries from a common counter.",
    dtypes=("float32",),
    compute=partial(forward, skip=False, cores="all"),
    cores="all",
)
