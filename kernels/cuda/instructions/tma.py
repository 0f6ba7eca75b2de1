"""Hopper's copy engine, the tensor memory accelerator (TMA): one thread moves a box of a matrix.

The engine knows the matrix from a tensor map (`runtime/matrix.py`), so a copy names only the corner of
the box: column x, row y. The engine computes the addresses, swizzles, and loads zeros for elements outside
the matrix; a store skips those. With the 128-byte swizzle the box begins at a multiple of 1024 bytes, its
rows are 128 bytes, and the 16-byte chunk c of row r lies at c ^ (r % 8): eight rows of a column lie in
different banks.

Source: PTX ISA, "Data Movement and Conversion Instructions: Tensor copy", cp.async.bulk.tensor, and "Tensors:
Swizzling modes". sm_90.
"""

from __future__ import annotations

from .inline_ptx import Known, Mask, Shared, Tensor, ptx

_LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
_STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"


@ptx(f"{_LOAD} [$0], [$1, {{$2, $3}}], [$4];")
def tma_load_2d(shared: Shared, i: int, tensor: Tensor, x: int, y: int, barriers: Shared, j: int) -> None:
    """tma_load_2d(shared, i, tensor, x, y, barriers, j): begin to load a box of `tensor` to shared[i].

    On arrival all bytes of the box are counted at the mbarrier barriers[j]. PTX: cp.async.bulk.tensor.2d.
    """


@ptx(f"{_LOAD}.multicast::cluster [$0], [$1, {{$2, $3}}], [$4], $5;")
def tma_load_2d_multicast(
    shared: Shared, i: int, tensor: Tensor, x: int, y: int, barriers: Shared, j: int, ranks: Mask
) -> None:
    """tma_load_2d_multicast(shared, i, tensor, x, y, barriers, j, ranks): load a box to several blocks.

    The box is read once, and written to shared[i] of every block of the cluster whose bit is set in `ranks`;
    each block counts it at its own barriers[j]. PTX: as `tma_load_2d`, with .multicast::cluster.
    """


@ptx(f"{_STORE} [$0, {{$1, $2}}], [$3];")
def tma_store_2d(tensor: Tensor, x: int, y: int, shared: Shared, i: int) -> None:
    """tma_store_2d(tensor, x, y, shared, i): begin to store the box at shared[i] to `tensor`.

    The thread that began stores groups them and waits for them, as for the copies of `copies.py`.
    """


@ptx("cp.async.bulk.commit_group;")
def tma_store_commit() -> None:
    """tma_store_commit(): make a group of this thread's stores. PTX: cp.async.bulk.commit_group."""


@ptx("cp.async.bulk.wait_group <groups>;")
def tma_store_wait(groups: Known) -> None:
    """tma_store_wait(groups): wait until at most `groups` groups, known when compiling, are not yet written.

    PTX: cp.async.bulk.wait_group.
    """


@ptx("cp.async.bulk.wait_group.read <groups>;")
def tma_store_wait_read(groups: Known) -> None:
    """tma_store_wait_read(groups): as `tma_store_wait`, but only until shared memory may be written again.

    PTX: cp.async.bulk.wait_group.read.
    """


@ptx("fence.proxy.tensormap::generic.acquire.sys [$0], 128;")
def tensor_map_acquire(tensor: Tensor) -> None:
    """tensor_map_acquire(tensor): see the tensor map in global memory as the host wrote it.

    Each thread that begins copies calls it once. PTX: fence.proxy.tensormap::generic.acquire.sys.
    """
