"""A training step of real models on one process and on several, in turns with a plain torch loop.

The global batch is the same for any number of ranks, so more ranks do the same work. On one rank the peer is
plain torch; on several it is torch's DistributedDataParallel over gloo. Both train in the same ranks, in
turns. Data parallelism is also measured in each of its forms.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from minidist.benchmarks.harness.training.rounds import Measured, Worlds, compare_pair, measure
from minidist.benchmarks.harness.training.strategies import YARDSTICK, Pair, Row
from minidist.benchmarks.harness.training.what_is_trained import Work
from minidist.benchmarks.harness.turns import Benchmark, compared
from minidist.kernels.cpu.support.bf16_instructions import NONE, matrix_unit

pytestmark = pytest.mark.no_finding

TITLES = {
    "mlp": "Training step: an MLP on handwritten digits, 256 rows",
    "byte-tiny": "Training step: a byte GPT of 0.1 M parameters, 16 rows of 64",
    "byte-small": "Training step: a byte GPT of 3 M parameters, 16 rows of 128",
}
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
SIZES = {ranks: Pair(Row(f"{ranks} ranks", f"dp={ranks}"), "torch DDP") for ranks in (2, 4)}
SIZES |= {1: Pair(Row("1 rank", "dp=1"), YARDSTICK)}


def _form(name: str) -> Pair:
    exact = "compression" not in FORMS[name]
    return Pair(Row(name, "dp=2", options={"data_parallel": FORMS[name]}, exact=exact), "torch DDP")


FORMS_WORK = {rows: Work("byte-small", 2 * rows, tied=True) for rows in (1, 8)}
"""The work by rows a rank."""


@pytest.fixture(scope="module")
def forms_timed(full: bool, worlds: Worlds) -> Callable[[int], Measured]:
    """Every form and the peer in turns, once for each number of rows a rank."""
    forms, rounds = [_form(name) for name in FORMS], {1: 60 if full else 10, 8: 15}
    return cache(lambda rows: measure(worlds, FORMS_WORK[rows], forms, rounds[rows]))


@compared(FORMS_AT)
@pytest.mark.parametrize("rows", [1, pytest.param(8, marks=pytest.mark.full_only)])
@pytest.mark.parametrize("form", FORMS)
def test_forms(benchmark: Benchmark, forms_timed: Any, form: str, rows: int) -> None:
    """13 MB of gradients, with little arithmetic, so that communication counts, or eight times as much."""
    benchmark.group = FORMS_AT.format("1 row" if rows == 1 else f"{rows} rows")
    compare_pair(benchmark, _form(form), FORMS_WORK[rows], forms_timed(rows), GOALS.get((rows, form)))


@pytest.fixture(scope="module")
def sizes_timed(worlds: Worlds) -> Callable[[Work, int], Measured]:
    """A model on each number of ranks in turns, once."""
    return cache(lambda work, rounds: measure(worlds, work, [*SIZES.values()], rounds))


def _enter_size(benchmark: Benchmark, work: Work, ranks: int, measured: Measured) -> None:
    compare_pair(benchmark, SIZES[ranks], work, measured)
    benchmark.extra_info["label"] = SIZES[ranks].row.strategy


@compared(TITLES["mlp"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_mlp(benchmark: Benchmark, sizes_timed: Any, full: bool, ranks: int) -> None:
    """A model with a short step: here the costs around the arithmetic show."""
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn: pip install 'minidist[bench]'")
    work = Work("mlp", rows=256, hidden=(512, 512))
    _enter_size(benchmark, work, ranks, sizes_timed(work, 40 if full else 9))


@compared(TITLES["mlp"])
def test_mlp_on_the_matrix_unit(benchmark: Benchmark, worlds: Worlds, full: bool) -> None:
    """The same MLP with every product on rung 8, forward and backward: float32 in, float32 out."""
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn: pip install 'minidist[bench]'")
    if not matrix_unit():
        pytest.skip(NONE)
    pair = Pair(
        Row("1 rank, rung 8", "one process", loop="matrix unit", loop_ranks=1, exact=False), YARDSTICK
    )
    work = Work("mlp", rows=256, hidden=(512, 512))
    compare_pair(benchmark, pair, work, measure(worlds, work, [pair], 40 if full else 9))
    benchmark.extra_info["note"] = f"bf16 products on {matrix_unit()}"


@compared(TITLES["byte-tiny"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_byte_gpt_tiny(benchmark: Benchmark, sizes_timed: Any, full: bool, ranks: int) -> None:
    """Many small parameters: one all-reduce for each is slow."""
    work = Work("byte-tiny", rows=16, tied=True)
    _enter_size(benchmark, work, ranks, sizes_timed(work, 60 if full else 15))


@compared(TITLES["byte-small"])
@pytest.mark.full_only
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_byte_gpt_small(benchmark: Benchmark, sizes_timed: Any, ranks: int) -> None:
    """On two cores, arithmetic and communication take about the same time."""
    work = Work("byte-small", rows=16, tied=True)
    _enter_size(benchmark, work, ranks, sizes_timed(work, 20))
