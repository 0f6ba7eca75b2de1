"""The launcher that started this process: torchrun, mpirun or srun, and as which rank of how many.

Each launcher says so in variables of its own. torchrun also says where the ranks meet (MASTER_ADDR and
MASTER_PORT); for the others the place follows from where rank 0 runs. Nothing here imports torch.

Sources: the manuals of Open MPI's mpirun, of MPICH's Hydra and of SLURM's srun, sections on environment
variables.
"""

from __future__ import annotations

import os
import re
import threading
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_PORTS = range(20_000, 30_000)  # below those that systems hand out by themselves


class _Names(NamedTuple):
    """The variables in which a launcher describes a rank; of several names the first that is set counts."""

    launcher: str
    rank: str
    ranks: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_ranks: tuple[str, ...]
    job: tuple[str, ...]  # what tells two jobs of one machine apart


_SLURM_JOB = ("SLURM_JOB_ID", "SLURM_STEP_ID")
_LAUNCHERS = (
    _Names(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    # MPICH's mpirun, and srun --mpi=pmi2. It comes before srun: Hydra starts one process of its own on each
    # host with srun, whose variables its ranks inherit.
    _Names(
        "mpirun",
        "PMI_RANK",
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "SLURM_LOCALID"),
        ("MPI_LOCALNRANKS",),
        ("PMI_ID", *_SLURM_JOB),
    ),
    _Names(
        "srun", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_LOCALID",), (), _SLURM_JOB
    ),
)


class Started(NamedTuple):
    """A process that a launcher started as one of several ranks."""

    launcher: str
    rank: int
    ranks: int
    local_rank: int  # among the ranks of this machine
    local_ranks: int  # how many those are
    job: str = ""


def started() -> Started | None:
    """Return the launcher that started this process as one of several ranks; None if there is none.

    ValueError if a variable is not a number.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        own, ranks = number("RANK", 0), number("WORLD_SIZE", 1)
        local_rank, local_ranks = number("LOCAL_RANK", own), number("LOCAL_WORLD_SIZE", ranks)
        return Started("torchrun", own, ranks, local_rank, local_ranks)
    for names in _LAUNCHERS:
        # The body of a batch script has SLURM's variables too, as task 0, but no step: srun did not start it.
        in_batch = names.launcher == "srun" and "SLURM_JOB_ID" in os.environ and not _first("SLURM_STEP_ID")
        if names.rank not in os.environ or not _first(*names.ranks) or in_batch:
            continue
        own, ranks = number(names.rank), number(_first(*names.ranks))
        if ranks > 1:
            place, places = _first(*names.local_rank), _first(*names.local_ranks)
            return Started(
                names.launcher,
                own,
                ranks,
                number(place) if place else own,
                number(places) if places else _tasks_here(ranks),
                " ".join(os.environ[name] for name in names.job if name in os.environ),
            )
    return None


def adopt() -> None:
    """Give this process torchrun's variables if mpirun or srun started it. Variables that are set stay.

    Raises ValueError if nothing says on which machine rank 0 is.
    """
    found = started()
    if found is None or found.launcher == "torchrun":
        return
    address = os.environ.get("MASTER_ADDR") or _first_host(found)
    if address is None:
        remedy = "mpirun -x MASTER_ADDR=..." if found.launcher == "mpirun" else "export MASTER_ADDR=..."
        raise ValueError(
            f"{found.launcher} started rank {found.rank} of {found.ranks}, {found.local_ranks} of them on "
            "this machine, and MASTER_ADDR is not set: the ranks can't find each other. Give the address of "
            f"rank 0's machine: {remedy}"
        )
    port = _PORTS[zlib.crc32(found.job.encode()) % len(_PORTS)] if found.job else 29_500
    described = {
        "RANK": found.rank,
        "WORLD_SIZE": found.ranks,
        "LOCAL_RANK": found.local_rank,
        "LOCAL_WORLD_SIZE": found.local_ranks,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    for name, value in described.items():
        os.environ.setdefault(name, str(value))


def end_with_launcher() -> None:
    """Have a rank end with the launcher that started it, also a killed one: the others cannot come back."""
    parent = os.getppid()
    if started() is None:
        return
    if parent == 1:  # the launcher itself, as in a container, or a stranger who adopts orphans
        with suppress(OSError):
            if not re.search(rb"python|mpi|prte|hydra|slurm", Path("/proc/1/cmdline").read_bytes()):
                os._exit(1)
    end_with(parent)  # no `prctl`, which goes by the thread that started this process


def end_with(parent: int) -> None:
    """Have this process end within a second of its parent: a thread looks twice a second."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="minidist-parent").start()


def without_launcher(environment: dict[str, str]) -> dict[str, str]:
    """Return `environment` for processes that this one starts, which are not ranks of its launcher."""
    own = {names.rank for names in _LAUNCHERS}
    return {k: v for k, v in environment.items() if k not in own and not k.startswith("TORCHELASTIC_")}


def number(name: str, default: int | None = None) -> int:
    """Return a variable's value; ValueError if it is not a whole number."""
    if default is not None and name not in os.environ:
        return default
    try:
        return int(os.environ[name])
    except ValueError:
        raise ValueError(f"{name} is {os.environ[name]!r}; it has to be a whole number") from None


def _first(*names: str) -> str:
    """Return the first of these variables that is set, or ""."""
    return next((name for name in names if os.environ.get(name)), "")


def _tasks_here(ranks: int) -> int:
    """Return the ranks on this machine by SLURM's list of tasks: "2(x3),1" is 2, 2, 2, 1. Else all ranks."""
    tasks = os.environ.get(_first("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"), "")
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks):
        counts += [int(count)] * int(times or 1)
    node = number("SLURM_NODEID", 0)
    return counts[node] if node < len(counts) else ranks


def _first_host(found: Started) -> str | None:
    """Return the machine of rank 0: this one if it has all ranks, or the first of SLURM's node list."""
    nodes = os.environ.get(_first("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"), "")
    # "rack1gpu[03-05,9],login1" begins with rack1gpu03.
    first = re.match(r"(?:[^\[,]|\[[^\]]*\])+", nodes)
    if found.local_ranks == found.ranks:
        return "127.0.0.1"
    if first:
        return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])
    return os.environ.get("SLURM_LAUNCH_NODE_IPADDR")
