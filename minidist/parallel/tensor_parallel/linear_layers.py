"""Linear layers cut between ranks: the two halves of a pair, which send one message forward and one backward.

If y = f(x A) B cuts A by columns and B by rows, each rank computes some hidden features from all inputs
(`ColumnParallelLinear`), applies f to them, and multiplies them by its rows of B: a summand of all outputs
(`RowParallelLinear`). In the paper y = x A; torch's `weight` is A^T, so a column of A is a row of `weight`.

Attention's queries, keys and values read one input. `column_linear` makes them one operation, which sums the
gradient of that input in one message instead of three, and meanwhile computes the gradients of the weights.

Sources: Shoeybi et al. 2019, "Megatron-LM", section 3 (f in front of the three maps); Korthikanti et al.
2022, section 4.2.2 (keep the share of the input; gather it again while the input's gradient is computed).

n ranks; shapes: x (..., T, K); a weight (M, K), where M is the rank's features, cut as evenly as possible; y
(..., T, M). Under sequence parallelism x is (..., T / n, K).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from minidist.comm.opaque import opaque
from minidist.comm.work import Group
from minidist.parallel.tensor_parallel.cuts import Cut, Device, TensorParallel, own_range
from minidist.parallel.tensor_parallel.operators import (
    OPERATORS,
    SharedFunction,
    copy_to_ranks,
    gather_from_ranks,
    reduce_from_ranks,
    scatter_sequence,
    split_to_ranks,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from minidist.parallel.training.fp8 import Rounding, rounded_linear

SEQUENCE = -2
Layer = TypeVar("Layer", bound="ParallelLinear")


def column_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group: Group = None,
    sequence_parallel: bool = False,
    overlap: bool = True,
    roundings: Sequence[Rounding | None] = (),
) -> list[Tensor]:
    """Map x by every weight: `copy_to_ranks` or `gather_sequence`, followed by the linear maps.

    Forward: sends nothing; under sequence parallelism it gathers x, (n - 1) S. Backward: sums the gradient of
    x, 2 (n - 1) / n S; under sequence parallelism it gathers x again, (n - 1) S, and reduces and scatters the
    gradient, also (n - 1) S. S is the bytes of x. If x needs no gradient, nothing is summed.

    overlap: compute the gradients of the weights while that of x is under way.
    roundings: what rounds the operands of each weight's products.
    """
    of = [_as_it_is if each is None else each.for_call().of for each in roundings or [None] * len(weights)]
    return list(_ColumnLinear.apply(x, group, sequence_parallel, overlap, of, *weights, *biases))


def _as_it_is(name: str, x: Tensor, along: int = 1) -> Tensor:
    return x


class _ColumnLinear(SharedFunction):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: Group,
        sequence_parallel: bool,
        overlap: bool,
        of: Sequence[Callable[..., Tensor]],
        *parameters: Any,
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]
        ctx.save_for_backward(x, *weights)
        ctx.group, ctx.sequence_parallel, ctx.overlap, ctx.of = group, sequence_parallel, overlap, of
        whole = start_all_gather(x, SEQUENCE, group)() if sequence_parallel else x
        return tuple(
            functional.linear(low("x", whole), low("w", w), b)
            for low, w, b in zip(of, weights, biases, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        needs_x, needs = ctx.needs_input_grad[0], ctx.needs_input_grad[5:]
        needs_w, needs_b = needs[: len(grads)], needs[len(grads) :]
        rows = [grad.reshape(-1, w.shape[0]) for grad, w in zip(grads, weights, strict=True)]  # (N, M)

        # Launch: gather the input again if this rank kept only a share. A recorded pass uses operators, which
        # have derivatives themselves.
        again = summed = cast(Any, None)
        enter, leave = OPERATORS[ctx.sequence_parallel]
        if torch.is_grad_enabled():
            again = partial(enter, x, group=ctx.group)
        elif ctx.sequence_parallel and any(needs_w):
            again = start_all_gather(x, SEQUENCE, ctx.group, overlap=ctx.overlap)

        # Compute the gradient by the input, and launch its sum.
        if needs_x:
            low = [(of("g", g), of("w", w, 0)) for of, g, w in zip(ctx.of, rows, weights, strict=True)]
            x_grad = torch.mm(*low[0])
            for g, w in low[1:]:
                x_grad.addmm_(g, w)
            x_grad = x_grad.view(*grads[0].shape[:-1], x.shape[-1])
            if torch.is_grad_enabled():
                summed = partial(leave, x_grad, group=ctx.group)
            elif ctx.sequence_parallel:
                summed = start_reduce_scatter(x_grad, SEQUENCE, ctx.group, ctx.overlap)
            else:
                summed = start_all_reduce(x_grad, ctx.group, ctx.overlap)

        # Compute the gradients by the parameters.
        inputs = (x if again is None else again()).reshape(-1, x.shape[-1])  # (N, K)
        w_grads = [
            of("g", g, 0).t() @ of("x", inputs, 0) if need else None
            for of, g, need in zip(ctx.of, rows, needs_w, strict=True)
        ]
        b_grads = [g.sum(0) if need else None for g, need in zip(rows, needs_b, strict=True)]

        # Wait.
        return None if summed is None else summed(), None, None, None, None, *w_grads, *b_grads


class ParallelLinear(TensorParallel):
    """This rank's part of a linear layer. Of GPT-2's Conv1D the weight is transposed, (in, out)."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    in_features: int  # of the whole layer, as are the outputs
    out_features: int
    transposed = False
    cut_operands = ""  # which of a product's x and w, and of the gradient g of its result, ranks share
    rounding: Rounding | None = None  # of a product's operands, with FP8

    def __init__(
        self, in_features: int, out_features: int, group: Group, sequence_parallel: bool, own: range
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.own = in_features, out_features, own
        self.group, self.sequence_parallel = group, sequence_parallel

    @classmethod
    def from_linear(cls: type[Layer], linear: nn.Module, *arguments: Any, **options: Any) -> Layer:
        """Keep this rank's part of a `torch.nn.Linear` that is the same on all ranks. Sends nothing.

        arguments, options: those that the class takes after `bias`.
        """
        make: Any = cls
        layer: Layer = make(*linear_sizes(linear), False, *arguments, **options, device="meta")
        layer.transposed = is_conv1d(linear)
        return layer.keep_part(linear)

    def turned(self, cut: Cut) -> Cut:
        """The cut of the weight as it is stored, from the cut of a Linear's weight."""
        return cut.transposed() if self.transposed else cut

    @property
    def matrix(self) -> Tensor:
        """The weight as a Linear has it, (out, in); a view."""
        return self.weight.t() if self.transposed else self.weight


class ColumnParallelLinear(ParallelLinear):
    """y = x W^T + b, where each rank computes some of the features: x (..., in) -> y (..., out / n).

    Forward: `copy_to_ranks`, the linear map, and on request `gather_from_ranks`. Under sequence parallelism
    `gather_sequence` replaces the copy, and x is (..., T / n, in). `column_linear` says how many bytes it
    sends. A new layer draws whole weights as `torch.nn.Linear` does, and uses those of the group's first
    rank; `from_linear` cuts an existing layer.

    Args:
        in_features, out_features, bias: of the whole layer.
        gather_output: return all features, (..., out), on every rank.
        group: the ranks that share the layer; None for all.
        sequence_parallel: x is this rank's share of the sequence, the last dimension but one.
        unit: number of features that stay together, such as those of an attention head.
        overlap: see `column_linear`.
        packed: the number of equal matrices that the weight holds below each other, such as 3 for queries,
            keys and values. Each is cut by itself, and y has this rank's features of each.

    The weight is (out / n, in), the bias (out / n,). Raises ValueError if there are fewer units than ranks,
    or if `unit` or `packed` does not fit the features.
    """

    cut_operands = "wg"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        gather_output: bool = False,
        group: Group = None,
        sequence_parallel: bool = False,
        *,
        unit: int = 1,
        overlap: bool = True,
        packed: int = 1,
        dtype: torch.dtype | None = None,
        device: Device = None,
    ) -> None:
        if out_features % packed or (gather_output and packed > 1):
            raise ValueError(
                f"a layer with {out_features} outputs is not {packed} equal matrices whose features can stay "
                "on their ranks; give a divisor of the outputs as packed, and gather_output=False"
            )
        own = own_range(out_features // packed, group, unit, "the outputs of a column-parallel layer")
        super().__init__(in_features, out_features, group, sequence_parallel, own)
        self.gather_output, self.overlap, self.packed = gather_output, overlap, packed
        self.is_vocabulary = False  # whether the features are the scores of tokens
        self.shared: SharedInput | None = None
        self.draw(nn.Linear(in_features, out_features, bias, device, dtype))

    @opaque
    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out / n)
        """Return this rank's features, or all of them with gather_output."""
        if self.shared is None:
            (y,) = map_together([self], x)
        else:
            y = self.shared.output(self, x)
        return gather_from_ranks(y, -1, self.out_features, self.group) if self.gather_output else y

    def cuts(self) -> dict[str, Cut]:
        """Weight and bias are cut by rows."""
        return {"weight": self.turned(self._rows(self.in_features)), "bias": self._rows()}

    def _rows(self, *columns: int) -> Cut:
        offsets = (self.own.start, *(0 for _ in columns))
        return Cut((self.out_features, *columns), offsets, (len(self.own), *columns), self.packed)

    def extra_repr(self) -> str:
        """The text between the brackets of print(layer)."""
        times = "" if self.packed == 1 else f"{self.packed} times "
        own = f"{self.own.start}-{self.own.stop} of {self.out_features // self.packed}"
        return f"{self.in_features}, {times}{own}"


