"""Dry runs compared with every rank of many layouts; a rank of many takes a minute and half a GB at most.

    pytest tests/scale/dryrun/test_run_at_scale.py -m scale -s

The predicted time of a step is compared with the clock in ../planner/test_calibration.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from tests.conftest import Clusters
from tests.helpers.dry_measured import Case, wrong

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


# A rank of 1024, in under a minute and half a gigabyte.


@pytest.mark.parametrize(
    "words",
    [
        "--model gpt2-xl --layout dp=64,tp=4,pp=4,zero=1 --rank 1023",
        "--model mixtral-8x7b --layout dp=64,tp=4,pp=4,ep=8,zero=1,micro_batches=4 --batch 256 --rank 1023",
        "--model mixtral-8x7b --layout dp=1024,ep=8,zero=1 --batch 1024 --tokens 4096 --rank 5",
    ],
)
def test_the_command_takes_less_than_a_minute_and_half_a_gigabyte(words: str) -> None:
    began = time.perf_counter()
    run = [sys.executable, "-m", "minidist", "dryrun", *words.split()]
    process = subprocess.Popen(run, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = status
    took, most = time.perf_counter() - began, usage.ru_maxrss * 1024
    print(f"{took:.1f} s, of which {usage.ru_utime + usage.ru_stime:.1f} on a CPU, {most / 1e9:.2f} GB")
    assert status == 0
    assert took < 60
    assert most < 0.5e9
