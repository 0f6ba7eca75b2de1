"""Costs that grow: seconds and memory against ranks, layers and parameters, each with its exponent.

Each size is a fresh Python. The exponent e says that the cost grows like size^e between the two largest
sizes; the note has it for seconds and for memory. `minidist bench growth` measures four rows:

    plan        `plan` of gpt3-175b on so many H100s: all layouts, and the sentences and the table of the best
    launch      `launch` of so many ranks that do nothing
    layers      a step of data parallelism on two ranks, with so many layers of 16 x 16, beside torch's DDP
    parameters  the same with four square layers of so many parameters
"""

from __future__ import annotations

import json
import math
import resource
import statistics
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
from torch import nn

import minidist as md
from minidist.benchmarks.harness.formats import seconds, size
from minidist.benchmarks.harness.turns import Benchmark, compared, record
from minidist.kernels.measure.timing_in_turns import time_in_turns

pytestmark = pytest.mark.no_finding
GROUP = "Costs that grow"
ROUNDS = 15
Cost = tuple[float, float, float]
"""Seconds, seconds of DDP or 0, and the most bytes of memory that a process had."""


def peak() -> float:
    """The most bytes of memory that this process has had."""
    return float(
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    )


def plan(ranks: int) -> Cost:
    """What `minidist plan` does."""
    from minidist.scale.planner import plan_report as report
    from minidist.scale.planner import ranking as planner

    start = time.perf_counter()
    found = planner.plan("gpt3-175b", ranks=ranks, hardware="h100")
    for part in (report.answer, report.reasons, report.table, report.unfit):
        part(found)
    return time.perf_counter() - start, 0.0, peak()


def launch(ranks: int) -> Cost:
    """Ranks after the first launch, which starts the supervisor. Memory is that of the largest rank."""
    peaks = md.launch(peak, 2)
    start = time.perf_counter()
    md.launch(md.rank, ranks)  # a function of this file would import pytest on each rank
    return time.perf_counter() - start, 0.0, max(peaks)


def steps(layers: int, width: int) -> Cost:
    """On a rank: a step of SGD, in turns with DDP."""
    x, y = torch.randn(2, 8, width)
    sgd = partial(torch.optim.SGD, lr=1e-3)

    def model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    engine = md.prepare(model(), sgd, md.Layout(dp=2), loss=nn.functional.mse_loss, rehearse=False)
    parallel = nn.parallel.DistributedDataParallel(model())
    optimizer = sgd(parallel.parameters())

    def peer() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(parallel(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    times = time_in_turns({"ours": partial(engine.step, x, y), "ddp": peer}, ROUNDS)
    return statistics.median(times["ours"]), statistics.median(times["ddp"]), peak()


def step(layers: int, width: int) -> Cost:
    """The slower rank's."""
    slower: Cost = max(md.launch(steps, 2, (layers, width), threads=1))
    return slower


GROWING = {
    "plan": (plan, "ranks", (8, 128, 1024, 16384)),
    "launch": (launch, "ranks", (8, 16, 32, 64)),
    "layers": (partial(step, width=16), "layers", (10, 100, 1000)),
    "parameters": (lambda n: step(4, math.isqrt(n // 4)), "parameters", (10**4, 10**5, 10**6, 10**7)),
}
"""By row: what is measured, from a size; what the size counts; the sizes."""


def exponent(sizes: tuple[int, ...], costs: list[float]) -> float:
    """The e of size^e between the two largest sizes."""
    return math.log(costs[-1] / costs[-2]) / math.log(sizes[-1] / sizes[-2])


@compared(GROUP)
@pytest.mark.parametrize("row", GROWING)
def test_growth(benchmark: Benchmark, row: str) -> None:
    """The cost of the largest size; the others, and the exponents, in the note."""
    _, unit, sizes = GROWING[row]
    program = f"import json; from {__name__} import GROWING as g; print(json.dumps(g[{row!r}][0]({{}})))"
    costs: list[Cost] = []
    for number in sizes:
        words = [sys.executable, "-c", program.format(number)]
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=600)
        costs.append(json.loads(done.stdout.splitlines()[-1]))
    times, peers, memory = (list(each) for each in zip(*costs, strict=True))
    record(benchmark, times[-1:], peers[-1:] if peers[-1] else (), "torch DDP" if peers[-1] else "")
    each = [f"{n:,} {seconds(t)} {size(m)}" for n, t, m in zip(sizes, times, memory, strict=True)]
    grow = f"exponents {exponent(sizes, times):.2f} and {exponent(sizes, memory):.2f}"
    benchmark.extra_info |= {"label": f"{row}, {sizes[-1]:,} {unit}", "note": "; ".join([*each, grow])}