class RowParallelLinear(ParallelLinear):
    """y = x W^T + b, where each rank has some of the inputs: x (..., in / n) -> y (..., out) on every rank.

    Forward: the map of this rank's part, `reduce_from_ranks`, and the bias, which every rank has whole. Under
    sequence parallelism `scatter_sequence` replaces the sum, y is (..., T / n, out), and the backward pass
    also sends 2 (n - 1) / n of the bias. The other arguments, new weights and errors are as for
    `ColumnParallelLinear`.

    input_is_parallel: x is this rank's part; if False, x is whole and is split here, which raises ValueError
    with sequence_parallel. The weight is (out, in / n), the bias (out,).
    """

    cut_operands = "xw"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        input_is_parallel: bool = True,
        group: Group = None,
        sequence_parallel: bool = False,
        *,
        unit: int = 1,
        dtype: torch.dtype | None = None,
        device: Device = None,
    ) -> None:
        if sequence_parallel and not input_is_parallel:
            raise ValueError(
                "sequence_parallel needs input_is_parallel: give input_is_parallel=True after a "
                "column-parallel layer, or sequence_parallel=False"
            )
        own = own_range(in_features, group, unit, "the inputs of a row-parallel layer")
        super().__init__(in_features, out_features, group, sequence_parallel, own)
        self.input_is_parallel = input_is_parallel
        self.draw(nn.Linear(in_features, out_features, bias, device, dtype))

    @opaque
    def forward(self, x: Tensor) -> Tensor:  # (..., in / n) -> (..., out)
        """Return the sum over the ranks, plus the bias."""
        if not self.input_is_parallel:
            x = split_to_ranks(x, -1, self.group)
        w, rounding = self.matrix, self.rounding
        y = functional.linear(x, w) if rounding is None else rounded_linear(x, w, rounding)
        bias: Tensor | None = self.bias
        if not self.sequence_parallel:
            y = reduce_from_ranks(y, self.group)
        else:
            y = scatter_sequence(y, -2, self.group)
            # Each rank adds the bias to its own tokens, so it has only a part of the bias's gradient.
            bias = None if bias is None else copy_to_ranks(bias, self.group)
        return y if bias is None else y + bias

    def cuts(self) -> dict[str, Cut]:
        """The weight is cut by columns."""
        sizes = self.out_features, len(self.own)
        return {"weight": self.turned(Cut((sizes[0], self.in_features), (0, self.own.start), sizes))}

    def extra_repr(self) -> str:
        """The text between the brackets of print(layer)."""
        return f"{self.own.start}-{self.own.stop} of {self.in_features}, {self.out_features}"


