"""Low precision: multiply numbers of 8 bits, scaled so that they use all of the little range that there is.

A Linear multiplies three times: x W^T, and backward g W and g^T x. Hardware with FP8 units does this twice as
fast in 8 bits as in 16. x and W are rounded to e4m3 (4 bits of exponent, 3 of fraction, up to 448), and the
gradient g to e5m2 (up to 57,344, but 2 bits of fraction). Numbers that are too large or too small for a
format would be lost, so they are multiplied by a scale first, and divided by it after rounding:

| Recipe | Which numbers share a scale |
|---|---|
| current | a tensor: the format's largest number over the tensor's |
| delayed | a tensor, by its largest number in the last 16 steps, which is known before the tensor is |
| blocks | 1 x 128 numbers of x and g along the sum, 128 x 128 of W: an outlier spoils only its block |
| mx | 1 x 32 numbers along the sum, and scales are powers of two |

Sums, all other layers and the optimizer keep the model's dtype. This page multiplies in it as well: it has
the results of 8 bits, and saves nothing. All else is as in `one_process`. Sends nothing.

Sources: Micikevicius et al. 2022, "FP8 Formats for Deep Learning"; DeepSeek-AI 2024, "DeepSeek-V3", section
3.3.2; Open Compute Project 2023, "OCP Microscaling Formats (MX) Specification", section 6.3.
Lesson: 15 "All together"
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minidist.plain.gpt import Batch, MakeOptimizer, loss_of

E4M3 = 3, 2.0**-9, 448.0, 448.0  # bits of the fraction; smallest and largest number; what is beyond
E5M2 = 2, 2.0**-16, 57344.0, torch.inf


class Recipe(NamedTuple):
    """A row of the table above."""

    block: int = 0  # 0: all of a tensor
    weight_rows: int = 1
    powers: bool = False
    history: int = 0  # steps


ROWS = {"current": Recipe(), "delayed": Recipe(history=16)}
ROWS |= {"blocks": Recipe(128, weight_rows=128), "mx": Recipe(32, powers=True)}


def rounded(x: Tensor, to: tuple[int, float, float, float]) -> Tensor:
    """Round to the nearest number of a format, of two equally near to the even one."""
    fraction, least, most, beyond = to
    exponent = x.frexp().exponent - 1 - fraction  # |x| has a step of 2^exponent
    step = torch.ldexp(torch.ones_like(x), exponent).clamp(min=least)
    y = torch.round(x / step) * step
    return torch.where(y.abs() > most, y.sign() * beyond, y)


class Product(torch.autograd.Function):
    """x W^T and its gradients, of rounded numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: "LowLinear") -> Tensor:  # (N, K), (M, K)
        """Return (N, M); the sum goes along K."""
        ctx.save_for_backward(x, weight)
        ctx.low = layer.low
        return layer.low("x", x) @ layer.low("w", weight).t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:  # (N, M)
        """Return the gradients of x and W; the sums go along M, and along N."""
        (x, weight), low = ctx.saved_tensors, ctx.low
        return low("g", g) @ low("w", weight.t()).t(), low("g", g.t()) @ low("x", x.t()).t(), None


class LowLinear(nn.Linear):
    """A Linear with products of 8-bit numbers."""

    row: Recipe
    past: list[dict[str, Tensor]]  # the largest x, w and g of each step, this one's last

    def forward(self, x: Tensor) -> Tensor:  # (..., K)
        """Return (..., M)."""
        return Product.apply(x.flatten(0, -2), self.weight, self).unflatten(0, x.shape[:-1]) + self.bias

    def low(self, name: str, x: Tensor) -> Tensor:
        """Scale a matrix, round it and divide it again. Its product sums along the last dimension."""
        row, to, (N, K) = self.row, E5M2 if name == "g" else E4M3, x.shape
        height, width = (row.weight_rows if name == "w" else 1, row.block) if row.block else (N, K)
        blocks = F.pad(x, (0, -K % width, 0, -N % height)).unflatten(1, (-1, width))
        blocks = blocks.unflatten(0, (-1, height))  # (N / height, height, K / width, width)
        largest = self.past[-1][name] = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-30)
        if row.history and len(self.past) > 1:
            largest = torch.stack([step[name] for step in self.past[-1 - row.history : -1]]).amax(0)
        scale = (most := torch.full_like(largest, to[2])) / largest
        if row.powers:  # from the largest powers of two, of the format and of the block
            scale = 2.0 ** (most.frexp().exponent - largest.frexp().exponent)
        low = rounded((blocks * scale).clamp(-to[2], to[2]), to) / scale
        return low.flatten(2).flatten(0, 1)[:N, :K]


def train(
    model: nn.Sequential, batches: Sequence[Batch], make_optimizer: MakeOptimizer, recipe: str = "current"
) -> list[float]:
    """Train `model` in place, one step for each batch, and return the losses."""
    layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    for layer in layers:
        layer.__class__, layer.row, layer.past = LowLinear, ROWS[recipe], []
    optimizer, losses = make_optimizer(model.parameters()), []
    for inputs, targets in batches:  # (B, T)
        optimizer.zero_grad()
        for layer in layers:
            layer.past.append({})
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for layer in layers:
        layer.__class__ = nn.Linear
        del layer.row, layer.past
    return losses
