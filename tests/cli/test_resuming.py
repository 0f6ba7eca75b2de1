"""A training that is killed, stopped or damaged continues, and ends as if nothing had happened."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pickle
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import minidist as md
from minidist.checkpoint import checkpoints, state_dict
from minidist.cli import resuming
from minidist.cli.train import TrainConfig, TrainResult, run, train
from minidist.parallel.engine.training_step import Engine
from tests.conftest import Clusters
from tests.helpers import warm_python
from tests.helpers.clocks import HANG, until
from tests.helpers.contract import patched, with_fault
from tests.helpers.processes import descendants, wait_until_gone
from tests.helpers.refusals import refused_on_ranks

HERE = Path(__file__).parent.parent
CONFIG = TrainConfig(steps=14, batch=13, save_every=3, layout=md.Layout(dp=2))
PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


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


@contextlib.contextmanager
def torchrun(ranks: int, restarts: int, arguments: list[str], **environment: str) -> Iterator[Any]:
    """torchrun on this machine; it and its ranks end with the test."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--monitor-interval", "0.1"]
    command += ["--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
    environment |= {"GLOO_SOCKET_IFNAME": "lo", warm_python.CHILDREN: str(ranks * (1 + restarts))}
    process = warm_python.Popen(
        [*command, *arguments],
        env={**os.environ, **environment},
        start_new_session=True,
        **PIPES,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def run_with_kills(configs: list[TrainConfig], kills: list[tuple[int, str, float]], timeout: float) -> Any:
    """Train under torchrun, killed so many times; return losses and test loss of each training."""
    program = [str(HERE / "helpers/killed_training.py"), *(pickle.dumps(config).hex() for config in configs)]
    with torchrun(configs[0].layout.ranks, len(kills), program, KILLS=json.dumps(kills)) as process:
        out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, err[-5000:]
    assert err.count("(exitcode: -9)") == len(kills), err  # each of them struck
    return json.loads(out[out.index("[[") :])


def check_kills(
    cluster: md.Cluster,
    folder: Path,
    configs: list[TrainConfig],
    kills: list[tuple[int, str, float]],
    timeout: float,
) -> None:
    def named(which: str) -> list[TrainConfig]:
        return [replace(config, save=str(folder / which / str(config.layout))) for config in configs]

    found = run_with_kills(named("killed"), kills, timeout)
    for config, again, (losses, test_loss) in zip(named("undisturbed"), named("killed"), found, strict=True):
        expected = undisturbed(cluster, config)
        assert losses == expected.losses
        assert test_loss == expected.test_loss
        one, other = (state_dict(checkpoints(str(each.save))[0]) for each in (config, again))
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.deep
def test_killed_ranks_change_nothing(cluster_of: Clusters, tmp_path: Path) -> None:
    configs = [replace(CONFIG, layout=md.Layout(dp=2, zero=zero)) for zero in (0, 1, 3)]
    # The first training makes five checkpoints, and the next one 3 and 6. A command that is killed while it
    # trains as the first does is in `test_a_stopped_command_goes_on_where_it_was`.
    kills = [(0, "rename", 7), (1, "backward 3", 8)]
    check_kills(cluster_of(2), tmp_path, configs, kills, 300)


@pytest.mark.faults
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_twenty_kills_change_nothing(cluster_of: Clusters, tmp_path: Path, zero: int) -> None:
    """At random places and times; a few minutes. pytest -m faults"""
    draw = random.Random(int(os.environ.get("MINIDIST_SEED", "0")))
    kills: list[tuple[int, str, float]] = []
    for _ in range(20):
        place = draw.choice(["step", f"backward {zero}", "write", "rename", "time"])
        number = draw.uniform(0, 0.1) if place == "time" else draw.randint(1, 9 if place[0] in "sb" else 3)
        kills.append((0 if place == "rename" else draw.randrange(2), place, number))
    config = replace(CONFIG, steps=400, layout=md.Layout(dp=2, zero=zero))
    check_kills(cluster_of(2), tmp_path, [config], kills, 900)


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
        ({"learning_rate": 0.1}, "learning_rate=0.003, and this one has 0.1; give --lr 0.003, or"),
        ({"batch": 8}, "batch=13, and this one has 8; give --batch 13, or another folder to --save"),
        ({"clip_norm": 1.0}, "clip_norm=None, and this one has 1.0; leave --clip-norm out, or"),
        (
            {"loss": "torch.nn.functional:l1_loss"},
            "loss=None, and this one has 'torch.nn.functional:l1_loss'",
        ),
        (
            {"layout": md.Layout(dp=2, precision="bf16")},
            "precision='fp32', and this one has 'bf16'; give --lay",
        ),
    ):
        said = f"is of a training with {text}"
        refused_on_ranks(cluster_of(2), ValueError, said, train, replace(config, **other))
    said = "has checkpoints, and the training must not continue from them"
    refused_on_ranks(cluster_of(2), ValueError, said, train, replace(config, resume=False))
    with pytest.raises(ValueError, match=r"give --batch 13, or another folder to --save$"):
        run(replace(config, batch=8))  # before ranks start


@pytest.mark.parametrize(("name", "goes_on"), [("momentum", True), ("sgd", False)])
def test_sgd_of_an_older_version_is_sgd_with_momentum(
    cluster_of: Clusters, tmp_path: Path, name: str, goes_on: bool
) -> None:
    config = replace(CONFIG, steps=2, save=str(tmp_path), optimizer="momentum", layout=md.Layout())

    def of_older_version() -> None:
        with pytest.MonkeyPatch.context() as patch:
            described = {**config.description, "optimizer": "sgd"}
            patch.setattr(TrainConfig, "description", property(lambda self: described))
            train(config)

    def resumed() -> int | str:
        try:
            return train(replace(config, steps=4, optimizer=name)).resumed_at
        except ValueError as error:
            return str(error)

    cluster_of(1).run(of_older_version)
    (found,) = cluster_of(1).run(resumed)
    assert found == 2 if goes_on else "with optimizer='momentum', and this one has 'sgd'" in found


def signalled(
    process: Any, when: Callable[[], Any], number: signal.Signals, everyone: bool = False
) -> tuple[str, str]:
    """Send a signal once `when()` is true; return what the command printed, once its ranks are gone.

    everyone: ranks and supervisor are signalled, too, as by a scheduler or by `systemctl stop`.
    """
    assert until(lambda: when() or process.poll() is not None)
    assert process.poll() is None, process.communicate()
    others = descendants(process.pid)
    for each in (process.pid, *(others if everyone else ())):
        os.kill(each, number)
    out, err = process.communicate(timeout=HANG)
    wait_until_gone(others)  # those of a killed command end a little later
    return out, err


def check_stopped(cluster: md.Cluster, config: TrainConfig, out: str) -> None:
    """The command has saved its last step; four more are those of a training that never stopped."""
    assert json.loads(out)["stopped"] is True
    losses = json.loads(out)["losses"]
    assert len(losses) >= config.save_every
    assert checkpoints(str(config.save))[0].name == f"step-{len(losses):08d}"
    assert not list(Path(str(config.save)).glob("*.writing"))
    check_resumed(cluster, config, len(losses))


def check_resumed(cluster: md.Cluster, config: TrainConfig, done: int) -> None:
    config = replace(config, steps=done + 4)
    expected = undisturbed(cluster, replace(config, save=None))
    assert cluster.run(alone, config)[0].losses == expected.losses


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
    damaged = tmp_path / "step-00000004" / "rank-00001.bin"
    damaged.unlink()
    told = resuming.how_to_continue(str(tmp_path))
    assert told == f"step 3 is saved in {tmp_path}; the same command continues from there"
    assert resuming.how_to_continue(str(tmp_path / "none")).startswith("nothing is saved in ")


def test_where_nothing_can_be_saved_is_said_before_the_first_step(
    cluster_of: Clusters, tmp_path: Path
) -> None:
    no_steps = patched(Engine, "step", None)
    (tmp_path / "file").write_text("no folder")
    for save, why in (
        (tmp_path / "file", "it is not a folder"),
        (tmp_path / "file" / "runs", "it is not a folder"),
        (Path("/proc/runs"), "No such file or directory"),
    ):
        said = f"no checkpoint can be saved in {save}: {why}; give another folder"
        config = replace(CONFIG, save=str(save))
        refused_on_ranks(cluster_of(2), ValueError, said, with_fault, no_steps, train, config)
    assert (tmp_path / "file").read_text() == "no folder"


def test_two_runs_in_one_folder_are_refused(cluster_of: Clusters, tmp_path: Path) -> None:
    def impatient(config: TrainConfig) -> int | str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(resuming, "PATIENCE", 0.1)
            try:
                return len(train(config).losses)
            except ValueError as error:
                return str(error)

    config = replace(CONFIG, steps=2, save=str(tmp_path))
    expected = f"another run saves in {tmp_path}; wait until it ends, or give another folder"
    with open(tmp_path / resuming.LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert cluster_of(2).run(impatient, config) == [expected, expected]
    for steps in (2, 3):  # each lets go of it at its end
        assert cluster_of(2).run(impatient, replace(config, steps=steps)) == [steps, steps]


@pytest.mark.parametrize(
    ("number", "everyone"),
    [
        pytest.param(signal.SIGTERM, False, marks=pytest.mark.deep),
        (signal.SIGTERM, True),
        pytest.param(signal.SIGINT, True, marks=pytest.mark.deep),
        pytest.param(signal.SIGKILL, False, marks=pytest.mark.deep),
    ],
)
def test_a_stopped_command_goes_on_where_it_was(
    cluster_of: Clusters, tmp_path: Path, number: signal.Signals, everyone: bool
) -> None:
    config = replace(CONFIG, steps=10**6, save=str(tmp_path / "stopped"), save_every=5)
    process = warm_python.Popen([sys.executable, "-m", "minidist", *words(config)], **PIPES)
    out, err = signalled(process, lambda: checkpoints(str(config.save)), number, everyone)
    if number == signal.SIGTERM:
        assert process.returncode == 143, err
        check_stopped(cluster_of(2), config, out)
    else:
        assert process.returncode == (130 if number == signal.SIGINT else -number)
        step = int(checkpoints(tmp_path / "stopped")[0].name[5:])
        assert number != signal.SIGINT or f"stopped; step {step} is saved in" in err
        check_resumed(cluster_of(2), config, step)


@pytest.mark.parametrize("everyone", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_a_command_stopped_while_it_starts_says_so(tmp_path: Path, everyone: bool) -> None:
    given = words(replace(CONFIG, save=str(tmp_path / "stopped")))
    process = subprocess.Popen([sys.executable, "-m", "minidist", *given], **PIPES)
    out, err = signalled(process, lambda: descendants(process.pid), signal.SIGTERM, everyone)
    assert (process.returncode, out) == (143, "")
    assert err == "minidist: stopped by SIGTERM before training began; the same command starts it\n"


@pytest.mark.faults
def test_torchrun_that_is_terminated_saves(cluster_of: Clusters, tmp_path: Path) -> None:
    config = replace(CONFIG, steps=10**6, save=str(tmp_path / "stopped"), save_every=5)
    with torchrun(2, 0, ["-m", "minidist", *words(config)]) as process:
        out, _ = signalled(process, lambda: checkpoints(str(config.save)), signal.SIGTERM)
    check_stopped(cluster_of(2), config, out[out.index("{") :])
