"""Which ranks of a group share a host, and with it memory.

Each rank tells the others an identity of its host and its process id, once per group. What counts as one
host is what can map one memory: the same boot of one kernel, and one namespace of process ids.
"""

from __future__ import annotations

import os
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

HOST_VARIABLE = "MINIDIST_HOST"
"""Where this is set, ranks with different values count as on different hosts, for trying things out."""


@dataclass(frozen=True)
class Process:
    """A rank's process, as its peers on one host see it."""

    host: tuple[int, int]  # checksums of what makes up a host's identity
    id: int
    started: int  # in clock ticks since the boot: a later process with the same id has another

    def alive(self) -> bool:
        """False once it has ended, also where nobody has reaped it yet."""
        try:
            fields = Path(f"/proc/{self.id}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return False
        return fields[0] not in "ZX" and int(fields[19]) == self.started


def this_process() -> Process:
    """Return what the other ranks have to know of this one."""
    texts = [os.environ.get(HOST_VARIABLE, "")]
    started = 0
    if sys.platform.startswith("linux"):
        texts += [Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")]
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    else:
        texts.append(os.uname().nodename)
    text = "\n".join(texts).encode()
    return Process((zlib.crc32(text), zlib.adler32(text)), os.getpid(), started)


def processes(group: dist.ProcessGroup) -> list[Process]:
    """Return the processes of a group's ranks, in their order: an all-gather of 32 bytes a rank over gloo."""
    own = this_process()
    row = torch.tensor([*own.host, own.id, own.started])
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, row, group=group)
    return [Process((a, b), id, started) for a, b, id, started in (row.tolist() for row in rows)]


def by_host(everyone: list[Process]) -> list[tuple[int, ...]]:
    """Return the ranks of each host, hosts in the order of their first rank."""
    hosts: dict[tuple[int, int], list[int]] = {}
    for rank, process in enumerate(everyone):
        hosts.setdefault(process.host, []).append(rank)
    return [tuple(ranks) for ranks in hosts.values()]
