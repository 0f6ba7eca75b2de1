"""Linear layers cut between ranks: by their outputs (column parallel) or by their inputs (row parallel).

A pair of them computes y = f(x A) B with one message each way: A is cut by columns, so that each rank has
some of the hidden features and applies f to them; B is cut by the rows that multiply these, and each rank
has a summand of y. (The names are those of the paper, where y = x A; `weight` is A^T, as torch has it, so
that a column of A is a row of `weight`.)

Source: Shoeybi et al. 2019, "Megatron-LM", section 3; sequence parallelism: Korthikanti et al. 2022,
section 4.2. n is the number of ranks; sizes that it does not divide are cut as evenly as can be.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from minidist import comm
from minidist.comm.work import Group
from minidist.parallel.column_function import column_linear
from minidist.parallel.tensor_cuts import Cut, TensorParallel, share
from minidist.parallel.tensor_operators import (
    copy_to_ranks,
    gather_from_ranks,
    reduce_from_ranks,
    scatter_sequence,
    split_to_ranks,
)

Device = torch.device | str | None


class ColumnParallelLinear(TensorParallel):
    """y = x W^T + b, of which each rank computes some features: x (..., in) -> y (..., out / n).

    Forward: `copy_to_ranks`, the map, and where asked for `gather_from_ranks`. Under sequence parallelism
    `gather_sequence` stands in place of the copy, and x is (..., T / n, in). Bytes sent: see these and
    `column_linear`; the layer's own sum is under way while it computes the gradient of its weight.

    A new layer draws its weights as `torch.nn.Linear`, whole, and takes those of the group's first rank; to
    cut a layer that is there, see `from_linear`.

    Args:
        in_features, out_features, bias: of the whole layer.
        gather_output: return all features, (..., out), on every rank.
        group: the ranks that share it; None for all.
        sequence_parallel: x is this rank's share of the sequence, the last dimension but one.
        unit: features that stay together, such as those of an attention head.
        overlap: see `column_linear`.

    Raises:
        ValueError: fewer units than ranks; or units that do not divide the features.
    """

    weight: nn.Parameter  # (out / n, in)
    bias: nn.Parameter | None  # (out / n,)

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
        dtype: torch.dtype | None = None,
        device: Device = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.gather_output, self.group, self.sequence_parallel = gather_output, group, sequence_parallel
        self.overlap = overlap
        self.own = share(out_features, group, unit, "the outputs of a column-parallel layer")
        self.is_vocabulary = False  # whether the features are scores of the vocabulary's tokens
        self.shared: SharedInput | None = None
        self._take(_drawn(in_features, out_features, bias, group, dtype, device))

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        gather_output: bool = False,
        group: Group = None,
        sequence_parallel: bool = False,
        *,
        unit: int = 1,
        overlap: bool = True,
    ) -> ColumnParallelLinear:
        """This rank's part of a layer whose weights are the same on all ranks. Nothing is sent.

        Raises as the class does, and TypeError where `linear` is no `torch.nn.Linear`.
        """
        check_linear(linear)
        options = {"unit": unit, "overlap": overlap, "device": "meta"}
        sizes = (linear.in_features, linear.out_features, False)
        layer = cls(*sizes, gather_output, group, sequence_parallel, **options)  # type: ignore[arg-type]
        layer._take(linear)
        return layer.train(linear.training)

    def _take(self, whole: nn.Linear) -> None:
        rows = slice(self.own.start, self.own.stop)
        self.weight = _part(whole.weight, rows)
        self.bias = None if whole.bias is None else _part(whole.bias, rows)

    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out / n)
        """See the class."""
        if self.shared is None:
            (y,) = map_together([self], x)
        else:
            y = self.shared.output(self, x)
        return gather_from_ranks(y, -1, self.out_features, self.group) if self.gather_output else y

    def cuts(self) -> dict[str, Cut]:
        """The weight is cut by rows, and so is the bias."""
        start, rows = self.own.start, len(self.own)
        found = {"weight": Cut((self.out_features, self.in_features), (start, 0), (rows, self.in_features))}
        if self.bias is not None:
            found["bias"] = Cut((self.out_features,), (start,), (rows,))
        return found

    def extra_repr(self) -> str:
        """What print(layer) shows between the brackets."""
        return f"{self.in_features}, {self.own.start}-{self.own.stop} of {self.out_features}"


class SharedInput:
    """Column-parallel layers that read one input: the first that is called on it computes for all of them."""

    def __init__(self, layers: Sequence[ColumnParallelLinear]) -> None:
        self.layers = layers
        self._input: Tensor | None = None
        self._outputs: dict[ColumnParallelLinear, Tensor] = {}

    def output(self, layer: ColumnParallelLinear, x: Tensor) -> Tensor:
        """What `layer` makes of x."""
        if x is not self._input or layer not in self._outputs:
            self._input = x
            self._outputs = dict(zip(self.layers, map_together(self.layers, x), strict=True))
        y = self._outputs.pop(layer)
        if not self._outputs:
            self._input = None
        return y


def map_together(layers: Sequence[ColumnParallelLinear], x: Tensor) -> list[Tensor]:
    """The outputs of layers that are alike but for their sizes, with one message for the input's gradient."""
    first = layers[0]
    return column_linear(
        x,
        [layer.weight for layer in layers],
        [layer.bias for layer in layers],
        first.group,
        first.sequence_parallel,
        first.overlap,
    )


