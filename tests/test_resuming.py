"""A training that is killed, stopped or damaged goes on, and ends as if nothing had happened."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import descendants, wait_until_gone

import minidist as md
from minidist import resuming
from minidist.checkpoint import checkpoints, state_dict
from minidist.parallel.hybrid import HybridEngine
from minidist.train import TrainConfig, TrainResult, train

Clusters = Callable[[int], md.Cluster]
HERE = Path(__file__).parent
CONFIG = TrainConfig(steps=14, batch=13, save_every=3, layout=md.Layout(dp=2))


def alone(config: TrainConfig) -> TrainResult:
    torch.set_num_threads(1)
    return train(config)


def undisturbed(cluster: md.Cluster, config: TrainConfig) -> TrainResult:
    result: TrainResult = cluster.run(alone, config)[0]
    return result


def words(config: TrainConfig) -> list[str]:
    names = ("steps", "batch", "save", "save_every")
    given = [word for n in names for word in (f"--{n.replace('_', '-')}", str(getattr(config, n)))]
    return ["train", *given, "--layout", str(config.layout), "--json"]


def run_with_kills(config: TrainConfig, kills: list[tuple[int, str, float]], timeout: float) -> Any:
    """Train under torchrun, in one life more than there are kills; what rank 0 printed at the end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--monitor-interval", "0.1"]
    command += ["--nproc-per-node", str(config.layout.ranks), "--max-restarts", str(len(kills))]
    environment = {
        **os.environ,
        "KILLS": json.dumps(kills),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    process = subprocess.Popen(
        [*command, str(HERE / "killed_training.py"), *words(config)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, err[-5000:]
    assert err.count("(exitcode: -9)") == len(kills), err  # each of them struck
    return json.loads(out[out.index("{") :])


def check_kills(
    cluster: md.Cluster,
    folder: Path,
    config: TrainConfig,
    kills: list[tuple[int, str, float]],
    timeout: float,
) -> None:
    expected = undisturbed(cluster, replace(config, save=str(folder / "undisturbed")))
    found = run_with_kills(replace(config, save=str(folder / "killed")), kills, timeout)
    assert found["losses"] == expected.losses
    assert found["test_loss"] == expected.test_loss
    name = f"step-{config.steps:08d}"
    weights, again = (state_dict(folder / which / name) for which in ("undisturbed", "killed"))
    assert weights.keys() == again.keys()
    assert all(torch.equal(weights[key], again[key]) for key in weights)


def test_killed_ranks_change_nothing(cluster_of: Clusters, tmp_path: Path) -> None:
    check_kills(cluster_of(2), tmp_path, CONFIG, [(1, "backward", 8), (0, "rename", 2)], 300)


@pytest.mark.faults
def test_twenty_kills_change_nothing(cluster_of: Clusters, tmp_path: Path) -> None:
    """At random places and times; a few minutes. pytest -m faults"""
    draw = random.Random(int(os.environ.get("MINIDIST_SEED", "0")))
    kills: list[tuple[int, str, float]] = []
    for _ in range(20):
        place = draw.choice(["step", "backward", "write", "rename", "time"])
        number = draw.uniform(0.5, 6) if place == "time" else draw.randint(1, 9 if place[0] in "sb" else 3)
        kills.append((0 if place == "rename" else draw.randrange(2), place, number))
    check_kills(cluster_of(2), tmp_path, replace(CONFIG, steps=200), kills, 900)


@pytest.mark.parametrize(
    ("before", "after"), [("dp=2", "dp=2"), ("dp=2,zero=1", "dp=3,zero=3"), ("dp=3,zero=2", "dp=1")]
)
def test_a_longer_run_goes_on_from_a_shorter_one(
    cluster_of: Clusters, tmp_path: Path, before: str, after: str
) -> None:
    config = replace(CONFIG, dtype="float64", save=str(tmp_path / "runs"), save_every=4, keep=2)
    first, second = md.Layout.parse(before), md.Layout.parse(after)
    short = replace(config, steps=9, layout=first)
    assert len(cluster_of(first.ranks).run(train, short)[0].losses) == 9
    assert [path.name for path in checkpoints(tmp_path / "runs")] == ["step-00000009", "step-00000008"]
    expected = cluster_of(second.ranks).run(train, replace(config, save=None, layout=second))
    for result in cluster_of(second.ranks).run(train, replace(config, layout=second)):
        # Float64 and some sums in another order.
        torch.testing.assert_close(result.losses, expected[0].losses, rtol=1e-10, atol=1e-10)
        assert result.test_loss == pytest.approx(expected[0].test_loss, rel=1e-10)
        assert result.resumed_at == 9
    again = cluster_of(second.ranks).run(train, replace(config, layout=second))[0]
    assert again.losses == result.losses  # a finished run has nothing left to do
    assert (again.bytes_sent, again.resumed_at) == (0, 14)


def test_a_folder_of_another_training_is_refused(cluster_of: Clusters, tmp_path: Path) -> None:
    config = replace(CONFIG, steps=2, save=str(tmp_path))
    cluster_of(2).run(train, config)
    for other, text in (
        ({"learning_rate": 0.1}, r"learning_rate=0\.003, and this one has 0\.1"),
        ({"clip_norm": 1.0}, r"clip_norm=None, and this one has 1\.0"),
        ({"layout": md.Layout(dp=2, precision="bf16")}, "precision='fp32', and this one has 'bf16'"),
    ):
        with pytest.raises(md.RankError, match=f"a training with {text}"):
            cluster_of(2).run(train, replace(config, **other))
    with pytest.raises(md.RankError, match="has checkpoints, and the training is not to go on from them"):
        cluster_of(2).run(train, replace(config, resume=False))


def test_a_damaged_checkpoint_is_passed_over_in_one_line(
    cluster_of: Clusters, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(CONFIG, steps=4, save=str(tmp_path))
    cluster_of(2).run(train, config)
    damaged = tmp_path / "step-00000004" / "rank-00000.bin"
    damaged.unlink()
    assert capsys.readouterr().err == ""
    assert cluster_of(2).run(train, config)[0].resumed_at == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"[rank 0] minidist: passed over a checkpoint: {damaged} is missing")


def test_where_nothing_can_be_saved_is_said_before_the_first_step(
    cluster_of: Clusters, tmp_path: Path
) -> None:
    def no_step(config: TrainConfig) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HybridEngine, "step", None)
            train(config)

    (tmp_path / "file").write_text("no folder")
    for save, why in (
        (tmp_path / "file", "it is no folder"),
        (tmp_path / "file" / "runs", "it is no folder"),
        (Path("/proc/runs"), "No such file or directory"),
    ):
        with pytest.raises(md.RankError, match=f"no checkpoint can be saved in {save}: {why}; give another"):
            cluster_of(2).run(no_step, replace(CONFIG, save=str(save)))
    assert (tmp_path / "file").read_text() == "no folder"


def test_two_runs_in_one_folder_are_refused(cluster_of: Clusters, tmp_path: Path) -> None:
    def impatient(config: TrainConfig) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(resuming, "PATIENCE", 0.1)
            return len(train(config).losses)

    config = replace(CONFIG, steps=2, save=str(tmp_path))
    with open(tmp_path / resuming.LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(md.RankError, match=f"another run saves in {tmp_path}; wait for its end"):
            cluster_of(2).run(impatient, config)
    for steps in (2, 3):  # each lets go of it at its end
        assert cluster_of(2).run(impatient, replace(config, steps=steps)) == [steps, steps]


@pytest.mark.parametrize(
    ("number", "everyone"), [(signal.SIGTERM, False), (signal.SIGTERM, True), (signal.SIGKILL, False)]
)
def test_a_stopped_command_goes_on_where_it_was(
    cluster_of: Clusters, tmp_path: Path, number: signal.Signals, everyone: bool
) -> None:
    """everyone: ranks and supervisor are signalled, too, as by a scheduler or by `systemctl stop`."""
    config = replace(CONFIG, steps=400, save=str(tmp_path / "stopped"), save_every=5)
    command = [sys.executable, "-m", "minidist"]
    process = subprocess.Popen(
        [*command, *words(config)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not checkpoints(tmp_path / "stopped"):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for each in [process.pid, *(descendants(process.pid) if everyone else ())]:
        os.kill(each, number)
    out, err = process.communicate(timeout=120)
    if number == signal.SIGTERM:
        assert process.returncode == 143, err
        assert json.loads(out)["stopped"] is True
        step = len(json.loads(out)["losses"])
        assert 5 <= step < 400
        assert checkpoints(tmp_path / "stopped")[0].name == f"step-{step:08d}"
        assert not list((tmp_path / "stopped").glob("*.writing"))
    else:
        assert process.returncode == -number
    expected = undisturbed(cluster_of(2), replace(config, save=None))
    assert cluster_of(2).run(alone, config)[0].losses == expected.losses


@pytest.mark.parametrize("everyone", [False, True])
def test_a_command_stopped_while_it_starts_says_so(tmp_path: Path, everyone: bool) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "minidist", *words(replace(CONFIG, save=str(tmp_path / "stopped")))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not (others := descendants(process.pid)):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for each in [*others, process.pid] if everyone else [process.pid]:
        os.kill(each, signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (143, "")
    assert err == "minidist: stopped by SIGTERM before training began; the same command starts it\n"
    wait_until_gone(others)
