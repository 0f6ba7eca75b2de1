"""How many bytes a rank sends, in closed form: what the algorithms' docstrings say, as functions.

n is the number of ranks, S the bytes of the buffer (of the (n k) input or output, where one of the two is
smaller). The formulas hold exactly where the parts that an algorithm cuts are equal; otherwise `bytes_sent`
counts. They come out as fractions, so that a test can compare them exactly.
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
    """Bytes that `rank` sends to others.

    Args:
        operation: "all_reduce", ...
        algorithm: "ring", ...
        rank: which rank.
        ranks: n, how many there are.
        size: S, bytes of the buffer.
        source: of a broadcast.
        node: of a hierarchical all-reduce: ranks of each node, which divide n; None for all on one.

    Raises:
        KeyError: no such operation or algorithm.
    """
    place = (rank - source) % ranks
    if algorithm == "hierarchical":
        return _hierarchical(ranks, size, node or ranks)
    return _FORMULAS[operation, algorithm](place, ranks, size)


def children(place: int, ranks: int) -> int:
    """Children of a rank in the binomial tree, counted from the root: the bits below its lowest set bit."""
    return sum(place % (2 << i) == 0 and place + (1 << i) < ranks for i in range((ranks - 1).bit_length()))


def subtree(place: int, ranks: int) -> int:
    """Ranks in a rank's subtree of the binomial tree, with itself: at most its lowest set bit."""
    return min(place & -place, ranks - place) if place else ranks


def _ring_broadcast(place: int, n: int, size: int) -> Fraction:
    return Fraction(size if place < n - 1 else 0)


def _tree_all_reduce(place: int, n: int, size: int) -> Fraction:
    return Fraction(((place > 0) + children(place, n)) * size)


def _tree_reduce_scatter(place: int, n: int, size: int) -> Fraction:
    return (place > 0) * size + Fraction(subtree(place, n) - 1, n) * size


def _tree_all_gather(place: int, n: int, size: int) -> Fraction:
    return (place > 0) * Fraction(subtree(place, n), n) * size + children(place, n) * size


def _halving_doubling(place: int, n: int, size: int) -> Fraction:
    power = 1 << (n.bit_length() - 1)
    folds = place < 2 * (n - power)
    if folds and place % 2 == 0:
        return Fraction(size)
    return 2 * Fraction(power - 1, power) * size + folds * size


def _hierarchical(n: int, size: int, node: int) -> Fraction:
    nodes = n // node
    return 2 * Fraction(node - 1, node) * size + 2 * Fraction(nodes - 1, nodes) * size / node


_FORMULAS: dict[tuple[str, str], Callable[[int, int, int], Fraction]] = {
    ("all_reduce", "ring"): lambda place, n, size: 2 * Fraction(n - 1, n) * size,
    ("all_reduce", "tree"): _tree_all_reduce,
    ("all_reduce", "halving_doubling"): _halving_doubling,
    ("all_reduce", "naive"): lambda place, n, size: Fraction(size if place else (n - 1) * size),
    ("reduce_scatter", "ring"): lambda place, n, size: Fraction(n - 1, n) * size,
    ("reduce_scatter", "tree"): _tree_reduce_scatter,
    ("all_gather", "ring"): lambda place, n, size: Fraction(n - 1, n) * size,
    ("all_gather", "tree"): _tree_all_gather,
    ("broadcast", "ring"): _ring_broadcast,
    ("broadcast", "tree"): lambda place, n, size: Fraction(children(place, n) * size),
    ("all_to_all", "pairwise"): lambda place, n, size: Fraction(n - 1, n) * size,
}