class RowParallelLinear(TensorParallel):
    """y = x W^T + b, where each rank has some of the inputs: x (..., in / n) -> y (..., out), on every rank.

    Forward: the map of the rank's part, `reduce_from_ranks`, and the bias, which every rank has whole. Under
    sequence parallelism `scatter_sequence` stands in place of the sum, and y is (..., T / n, out). Bytes
    sent: see these; under sequence parallelism 2 (n - 1) / n of the bias in the backward pass, too.

    New weights and cutting a layer that is there: as for `ColumnParallelLinear`.

    Args:
        in_features, out_features, bias: of the whole layer.
        input_is_parallel: x is this rank's part; False where it is whole, and is to be split here.
        group, sequence_parallel, unit: as for `ColumnParallelLinear`.

    Raises:
        ValueError: as for `ColumnParallelLinear`.
    """

    weight: nn.Parameter  # (out, in / n)
    bias: nn.Parameter | None  # (out,)

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
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.input_is_parallel = input_is_parallel
        self.group, self.sequence_parallel = group, sequence_parallel
        self.own = share(in_features, group, unit, "the inputs of a row-parallel layer")
        self._take(_drawn(in_features, out_features, bias, group, dtype, device))

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        input_is_parallel: bool = True,
        group: Group = None,
        sequence_parallel: bool = False,
        *,
        unit: int = 1,
    ) -> RowParallelLinear:
        """See `ColumnParallelLinear.from_linear`."""
        check_linear(linear)
        sizes = (linear.in_features, linear.out_features, False)
        layer = cls(*sizes, input_is_parallel, group, sequence_parallel, unit=unit, device="meta")
        layer._take(linear)
        return layer.train(linear.training)

    def _take(self, whole: nn.Linear) -> None:
        self.weight = _part(whole.weight, (slice(None), slice(self.own.start, self.own.stop)))
        self.bias = None if whole.bias is None else _part(whole.bias, slice(None))

    def forward(self, x: Tensor) -> Tensor:  # (..., in / n) -> (..., out)
        """See the class."""
        if not self.input_is_parallel:
            x = split_to_ranks(x, -1, self.group)
        y = functional.linear(x, self.weight)
        bias: Tensor | None = self.bias
        if not self.sequence_parallel:
            y = reduce_from_ranks(y, self.group)
        else:
            y = scatter_sequence(y, -2, self.group)
            # Each rank adds it to other tokens, and so has a part of its gradient.
            bias = None if bias is None else copy_to_ranks(bias, self.group)
        return y if bias is None else y + bias

    def cuts(self) -> dict[str, Cut]:
        """The weight is cut by columns."""
        shape = (self.out_features, self.in_features)
        return {"weight": Cut(shape, (0, self.own.start), (self.out_features, len(self.own)))}

    def extra_repr(self) -> str:
        """What print(layer) shows between the brackets."""
        return f"{self.own.start}-{self.own.stop} of {self.in_features}, {self.out_features}"


def check_linear(linear: object) -> None:
    """TypeError where a layer does not compute what `torch.nn.Linear` does."""
    if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward:
        raise TypeError(f"a {type(linear).__name__} cannot be cut between ranks; give a torch.nn.Linear")


def _drawn(
    in_features: int, out_features: int, bias: bool, group: Group, dtype: torch.dtype | None, device: Device
) -> nn.Linear:
    """A whole layer with the weights of the group's first rank."""
    whole = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
    send_whole(whole, group)
    return whole


def send_whole(module: nn.Module, group: Group) -> None:
    """Copy the parameters and buffers of the group's first rank to all; a collective."""
    for tensor in [*module.parameters(), *module.buffers()]:
        if not tensor.is_meta:
            comm.broadcast(tensor.detach(), group=group)


def _part(whole: Tensor, index: slice | tuple[slice, ...]) -> nn.Parameter:
    part = whole.detach()[index].clone(memory_format=torch.contiguous_format)
    return nn.Parameter(part, requires_grad=whole.requires_grad)
