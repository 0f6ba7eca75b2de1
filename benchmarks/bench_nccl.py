"""Collectives between the GPUs of one machine: ours beside torch.distributed's over NCCL, in turns.

One rank for each GPU. Where both run NCCL's collective, the difference is what our communication API adds;
the ring is our own algorithm over NCCL's messages.
"""

from __future__ import annotations

import pytest
import torch

from minidist.benchmarks.harness.collective_timing import enter, time_against_torch
from minidist.benchmarks.harness.training.rounds import Worlds
from minidist.benchmarks.harness.turns import Benchmark, compared

GPUS = torch.cuda.device_count() if torch.distributed.is_nccl_available() else 0
if GPUS < 2:
    here = f"there {'is' if GPUS else 'are'} {GPUS or 'none'}"
    pytest.skip(f"NCCL joins ranks that have a GPU each: it takes two, and {here}", allow_module_level=True)

GROUP = "Collectives of GPUs beside torch.distributed over NCCL"
VARIANTS = ("all-reduce", "ring", "reduce-scatter", "all-gather", "broadcast", "all-to-all")


@compared(GROUP)
@pytest.mark.parametrize("size", [2**16, 2**20, 2**24, 2**28])
@pytest.mark.parametrize("variant", VARIANTS)
def test_against_nccl(benchmark: Benchmark, full: bool, worlds: Worlds, variant: str, size: int) -> None:
    """The same tensor, rewritten before each call."""
    timed = worlds(GPUS).run(time_against_torch, variant, size, 15 if full else 7, "cuda")
    label = "all-reduce by our ring" if variant == "ring" else variant
    enter(benchmark, timed, variant, size, label, "NCCL")
