"""BatchNorm when ranks share a batch's rows: statistics over all of them, or each rank's own, averaged later.

A BatchNorm normalizes with the mean and variance of the rows that it sees. On n ranks it sees an n-th of
them, so the ranks train another model than a single process would. `synchronize` mends this. Forward, ranks
gather each channel's count, mean and sum of squared deviations, and combine them. Backward, they sum two
numbers for each channel. Without it every rank normalizes by its own rows and keeps running statistics of
them. `average_statistics` then gives all ranks their mean, before an evaluation or an export reads them.

Source: Chan, Golub and LeVeque 1983, "Algorithms for Computing the Sample Variance", section 3 (combining).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from minidist import comm
from minidist.comm.opaque import opaque, refuse_recorded
from minidist.comm.work import Group, ranks_of
from minidist.parallel.flat.joined_messages import together


def batch_norms(model: nn.Module) -> list[tuple[str, _BatchNorm]]:
    """The model's BatchNorms, with their names."""
    return [(name, part) for name, part in model.named_modules() if isinstance(part, _BatchNorm)]


def synchronize(model: nn.Module, group: Group) -> None:
    """Let each BatchNorm that trains take its statistics over the rows of all the group's ranks, in place.

    Forward, a rank sends (n - 1) (2 C + 1) numbers for C channels; backward, 2 (n - 1) / n 2 C of them. They
    have the dtype of the activations, or float32 for 16 bits. ValueError if there is no BatchNorm, or one
    without running statistics.
    """
    found = batch_norms(model)
    if not found:
        raise ValueError(
            "batch_norm is 'synchronized' and the model has no BatchNorm to synchronize; leave it out"
        )
    for name, norm in found:
        if norm.running_mean is None:
            raise ValueError(
                f"{name or 'the model'} keeps no running statistics, so an evaluation would depend on which "
                "rows a rank has; make it with track_running_stats=True to synchronize it"
            )
    for _, norm in found:
        norm.__dict__["forward"] = _Synchronized(norm, group)


def synchronized(model: nn.Module) -> list[_Synchronized]:
    """What the model's synchronized BatchNorms call, to tell it whether rows are padding."""
    return [norm.forward for _, norm in batch_norms(model) if isinstance(norm.forward, _Synchronized)]


@torch.no_grad()
def average_statistics(model: nn.Module, group: Group) -> None:
    """Give the group's ranks the mean of their BatchNorms' running statistics; a collective if there are any.

    Averaging the running means gives the mean of all rows. Averaging the variances leaves out how far the
    ranks' means lay apart. Sends 2 (n - 1) / n of 8 bytes for each number.
    """
    if len(ranks_of(group)) == 1:
        return
    own = [norm for _, norm in batch_norms(model) if not isinstance(norm.forward, _Synchronized)]
    kept = [x for norm in own for x in (norm.running_mean, norm.running_var) if x is not None]
    means = [x.double() if x.dtype != torch.float64 else x.clone() for x in kept]
    together(means, lambda x: comm.all_reduce(x, "mean", group=group))
    for x, mean in zip(kept, means, strict=True):
        x.copy_(mean)


class _Synchronized:
    """The `forward` of a BatchNorm with statistics over the rows of all ranks.

    is_padding: whether to leave out this rank's rows, as once its loader has ended.
    """

    is_padding = False

    def __init__(self, norm: _BatchNorm, group: Group) -> None:
        self._norm, self._group = norm, group

    @opaque
    def __call__(self, x: Tensor) -> Tensor:
        norm = self._norm
        if not norm.training:
            return type(norm).forward(norm, x)
        norm._check_input_dim(x)  # type: ignore[no-untyped-call]
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        normal, count, mean, variance = _Normalize.apply(wide, norm.eps, self._group, self.is_padding)  # type: ignore[no-untyped-call]
        self._follow(float(count), mean, variance)
        if norm.affine:
            shape = (1, -1, *[1] * (x.dim() - 2))
            normal = normal * norm.weight.view(shape) + norm.bias.view(shape)
        result: Tensor = normal.to(x.dtype)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> _Synchronized:
        return _Synchronized(copy.deepcopy(self._norm, memo), self._group)

    @torch.no_grad()
    def _follow(self, count: float, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics as torch does, with the unbiased variance."""
        norm: Any = self._norm
        norm.num_batches_tracked.add_(1)
        momentum = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
        norm.running_mean.lerp_(mean.to(norm.running_mean), momentum)
        norm.running_var.lerp_((variance * (count / (count - 1))).to(norm.running_var), momentum)


class _Normalize(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) by channel, over the rows of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, eps: float, group: Group, is_padding: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        axes, shape = [0, *range(2, x.dim())], (1, -1, *[1] * (x.dim() - 2))  # x is (B, C, ...)
        seen, channels = x[:0] if is_padding else x, x.shape[1]
        own_count = seen.numel() // max(1, channels)
        own_mean = seen.sum(axes) / max(1, own_count)
        own_squares = (seen - own_mean.view(shape)).square().sum(axes)
        own = torch.cat([x.new_tensor([float(own_count)]), own_mean, own_squares])
        every = comm.all_gather(own, group=group).view(-1, 2 * channels + 1)
        counts, means, squares = every[:, :1], every[:, 1 : channels + 1], every[:, channels + 1 :]
        count = counts.sum()
        if count < 2:
            raise ValueError(
                f"a BatchNorm got {int(count)} values per channel from all ranks; give at least 2 to train"
            )
        mean = (means * counts).sum(0) / count
        variance = (squares.sum(0) + (counts * (means - mean).square()).sum(0)) / count
        scale = (variance + eps).rsqrt()
        normal = (x - mean.view(shape)) * scale.view(shape)
        ctx.save_for_backward(normal, scale, count)
        ctx.axes, ctx.shape, ctx.group, ctx.is_padding = axes, shape, group, is_padding
        ctx.mark_non_differentiable(count, mean, variance)
        return normal, count, mean, variance

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor, None, None, None]:
        refuse_recorded("a synchronized BatchNorm", "leave batch_norm='synchronized' out, or use a GroupNorm")
        normal, scale, count = ctx.saved_tensors
        sums = torch.stack([gradient.sum(ctx.axes), (gradient * normal).sum(ctx.axes)])
        comm.all_reduce(sums, group=ctx.group)
        if not ctx.is_padding:  # padding has no part in the statistics
            of_gradient, of_product = (each.view(ctx.shape) / count for each in sums)
            gradient = gradient - of_gradient - normal * of_product
        return gradient * scale.view(ctx.shape), None, None, None


def fixed_batch_norms(model: nn.Module) -> list[nn.Module]:
    """Put the BatchNorms that train, each with the rows that it sees, in evaluation mode; returns them."""
    found: list[nn.Module] = [
        part
        for _, part in batch_norms(model)
        if part.training and part.running_mean is not None and "forward" not in part.__dict__
    ]
    for part in found:
        part.training = False
    return found
