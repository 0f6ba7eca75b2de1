"""Clusters whose collectives in shared memory take small steps, and two hosts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import minidist as md
from minidist import comm
from minidist.benchmarks.harness.slow_link.two_hosts import TwoHosts
from minidist.comm import work
from minidist.comm.transport import shared_memory
from tests.conftest import Clusters


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    with TwoHosts() as made:
        yield made


@pytest.fixture
def small_buffers(cluster_of: Clusters) -> Iterator[Clusters]:
    """Clusters whose staging buffers hold 64 bytes, so that a few elements take several chunks and pieces."""

    def resize(stage: int, piece: int) -> None:
        shared_memory.STAGE, shared_memory.PIECE = stage, piece
        work.forget_groups()
        comm.barrier()  # makes the memory

    def get(ranks: int) -> md.Cluster:
        cluster = cluster_of(ranks)
        cluster.run(resize, 64, 16)
        used.append(cluster)
        return cluster

    sizes, used = (shared_memory.STAGE, shared_memory.PIECE), list[md.Cluster]()
    yield get
    for cluster in used:
        cluster.run(resize, *sizes)
