"""Find out which ranks of a group share a host, and so can share memory.

Each rank tells the others its host's identity and its process id, once per group. Two processes are on one
host if they can map the same memory: they run on the same boot of one kernel, in one namespace of process
ids.
"""

from __future__ import annotations

import os
import sys
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

HOST_VARIABLE = "MINIDIST_HOST"
"""Environment variable for experiments: ranks with different values count as on different hosts."""


class Process(NamedTuple):
    """A rank's process, as its peers on the host see it."""

    host: tuple[int, int]  # two checksums of the host's identity
    id: int
    started: int  # clock ticks since the boot; tells it from a later process with the same id

    def alive(self) -> bool:
        """Return False once it has ended, even if nobody has reaped it yet."""
        try:
            state, started = _state(self.id)
        except OSError:
            return False
        return state not in "ZX" and started == self.started


def _state(process: int) -> tuple[str, int]:
    """Return a process's state, a letter, and when it started, in clock ticks since the boot."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])


def this_process() -> Process:
    """Describe this process to the other ranks."""
    texts = [os.environ.get(HOST_VARIABLE, "")]
    started = 0
    if sys.platform.startswith("linux"):
        texts += [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
        started = _state(os.getpid())[1]
    else:
        texts.append(os.uname().nodename)
    text = "\n".join(texts).encode()
    return Process((zlib.crc32(text), zlib.adler32(text)), os.getpid(), started)


def processes(group: dist.ProcessGroup) -> list[Process]:
    """Return the processes of a group's ranks, in rank order. All-gathers 32 bytes a rank over gloo."""
    own = this_process()
    row = torch.tensor([*own.host, own.id, own.started])
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, row, group=group)
    return [Process((a, b), id, started) for a, b, id, started in (row.tolist() for row in rows)]


def by_host(everyone: list[Process]) -> list[tuple[int, ...]]:
    """Return the ranks of each host, with hosts in the order of their first rank."""
    hosts: dict[tuple[int, int], list[int]] = {}
    for rank, process in enumerate(everyone):
        hosts.setdefault(process.host, []).append(rank)
    return [tuple(ranks) for ranks in hosts.values()]
