"""Attention to one block of keys after another: softmax without the whole row, and its gradient.

A row's softmax needs its largest score and the sum of the exponentials. Both can be kept as they are so far,
together with the sum of values that they weight: a new block that raises the largest score makes what was
summed fade by the exponential of the difference. What stays is one number a row, the log of the sum, from
which the backward pass computes each block's weights again. No matrix is larger than queries by `tile` keys.

Sources: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", section 3; Rabe and Staats
2021, "Self-attention Does Not Need O(n^2) Memory", section 2; Dao et al. 2022, "FlashAttention", section 3.1
and appendix B (the backward pass).

N batch times key heads, G query heads that share a key head, T queries, S keys, D width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor


class OnlineSoftmax:
    """Rows of attention as far as keys have come: `add` blocks in any order, then `finish`.

    Each row has to see a key of the first block that is added with any. Everything is in the dtype of the
    queries that come; sums are kept in it, so let it be float32 or float64.
    """

    def __init__(self, queries: Tensor) -> None:  # (N, G, T, D)
        rows = (*queries.shape[:3], 1)
        self.mixed = torch.zeros_like(queries, memory_format=torch.contiguous_format)  # (N, G, T, D)
        self.largest = queries.new_full(rows, -torch.inf)
        self.total = queries.new_zeros(rows)

    def add(self, q: Tensor, k: Tensor, v: Tensor, first: int, diagonal: bool, tile: int) -> None:
        """Add keys k and values v, both (N, S, D), for the queries from `first` on.

        q: (N, G, T, D), all queries, scaled. diagonal: query i sees keys 0 to i.
        """
        for start in range(0, k.shape[1], tile):
            keys, rows = slice(start, start + tile), slice(start if diagonal else first, None)
            scores = _scores(q[:, :, rows], k[:, keys], diagonal)
            mixed, largest, total = (x[:, :, rows] for x in (self.mixed, self.largest, self.total))
            higher = torch.maximum(largest, scores.amax(-1, keepdim=True))
            weights = scores.sub_(higher).exp_()
            fade = (largest - higher).exp_()
            total.mul_(fade).add_(weights.sum(-1, keepdim=True))
            mixed.mul_(fade).add_(_times(weights, v[:, keys]))
            largest.copy_(higher)

    def finish(self) -> tuple[Tensor, Tensor]:
        """The weighted means of the values, (N, G, T, D), and the log of each row's sum, (N, G, T, 1)."""
        return self.mixed.div_(self.total), self.largest.add_(self.total.log_())


class SoftmaxGradient:
    """The gradient of `OnlineSoftmax`: blocks again in any order, each of which gets its keys' and values'.

    Attributes:
        queries: (N, G, T, D), the gradient of the scaled queries, from the blocks that were added.
    """

    def __init__(self, q: Tensor, mixed: Tensor, log_total: Tensor, gradient: Tensor) -> None:
        self._q, self._gradient, self._log_total = q, gradient, log_total
        # The sum over all keys of weight times weight's gradient, a row: from what the row became.
        self._mean = (gradient * mixed).sum(-1, keepdim=True)  # (N, G, T, 1)
        self.queries = torch.zeros_like(q, memory_format=torch.contiguous_format)

    def add(self, k: Tensor, v: Tensor, into: Tensor, first: int, diagonal: bool, tile: int) -> None:
        """Add the gradients of keys and values, both (N, S, D), to `into`, (2, N, S, D)."""
        for start in range(0, k.shape[1], tile):
            keys, rows = slice(start, start + tile), slice(start if diagonal else first, None)
            q, gradient = self._q[:, :, rows], self._gradient[:, :, rows]
            weights = _scores(q, k[:, keys], diagonal).sub_(self._log_total[:, :, rows]).exp_()
            into[1, :, keys] += _times_transposed(weights, gradient)
            scores = _scores(gradient, v[:, keys]).sub_(self._mean[:, :, rows]).mul_(weights)
            into[0, :, keys] += _times_transposed(scores, q)
            self.queries[:, :, rows] += _times(scores, k[:, keys])


def _scores(q: Tensor, k: Tensor, diagonal: bool = False) -> Tensor:  # (N, G, T, D), (N, S, D)
    """Products of all queries and keys, (N, G, T, S); where `diagonal`, -inf for keys after a query."""
    scores = torch.bmm(q.flatten(1, 2), k.transpose(1, 2)).view(*q.shape[:3], k.shape[1])
    if diagonal:
        size = k.shape[1]
        later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
        scores[:, :, :size].masked_fill_(later, -torch.inf)
    return scores


def _times(weights: Tensor, v: Tensor) -> Tensor:  # (N, G, T, S), (N, S, D) -> (N, G, T, D)
    return torch.bmm(weights.flatten(1, 2), v).view(*weights.shape[:3], v.shape[2])


def _times_transposed(weights: Tensor, x: Tensor) -> Tensor:  # (N, G, T, S), (N, G, T, D) -> (N, S, D)
    """Summed over queries, those of all heads that share a key head."""
    return torch.bmm(weights.flatten(1, 2).transpose(1, 2), x.flatten(1, 2))
