"""The attention ladder on a CPU: seven ways to compute softmax(q k^T / sqrt(width)) v.

| File | The one idea |
|---|---|
| s1_three_passes | the definition: all scores, a softmax in three passes |
| s2_one_pass | largest score and sum in one pass: a row of scores is enough |
| s3_key_blocks | sums of values are rescaled, too: no row of scores |
| s4_register_tile | both products in the matmul ladder's register tile |
| s5_threads | all cores share the work |
| s6_causal | blocks that the mask hides are skipped |
| s7_backward | the backward pass computes the weights again |

The upper rungs share code in `support`. They share `../support` with the matmul ladder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...rung import ladder

if TYPE_CHECKING:
    from ...attention_rung import AttentionRung

    ATTENTION_LADDER: tuple[AttentionRung, ...]
    """The seven rungs of attention on a CPU: from the definition to a backward pass on all cores."""

RUNGS, load, __getattr__ = ladder(__name__, "ATTENTION_LADDER")
