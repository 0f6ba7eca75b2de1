"""The bytes that a rank sends, in closed form: the formulas of the algorithms' docstrings, as functions.

n is the number of ranks, S the bytes of the buffer, which is the larger of input and output. The formulas are
exact where an algorithm cuts equal parts; otherwise `bytes_sent` counts. They return fractions, which a test
can compare exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction


def formula(
    operation: str,
    algorithm: str,
    rank: int,
    ranks: int,
    size: int,
    source: int = 0,
    node: int | None = None,
) -> Fraction:
    """Bytes that `rank` sends to others, of the S = `size` bytes of the buffer.

    source: for a broadcast. node: for a hierarchical all-reduce, the ranks of a node, which divide n; None
    for one node. KeyError for an unknown operation or algorithm.
    """
    if algorithm == "hierarchical":
        return _hierarchical(ranks, size, node or ranks)
    return _FORMULAS[operation, algorithm]((rank - source) % ranks, ranks, size)


def all_reduce_bytes(size: int, ranks: int) -> int:
    """Bytes that a rank sends in an all-reduce that is a ring, torch's or in memory: 2 (n - 1) / n S."""
    return 2 * (ranks - 1) * size // ranks


def children(index: int, ranks: int) -> int:
    """Children in the binomial tree of a rank, numbered from the root: the bits below its lowest set bit."""
    return sum(index % (2 << i) == 0 and index + (1 << i) < ranks for i in range((ranks - 1).bit_length()))


def subtree(index: int, ranks: int) -> int:
    """Ranks in the subtree of a rank, with itself: at most its lowest set bit."""
    return min(index & -index, ranks - index) if index else ranks


def _tree_reduce_scatter(index: int, n: int, size: int) -> Fraction:
    return (index > 0) * size + Fraction(subtree(index, n) - 1, n) * size


def _tree_all_gather(index: int, n: int, size: int) -> Fraction:
    return (index > 0) * Fraction(subtree(index, n), n) * size + children(index, n) * size


def _halving_doubling(index: int, n: int, size: int) -> Fraction:
    power = 1 << (n.bit_length() - 1)
    folds = index < 2 * (n - power)
    if folds and index % 2 == 0:
        return Fraction(size)
    return 2 * Fraction(power - 1, power) * size + folds * size


def _hierarchical(n: int, size: int, node: int) -> Fraction:
    nodes = n // node
    return 2 * Fraction(node - 1, node) * size + 2 * Fraction(nodes - 1, nodes) * size / node


_FORMULAS: dict[tuple[str, str], Callable[[int, int, int], Fraction]] = {
    ("all_reduce", "ring"): lambda index, n, size: 2 * Fraction(n - 1, n) * size,
    ("all_reduce", "tree"): lambda index, n, size: Fraction(((index > 0) + children(index, n)) * size),
    ("all_reduce", "halving_doubling"): _halving_doubling,
    ("all_reduce", "naive"): lambda index, n, size: Fraction(size if index else (n - 1) * size),
    ("reduce_scatter", "ring"): lambda index, n, size: Fraction(n - 1, n) * size,
    ("reduce_scatter", "tree"): _tree_reduce_scatter,
    ("all_gather", "ring"): lambda index, n, size: Fraction(n - 1, n) * size,
    ("all_gather", "tree"): _tree_all_gather,
    ("broadcast", "ring"): lambda index, n, size: Fraction(size if index < n - 1 else 0),
    ("broadcast", "tree"): lambda index, n, size: Fraction(children(index, n) * size),
    ("all_to_all", "pairwise"): lambda index, n, size: Fraction(n - 1, n) * size,
}
