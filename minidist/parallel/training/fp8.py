"""FP8, emulated: round the operands of a Linear's three products to 8 bits, and multiply them as before.

A Linear multiplies three times: x W^T forward, and backward g W for the input and g^T x for the weight. Here
x and W are rounded to e4m3 and g to e5m2 before each, with the scales of a recipe (contract/fp8_recipes.py).
Sums, biases, all other layers and the optimizer stay in the parameters' dtype, float32 or float64. So it has
FP8's errors and saves neither time nor memory: it is slower than float32.

Along a sum the blocks of a recipe follow the sum: x is rounded along its features forward, and along the
tokens for the weight's gradient. A rank scales the rows that it has, as if they were a micro-batch. Ranks
that share a matrix scale it as a whole, like one process; blocks begin anew at each rank's part.

With delayed scaling a step's scales come from the steps before, so that no product waits for a maximum. Each
step collects its maxima, which makes a repeated forward pass harmless, and at its end all ranks exchange them
in one message. While a tensor's history is 0, it is scaled by its own maximum.

Sources: as in contract/fp8_recipes.py. n tokens, K inputs and M outputs of a Linear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode

from minidist import comm
from minidist.comm.opaque import opaque, refuse_recorded
from minidist.comm.work import Group
from minidist.parallel.contract.fp8_recipes import Fp8Recipe


class Format(NamedTuple):
    """An 8-bit floating-point format with a sign."""

    digits: int  # bits of the fraction
    least: float  # the smallest number above 0
    most: float  # the largest
    power: float  # the largest power of two
    beyond: float  # what a larger number becomes


E4M3 = Format(3, 2.0**-9, 448.0, 2.0**8, 448.0)
E5M2 = Format(2, 2.0**-16, 57344.0, 2.0**15, torch.inf)
_EXPONENT = {torch.float32: (torch.int32, 0x7F800000), torch.float64: (torch.int64, 0x7FF0000000000000)}


def power_below(x: Tensor) -> Tensor:
    """The largest power of two up to |x|; 0 for 0, infinity for numbers that are not finite."""
    bits, mask = _EXPONENT[x.dtype]
    return (x.view(bits) & mask).view(x.dtype)


def rounded(x: Tensor, to: Format) -> Tensor:
    """Round to the nearest number of a format, ties to even: the values of torch's casts to float8."""
    step = power_below(x).mul_(2.0**-to.digits).clamp_(to.least, 2.0**99)
    found = (x / step).round_().mul_(step)
    return torch.where(found.abs() > to.most, found.sign().mul_(to.beyond), found)


