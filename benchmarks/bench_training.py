"""A training step of real models on one process and on several, in turns with a plain torch loop.

The global batch is the same for any number of ranks, so more ranks do the same work. On one rank the peer is
plain torch; on several it is torch's DistributedDataParallel over gloo. Both train in the same ranks, in
turns. Data parallelism is also measured in each of its forms.
"""

from __future__ import annotations

from typing import Any

import pytest

from minidist.benchmarks.harness.training.rounds import Measured, Worlds, compare_pair, measure
from minidist.benchmarks.harness.training.strategies import YARDSTICK, Pair, Row
from minidist.benchmarks.harness.training.what_is_trained import Work
from minidist.benchmarks.harness.turns import Benchmark, case, compared
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
GOALS: dict[Any, float] = {(1, "overlap"): 0.83, (8, "overlap"): 1.00, (1, "overlap, sockets"): 1.03}
"""Goals for the ratio to torch's DDP, by rows a rank and form."""
FORM_PAIRS = {
    name: Pair(
        Row(name, "dp=2", options={"data_parallel": form}, exact="compression" not in form), "torch DDP"
    )
    for name, form in FORMS.items()
}
SIZES = {ranks: Pair(Row(f"{ranks} ranks", f"dp={ranks}"), "torch DDP") for ranks in (2, 4)}
SIZES |= {1: Pair(Row("1 rank", "dp=1"), YARDSTICK)}
UNIT = Row("1 rank, rung 8", "one process", loop="matrix unit", loop_ranks=1, exact=False)
DIGITS = Work("mlp", rows=256, hidden=(512, 512))
PROGRAMS: dict[int | str, tuple[Work, dict[Any, Pair], tuple[int, int]]] = {
    1: (Work("byte-small", rows=2, tied=True), FORM_PAIRS, (10, 60)),
    8: (Work("byte-small", rows=16, tied=True), FORM_PAIRS, (15, 15)),
    "mlp": (DIGITS, SIZES, (9, 40)),
    "matrix unit": (DIGITS, {1: Pair(UNIT, YARDSTICK)}, (9, 40)),
    "byte-tiny": (Work("byte-tiny", rows=16, tied=True), SIZES, (15, 60)),
    "byte-small": (Work("byte-small", rows=16, tied=True), SIZES, (20, 20)),
}
"""The programs that run in turns: their work, themselves, the rounds of a quick run and of a full one.

By a model; or, for the forms of data parallelism, by the rows a rank.
"""


def measured(worlds: Worlds, full: bool, which: int | str) -> Measured:
    """The programs of a row of `PROGRAMS` in turns."""
    work, several, rounds = PROGRAMS[which]
    return measure(worlds, work, [*several.values()], rounds[full])


def _enter(benchmark: Benchmark, timed: Any, which: int | str, key: Any) -> None:
    work, several, _ = PROGRAMS[which]
    compare_pair(benchmark, several[key], work, timed(which), GOALS.get((which, key)))
    benchmark.extra_info["label"] = several[key].row.strategy


@compared(FORMS_AT)
@pytest.mark.parametrize("rows", [1, case(8, quick=False)])
@pytest.mark.parametrize("form", FORMS)
def test_forms(benchmark: Benchmark, timed: Any, form: str, rows: int) -> None:
    """13 MB of gradients, with little arithmetic, so that communication counts, or eight times as much."""
    benchmark.group = FORMS_AT.format("1 row" if rows == 1 else f"{rows} rows")
    _enter(benchmark, timed, rows, form)


@compared(TITLES["mlp"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_mlp(benchmark: Benchmark, timed: Any, ranks: int) -> None:
    """A model with a short step: here the costs around the arithmetic show."""
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn: pip install 'minidist[bench]'")
    _enter(benchmark, timed, "mlp", ranks)


@compared(TITLES["mlp"])
def test_mlp_on_the_matrix_unit(benchmark: Benchmark, timed: Any) -> None:
    """The same MLP with every product on rung 8, forward and backward: float32 in, float32 out."""
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn: pip install 'minidist[bench]'")
    if not matrix_unit():
        pytest.skip(NONE)
    _enter(benchmark, timed, "matrix unit", 1)
    benchmark.extra_info["note"] = f"bf16 products on {matrix_unit()}"


@compared(TITLES["byte-tiny"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_byte_gpt_tiny(benchmark: Benchmark, timed: Any, ranks: int) -> None:
    """Many small parameters: one all-reduce for each is slow."""
    _enter(benchmark, timed, "byte-tiny", ranks)


@compared(TITLES["byte-small"])
@pytest.mark.full_only
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_byte_gpt_small(benchmark: Benchmark, timed: Any, ranks: int) -> None:
    """On two cores, arithmetic and communication take about the same time."""
    _enter(benchmark, timed, "byte-small", ranks)
