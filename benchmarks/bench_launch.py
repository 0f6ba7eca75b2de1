"""Starting ranks and calling them, in turns with what every user of torch pays: one `import torch`.

The limits are this project's own goals: a no-op on 4 warm ranks in 10 ms, 4 cold ranks in 1.5 times an
import of torch, and `import minidist` in 60 ms after it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest

import minidist as md
from minidist.benchmarks.harness.training.rounds import Worlds
from minidist.benchmarks.harness.turns import Benchmark, compared, measure_pair, record

pytestmark = pytest.mark.no_finding

GROUP = "Starting ranks and calling them"
RANKS = 4

# Each program prints the seconds that it measured itself.
IMPORT_TORCH = "import torch; print(0.0)"
LAUNCH = f"""
import time
import minidist as md
start = time.perf_counter()
assert md.launch(md.rank, ranks={RANKS}) == list(range({RANKS}))
print(time.perf_counter() - start)
"""
IMPORT_MINIDIST = """
import time
import torch
start = time.perf_counter()
import minidist as md
{names}
print(time.perf_counter() - start)
"""
ALL_NAMES = "for name in md.__all__: getattr(md, name)"


def fresh_process(program: str) -> tuple[float, float]:
    """Run a program in a fresh Python; return the seconds it took and the seconds it printed."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    whole = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(f"a fresh Python failed:\n{done.stderr}")
    return whole, float(done.stdout)


@pytest.mark.benchmark(group=GROUP)
def test_warm_no_op(benchmark: Benchmark) -> None:
    """The round trip of a function that does nothing."""
    with md.Cluster(RANKS) as cluster:
        result = benchmark(cluster.run, md.rank)
    assert result == list(range(RANKS))
    benchmark.extra_info |= {"label": f"no-op, {RANKS} warm ranks", "goal": {"of": "median", "below": 0.010}}


def measured(_: Worlds, full: bool) -> dict[str, list[float]]:
    """Seconds of scripts that launch cold ranks, in turns with processes that import torch."""
    scripts: list[tuple[float, float]] = []

    def script() -> float:
        scripts.append(fresh_process(LAUNCH))
        return scripts[-1][0]

    rounds = 15 if full else 5
    whole, torch_s = measure_pair(script, lambda: fresh_process(IMPORT_TORCH)[0], rounds=rounds)
    return {"script": whole, "launch": [inside for _, inside in scripts[-rounds:]], "torch": torch_s}


@compared(GROUP)
@pytest.mark.parametrize("what", ["script", "launch"])
def test_cold(benchmark: Benchmark, timed: Any, what: str) -> None:
    """A whole script as the shell sees it, and the first `launch` in a process that is already running."""
    record(benchmark, timed()[what], timed()["torch"], "import torch")
    label = f"{'md.' * (what == 'launch')}{what}, {RANKS} cold ranks"
    benchmark.extra_info |= {"label": label, "goal": {"of": "ratio", "below": 1.5}}


@compared(GROUP)
@pytest.mark.parametrize("names", ["", ALL_NAMES], ids=["package", "all-names"])
def test_import(benchmark: Benchmark, full: bool, names: str) -> None:
    """Seconds of `import minidist`, and of the first use of all its names, in a process that has torch."""
    program = IMPORT_MINIDIST.format(names=names)
    runs = [fresh_process(program) for _ in range(1 + (15 if full else 3))][1:]
    record(benchmark, [inside for _, inside in runs])
    benchmark.extra_info |= {
        "label": "import minidist, all names" if names else "import minidist",
        "goal": {"of": "median", "below": 0.060},
    }
