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

from .inline_ptx import AsmOperand, Assembler, Value, instruction


@instruction()
def mbarrier_init(to: Assembler, barriers: AsmOperand, i: AsmOperand, count: AsmOperand) -> None:
    """mbarrier_init(barriers, i, count): make barriers[i], uint64 in shared memory, for `count` arrivals.

    One thread does this once; `fence_mbarrier_init` and a barrier show it to the others. PTX: mbarrier.init.
    """
    operands = [to.shared_address(barriers, i), to.integer(count)]
    to.ptx("mbarrier.init.shared::cta.b64 [$0], $1;", "r,r", operands)


@instruction()
def mbarrier_arrive_at(to: Assembler, barriers: AsmOperand, i: AsmOperand, rank: AsmOperand) -> None:
    """mbarrier_arrive_at(barriers, i, rank): arrive at the same mbarrier of block `rank` of the cluster.

    It does not show this thread's stores to that block. Here it says that multiplications, already waited
    for, have read shared memory. Showing stores too (.release.cluster) costs a fence of all memory. PTX:
    mapa, mbarrier.arrive.
    """
    text = """{
    .reg .b32 there;
    mapa.shared::cluster.u32 there, $0, $1;
    mbarrier.arrive.shared::cluster.b64 _, [there];
    }"""
    to.ptx(text, "r,r", [to.shared_address(barriers, i), to.integer(rank)])


@instruction()
def mbarrier_expect(to: Assembler, barriers: AsmOperand, i: AsmOperand, count: AsmOperand) -> None:
    """mbarrier_expect(barriers, i, count): arrive, and announce `count` bytes of copies to this phase."""
    operands = [to.shared_address(barriers, i), to.integer(count)]
    to.ptx("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", "r,r", operands)


@instruction()
def mbarrier_wait(to: Assembler, barriers: AsmOperand, i: AsmOperand, parity: AsmOperand) -> None:
    """mbarrier_wait(barriers, i, parity): wait until the phase of this parity is over.

    The hardware suspends the thread for a while at every try. PTX: mbarrier.try_wait.parity in a loop, whose
    labels are local to the braces so that the compiler may copy it.
    """
    text = """{
    .reg .pred over;
    again:
    mbarrier.try_wait.parity.shared::cta.b64 over, [$0], $1;
    @over bra done;
    bra again;
    done:
    }"""
    to.ptx(text, "r,r", [to.shared_address(barriers, i), to.integer(parity)])


@instruction(literals=("threads",))
def barrier_sync(to: Assembler, name: AsmOperand, threads: AsmOperand) -> None:
    """barrier_sync(name, threads): wait until `threads` threads of the block are at barrier number `name`.

    `threads` is a multiple of 32, known when compiling; names are 0 to 15, and `cuda.syncthreads()` uses 0.
    PTX: bar.sync. Any architecture.
    """
    to.ptx(f"bar.sync $0, {threads.literal};", "r", [to.integer(name)])


@instruction(returns="int32")
def cluster_rank(to: Assembler) -> Value:
    """cluster_rank(): this block's number in its cluster. PTX: %cluster_ctarank."""
    return to.ptx("mov.u32 $0, %cluster_ctarank;", "=r", results=1, pure=True)[0]


@instruction()
def cluster_arrive(to: Assembler) -> None:
    """cluster_arrive(): tell the cluster's other threads that this one is here."""
    to.ptx("barrier.cluster.arrive.release;", "")


@instruction()
def cluster_wait(to: Assembler) -> None:
    """cluster_wait(): wait until all threads of the cluster have arrived."""
    to.ptx("barrier.cluster.wait.acquire;", "")


@instruction()
def fence_mbarrier_init(to: Assembler) -> None:
    """fence_mbarrier_init(): show this thread's new mbarriers to the cluster and the copy engine."""
    to.ptx("fence.mbarrier_init.release.cluster;", "")


@instruction()
def fence_proxy_async(to: Assembler) -> None:
    """fence_proxy_async(): show this thread's stores in shared memory to the copy engine and wgmma."""
    to.ptx("fence.proxy.async.shared::cta;", "")
