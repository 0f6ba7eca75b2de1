"""A training step of real models on one process and on several, each beside the loop that torch's users
write.

The global batch is the same for any number of ranks, so more ranks do the same work. On one rank the peer is
plain torch, on several it is torch's DistributedDataParallel over gloo; both train in the same ranks, in
turn.
"""

from __future__ import annotations

import numpy as np
import pytest

import minidist as md
from minidist.benchmarks.steps import Case, time_steps
from minidist.benchmarks.turns import Benchmark, compared, record

MLP = "Training step: an MLP on handwritten digits, 256 rows"
TINY = "Training step: a byte GPT of 0.1 M parameters, 16 rows of 64"
SMALL = "Training step: a byte GPT of 3 M parameters, 16 rows of 128"


def _train(benchmark: Benchmark, case: Case, ranks: int, rounds: int) -> None:
    with md.Cluster(ranks, timeout=300) as cluster:
        timed = cluster.run(time_steps, case, rounds)
    # Both trained the same model on the same rows, or the comparison means nothing.
    np.testing.assert_allclose(
        timed[0].our_losses[:3], np.mean([rank.peer_losses[:3] for rank in timed], axis=0), rtol=1e-3
    )
    # A step has ended when the slowest rank has.
    ours = [max(step) for step in zip(*(rank.ours for rank in timed), strict=True)]
    peer = [max(step) for step in zip(*(rank.peer for rank in timed), strict=True)]
    record(benchmark, ours, peer, "torch DDP" if ranks > 1 else "plain torch")
    extra = benchmark.extra_info
    extra |= {"label": f"{ranks} ranks, naive" if ranks > 1 else "1 rank", "ranks": ranks}
    extra["bytes_per_step"] = max(rank.bytes_per_step for rank in timed)
    extra["rows_per_s"] = case.rows / float(np.median(ours))


@compared(MLP)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_mlp(benchmark: Benchmark, full: bool, ranks: int) -> None:
    """A model whose step is short: what a step costs beside its arithmetic shows here."""
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn: pip install 'minidist[bench]'")
    _train(benchmark, Case("mlp", rows=256), ranks, rounds=300 if full else 60)


@compared(TINY)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_byte_gpt_tiny(benchmark: Benchmark, full: bool, ranks: int) -> None:
    """Many small parameters: one all-reduce for each is slow."""
    _train(benchmark, Case("byte-tiny", rows=16), ranks, rounds=100 if full else 30)


@compared(SMALL)
@pytest.mark.full_only
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_byte_gpt_small(benchmark: Benchmark, ranks: int) -> None:
    """Arithmetic and communication of the same order, on two cores."""
    _train(benchmark, Case("byte-small", rows=16), ranks, rounds=20)