# Several column-parallel layers of one input


class SharedInput:
    """Column-parallel layers that read one input: the first one called on it computes the outputs of all."""

    def __init__(self, layers: Sequence[ColumnParallelLinear]) -> None:
        self.layers = layers
        self._input: Tensor | None = None
        self._outputs: dict[ColumnParallelLinear, Tensor] = {}

    def output(self, layer: ColumnParallelLinear, x: Tensor) -> Tensor:
        """Return the output of `layer` for x."""
        if x is not self._input or layer not in self._outputs:
            self._input = x
            self._outputs = dict(zip(self.layers, map_together(self.layers, x), strict=True))
        y = self._outputs.pop(layer)
        if not self._outputs:
            self._input = None
        return y


def map_together(layers: Sequence[ColumnParallelLinear], x: Tensor) -> list[Tensor]:
    """Return the outputs of layers that differ only in size; the gradient of x is summed in one message."""
    first = layers[0]
    weights, biases = [layer.matrix for layer in layers], [layer.bias for layer in layers]
    options = first.group, first.sequence_parallel, first.overlap
    return column_linear(x, weights, biases, *options, [layer.rounding for layer in layers])


# Which layers can be cut


def is_conv1d(module: object) -> bool:
    """Whether a layer is GPT-2's linear layer of transformers, whose weight is (in, out)."""
    kind = type(module)
    return (kind.__module__, kind.__qualname__) == ("transformers.pytorch_utils", "Conv1D")


def linear_sizes(linear: Any) -> tuple[int, int]:
    """How many inputs and outputs a linear layer has; TypeError for another module.

    It has to compute what `torch.nn.Linear` does, or GPT-2's Conv1D.
    """
    if is_conv1d(linear):
        inputs, outputs = linear.weight.shape
        return inputs, outputs
    if isinstance(linear, nn.MultiheadAttention | nn.modules.linear.NonDynamicallyQuantizableLinear):
        raise TypeError(
            "a MultiheadAttention holds queries, keys and values in one matrix and reads its out_proj's "
            "weight itself, so it cannot be cut; leave it out of the plan, which may cut the layers around "
            "it, or write attention with layers of torch.nn.Linear"
        )
    if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward:
        raise TypeError(f"a {type(linear).__name__} cannot be cut between ranks; give a torch.nn.Linear")
    outputs, inputs = linear.weight.shape
    return inputs, outputs
