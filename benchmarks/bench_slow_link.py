"""Data parallelism, local SGD, compression, ZeRO and hybrids over a slow link between two hosts.

Two hosts of two ranks each are made from the kernel's namespaces on one machine. The link between them runs
at full speed and at 1 Gbit/s with 5 ms each way, in turns. Each row also has the time that the cost model
predicts: a step without communication, followed by its calls one after the other.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

import minidist
from minidist.benchmarks.harness import slow_link_steps as steps
from minidist.benchmarks.harness.slow_link_steps import ALONE, CASE, FAST, FORMS, INSIDE, PEER, SLOW
from minidist.benchmarks.harness.turns import Benchmark, compared, record
from minidist.benchmarks.harness.two_hosts import TwoHosts, why_not

GROUP = "A slow link: a byte GPT of 3 M parameters on 2 hosts of 2 ranks, 1 row of 128 a rank; {}"
RANKS = 2
"""Ranks of each host."""
ROUNDS = 7
LIMIT = 540.0
"""Seconds that the whole suite may take."""
LAYOUTS = {"ZeRO-1": "dp=4,zero=1", "ZeRO-3": "dp=4,zero=3", INSIDE: "dp=2,tp=2"}
MEASURED = [name for name in FORMS if name not in (PEER, ALONE)]

if REASON := why_not():
    pytest.skip(f"two hosts on one machine: {REASON}", allow_module_level=True)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every form on both links in turns, in one run."""
    results = tmp_path_factory.mktemp("slow_link") / "results.json"
    environment = {"PYTHONPATH": str(Path(minidist.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    with TwoHosts() as hosts:
        program = [str(steps.__file__), hosts.socket, str(results), str(ROUNDS)]
        runs = hosts.torchrun(RANKS, program, environment)
        end = time.monotonic() + LIMIT
        for run in runs:
            said, _ = run.communicate(timeout=max(1.0, end - time.monotonic()))
            assert run.returncode == 0, said[-3000:]
    found: dict[str, Any] = json.loads(results.read_text())
    return found


@compared(GROUP.format(SLOW))
@pytest.mark.full_only
@pytest.mark.parametrize("form", MEASURED)
def test_slow(benchmark: Benchmark, measured: Any, form: str) -> None:
    """The slow link."""
    _enter(benchmark, measured, form, SLOW)
    computing = statistics.median(measured["seconds"][SLOW][ALONE])
    benchmark.extra_info["predicted"] = computing + measured["found"][form]["predicted"]


@compared(GROUP.format(FAST))
@pytest.mark.full_only
@pytest.mark.parametrize("form", MEASURED)
def test_fast(benchmark: Benchmark, measured: Any, form: str) -> None:
    """The fast link, for comparison."""
    _enter(benchmark, measured, form, FAST)


def _enter(benchmark: Benchmark, measured: Any, form: str, link: str) -> None:
    times, found = measured["seconds"][link], measured["found"][form]
    record(benchmark, times[form], times[PEER], PEER)
    ratio = statistics.median(times[form]) / statistics.median(times[ALONE])
    benchmark.extra_info |= {
        "label": form,
        "strategy": form,
        "layout": LAYOUTS.get(form, "dp=4"),
        "model": CASE.model,
        "ranks": 2 * RANKS,
        "bytes_per_step": found["sent"],
        "note": f"{found['across'] / 1e6:.2f} MB from host to host a step; {ratio:.2f} of a step alone",
    }
