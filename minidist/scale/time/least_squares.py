"""Least squares with no negative answers: rates and latencies below zero would predict times below zero.

Of a few unknowns every subset is tried: the others are zero, and of the answers without a negative one that
with the least error is taken. That is what Lawson and Hanson's algorithm finds, too, with fewer trials.

Source: Lawson and Hanson 1974, "Solving Least Squares Problems", chapter 23.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np


def nonnegative(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """The x of 0 or more for which `rows` times x come nearest to `values`."""
    matrix, wanted = np.asarray(rows, float), np.asarray(values, float)
    count = matrix.shape[1]
    scale = np.where(norms := np.linalg.norm(matrix, axis=0), norms, 1.0)
    best, least = np.zeros(count), float(wanted @ wanted)
    for size in range(1, count + 1):
        for chosen in map(list, combinations(range(count), size)):
            answer = np.linalg.lstsq(matrix[:, chosen] / scale[chosen], wanted, rcond=None)[0] / scale[chosen]
            error = float(np.sum((matrix[:, chosen] @ answer - wanted) ** 2))
            if (answer >= 0).all() and error < least * (1 - 1e-12):
                best, least = np.zeros(count), error
                best[chosen] = answer
    return [float(value) for value in best]
