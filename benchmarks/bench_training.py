"""A training step of real models on one process and on several, in turns with a plain torch loop.

The global batch is the same for any number of ranks, so more ranks do the same work. On one rank the peer is
plain torch; on several it is torch's DistributedDataParallel over gloo. Both train in the same ranks, in
turns. Data parallelism is also measured in each of its forms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from minidist.benchmarks.harness.steps.training_steps import Case, Timed, time_forms, time_steps
from minidist.benchmarks.harness.strategy_table.strategy_rounds import Worlds
from minidist.benchmarks.harness.turns import Benchmark, compared, record

pytestmark = pytest.mark.no_finding

MLP = "Training step: an MLP on handwritten digits, 256 rows"
TINY = "Training step: a byte GPT of 0.1 M parameters, 16 rows of 64"
SMALL = "Training step: a byte GPT of 3 M parameters, 16 rows of 128"
FORMS_AT = "Data parallelism in every form: a byte GPT of 3 M parameters on 2 ranks, {} of 128 a rank"

FORMS: dict[str, dict[str, Any]] = {
    "one all-reduce a parameter": {"bucket_mb": 0, "overlap": False},
    "buckets": {"overlap": False},
    "overlap": {},
    "overlap, 4 MB buckets": {"bucket_mb": 4},
    "overlap, sockets": {"algorithm": "torch"},
    "ring, sockets": {"algorithm": "ring"},
    "float16": {"compression": "float16"},
    "bfloat16": {"compression": "bfloat16"},
    "top 1%": {"compression": "topk"},
    "PowerSGD, rank 4": {"compression": "powersgd"},
}
GOALS = {(1, "overlap"): 0.83, (8, "overlap"): 1.00, (1, "overlap, sockets"): 1.03}
"""Goals for the ratio to torch's DDP, by rows a rank and form."""


def _enter(benchmark: Benchmark, timed: Sequence[Timed], label: str, rows: int, exact: bool = True) -> None:
    """Record what the ranks measured; `rows` are those of a global batch."""
    ranks = len(timed)
    if exact:  # the comparison means nothing unless both trained the same model on the same rows
        np.testing.assert_allclose(
            timed[0].our_losses[:3], np.mean([rank.peer_losses[:3] for rank in timed], axis=0), rtol=1e-3
        )
    # A step ends when the slowest rank has finished.
    ours = [max(step) for step in zip(*(rank.ours for rank in timed), strict=True)]
    peer = [max(step) for step in zip(*(rank.peer for rank in timed), strict=True)]
    record(benchmark, ours, peer, "torch DDP" if ranks > 1 else "plain torch")
    extra = benchmark.extra_info
    extra |= {"label": label, "ranks": ranks, "rows_per_s": rows / float(np.median(ours))}
    extra["bytes_per_step"] = max(rank.bytes_per_step for rank in timed)
    extra["comm_overlap"] = min(rank.comm_overlap for rank in timed)


def _train(benchmark: Benchmark, worlds: Worlds, case: Case, ranks: int, rounds: int) -> None:
    timed = worlds(ranks).run(time_steps, case, rounds)
    _enter(benchmark, timed, f"{ranks} ranks" if ranks > 1 else "1 rank", case.rows)


@pytest.fixture(scope="module")
def forms_timed(full: bool, worlds: Worlds) -> Callable[[int], list[dict[str, Timed]]]:
    """Every form and the peer in turns, once for each number of rows a rank."""

    @cache
    def measure(rows: int) -> list[dict[str, Timed]]:
        rounds = (60 if full else 10) if rows == 1 else 15
        return worlds(2).run(time_forms, Case("byte-small", rows=2 * rows), FORMS, rounds)

    return measure


def _form(
    benchmark: Benchmark, measure: Callable[[int], list[dict[str, Timed]]], rows: int, form: str
) -> None:
    timed = [rank[form] for rank in measure(rows)]
    _enter(benchmark, timed, form, 2 * rows, exact="compression" not in FORMS[form])
    if (rows, form) in GOALS:
        benchmark.extra_info["goal"] = {"of": "ratio", "below": GOALS[rows, form]}


@compared(FORMS_AT.format("1 row"))
@pytest.mark.parametrize("form", FORMS)
def test_forms(benchmark: Benchmark, forms_timed: Any, form: str) -> None:
    """Little arithmetic and 13 MB of gradients: communication counts."""
    _form(benchmark, forms_timed, 1, form)


@compared(FORMS_AT.format("8 rows"))
@pytest.mark.full_only
@pytest.mark.parametrize("form", FORMS)
def test_forms_with_more_arithmetic(benchmark: Benchmark, forms_timed: Any, form: str) -> None:
    """The same gradients with eight times the arithmetic."""
    _form(benchmark, forms_timed, 8, form)


@compared(MLP)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_mlp(benchmark: Benchmark, worlds: Worlds, full: bool, ranks: int) -> None:
    """A model with a short step: here the costs around the arithmetic show."""
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn: pip install 'minidist[bench]'")
    _train(benchmark, worlds, Case("mlp", rows=256), ranks, rounds=300 if full else 60)


@compared(TINY)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_byte_gpt_tiny(benchmark: Benchmark, worlds: Worlds, full: bool, ranks: int) -> None:
    """Many small parameters: one all-reduce for each is slow."""
    _train(benchmark, worlds, Case("byte-tiny", rows=16), ranks, rounds=100 if full else 30)


@compared(SMALL)
@pytest.mark.full_only
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_byte_gpt_small(benchmark: Benchmark, worlds: Worlds, ranks: int) -> None:
    """On two cores, arithmetic and communication take about the same time."""
    _train(benchmark, worlds, Case("byte-small", rows=16), ranks, rounds=20)
