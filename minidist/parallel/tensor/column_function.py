"""Column-parallel maps of one input as one operation, which talks while it computes.

Attention's queries, keys and values read the same input. As three layers each would sum its input's gradient
over the ranks; as one operation with three outputs they send one message. And since each gradient by a weight
needs nothing of that sum, they are computed while it is under way.

Sources: Shoeybi et al. 2019, section 3 (f in front of the three maps); Korthikanti et al. 2022, section 4.2.2
(keep the share of the input, gather it again in the backward pass while the input's gradient is computed).

Shapes: x (..., T, K); a weight (M, K), M the rank's features; y (..., T, M). Under sequence parallelism x is
a share (..., T / n, K), and y is of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from minidist.comm.work import Group
from minidist.parallel.tensor.collectives import start_all_gather, start_all_reduce, start_reduce_scatter

SEQUENCE = -2


def column_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group: Group = None,
    sequence_parallel: bool = False,
    overlap: bool = True,
) -> list[Tensor]:
    """Map x by every weight: `copy_to_ranks`, or `gather_sequence`, and the linear maps after it.

    Forward: sends nothing; under sequence parallelism gathers x, (n - 1) S. Backward: sums the gradient of x,
    2 (n - 1) / n S; under sequence parallelism gathers x again, (n - 1) S, and reduces and scatters its
    gradient, as many. S: bytes of x. Where x needs no gradient nothing is summed.

    overlap: compute the weights' gradients while x's is under way.
    """
    return list(
        _ColumnLinear.apply(x, group, sequence_parallel, overlap, len(weights), *weights, *biases)  # type: ignore[no-untyped-call]
    )


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: Group,
        sequence_parallel: bool,
        overlap: bool,
        count: int,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        weights: Any = parameters[:count]
        biases: Any = parameters[count:]
        ctx.save_for_backward(x, *weights)
        ctx.group, ctx.sequence_parallel, ctx.overlap, ctx.count = group, sequence_parallel, overlap, count
        whole = start_all_gather(x, SEQUENCE, group)() if sequence_parallel else x
        return tuple(functional.linear(whole, w, b) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        needs_x, needs = ctx.needs_input_grad[0], ctx.needs_input_grad[5:]
        needs_w, needs_b = needs[: ctx.count], needs[ctx.count :]
        rows = [grad.reshape(-1, w.shape[0]) for grad, w in zip(grads, weights, strict=True)]  # (N, M)

        # Launch: the input again, where this rank has kept a share.
        again = None
        if ctx.sequence_parallel and any(needs_w):
            again = start_all_gather(x, SEQUENCE, ctx.group, overlap=ctx.overlap)

        # Compute the gradient by the input, and launch its sum.
        summed = None
        if needs_x:
            x_grad = rows[0] @ weights[0]
            for g, w in zip(rows[1:], weights[1:], strict=True):
                x_grad.addmm_(g, w)
            x_grad = x_grad.view(*grads[0].shape[:-1], x.shape[-1])
            if ctx.sequence_parallel:
                summed = start_reduce_scatter(x_grad, SEQUENCE, ctx.group, ctx.overlap)
            else:
                summed = start_all_reduce(x_grad, ctx.group, ctx.overlap)

        # Compute the gradients by the parameters.
        inputs = (x if again is None else again()).reshape(-1, x.shape[-1])  # (N, K)
        w_grads = [g.t() @ inputs if need else None for g, need in zip(rows, needs_w, strict=True)]
        b_grads = [g.sum(0) if need else None for g, need in zip(rows, needs_b, strict=True)]

        # Wait.
        return None if summed is None else summed(), None, None, None, None, *w_grads, *b_grads
