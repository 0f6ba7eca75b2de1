"""The world: which rank this process is, of how many; joining and leaving it.

The only state is the default process group of torch.distributed. A process that has joined no world is a
world of one, rank 0 of 1. So the same program runs alone, under `minidist.launch`, and under torchrun, mpirun
or srun.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING

from minidist._arguments import check_seconds
from minidist.comm import started_by
from minidist.comm.started_by import number

# The functions that need torch import it: a script that only launches others does not pay for it.
if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

DEFAULT_TIMEOUT = 300.0
"""Seconds that a collective waits for the other ranks by default."""

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_joined_here = False  # whether `init` made the world, so that `shutdown` may end it


def init(timeout: float = DEFAULT_TIMEOUT, check: bool = False) -> None:
    """Join the world of the ranks that torchrun, mpirun or srun started.

    torchrun describes it in RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which may also be set by hand. If
    mpirun or srun started the ranks, their own variables are read, and set under torchrun's names. It does
    nothing in a rank of `minidist.launch` or `minidist.Cluster`, which has joined already, nor in a process
    without these variables, which is a world of one.

    Args:
        timeout: seconds to wait for the other ranks, here and in every collective.
        check: compare every call with the other ranks' before it begins, so that a mismatch is an error that
            names both; see `minidist.comm.checking`. The same on all ranks.

    Raises:
        ValueError: a variable is missing or is not a number, nothing says where rank 0 is, or the timeout is
            not positive.
        RuntimeError: the port is in use.
        TimeoutError: the others did not come in time.
    """
    global _joined_here
    check_seconds("timeout", timeout, " to wait for the others")
    if _is_joined():
        return
    described = ("RANK", "WORLD_SIZE")
    if not any(name in os.environ for name in described):
        started_by.adopt()
    if not any(name in os.environ for name in described):
        return
    started_by.end_with_launcher()
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} not set: a world needs {', '.join(_VARIABLES)}; torchrun sets them all"
        )
    own, ranks, port = (number(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if not 1 <= port < 2**16 or ranks < 1:
        raise ValueError(
            f"MASTER_PORT is {port} and WORLD_SIZE {ranks}; give a port below 65536 and some ranks"
        )
    if not 0 <= own < ranks:
        raise ValueError(f"RANK is {own} and WORLD_SIZE {ranks}; ranks are numbered from 0 to {ranks - 1}")
    from minidist.comm.rendezvous import open_store

    store = open_store(os.environ["MASTER_ADDR"], port, own, ranks, timeout)
    join(store, own, ranks, timedelta(seconds=timeout), check)
    _joined_here = True
    atexit.register(_shutdown_at_exit)


def join(store: Store, own: int, ranks: int, limit: timedelta, check: bool = False) -> None:
    """Form the default group: gloo, and NCCL for tensors on a GPU where each rank has one to itself.

    With `check=True` the ranks compare their calls before these begin.
    """
    import torch
    import torch.distributed as dist

    from minidist.comm import returned_ranks
    from minidist.comm.transport import mailbox

    mailbox.start(store, own, ranks)
    gpus = torch.cuda.device_count()
    local_ranks = number("LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in os.environ else ranks
    joined_by_nccl = dist.is_nccl_available() and gpus >= local_ranks
    backend = "cpu:gloo,cuda:nccl" if joined_by_nccl else "gloo"
    if own == 0 and gpus and not joined_by_nccl:
        warnings.warn(_idle_gpus(gpus, local_ranks), stacklevel=2)
    returned_ranks.start(store, own, only_gloo=backend == "gloo")
    dist.init_process_group(backend, store=store, rank=own, world_size=ranks, timeout=limit)
    if backend != "gloo":
        torch.cuda.set_device(local_rank())
    if check:
        from minidist.comm.checking import call_checker

        call_checker.start(store, own, ranks, limit.total_seconds())


def _idle_gpus(gpus: int, ranks: int) -> str:
    """Say what nobody would guess: one rank computes on the GPU, and two ranks on CPUs."""
    why = f"{ranks} ranks of this machine see {gpus} GPU(s)" if gpus < ranks else "this torch has no NCCL"
    return (
        f"{why}, so all ranks compute on CPUs, over gloo; do not compare their speed with a GPU's. Start no "
        "more ranks than there are GPUs, let each see all of them (under Slurm: --gpus-per-node, and not "
        "--gpus-per-task), or hide the GPUs from every run with CUDA_VISIBLE_DEVICES=''"
    )


def rank() -> int:
    """This process's rank: 0 to size() - 1."""
    if not _is_joined():
        return 0
    from minidist.comm.work import rank_in

    return rank_in(None)


def size() -> int:
    """Number of ranks in the world."""
    if not _is_joined():
        return 1
    from minidist.comm.work import ranks_of

    return len(ranks_of(None))


def local_rank() -> int:
    """This process's rank among those on its own machine."""
    return number("LOCAL_RANK") if _is_joined() and "LOCAL_RANK" in os.environ else rank()


def device() -> torch.device:
    """The device on which this rank computes: its own GPU where NCCL joins the ranks, else the CPU."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized() and "nccl" not in str(dist.get_backend_config()):
        return torch.device("cpu")
    return torch.device("cuda", local_rank()) if torch.cuda.is_available() else torch.device("cpu")


def shutdown() -> None:
    """Leave the world that `init` joined. Without one, or in a launcher's world, it does nothing."""
    global _joined_here
    if _joined_here:
        import torch.distributed as dist

        from minidist.comm import returned_ranks, work
        from minidist.comm.checking import call_checker
        from minidist.comm.transport import mailbox

        _joined_here = False
        call_checker.stop()
        work.forget_groups()
        mailbox.stop()
        returned_ranks.stop()
        dist.destroy_process_group()


def _shutdown_at_exit() -> None:
    """Leave the world before the interpreter ends, which a running thread of gloo would abort."""
    shutdown()
    gc.collect()  # objects that hold a group in a cycle


def _is_joined() -> bool:
    """True in a process that belongs to a world, which one that has not imported torch does not."""
    if "torch.distributed" not in sys.modules:
        return False
    import torch.distributed as dist

    return dist.is_initialized()
