"""Where a tensor is cut between ranks: sizes that they do not divide are split as evenly as can be.

Rank r of n gets units u r / n to u (r + 1) / n of u, so that shares differ by one unit at most. A unit is one
row or column, or what must stay together, such as the rows of an attention head. Nothing is padded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from minidist.comm.work import Group, rank_in, ranks_of


@dataclass(frozen=True)
class Cut:
    """The box of a whole tensor that a rank holds.

    The first `sizes` elements in each dimension of the rank's tensor are that box; what is padding beyond is
    zero, has gradient zero, and stays so.
    """

    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]  # where the box begins in it
    sizes: tuple[int, ...]  # of the box


class TensorParallel(nn.Module, ABC):
    """A module that holds its rank's part of some parameters.

    Attributes:
        group: the ranks that share them; None for all.
        sequence_parallel: whether each rank has a share of the sequence outside of the parts that are cut.
    """

    group: Group
    sequence_parallel: bool

    @abstractmethod
    def cuts(self) -> dict[str, Cut]:
        """For each own parameter that is cut its `Cut`."""


def cuts(module: nn.Module) -> dict[str, Cut]:
    """For the name of each parameter of `module` that is cut where in the whole this rank's part is.

    The others are whole on every rank, and so are their gradients after a backward pass, the same on all. A
    tied parameter is there under each of its names.
    """
    found = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, TensorParallel):
            for name, cut in part.cuts().items():
                found[f"{prefix}.{name}" if prefix else name] = cut
    return found


def share(size: int, group: Group = None, unit: int = 1, what: str = "the tensor") -> range:
    """This rank's part of `size` elements, that are cut between units.

    what: for the error: what is cut.

    Raises:
        ValueError: there are more ranks than units, or `unit` does not divide `size`.
    """
    if unit < 1 or size % unit:
        raise ValueError(f"{what} has size {size}, which units of {unit} do not divide; give another unit")
    ranks, units = len(ranks_of(group)), size // unit
    if units < ranks:
        things = f"{units}" if unit == 1 else f"{units} units of {unit}"
        raise ValueError(
            f"{what} has size {size}: {things} cannot be shared by {ranks} tensor-parallel ranks; "
            f"use at most {units}"
        )
    return share_of(size, rank_in(group), ranks, unit)


def share_of(size: int, rank: int, ranks: int, unit: int = 1) -> range:
    """The part of `size` elements that is a rank's; it may be empty."""
    units = size // unit
    return range(units * rank // ranks * unit, units * (rank + 1) // ranks * unit)


def sizes_of(size: int, ranks: int, unit: int = 1) -> Sequence[int]:
    """How many elements each rank has."""
    return [len(share_of(size, rank, ranks, unit)) for rank in range(ranks)]
