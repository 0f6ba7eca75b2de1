"""Check the arguments of ring attention, on one rank and across ranks.

If ranks differ in a shape, gloo ends the process in the middle of a block, or gives wrong numbers if the
block has the expected number of bytes. So each rank sends eight numbers before the first block travels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minidist import comm
from minidist._arguments import check_whole, is_number
from minidist.comm.work import Group, ranks_of
from minidist.parallel.context import zigzag_order

TOLD = 8
"""How many int64 numbers describe a rank's arguments to the others."""
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def agreed_length(q: Tensor, k: Tensor, length: int | None, causal: bool, group: Group) -> int:
    """Return the length of the whole sequence, after checking that the ranks' arguments fit together.

    Every call checks: a rank that checked only shapes new to it would wait for ranks that do not check.
    """
    ranks = len(ranks_of(group))
    batch, heads, own, width = q.shape
    number = _DTYPES.index(q.dtype) if q.dtype in _DTYPES else -1
    told = [own, batch, heads, k.shape[1], width, number, -1 if length is None else length, bool(causal)]
    found = comm.all_gather(torch.tensor(told, device="cpu"), group=group).view(ranks, TOLD).tolist()
    for rank, each in enumerate(found):
        if each[1:] != found[0][1:]:
            raise ValueError(
                f"the ranks give ring_attention different arguments: rank 0 {_described(found[0])}, and "
                f"rank {rank} {_described(each)}; only the number of positions, T, may differ"
            )
    sizes = [each[0] for each in found]
    length = sum(sizes) if length is None else length
    wanted = [zigzag_order.size(length, ranks, rank) for rank in range(ranks)]
    if sizes != wanted:
        raise ValueError(
            f"the ranks have {sizes} positions, but zigzag order cuts a sequence of {length} into {wanted}; "
            "cut the sequence with SequenceShare"
        )
    return length


def _described(told: list[int]) -> str:
    size, batch, heads, key_heads, width, number, length, causal = told
    dtype = str(_DTYPES[number]) if number >= 0 else "another dtype"
    return (
        f"has q {(batch, heads, size, width)} and k {(batch, key_heads, size, width)} in {dtype}, length="
        f"{None if length < 0 else length}, causal={bool(causal)}"
    )


def check_arguments(
    q: Tensor, k: Tensor, v: Tensor, tile: int, length: int | None, scale: float | None
) -> None:
    """Raise TypeError or ValueError if this rank's arguments are wrong; see `ring_attention`."""
    if not all(isinstance(x, Tensor) for x in (q, k, v)):
        kinds = ", ".join(type(x).__name__ for x in (q, k, v))
        raise TypeError(f"q, k and v are {kinds}; give torch tensors")
    if length is not None:
        check_whole("length", length, 0, ", the positions of the whole sequence")
    check_whole("tile", tile, 1, ", the keys to compute with at once")
    if scale is not None and not is_number(scale):
        raise TypeError(f"scale is {scale!r}; give a number, or None for 1 / sqrt(D)")
    if not q.is_floating_point() or not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; give one floating dtype")
    shapes = f"q is {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}"
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape or q.shape[::2] != k.shape[::2]:
        raise ValueError(f"{shapes}; give q (B, H, T, D), and k and v (B, K, T, D)")
    if q.shape[3] != k.shape[3] or not q.shape[3]:
        raise ValueError(f"{shapes}; give the heads of all three one width of at least 1")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"{shapes}; the number of key heads has to divide that of query heads")
