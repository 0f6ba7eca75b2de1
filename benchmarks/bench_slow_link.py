"""Data parallelism, local SGD, compression, ZeRO and hybrids over a slow link between two hosts.

Two hosts of two ranks each are made from the kernel's namespaces on one machine. The link between them runs
at full speed and at 1 Gbit/s with 5 ms each way, in turns. At 100 Mbit/s, hybrid ZeRO, whose groups are the
hosts, runs in turns with plain ZeRO; the bytes that cross are compared with the formula. Each row of a slow
link also has the time that the cost model predicts: a step without communication, followed by its calls one
after the other.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

import minidist
from minidist.benchmarks.harness.slow_link import slow_link_steps as steps
from minidist.benchmarks.harness.slow_link.two_hosts import TwoHosts, why_not
from minidist.benchmarks.harness.turns import Benchmark, compared, record

GROUP = "A slow link: a byte GPT of 3 M parameters on 2 hosts of 2 ranks, 1 row of 128 a rank; {}"
RANKS = 2
"""Ranks of each host."""
ROUNDS = 7
LIMIT = 900.0
"""Seconds that the whole suite may take."""
LAYOUTS = {**steps.SHARDED, steps.INSIDE: "dp=2,tp=2"}
ROWS = [name for name in steps.MEASURED[steps.SLOW] if name not in (steps.PEER, steps.ALONE)]
PLAIN = {f"hybrid ZeRO-{stage}": f"ZeRO-{stage}" for stage in (1, 2, 3)} | {steps.SECONDARY: "ZeRO-3"}
"""The forms that save bytes between hosts, each with the form that it is compared with at 100 Mbit/s."""
GOALS = {"hybrid ZeRO-3": 0.67}
"""Goals for the ratio to plain ZeRO at 100 Mbit/s."""

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
    for form in steps.SHARDED:  # headers, acknowledgements and counts of rows come on top
        assert found["found"][form]["across"] == pytest.approx(found["found"][form]["formula"], rel=0.01)
    return found


@compared(GROUP.format(steps.SLOWEST))
@pytest.mark.full_only
@pytest.mark.parametrize("form", steps.SHARDED)
def test_slowest(benchmark: Benchmark, measured: Any, form: str) -> None:
    """A link so slow that bytes decide: hybrid ZeRO beside plain ZeRO, and that beside torch's DDP."""
    _enter(benchmark, measured, form, steps.SLOWEST, PLAIN.get(form, steps.PEER))
    if form in GOALS:
        benchmark.extra_info["goal"] = {"of": "ratio", "below": GOALS[form]}


@compared(GROUP)
@pytest.mark.full_only
@pytest.mark.parametrize("form", ROWS)
@pytest.mark.parametrize("link", [steps.SLOW, steps.FAST])
def test_link(benchmark: Benchmark, measured: Any, link: str, form: str) -> None:
    """The slow link, and the fast one for comparison."""
    benchmark.group = GROUP.format(link)
    _enter(benchmark, measured, form, link)


def _enter(benchmark: Benchmark, measured: Any, form: str, link: str, peer: str = steps.PEER) -> None:
    times, found = measured["seconds"][link], measured["found"][form]
    record(benchmark, times[form], times[peer], peer)
    computing = statistics.median(times[steps.ALONE])
    across = f"{found['across'] / 1e6:.2f} MB from host to host a step"
    if "formula" in found:
        across += f" ({found['formula'] / 1e6:.2f} by the formula)"
    benchmark.extra_info |= {
        "label": form,
        "strategy": form,
        "layout": LAYOUTS.get(form, "dp=4"),
        "model": steps.WORK.model,
        "ranks": 2 * RANKS,
        "bytes_per_step": found["sent"],
        "note": f"{across}; {statistics.median(times[form]) / computing:.2f} of a step alone",
    }
    if link in found["predicted"]:
        benchmark.extra_info["predicted"] = computing + found["predicted"][link]
