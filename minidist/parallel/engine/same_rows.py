"""Were ranks that have to pass the same rows given the same? Those that split the model, and not the batch.

A rank that picks rows by its own number, and not by `engine.data_rank`, trains on inputs and targets that do
not belong together, without an error. The first step looks, and each rehearsed one. Where they come from
loaders, each batch looks whether one has ended before another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from operator import itemgetter

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
    for _, x in sorted((each for pair in pairs for each in tensors(pair)), key=itemgetter(0)):
        own.update(raw_bytes(x.resolve_conj()))
    with held_back():
        _require_alike("rows", data_rank, int.from_bytes(own.digest()[:7], "big"))


def require_same_batches(data_rank: int, data_ranks: int, batches: int) -> None:
    """ValueError, on all ranks, where loaders of the same `data_rank` gave different numbers of batches.

    A collective as above, of as many bytes, which ledgers have.
    """
    if data_ranks < comm.size():
        _require_alike("numbers of batches", data_rank, batches)


def _require_alike(what: str, data_rank: int, own: int) -> None:
    told = torch.tensor([[data_rank, own]], device=comm.device())
    everyones = comm.all_gather(told).tolist()
    first: dict[int, tuple[int, int]] = {}
    for rank, (index, theirs) in enumerate(everyones):
        other, known = first.setdefault(index, (rank, theirs))
        if theirs != known:
            raise ValueError(
                f"ranks {other} and {rank} were given different {what}, and all ranks of a pipeline, or of "
                "tp or cp, pass the same: pick them by engine.data_rank of engine.data_ranks, not by the rank"
            )
