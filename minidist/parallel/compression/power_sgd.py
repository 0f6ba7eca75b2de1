"""PowerSGD: send a matrix's gradient as the product of two thin factors.

M (m x k) is approximated by P Q^T with r columns each. One step of the power method for each training step is
enough, because it starts from the last step's Q and because error feedback adds what the product leaves out
to the next gradient. Each factor is linear in M if the other is fixed, so ranks can sum them with an
all-reduce.

Source: Vogels et al. 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minidist._arguments import check_whole
from minidist.comm.algorithms.formulas import all_reduce_bytes
from minidist.parallel.compression.compressor import Compression, Reduction, Views
from minidist.parallel.flat.gradients import GradientComm, PendingMessage


@dataclass(frozen=True)
class PowerSGD(Compression):
    """Sends factors of `rank` columns for each matrix; vectors and matrices too small to gain are sent whole.

    A parameter with more than two dimensions is a matrix of its first dimension and all others. With V
    elements sent whole, a rank sends two all-reduces: of the sum of m r, plus V, and of the sum of k r
    elements. Memory: one more copy of the gradients.
    """

    rank: int = 4  # r, columns of a factor
    error_feedback: bool = True  # False drops what the factors leave out, for comparison
    warm_start: bool = True  # False draws a new Q in every step
    seed: int = 0  # of the first Q, the same on all ranks

    def __post_init__(self) -> None:
        check_whole("rank", self.rank, 1, ", the columns of a factor")

    def reduction(self, flat: Tensor, views: Views, over: GradientComm, number: int) -> Reduction:
        """Two all-reduces, of all the bucket's P and of all its Q."""
        return _LowRank(flat, views, over, self, number)

    def bytes_sent(self, tensors: Sequence[Tensor], ranks: int) -> int:
        """2 (n - 1) / n of P and what is sent whole, and of Q."""
        shapes = [self.matrix(tensor.shape) for tensor in tensors]
        whole = sum(tensor.numel() for tensor, shape in zip(tensors, shapes, strict=True) if shape is None)
        rows, columns = (sum(shape[side] for shape in shapes if shape is not None) for side in (0, 1))
        element = sent_dtype(tensors[0].dtype).itemsize
        messages = (rows * self.rank + whole, columns * self.rank)
        return sum(all_reduce_bytes(elements * element, ranks) for elements in messages)

    def matrix(self, shape: torch.Size) -> tuple[int, int] | None:
        """Return a parameter's rows and columns as a matrix, fewer rows; None if it is sent whole."""
        if len(shape) < 2 or not shape.numel():
            return None
        m, k = sorted((shape[0], shape.numel() // shape[0]))
        return (m, k) if self.rank * (m + k) < m * k else None


def sent_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which factors are computed and sent: there is no QR in half precision."""
    return dtype if dtype.itemsize > 2 else torch.float32


class _LowRank(Reduction):
    def __init__(
        self, flat: Tensor, views: Views, over: GradientComm, options: PowerSGD, number: int
    ) -> None:
        self._flat, self._gradient_comm, self._options, r = flat, over, options, options.rank
        self.error = torch.zeros_like(flat) if options.error_feedback else None
        self._generator = torch.Generator().manual_seed(options.seed + number)
        # The shorter side is the rows of M (m, k), so that an orthogonal P (m, r) spans all of M if r is m.
        matrices = [view.flatten(1) for view in views if options.matrix(view.shape)]
        self._matrices = [m if m.shape[0] <= m.shape[1] else m.t() for m in matrices]
        self._whole = [view.view(-1) for view in views if not options.matrix(view.shape)]

        dtype = sent_dtype(flat.dtype)
        elements = sum(view.numel() for view in self._whole)
        rows, columns = (sum(m.shape[side] * r for m in self._matrices) for side in (0, 1))
        self._first = over.zeros(rows + elements, dtype, flat.device)
        self._second = over.zeros(columns, dtype, flat.device)
        self._ps = _views(self._first, [(m.shape[0], r) for m in self._matrices])
        self._qs = _views(self._second, [(m.shape[1], r) for m in self._matrices])
        self._sent_whole = _views(self._first[rows:], [(view.numel(),) for view in self._whole])
        self._draw()

    def _draw(self) -> None:
        for q in self._qs:
            q.copy_(torch.randn(q.shape, generator=self._generator, dtype=q.dtype))

    def run(self) -> Iterator[PendingMessage]:
        if not self._options.warm_start:
            self._draw()
        if self.error is not None:
            self._flat += self.error
            self.error.copy_(self._flat)
        for matrix, p, q in zip(self._matrices, self._ps, self._qs, strict=True):
            torch.matmul(matrix.to(q.dtype), q, out=p)
        for view, sent in zip(self._whole, self._sent_whole, strict=True):
            sent.copy_(view)
        yield self._gradient_comm.all_reduce(self._first)

        for matrix, p, q in zip(self._matrices, self._ps, self._qs, strict=True):
            p.copy_(torch.linalg.qr(p).Q)
            torch.matmul(matrix.t().to(p.dtype), p, out=q)
        if self._matrices:
            yield self._gradient_comm.all_reduce(self._second)

        for matrix, p, q in zip(self._matrices, self._ps, self._qs, strict=True):
            matrix.copy_(p @ q.t())
        for view, sent in zip(self._whole, self._sent_whole, strict=True):
            view.copy_(sent)
        if self.error is not None:  # each rank keeps its gradient, less its part of what was applied
            self.error.sub_(self._flat, alpha=1 / self._gradient_comm.ranks)
            for view in self._whole:
                start = view.storage_offset() - self._flat.storage_offset()
                self.error[start : start + view.numel()].zero_()


def _views(flat: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """Views of `flat` in these shapes, one after the other."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    parts = torch.split_with_sizes(flat[: sum(sizes)], sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
