"""The forms in which a caller gives batches to an engine, and loaders that end at different times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from minidist import comm
from minidist.comm.work import Group, rank_in, ranks_of
from minidist.parallel.contract.batch import mapped
from minidist.parallel.flat.gathering import gather_values

Pair = tuple[Any, Any]
"""Inputs and targets; the same object twice if the batch is one."""


class _Nothing:
    """Stands for targets that were not given; None would be a mistake."""


NOTHING: Any = _Nothing()


def pairs_of(inputs: Any, targets: Any, is_one: bool) -> list[Pair]:
    """The batches of a step as (inputs, targets).

    Without targets, a pair is inputs and targets, as loaders give them, and anything else is a batch. A list
    is of batches, unless it has a tensor in it: torch's loaders give batches as lists.

    is_one: whether the loss takes the batch as one, pair or not.
    """
    if targets is not NOTHING:
        batch = inputs, targets
        return [(batch, batch)] if is_one else [batch]
    if is_list(inputs):
        if not inputs:
            raise ValueError("the list of batches is empty; give at least one batch")
        return [pair for each in inputs for pair in pairs_of(as_batch(each), NOTHING, is_one)]
    batch = as_batch(inputs)
    if is_one or not isinstance(batch, tuple) or len(batch) != 2:
        return [(batch, batch)]
    return [batch]


def is_list(given: Any) -> bool:
    """Whether it is a list of batches, and not a batch."""
    return isinstance(given, list) and not any(isinstance(each, Tensor) for each in given)


def is_loader(given: Any) -> bool:
    """Whether it gives batches, one after the other."""
    if isinstance(given, Tensor | Mapping | tuple | str) or not isinstance(given, Iterable):
        return False
    return not isinstance(given, list) or is_list(given)


def as_batch(given: Any) -> Any:
    """Turn a loader's list of tensors into a tuple; other batches stay as they are."""
    return tuple(given) if isinstance(given, list) else given


def aligned(loader: Iterable[Any], group: Group) -> Iterator[tuple[Any, bool]]:
    """A rank's batches, and whether each counts: until all of the group's ranks have run out.

    A rank that has run out gets its last batch again, which does not count. One that has none at all gets the
    first batch of another rank. Each batch sends n - 1 bytes, and the end as many.
    """
    batches, batch, is_first = iter(loader), NOTHING, True
    while True:
        new = next(batches, NOTHING)
        own = torch.tensor([new is not NOTHING], dtype=torch.uint8, device=comm.device())
        have = comm.all_gather(own, group=group).tolist() if len(ranks_of(group)) > 1 else own.tolist()
        if not any(have):
            return
        if is_first and not all(have):
            sends = have.index(1) == rank_in(group)
            own_first = mapped(Tensor.cpu, as_batch(new)) if sends else None
            batch = gather_values(own_first, group)[have.index(1)]
        if new is not NOTHING:
            batch = as_batch(new)
        is_first = False
        yield batch, new is not NOTHING
