"""Attention over one block of keys after another: softmax without the whole row, and its gradient.

The softmax of a row needs the row's largest score and the sum of its exponentials. Both can be kept for the
keys seen so far, together with the weighted sum of values. When a new block raises the largest score, the
sums are multiplied by the exponential of the difference. What remains is one number a row, the log of the
sum, from which the backward pass computes each block's weights again. No matrix is larger than queries by
`tile` keys. A rung of the attention ladder may compute the blocks in its own way (`RungSoftmax`).

Sources: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", section 3; Rabe and Staats
2021, "Self-attention Does Not Need O(n^2) Memory", section 2; Dao et al. 2022, "FlashAttention", section 3.1
and appendix B (the backward pass).

N is batch times key heads, G the query heads that share a key head, T queries, S keys, D the width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minidist.kernels.attention_rung import AttentionRung
from minidist.model.attention import on_rung
from minidist.model.matmul import check_operand


class OnlineSoftmax:
    """Rows of attention over the keys seen so far: `add` blocks in any order, then `finish`.

    The first block with any keys must give each row at least one key that it sees. Sums are kept in the dtype
    of the queries, so use float32 or float64.
    """

    def __init__(self, queries: Tensor) -> None:  # (N, G, T, D)
        rows = (*queries.shape[:3], 1)
        self.mixed = torch.zeros_like(queries, memory_format=torch.contiguous_format)  # (N, G, T, D)
        self.largest = queries.new_full(rows, -torch.inf)
        self.total = queries.new_zeros(rows)

    def add(self, q: Tensor, k: Tensor, v: Tensor, first: int, diagonal: bool, tile: int) -> None:
        """Add keys k and values v, both (N, S, D), for the queries from index `first` on.

        q: (N, G, T, D), all queries, already scaled. diagonal: query i sees keys 0 to i.
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
        """Return the weighted means of the values, (N, G, T, D), and the log of each sum, (N, G, T, 1)."""
        return self.mixed.div_(self.total), self.largest.add_(self.total.log_())


class SoftmaxGradient:
    """The gradient of `OnlineSoftmax`: `add` the same blocks in any order, then read `queries`."""

    def __init__(self, q: Tensor, mixed: Tensor, log_total: Tensor, gradient: Tensor) -> None:
        self._q, self._gradient, self._log_total = q, gradient, log_total
        # A row's sum over all keys of weight times the weight's gradient, from the row's result.
        self._mean = (gradient * mixed).sum(-1, keepdim=True)  # (N, G, T, 1)
        # (N, G, T, D), the gradient of the scaled queries from the blocks added so far.
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


class RungSoftmax(OnlineSoftmax):
    """`OnlineSoftmax` on a rung: of each block it has the result, and the log of the sum."""

    def __init__(self, queries: Tensor, rung: AttentionRung) -> None:
        check_operand("q", queries, rung)
        super().__init__(queries)
        self._rung = rung
        self.total += 1  # `largest` is the log of the whole sum

    def add(self, q: Tensor, k: Tensor, v: Tensor, first: int, diagonal: bool, tile: int) -> None:
        """As `OnlineSoftmax.add`, with a tile of the rung's own."""
        found, logs = on_rung(self._rung, *_for_rung(q[:, :, first:], k, v), causal=diagonal)
        mixed, before = self.mixed[:, :, first:], self.largest[:, :, first:]
        together = torch.logaddexp(before, logs[..., None])
        mixed.mul_((before - together).exp_()).add_(found.mul_((logs[..., None] - together).exp_()))
        before.copy_(together)


class RungGradient(SoftmaxGradient):
    """`SoftmaxGradient` on a rung."""

    def __init__(self, rung: AttentionRung, *given: Tensor) -> None:  # as for SoftmaxGradient
        super().__init__(*given)
        self._rung, self._given = rung, given

    def add(self, k: Tensor, v: Tensor, into: Tensor, first: int, diagonal: bool, tile: int) -> None:
        """As `SoftmaxGradient.add`, with a tile of the rung's own."""
        q, mixed, logs, gradient = (x[:, :, first:] for x in self._given)
        given = (*_for_rung(q, k, v), mixed, logs[..., 0], gradient)
        q_gradient, *found = on_rung(self._rung, *given, causal=diagonal)
        self.queries[:, :, first:] += q_gradient.mul_(q.shape[3] ** 0.5)
        into += torch.stack([x.sum(1) for x in found])


def _for_rung(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Undo the rung's factor 1 / sqrt(D), and give each query head its keys: all (N, G, _, D)."""
    k, v = (x[:, None].expand(-1, q.shape[1], -1, -1) for x in (k, v))
    return q * q.shape[3] ** 0.5, k, v


def _scores(q: Tensor, k: Tensor, diagonal: bool = False) -> Tensor:  # (N, G, T, D), (N, S, D)
    """Return the products of all queries and keys, (N, G, T, S); with `diagonal`, -inf for later keys."""
    scores = torch.bmm(q.flatten(1, 2), k.transpose(1, 2)).view(*q.shape[:3], k.shape[1])
    if diagonal:
        size = k.shape[1]
        later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
        scores[:, :, :size].masked_fill_(later, -torch.inf)
    return scores


def _times(weights: Tensor, v: Tensor) -> Tensor:  # (N, G, T, S), (N, S, D) -> (N, G, T, D)
    return torch.bmm(weights.flatten(1, 2), v).view(*weights.shape[:3], v.shape[2])


def _times_transposed(weights: Tensor, x: Tensor) -> Tensor:  # (N, G, T, S), (N, G, T, D) -> (N, S, D)
    """Sum over the queries of all heads that share a key head."""
    return torch.bmm(weights.flatten(1, 2).transpose(1, 2), x.flatten(1, 2))
