"""torchrun on two hosts made on this machine (`slow_link/two_hosts.py`), as by hand on two machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import minidist as md
from minidist.benchmarks.harness.slow_link.two_hosts import TwoHosts, why_not
from minidist.cli.train import TrainConfig, train
from tests.helpers.clocks import HANG

REASON = why_not()
pytestmark = [
    pytest.mark.scale,
    pytest.mark.skipif(bool(REASON), reason=f"no two hosts here: {REASON}"),
]
RANKS = 2
"""Of each host."""


CUT = """
import sys
import torch
import minidist as md
from minidist import comm

md.init(timeout=float(sys.argv[1]))
for step in range(10**6):
    comm.all_reduce(torch.ones(1000))
    if step == 10 and md.rank() == 0:
        print("under way", flush=True)
"""


def test_torchrun_ends_on_both_hosts_when_the_wire_is_cut(hosts: TwoHosts, tmp_path: Path) -> None:
    (tmp_path / "cut.py").write_text(CUT)
    runs = hosts.torchrun(RANKS, [str(tmp_path / "cut.py"), "5"], ENVIRONMENT)
    try:
        assert runs[0].stdout is not None
        while (line := runs[0].stdout.readline()) != "under way\n":
            assert line, "ended before it was under way"
        hosts.wire(cut=True)
        for run in runs:
            said, _ = run.communicate(timeout=HANG)
            assert run.returncode
            assert "CollectiveError: all_reduce of float32[1000] on rank " in said
    finally:
        hosts.wire()
        for run in runs:
            run.kill()


@pytest.mark.parametrize("layout", ["dp=4", "dp=2,tp=2", "dp=2,pp=2,micro_batches=2"])
def test_minidist_train_by_torchrun_on_both_hosts(hosts: TwoHosts, tmp_path: Path, layout: str) -> None:
    """The losses of one process, through a slow wire; a checkpoint that one host goes on from."""
    alone = train(TrainConfig(**TRAINED, steps=5))
    save = str(tmp_path / "run")
    words = [word for name, value in TRAINED.items() for word in (f"--{name}", str(value))]
    more = ["--steps", "3", "--layout", layout, "--save", save, "--json"]
    hosts.wire(rate=1e9, delay=5e-3)
    runs = hosts.torchrun(RANKS, ["-m", "minidist", "train", *words, *more], ENVIRONMENT)
    said = [run.communicate(timeout=HANG)[0] for run in runs]
    hosts.wire()
    assert [run.returncode for run in runs] == [0, 0], said
    result = json.loads(said[0][said[0].index("{") :])
    assert result["losses"] == pytest.approx(alone.losses[:3], rel=1e-10)
    resumed = train(TrainConfig(**TRAINED, steps=5, save=save))
    assert resumed.resumed_at == 3
    assert resumed.losses == pytest.approx(alone.losses, rel=1e-10)


TRAINED: dict[str, Any] = {"data": "bytes", "batch": 64, "dtype": "float64"}
ENVIRONMENT = {"PYTHONPATH": str(Path(md.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
