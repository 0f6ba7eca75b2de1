"""Which part of a matrix's rows, columns or heads each tensor-parallel rank has. Needs no torch.

The parts differ by at most one unit, such as an attention head. Source: Shoeybi et al. 2019, "Megatron-LM",
section 3, which cuts matrices so.
"""

from __future__ import annotations


def share_of(size: int, rank: int, ranks: int, unit: int = 1) -> range:
    """Return a rank's part of `size` elements, which may be empty."""
    units = size // unit
    return range(units * rank // ranks * unit, units * (rank + 1) // ranks * unit)


def sizes_of(size: int, ranks: int) -> list[int]:
    """Return how many elements each rank has."""
    return [len(share_of(size, rank, ranks)) for rank in range(ranks)]
