"""The same training on the CPU and on a GPU, in turns: where a GPU pays, and where its launches cost more.

One process trains with our engine on all of the CPU's cores, and on the GPU in float32, with TF32 products,
and in bfloat16. An MLP's step is short, and on a GPU it is mostly launches; a GPT's large products suit a
GPU.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
import torch

import minidist as md
from minidist.benchmarks.harness.cuda.cuda_timing import float32_as
from minidist.benchmarks.harness.training.programs import COUNTED
from minidist.benchmarks.harness.training.rounds import Worlds
from minidist.benchmarks.harness.training.what_is_trained import ADAMW, Batch, Work
from minidist.benchmarks.harness.turns import Benchmark, compared, record
from minidist.comm.launching.cores import available_cores
from minidist.kernels.measure.timing_in_turns import time_in_turns
from minidist.parallel.engine.training_step import Engine

if not torch.cuda.is_available():
    pytest.skip("torch finds no GPU to set beside the CPU: run this on one", allow_module_level=True)

GROUP = "CPU and GPU: the same training in one process"
CPU = f"the CPU's {available_cores()} cores"
WORKS = {
    "MLP": Work("mlp", rows=256),
    "byte GPT of 0.1 M parameters": Work("byte-tiny", rows=16),
    "byte GPT of 3 M parameters": Work("byte-small", rows=16),
}

Way = tuple[str, str]
WAYS = {"float32": ("dp=1", "float32"), "TF32": ("dp=1", "tf32"), "bfloat16": ("precision=bf16", "float32")}
"""How the GPU computes: the layout, and the arithmetic of products of float32."""


class Trained:
    """A training on one device: its engine, its batches there, and its losses."""

    def __init__(self, work: Work, device: str, way: Way) -> None:
        (layout, self.products), self.device = way, device
        model = work.build().to(device)
        self.engine: Engine = md.prepare(model, ADAMW, md.Layout.parse(layout), rehearse=False)
        self.batches: list[Batch] = [(x.to(device), y.to(device)) for x, y in work.batches()]
        self.losses: list[float] = []

    def __call__(self) -> None:
        """One step. It returns the loss, so the GPU has finished when it returns."""
        with float32_as(self.products):
            batch = self.batches[len(self.losses) % len(self.batches)]
            self.losses.append(self.engine.step(*batch))
            if self.device == "cuda":
                torch.cuda.synchronize()


def measured(_: Worlds, full: bool, name: str) -> tuple[dict[str, list[float]], dict[str, Trained]]:
    """A model on the CPU and in every way on the GPU, in turns."""
    torch.set_num_threads(available_cores())  # a container may leave fewer than torch takes
    work = WORKS[name]
    programs = {CPU: Trained(work, "cpu", WAYS["float32"])}
    programs |= {label: Trained(work, "cuda", way) for label, way in WAYS.items()}
    start = time.perf_counter()
    programs[CPU]()
    once = time.perf_counter() - start
    rounds = max(5, min(100, int((20 if full else 4) / once)))
    return time_in_turns(programs, rounds), programs


@compared(GROUP)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", WORKS)
def test_devices(benchmark: Benchmark, timed: Any, name: str, way: str) -> None:
    """One step: forward, backward, update."""
    seconds, programs = timed(name)
    first = programs[way].losses[0], programs[CPU].losses[0]  # the same training, but for its arithmetic
    assert abs(first[0] - first[1]) <= 0.02 * abs(first[1]), f"the first losses are {first}"
    record(benchmark, seconds[way], seconds[CPU], CPU)
    benchmark.extra_info |= {
        "label": f"{name}, {way}",
        "program": "the GPU",
        "model": WORKS[name].model,
        "ranks": 1,
        "rows_per_s": WORKS[name].rows / statistics.median(seconds[way]),
        "memory": vars(programs[way].engine.memory()),
        "memory_source": COUNTED,
    }