def scaled(x: Tensor, to: Format, recipe: Fp8Recipe, rows: int = 1, largest: Tensor | None = None) -> Tensor:
    """Multiply a matrix by its scales, round it, and divide again; blocks lie along the last dimension.

    rows: that share a scale. largest: of the whole tensor; None for that of each block. A block in which a
    number is not finite becomes NaN.
    """
    size, (height, width) = x.shape, (rows, recipe.block) if recipe.block else x.shape
    if recipe.block:
        x = functional.pad(x, (0, -size[1] % width, 0, -size[0] % height))
    blocks = x.reshape(len(x) // max(height, 1), height, -1, max(width, 1)) if x.numel() else x[None, :, None]
    if largest is None:
        largest = blocks.abs().amax((1, 3), keepdim=True) if x.numel() else x.new_zeros(())
    largest = largest.clamp_min(2.0**-127 * to.power)  # MX has no smaller scale
    scale = to.power / power_below(largest) if recipe.powers else to.most / largest
    found = rounded((blocks * scale).clamp_(-to.most, to.most), to) / scale
    return found.reshape(x.shape)[: size[0], : size[1]]


def switch_fast_paths_off(model: nn.Module, around: type = nn.Module) -> None:
    """Let torch's encoder layers call the layers in them when they evaluate, where one of a type is in them.

    Their fast path reads `linear1.weight` itself, which is not all of a layer that is cut or rounds. Both
    attributes are conditions of the fast paths and nothing else.
    """
    for part in model.modules():
        if any(isinstance(inner, around) for inner in part.modules()):
            if isinstance(part, nn.TransformerEncoderLayer):
                part.activation_relu_or_gelu = 0
            elif isinstance(part, nn.TransformerEncoder):
                part.use_nested_tensor = False


def linears_of(model: nn.Module) -> list[str]:
    """The names of the Linears that FP8 rounds: torch's, and GPT-2's Conv1D; TypeError if there are none.

    A MultiheadAttention multiplies by itself, and experts in groups; they are not among them.
    """
    packed, found = nn.modules.linear.NonDynamicallyQuantizableLinear, []
    module: Any
    for name, module in model.named_modules():
        is_linear = type(module).forward is nn.Linear.forward and not isinstance(module, packed)
        if is_linear or type(module).__qualname__ == "Conv1D":
            found.append(name)
            if (dtype := module.weight.dtype) not in _EXPONENT:
                raise ValueError(
                    f"FP8 rounds numbers in float32 or float64, and {name} has {dtype}; call model.float()"
                )
    if not found:
        raise TypeError(
            f"a {type(model).__name__} has no torch.nn.Linear for FP8 to round; use precision='fp32'"
        )
    return found


class Fp8:
    """Rounds the operands of a model's Linears by a recipe, and keeps the maxima of past steps.

    names: of all Linears of the whole model, in one order on all ranks.
    """

    def __init__(self, recipe: Fp8Recipe, names: Sequence[str]) -> None:
        self.recipe, self.names = recipe, [*names]
        # The largest numbers of x, w and g in the past steps, the newest first, and in this one.
        self.past = torch.zeros(recipe.history, len(names), 3, dtype=torch.float64)
        self.now = torch.zeros(len(names), 3, dtype=torch.float64)
        self.is_new = [[True] * 3 for _ in names]  # whether it has been 0 in all past steps, on all ranks

    def wrap(self, model: nn.Module) -> None:
        """Make those Linears round that this rank has."""
        modules = dict(model.named_modules())
        for index, name in enumerate(self.names):
            module: Any = modules.get(name)
            if hasattr(module, "cut_operands"):  # a layer of tensor parallelism
                module.rounding = Rounding(self, index, module.cut_operands, module.group)
            elif module is not None and hasattr(module, "weight"):  # and not another stage's
                module.forward = partial(_forward, module, Rounding(self, index))
        switch_fast_paths_off(model)
        device = next((p.device for p in model.parameters()), self.now.device)
        self.past, self.now = self.past.to(device), self.now.to(device)

    @torch.no_grad()
    def end_step(self) -> None:
        """Put the step's maxima over all ranks into the history; sends 2 (n - 1) / n 24 bytes a Linear."""
        if self.recipe.history:
            comm.all_reduce(self.now, "max")
            self.past = torch.cat((self.now[None], self.past[:-1]))
            self._begin_step()

    def settings(self) -> dict[str, Any]:
        """The history by the Linears' names, the same on all ranks."""
        if not self.recipe.history:
            return {}
        return dict(zip(self.names, self.past.transpose(0, 1).tolist(), strict=True))

    def load_settings(self, settings: Mapping[str, Any]) -> None:
        """Continue with a saved history, as far as it has the same Linears."""
        for index, name in enumerate(self.names if self.recipe.history else ()):
            if name in settings:
                self.past[:, index] = torch.tensor(settings[name])
        self._begin_step()

    def _begin_step(self) -> None:
        self.now, is_new = torch.zeros_like(self.now), self.past.amax(0) == 0
        if _get_current_dispatch_mode() is not None:  # a dry run has no values, and supposes the usual ones
            is_new = torch.zeros_like(is_new)
        self.is_new = is_new.tolist()


class Rounding(NamedTuple):
    """Rounds the operands of one Linear's products."""

    fp8: Fp8
    linear: int  # its place among the names
    cut: str = ""  # which of x, w and g the ranks of the group have parts of
    group: Group = None
    trains: bool = True  # whether a step's maxima count

    def for_call(self) -> Rounding:
        """The same for a call in which gradients are wanted, or not."""
        return self._replace(trains=torch.is_grad_enabled())

    def of(self, name: str, x: Tensor, along: int = 1) -> Tensor:
        """Round the operand x, w or g, a matrix whose products sum along a dimension; x may be (..., K)."""
        recipe, to, column = self.fp8.recipe, E5M2 if name == "g" else E4M3, "xwg".index(name)
        largest = None
        if not recipe.block:
            largest = x.abs().amax() if x.numel() else x.new_zeros(())
            is_new = self.fp8.is_new[self.linear][column]  # equal on all ranks
            if name in self.cut and is_new:
                comm.all_reduce(largest, "max", group=self.group)
            if recipe.history:
                if self.trains:
                    now, finite = self.fp8.now[self.linear], torch.nan_to_num(largest, 0.0, 0.0, 0.0)
                    now[column] = torch.maximum(now[column], finite.to(now))
                if not is_new:
                    past = self.fp8.past[:, self.linear, column].amax().to(x)
                    largest = torch.where(past > 0, past, largest) + largest * 0  # NaN where x is not finite
        rows = recipe.weight_rows if name == "w" else 1
        if along == 0:
            return scaled(x.t(), to, recipe, rows, largest).t()
        return scaled(x.reshape(-1, x.shape[-1]), to, recipe, rows, largest).view(x.shape)


@opaque
def rounded_linear(x: Tensor, weight: Tensor, rounding: Rounding) -> Tensor:  # (..., K), (M, K)
    """Return x W^T of rounded operands: (..., M)."""
    y: Tensor = _Linear.apply(x, weight, rounding.for_call())  # type: ignore[no-untyped-call]
    return y


def _forward(module: Any, rounding: Rounding, x: Tensor) -> Tensor:
    weight = module.weight if isinstance(module, nn.Linear) else module.weight.t()
    y = rounded_linear(x, weight, rounding)
    return y if module.bias is None else y + module.bias


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rounding: Rounding) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.of = rounding.of
        return functional.linear(ctx.of("x", x), ctx.of("w", weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # (..., M)
        refuse_recorded("an FP8 product", "use precision='fp32'")
        (x, weight), of, rows = ctx.saved_tensors, ctx.of, grad.reshape(-1, grad.shape[-1])  # (n, M)
        x_grad = w_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = (of("g", rows) @ of("w", weight, along=0)).view(x.shape)
        if ctx.needs_input_grad[1]:
            w_grad = of("g", rows, along=0).t() @ of("x", x.reshape(-1, x.shape[-1]), along=0)
        return x_grad, w_grad, None
