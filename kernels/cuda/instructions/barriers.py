"""How the parts of a Hopper block wait for each other: mbarriers, named barriers, clusters, fences.

An mbarrier is 8 bytes of shared memory that count arrivals, of threads and of bytes. Its phases follow each
other: a phase ends when as many threads as `mbarrier_init` said have arrived, and all bytes that they
announced; then the next begins. A thread waits for the end of a phase by its parity, which is 0 for the
first, 1 for the second, 0 for the third. The phase before the first has parity 1 and counts as over. A ring
of tiles takes two mbarriers a slot: "full", where the copy engine counts bytes, and "empty", where readers
arrive.

Blocks of a cluster run at the same time on neighbouring multiprocessors and reach each other's shared memory.

The copy engine and wgmma access shared memory through the "asynchronous proxy", not on the path of ordinary
loads and stores. They see a thread's stores only after `fence_proxy_async`.

Source: PTX ISA, "Parallel Synchronization and Communication Instructions": mbarrier, barrier,
barrier.cluster, membar/fence. All of this file needs sm_90.
"""

from __future__ import annotations

from typing import Any

from .inline_ptx import Known, Shared, ptx


@ptx("mbarrier.init.shared::cta.b64 [$0], $1;")
def mbarrier_init(barriers: Shared, i: int, count: int) -> None:
    """mbarrier_init(barriers, i, count): make barriers[i], uint64 in shared memory, for `count` arrivals.

    One thread does this once; `fence_mbarrier_init` and a barrier show it to the others. PTX: mbarrier.init.
    """


@ptx(
    """{
    .reg .b32 there;
    mapa.shared::cluster.u32 there, $0, $1;
    mbarrier.arrive.shared::cluster.b64 _, [there];
    }"""
)
def mbarrier_arrive_at(barriers: Shared, i: int, rank: int) -> None:
    """mbarrier_arrive_at(barriers, i, rank): arrive at the same mbarrier of block `rank` of the cluster.

    It does not show this thread's stores to that block. Here it says that multiplications, already waited
    for, have read shared memory. Showing stores too (.release.cluster) costs a fence of all memory. PTX:
    mapa, mbarrier.arrive.
    """


@ptx("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;")
def mbarrier_expect(barriers: Shared, i: int, count: int) -> None:
    """mbarrier_expect(barriers, i, count): arrive, and announce `count` bytes of copies to this phase."""


@ptx(
    """{
    .reg .pred over;
    again:
    mbarrier.try_wait.parity.shared::cta.b64 over, [$0], $1;
    @over bra done;
    bra again;
    done:
    }"""
)
def mbarrier_wait(barriers: Shared, i: int, parity: int) -> None:
    """mbarrier_wait(barriers, i, parity): wait until the phase of this parity is over.

    The hardware suspends the thread for a while at every try. PTX: mbarrier.try_wait.parity in a loop, whose
    labels are local to the braces so that the compiler may copy it.
    """


@ptx("bar.sync $0, <threads>;")
def barrier_sync(name: int, threads: Known) -> None:
    """barrier_sync(name, threads): wait until `threads` threads of the block are at barrier number `name`.

    `threads` is a multiple of 32, known when compiling; names are 0 to 15, and `cuda.syncthreads()` uses 0.
    PTX: bar.sync. Any architecture.
    """


@ptx("mov.u32 $0, %cluster_ctarank;", returns="int32", pure=True)
def cluster_rank() -> Any:
    """cluster_rank(): this block's number in its cluster. PTX: %cluster_ctarank."""


@ptx("barrier.cluster.arrive.release;")
def cluster_arrive() -> None:
    """cluster_arrive(): tell the cluster's other threads that this one is here."""


@ptx("barrier.cluster.wait.acquire;")
def cluster_wait() -> None:
    """cluster_wait(): wait until all threads of the cluster have arrived."""


@ptx("fence.mbarrier_init.release.cluster;")
def fence_mbarrier_init() -> None:
    """fence_mbarrier_init(): show this thread's new mbarriers to the cluster and the copy engine."""


@ptx("fence.proxy.async.shared::cta;")
def fence_proxy_async() -> None:
    """fence_proxy_async(): show this thread's stores in shared memory to the copy engine and wgmma."""
