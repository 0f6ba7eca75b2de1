"""Were ranks that have to pass the same rows given the same? Those that split the model, and not the batch.

A rank that picks rows by its own number, and not by `engine.data_rank`, trains on inputs and targets that do
not belong together, without an error. The first step looks, and each rehearsed one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from minidist import comm
from minidist.comm.ledgers import held_back
from minidist.parallel.contract.batch import Pair, rows_of, tensors
from minidist.parallel.flat.gathering import raw_bytes


def require_same_rows(data_rank: int, data_ranks: int, pairs: Sequence[Pair]) -> None:
    """ValueError, on all ranks, where two of the same `data_rank` were given different rows.

    A collective where ranks share layers, tokens or matrices: an all-gather of 16 bytes, which no ledger has.
    """
    if data_ranks == comm.size():
        return
    own = hashlib.sha256(repr([rows_of(inputs) for inputs, _ in pairs]).encode())
    for _, x in (each for pair in pairs for each in tensors(pair)):
        own.update(raw_bytes(x.resolve_conj()))
    told = [data_rank, int.from_bytes(own.digest()[:7], "big")]
    with held_back():
        everyones = comm.all_gather(torch.tensor(told, device=comm.device())).view(-1, len(told)).tolist()
    first: dict[int, tuple[int, int]] = {}
    for rank, (index, digest) in enumerate(everyones):
        other, known = first.setdefault(index, (rank, digest))
        if digest != known:
            raise ValueError(
                f"ranks {other} and {rank} were given different rows, and all ranks of a pipeline, or of tp "
                "or cp, pass the same: pick them by engine.data_rank of engine.data_ranks, not by the rank"
            )
