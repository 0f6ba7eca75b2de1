"""What ring attention takes: one rank's arguments, and those of all ranks together.

Ranks that differ in a shape would be found too late, in the middle of a block, or not at all where the bytes
are as many: so each tells the others eight numbers before the first block goes round.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minidist import comm
from minidist.comm.work import Group, ranks_of
from minidist.parallel.context import zigzag_order

TOLD = 8
"""Numbers that a rank tells the others of its arguments."""
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def agreed_length(q: Tensor, k: Tensor, length: int | None, causal: bool, group: Group) -> int:
    """The length of the whole sequence, where the ranks' arguments go together.

    Every call asks: a rank that asked for shapes that are new to it alone would wait for ranks that do not.
    A block of another rank's size would end the process in gloo, one of the same size give wrong numbers.
    """
    ranks = len(ranks_of(group))
    batch, heads, own, width = q.shape
    number = _DTYPES.index(q.dtype) if q.dtype in _DTYPES else -1
    told = [own, batch, heads, k.shape[1], width, number, -1 if length is None else length, bool(causal)]
    found = comm.all_gather(torch.tensor(told, device="cpu"), group=group).view(ranks, TOLD).tolist()
    for rank, each in enumerate(found):
        if each[1:] != found[0][1:]:
            raise ValueError(
                f"the ranks give ring_attention other arguments: rank 0 {_described(found[0])}, and "
                f"rank {rank} {_described(each)}; give all the same but for the positions, T"
            )
    sizes = [each[0] for each in found]
    length = sum(sizes) if length is None else length
    wanted = [zigzag_order.size(length, ranks, rank) for rank in range(ranks)]
    if sizes != wanted:
        raise ValueError(
            f"the ranks have {sizes} positions, and a sequence of {length} is dealt in {wanted} in "
            "zigzag order; cut the sequence with SequenceShare"
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
    """TypeError or ValueError where this rank's arguments are wrong; see `ring_attention`."""
    if not all(isinstance(x, Tensor) for x in (q, k, v)):
        kinds = ", ".join(type(x).__name__ for x in (q, k, v))
        raise TypeError(f"q, k and v are {kinds}; give torch tensors")
    for name, value in (("length", length), ("tile", tile)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise TypeError(f"{name} is {value!r}; give a whole number")
    if scale is not None and not isinstance(scale, int | float):
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
    if length is not None and length < 0:
        raise ValueError(f"length is {length}; give the number of positions of the whole sequence")
    if tile < 1:
        raise ValueError(f"tile is {tile}; give at least 1 key")
