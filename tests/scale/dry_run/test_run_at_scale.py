"""Dry runs compared with every rank of many layouts and with the clock; they take a minute and 2 GB at most.

    pytest tests/scale/dry_run/test_run_at_scale.py -m scale -s

The clock has to be that of a machine that does nothing else.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch

import minidist as md
from minidist.model import GPT, config
from minidist.scale.dry_run.run import OPTIMIZERS, dryrun
from minidist.scale.time.measure_machine import this_machine
from tests.helpers.dry_measured import Case, wrong

Clusters = Callable[[int], md.Cluster]
pytestmark = pytest.mark.scale


# Bytes exact, memory within 5%.

LAYOUTS = {
    2: [
        *("dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2", "tp=2,sequence_parallel=true", "cp=2"),
        *("pp=2", "pp=2,micro_batches=4", "pp=2,micro_batches=4,schedule=gpipe"),
        *("pp=2,micro_batches=4,schedule=zero_bubble", "pp=2,micro_batches=4,schedule=interleaved,chunks=2"),
        *("dp=2,precision=bf16", "dp=2,recompute=true,precision=fp16"),
    ],
    4: [
        *("dp=4,zero=1,precision=bf16", "dp=4,zero=2,micro_batches=2", "dp=4,zero=3,recompute=true"),
        *("dp=2,tp=2,zero=1", "dp=2,tp=2,zero=3,sequence_parallel=true", "dp=2,tp=2,zero=2,micro_batches=2"),
        *("dp=2,pp=2,zero=1,micro_batches=2", "pp=4,micro_batches=8", "cp=4", "cp=2,dp=2,zero=3"),
        *("pp=2,tp=2,micro_batches=3,sequence_parallel=true", "cp=2,pp=2,micro_batches=3", "tp=4"),
    ],
    8: [
        *("dp=2,tp=2,pp=2,micro_batches=2", "dp=2,tp=2,pp=2,zero=1,sequence_parallel=true,precision=bf16"),
        *("dp=2,pp=2,cp=2,micro_batches=4", "dp=2,tp=2,cp=2,zero=1", "dp=2,tp=2,cp=2,zero=3", "dp=8,zero=2"),
        *("pp=4,tp=2,micro_batches=4,recompute=true", "dp=4,pp=2,micro_batches=2,schedule=zero_bubble"),
    ],
}


@pytest.mark.parametrize(("ranks", "text"), [(n, text) for n, texts in LAYOUTS.items() for text in texts])
@pytest.mark.parametrize("way", ["torch", "shared_memory"])
def test_every_rank_of_every_layout(cluster_of: Clusters, ranks: int, text: str, way: str) -> None:
    tokens = 16 if "sequence_parallel" in text else 13
    ragged = Case(text, rows=3 * ranks - 1, tokens=tokens, way=way, blocks=4, heads=5, width=40)
    byte = Case(text, rows=2 * ranks, way=way, model="byte-tiny", optimizer="momentum")
    for case in (ragged, byte):
        assert not wrong(cluster_of(ranks).run, case)


# Time within 30%.

TIMED = {
    2: ["dp=2", "dp=2,zero=1", "dp=2,zero=3", "tp=2", "pp=2,micro_batches=4"],
    4: ["dp=4", "dp=4,zero=2", "dp=2,tp=2", "dp=2,pp=2,micro_batches=4"],
    8: ["dp=8", "dp=8,zero=1", "dp=2,tp=2,pp=2,micro_batches=4"],
}
MODEL, ROWS, STEPS, TURNS = "byte-small", 16, 5, 3


def seconds(text: str) -> list[float]:
    """Seconds of steps, on each rank of a cluster."""
    shape = config(MODEL)
    engine = md.prepare(GPT(shape), OPTIMIZERS["adamw"], md.Layout.parse(text))
    own = len(range(engine.data_rank, ROWS, engine.data_ranks))
    inputs, targets = torch.randint(0, shape.vocabulary, (2, own, shape.context))
    found = []
    for _ in range(2 + STEPS):
        began = time.perf_counter()
        engine.step(inputs, targets)
        found.append(time.perf_counter() - began)
    return found[2:]


_pairs: dict[int, dict[str, list[tuple[float, float]]]] = {}


def pairs(clusters: Clusters, ranks: int) -> dict[str, list[tuple[float, float]]]:
    """Predicted and measured seconds of each layout on so many ranks.

    In turns with the machine's own measurement: one that others compute on, too, may be a third slower a
    minute later.
    """
    if ranks not in _pairs:
        found: dict[str, list[tuple[float, float]]] = {text: [] for text in TIMED[ranks]}
        for _ in range(TURNS):
            machine = this_machine((ranks,))
            for text, several in found.items():
                steps = [max(step) for step in zip(*clusters(ranks).run(seconds, text), strict=True)]
                predicted = dryrun(MODEL, md.Layout.parse(text), ROWS).predict(machine).seconds
                several.append((predicted, statistics.median(steps)))
        _pairs[ranks] = found
    return _pairs[ranks]


@pytest.mark.parametrize(("ranks", "text"), [(n, text) for n, texts in TIMED.items() for text in texts])
def test_a_step_takes_as_long_as_predicted(cluster_of: Clusters, ranks: int, text: str) -> None:
    found = pairs(cluster_of, ranks)[text]
    ratio = statistics.median(predicted / measured for predicted, measured in found)
    each = ", ".join(f"{predicted * 1e3:.0f} ms for {measured * 1e3:.0f}" for predicted, measured in found)
    print(f"{text}: predicted {each}, {ratio:.2f} in the median")
    assert 0.7 < ratio < 1.3


# A rank of 1024, in under a minute and 2 GB.


def test_the_command_takes_less_than_a_minute_and_two_gigabytes() -> None:
    words = "-m minidist dryrun --model gpt2-xl --layout dp=64,tp=4,pp=4,zero=1 --rank 1023"
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, *words.split()], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = status
    took, most = time.perf_counter() - began, usage.ru_maxrss * 1024
    print(f"{took:.1f} s, {most / 1e9:.2f} GB")
    assert status == 0
    assert took < 60
    assert most < 2e9
