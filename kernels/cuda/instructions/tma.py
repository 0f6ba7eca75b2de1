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

from llvmlite import ir

from .inline_ptx import INT16, AsmOperand, Assembler, Value, instruction

_LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
_STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"


@instruction()
def tma_load_2d(
    to: Assembler,
    shared: AsmOperand,
    i: AsmOperand,
    tensor: AsmOperand,
    x: AsmOperand,
    y: AsmOperand,
    barriers: AsmOperand,
    j: AsmOperand,
) -> None:
    """tma_load_2d(shared, i, tensor, x, y, barriers, j): begin to load a box of `tensor` to shared[i].

    On arrival all bytes of the box are counted at the mbarrier barriers[j]. PTX: cp.async.bulk.tensor.2d.
    """
    to.ptx(
        f"{_LOAD} [$0], [$1, {{$2, $3}}], [$4];", "r,l,r,r,r", _load(to, shared, i, tensor, x, y, barriers, j)
    )


@instruction()
def tma_load_2d_multicast(
    to: Assembler,
    shared: AsmOperand,
    i: AsmOperand,
    tensor: AsmOperand,
    x: AsmOperand,
    y: AsmOperand,
    barriers: AsmOperand,
    j: AsmOperand,
    ranks: AsmOperand,
) -> None:
    """tma_load_2d_multicast(shared, i, tensor, x, y, barriers, j, ranks): load a box to several blocks.

    The box is read once, and written to shared[i] of every block of the cluster whose bit is set in `ranks`;
    each block counts it at its own barriers[j]. PTX: as `tma_load_2d`, with .multicast::cluster.
    """
    operands = _load(to, shared, i, tensor, x, y, barriers, j)
    mask = to.builder.trunc(to.integer(ranks), INT16)
    text = f"{_LOAD}.multicast::cluster [$0], [$1, {{$2, $3}}], [$4], $5;"
    to.ptx(text, "r,l,r,r,r,h", [*operands, mask])


def _load(to: Assembler, *operands: AsmOperand) -> list[Value]:
    shared, i, tensor, x, y, barriers, j = operands
    addresses = [to.shared_address(shared, i), _address(to, tensor)]
    return [*addresses, to.integer(x), to.integer(y), to.shared_address(barriers, j)]


@instruction()
def tma_store_2d(
    to: Assembler, tensor: AsmOperand, x: AsmOperand, y: AsmOperand, shared: AsmOperand, i: AsmOperand
) -> None:
    """tma_store_2d(tensor, x, y, shared, i): begin to store the box at shared[i] to `tensor`.

    The thread that began stores groups them and waits for them, as for the copies of `copies.py`.
    """
    operands = [_address(to, tensor), to.integer(x), to.integer(y), to.shared_address(shared, i)]
    to.ptx(f"{_STORE} [$0, {{$1, $2}}], [$3];", "l,r,r,r", operands)


@instruction()
def tma_store_commit(to: Assembler) -> None:
    """tma_store_commit(): make a group of this thread's stores. PTX: cp.async.bulk.commit_group."""
    to.ptx("cp.async.bulk.commit_group;", "")


@instruction(literals=("groups",))
def tma_store_wait(to: Assembler, groups: AsmOperand) -> None:
    """tma_store_wait(groups): wait until at most `groups` groups, known when compiling, are not yet written.

    PTX: cp.async.bulk.wait_group.
    """
    to.ptx(f"cp.async.bulk.wait_group {groups.literal};", "")


@instruction(literals=("groups",))
def tma_store_wait_read(to: Assembler, groups: AsmOperand) -> None:
    """tma_store_wait_read(groups): as `tma_store_wait`, but only until shared memory may be written again.

    PTX: cp.async.bulk.wait_group.read.
    """
    to.ptx(f"cp.async.bulk.wait_group.read {groups.literal};", "")


@instruction()
def tensor_map_acquire(to: Assembler, tensor: AsmOperand) -> None:
    """tensor_map_acquire(tensor): see the tensor map in global memory as the host wrote it.

    Each thread that begins copies calls it once. PTX: fence.proxy.tensormap::generic.acquire.sys.
    """
    to.ptx("fence.proxy.tensormap::generic.acquire.sys [$0], 128;", "l", [_address(to, tensor)])


def _address(to: Assembler, tensor: AsmOperand) -> Value:
    """The generic address of a tensor map, 128 bytes in global memory."""
    return to.builder.ptrtoint(to.start(tensor), ir.IntType(64))
