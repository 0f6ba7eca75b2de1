"""The ranks that mpirun and srun describe, with their variables set by hand; and those that mpirun starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import minidist as md
from minidist.comm import started_by
from minidist.comm.started_by import Started
from tests.comm.programs import written
from tests.helpers.clocks import HANG
from tests.helpers.processes import wait_until_gone

ADOPTED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[03-05,9]",
}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {*os.environ, *ADOPTED}:
        if name in ADOPTED or name.startswith(("OMPI_", "PMI", "SLURM_", "TORCHELASTIC_")):
            monkeypatch.setenv(name, "")  # recorded, so that what `adopt` sets is undone
            monkeypatch.delenv(name)


def set_all(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def adopted() -> dict[str, str]:
    started_by.adopt()
    return {name: os.environ[name] for name in ADOPTED if name in os.environ}


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, None),
        (OPEN_MPI, Started("mpirun", 2, 4, 2, 4)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, Started("mpirun", 1, 2, 1, 2)),
        (
            {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"},
            Started("mpirun", 5, 8, 1, 4),
        ),
        (SRUN, Started("srun", 3, 5, 1, 2, "17 0")),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "4"}, Started("srun", 3, 4, 1, 2, "17 0")),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}, Started("srun", 0, 2, 0, 2)),
        # srun --mpi=pmi2, whose variables of PMI count, and Hydra on hosts that srun reached.
        ({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "5"}, Started("mpirun", 3, 5, 1, 2, "17 0")),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "17"}, None),  # a batch script's body
        (
            {**SRUN, "TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "9"},
            Started("torchrun", 1, 9, 1, 9),
        ),
    ],
)
def test_who_started_this_process(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], found: Started | None
) -> None:
    set_all(monkeypatch, variables)
    assert started_by.started() == found


def test_mpiruns_ranks_of_one_machine_meet_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, OPEN_MPI)
    assert adopted() == dict(zip(ADOPTED, ("2", "4", "2", "4", "127.0.0.1", "29500"), strict=True))


def test_two_jobs_of_one_machine_have_ports_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = set()
    for job in ("1", "2"):
        set_all(monkeypatch, {**SRUN, "SLURM_JOB_ID": job})
        ports.add(adopted()["MASTER_PORT"])
        monkeypatch.delenv("MASTER_PORT")
    assert len(ports) == 2


@pytest.mark.parametrize(
    ("nodes", "address"),
    [
        ({}, "gpu03"),
        ({"SLURM_STEP_NODELIST": "login1,gpu[03-05]"}, "login1"),
        ({"SLURM_STEP_NODELIST": "gpu[7,9]-ib"}, "gpu7-ib"),
        ({"SLURM_STEP_NODELIST": "rack[1-2]node[01-04],login1"}, "rack1node01"),
        ({"SLURM_STEP_NODELIST": "", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7"}, "10.0.0.7"),
        ({"MASTER_ADDR": "elsewhere"}, "elsewhere"),
        ({"SLURM_STEP_TASKS_PER_NODE": "5"}, "127.0.0.1"),
    ],
)
def test_sruns_ranks_meet_on_the_first_node(
    monkeypatch: pytest.MonkeyPatch, nodes: dict[str, str], address: str
) -> None:
    set_all(monkeypatch, {**SRUN, **nodes})
    assert adopted()["MASTER_ADDR"] == address


OF_TWO = {"WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "rank 2 of 4, 2 of them on this machine, and MAS"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "four"}, "SIZE is 'four'; it has to be a whole number"),
        ({"RANK": "0"}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set"),
        ({**OPEN_MPI, "RANK": "0"}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set"),  # set by hand, it leads
        ({**OF_TWO, "RANK": "x"}, "RANK is 'x'"),
        ({**OF_TWO, "RANK": "2"}, "RANK is 2 and WORLD_SIZE 2"),
    ],
)
def test_a_missing_or_wrong_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], text: str
) -> None:
    set_all(monkeypatch, variables)
    with pytest.raises(ValueError, match=text):
        md.init()


def test_ranks_of_a_launchers_rank_are_not_its_own() -> None:
    environment = {**OPEN_MPI, "PMI_RANK": "2", "SLURM_PROCID": "2", "TORCHELASTIC_RUN_ID": "x", "PATH": "p"}
    left = started_by.without_launcher(environment)
    assert left == {name: value for name, value in OPEN_MPI.items() if name != "OMPI_COMM_WORLD_RANK"} | {
        "PATH": "p"
    }


def mpirun(ranks: int, *words: str) -> str:
    program = shutil.which("mpirun")
    if (
        program is None
        or "Open MPI" not in subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    ):
        pytest.skip("Open MPI is not installed (Debian: apt-get install openmpi-bin)")
    command = [program, "--allow-run-as-root", "--oversubscribe", "-np", str(ranks), sys.executable, *words]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=HANG, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.deep
def test_mpirun_starts_the_ranks(tmp_path: Path) -> None:
    script = """
        import torch
        import minidist as md
        from minidist import comm

        md.init()
        total = comm.all_reduce(torch.tensor([1.0 + md.rank()])).item()
        shown = md.launch(lambda: f"{md.rank()} of {md.size()}, {md.local_rank()} here: {total}", ranks=4)
        if md.rank() == 0:
            print(shown)
    """
    expected = [f"{rank} of 4, {rank} here: 10.0" for rank in range(4)]
    assert mpirun(4, str(written(tmp_path, script))) == f"{expected}\n"


@pytest.mark.deep
def test_mpirun_starts_an_example_and_the_command() -> None:
    example = Path(__file__).parents[2] / "examples" / "kmeans.py"
    assert mpirun(2, str(example), "2").count("mean squared distance: 0.") == 2  # each rank prints
    said = mpirun(2, "-m", "minidist", "train", "--steps", "3")
    assert said.count("layout dp=2: 3 steps") == 1


CHILD = """
import time
from minidist.comm import started_by
started_by.end_with_launcher()
print("watches", flush=True)
time.sleep(600)
"""
PARENT = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}])
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("launcher", [{"TORCHELASTIC_RUN_ID": "1"}, OPEN_MPI])
def test_a_rank_ends_with_a_killed_launcher_that_started_it(launcher: dict[str, str]) -> None:
    environment = {**os.environ, **launcher, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=environment
    )
    with parent:
        assert parent.stdout is not None
        said = {parent.stdout.readline().strip() for _ in range(2)}
        (child,) = map(int, said - {"watches"})
        parent.kill()
        parent.wait()
    wait_until_gone([child])


def test_init_watches_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    def watched() -> None:
        raise InterruptedError

    set_all(monkeypatch, OPEN_MPI)
    monkeypatch.setattr(started_by, "end_with_launcher", watched)
    with pytest.raises(InterruptedError):
        md.init()
