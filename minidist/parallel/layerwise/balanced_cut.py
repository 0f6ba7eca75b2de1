"""Where to cut a chain of layers, given what each layer weighs. Needs no torch.

The slowest part of a pipeline sets the pace, so the heaviest part is made as light as possible. Whatever the
cut, the heaviest part weighs as much as some run of consecutive layers. A bisection over those weights finds
the smallest limit for which the parts suffice, each filled up to the limit. Under that limit, a dynamic
program finds the most even parts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise


def cut_by_weights(weights: Sequence[float], parts: int) -> list[range]:
    """Cut a chain into 1 to len(weights) consecutive parts so that the heaviest is as light as possible.

    Among such cuts, the one with the least sum of squares is taken: its parts differ least. Returns the
    indices of each part's layers.
    """
    count = len(weights)
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)

    def suffices(most: float) -> bool:
        """Whether `parts` parts are enough if none may be heavier than `most`."""
        begin, needed = 0, 1
        for end in range(1, count + 1):
            if sums[end] - sums[begin] > most:
                begin, needed = end - 1, needed + 1
                if sums[end] - sums[begin] > most:
                    return False
        return needed <= parts

    def best(most: float) -> list[tuple[float, list[int]]]:
        """For each number of first layers: the least sum of squares and the cuts, no part over `most`."""
        found: list[tuple[float, list[int]]] = [(0.0, [0])] + [(float("inf"), [])] * count
        for part in range(1, parts + 1):
            found = [
                min(
                    (
                        (found[begin][0] + (sums[end] - sums[begin]) ** 2, [*found[begin][1], end])
                        for begin in range(part - 1, end)
                        if found[begin][1] and sums[end] - sums[begin] <= most
                    ),
                    default=(float("inf"), []),
                    key=lambda each: each[0],
                )
                for end in range(count + 1)
            ]
        return found

    runs = sorted({sums[end] - sums[begin] for end in range(count + 1) for begin in range(end)})
    lightest = bisect_left(runs, True, key=suffices)
    edges = best(runs[lightest])[count][1]
    return [range(begin, end) for begin, end in pairwise(edges)]
