"""Ranks on the hosts of `two_hosts.py`, forked from one interpreter that has torch: a program, and no test.

Each gets the variables that torchrun sets, joins the world with `md.init`, and runs one function; its result,
or its error in words, goes into a file. torchrun itself costs each rank and each host the seconds that an
import of torch takes; what it adds is tested apart.

    python ranks_on_hosts.py FOLDER TIMEOUT RANKS_OF_A_HOST FIRST_PROCESS FIRST_PROCESS
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from minidist.benchmarks.harness.slow_link.two_hosts import NAMES, PORT, TwoHosts
from tests.helpers import warm_python

_SPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000  # mounts, name, IPC, pids, network


def run(
    hosts: TwoHosts,
    ranks: int,
    fn: Callable[..., Any],
    *args: Any,
    folder: Path,
    timeout: float,
    limit: float = 240.0,
) -> list[tuple[Any, str, float]]:
    """Run fn(*args) on so many ranks of each host.

    Returns:
        Of each rank what it returned, or its error and the seconds until then.
    """
    (folder / "call").write_bytes(cloudpickle.dumps((fn, args)))
    given = [folder, timeout, ranks, *hosts.firsts]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
    }
    done = warm_python.run(
        [sys.executable, __file__, *map(str, given)], env=environment, timeout=limit, stderr=None
    )
    assert done.returncode == 0
    return [cloudpickle.loads((folder / str(rank)).read_bytes()) for rank in range(len(NAMES) * ranks)]


def one_rank(folder: Path, timeout: float) -> None:
    """Do what a rank does, and keep what came of it."""
    import minidist as md

    begun = time.monotonic()
    value, error = None, ""
    try:
        md.init(timeout=timeout)
        fn, args = cloudpickle.loads((folder / "call").read_bytes())
        begun = time.monotonic()
        value = fn(*args)
    except Exception as raised:
        error = "".join(traceback.format_exception_only(raised)).strip()
    result = cloudpickle.dumps((value, error, time.monotonic() - begun))
    place = folder / f"{os.environ['RANK']}.part"
    place.write_bytes(result)
    place.rename(place.with_suffix(""))


def fork(work: Callable[[], None]) -> int:
    """Fork a process that does one thing."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def one_host(host: int, first: int, ranks: int, folder: Path, timeout: float) -> None:
    """Enter a host, and fork its ranks."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(os.pidfd_open(first), _SPACES):
        raise OSError(ctypes.get_errno(), f"cannot enter the namespaces of process {first}")

    def rank(local: int) -> None:
        os.environ.update({"RANK": str(host * ranks + local), "LOCAL_RANK": str(local)})
        one_rank(folder, timeout)

    for process in [fork(lambda local=local: rank(local)) for local in range(ranks)]:
        os.waitpid(process, 0)


def main() -> None:
    """Fork a process for each host."""

    # Else each rank would import it for itself.
    from minidist.comm import collectives, messages, world  # noqa: F401
    from minidist.parallel.engine import prepare  # noqa: F401

    folder, timeout, ranks, *firsts = sys.argv[1:]
    each = int(ranks)
    os.environ |= {"MASTER_ADDR": NAMES[0], "MASTER_PORT": str(PORT)}
    os.environ |= {"WORLD_SIZE": str(len(firsts) * each), "LOCAL_WORLD_SIZE": ranks}
    work = [
        fork(lambda host=host, first=first: one_host(host, int(first), each, Path(folder), float(timeout)))
        for host, first in enumerate(firsts)
    ]
    for process in work:
        os.waitpid(process, 0)


if __name__ == "__main__":
    main()
