"""Each launch file's own command, on two hosts made on this machine (`slow_link/two_hosts.py`), a rank each.

What a service does around it is done here: the variables that SLURM and Kubeflow's operator set, the file
that SageMaker writes. The smallest training takes the place of the file's own.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from minidist.benchmarks.harness.slow_link.slow_wire import CARD
from minidist.benchmarks.harness.slow_link.two_hosts import TwoHosts, why_not
from minidist.cli.train import TrainConfig, train
from tests.deploy.test_deploy import DEPLOY, EXTRA, ROOT, container_words, document, slurm, worker
from tests.helpers.clocks import HANG
from tests.helpers.processes import descendants

REASON = why_not()
pytestmark = [
    pytest.mark.scale,
    pytest.mark.skipif(bool(REASON), reason=f"no two hosts here: {REASON}"),
]
STEPS = 6
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def check(
    hosts: TwoHosts,
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    steps: int = STEPS,
    meanwhile: Callable[[list[subprocess.Popen[str]]], object] | None = None,
) -> str:
    """Run a host's command with its variables; both train as one process does. Returns what they print."""
    common = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin:/sbin",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    runs = [
        hosts.start(host, ["env", "--chdir", str(ROOT), *command], {**common, **environment})
        for host, (command, environment) in enumerate(zip(commands, environments, strict=True))
    ]
    if meanwhile is not None:
        meanwhile(runs)
    said = [run.communicate(timeout=HANG)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], said
    assert not RESULT.search(said[1])  # rank 0 speaks for all
    found = RESULT.search(said[0])
    assert found, said
    result, _ = json.JSONDecoder().raw_decode(said[0][found.start() :])
    assert result["config"]["layout"]["dp"] == 2
    alone = train(TrainConfig(steps=steps, dtype="float64"))
    assert result["losses"] == pytest.approx(alone.losses, rel=1e-10)
    return "".join(said)


RESULT = re.compile(r'^{\s*"config"', re.MULTILINE)


def words(save: Path | str, steps: int = STEPS, every: int = 50) -> list[str]:
    given = {"data": "digits", "dtype": "float64", "steps": steps, "layout": "dp=2", "save": save}
    given["save-every"] = every
    return [*(str(word) for name, value in given.items() for word in (f"--{name}", value)), "--json"]


def test_slurm(tmp_path: Path) -> None:
    """What srun was given, on both hosts, as srun does."""
    asked = slurm(tmp_path, words(tmp_path / "runs"), RANKS_PER_HOST="1")
    with TwoHosts() as hosts:
        check(hosts, [asked, asked], [OWN_STORE, OWN_STORE])


def test_a_rank_that_dies_is_started_anew_with_the_others(tmp_path: Path) -> None:
    """On the second host, once there is a checkpoint, under what srun was given."""
    steps, runs = 1000, tmp_path / "runs"
    asked = slurm(tmp_path, words(runs, steps, every=100), RANKS_PER_HOST="1")

    def kill(started: list[subprocess.Popen[str]]) -> None:
        while not [*runs.glob("step-*00")]:
            assert all(each.poll() is None for each in started)
            time.sleep(0.05)
        # Below nsenter and torchrun.
        (rank,) = (each for each in descendants(started[1].pid) if not descendants(each))
        os.kill(rank, signal.SIGKILL)

    with TwoHosts() as hosts:
        said = check(hosts, [asked, asked], [OWN_STORE, OWN_STORE], steps, kill)
    assert "(exitcode: -9)" in said


def test_kubernetes(tmp_path: Path) -> None:
    """The container's command, with the variables that the operator sets (its version 1.9)."""
    job = document("kubernetes.yaml")
    (container,) = worker(job)["containers"]
    elastic, name = job["spec"]["elasticPolicy"], job["metadata"]["name"]
    environment = {
        **{variable["name"]: variable["value"] for variable in container["env"]},
        "PYTHONUNBUFFERED": "1",
        "PET_RDZV_BACKEND": elastic["rdzvBackend"],
        "PET_RDZV_ENDPOINT": f"{name}-worker-0:23456",
        "PET_NNODES": f"{elastic['minReplicas']}:{elastic['maxReplicas']}",
        "PET_MAX_RESTARTS": str(elastic["maxRestarts"]),
        "PET_NPROC_PER_NODE": "1",  # there is no GPU
    }
    command = [word.replace("/minidist", str(ROOT)) for word in container["command"]] + words(
        tmp_path / "runs"
    )
    with TwoHosts((f"{name}-worker-0", f"{name}-worker-1")) as hosts:
        check(hosts, [command, command], [environment, environment])


def test_sagemaker(tmp_path: Path) -> None:
    """The entry point, where SageMaker's file says who is there; what it writes goes to the common disk."""
    pytest.importorskip("accelerate", reason=f"it starts the ranks: {EXTRA}")
    request = document("sagemaker.yaml")
    program = [word.replace("/minidist", str(ROOT)) for word in container_words(request)[:2]]
    (channel,) = request["InputDataConfig"]
    names = "algo-1", "algo-2"
    with TwoHosts(names) as hosts:
        for number, name in enumerate(names):
            told = {"current_host": name, "hosts": [*names], "network_interface_name": CARD}
            runs = f"/opt/ml/input/data/{channel['ChannelName']}"
            script = (
                "mount -t tmpfs none /opt && mkdir -p /opt/ml/input/config && "
                f"echo {shlex.quote(json.dumps(told))} > /opt/ml/input/config/resourceconfig.json && "
                f"mkdir -p {runs} && mount --bind {tmp_path} {runs}"
            )
            hosts.run(number, ["sh", "-c", script])
        command = [*program, *words(f"{runs}/7")]
        check(hosts, [command, command], [{"RANKS_PER_HOST": "1"}] * 2)
    assert [*(tmp_path / "7").glob("step-*")]


def test_accelerate(tmp_path: Path) -> None:
    """The command at the top of its file, on both; without GPUs."""
    pytest.importorskip("accelerate", reason=f"it starts the ranks: {EXTRA}")
    config = ["--config_file", str(DEPLOY / "accelerate.yaml"), "--num_processes", "2"]
    with TwoHosts(("node0", "node1")) as hosts:
        launch, program = ["accelerate", "launch", *config], ["deploy/train.py", *words(tmp_path)]
        check(hosts, [[*launch, "--machine_rank", number, *program] for number in "01"], [{}, {}])
