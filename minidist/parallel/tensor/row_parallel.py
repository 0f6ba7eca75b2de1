"""Linear layers cut between ranks by their inputs: each rank has a summand of all outputs.

The second half of a pair; the first is column_parallel.py.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3; sequence parallelism: Korthikanti et al. 2022,
section 4.2. n is the number of ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from minidist.comm.work import Group
from minidist.parallel.tensor.cuts import Cut, TensorParallel, share
from minidist.parallel.tensor.operators import (
    copy_to_ranks,
    reduce_from_ranks,
    scatter_sequence,
    split_to_ranks,
)
from minidist.parallel.tensor.whole_layers import Device, check_linear, drawn, part_of


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
        ValueError: as for `ColumnParallelLinear`; sequence parallelism with a whole input.
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
        if sequence_parallel and not input_is_parallel:
            raise ValueError(
                "a row-parallel layer whose input is whole has no share of the sequence to return: give "
                "input_is_parallel=True after a column-parallel layer, or sequence_parallel=False"
            )
        self.in_features, self.out_features = in_features, out_features
        self.input_is_parallel = input_is_parallel
        self.group, self.sequence_parallel = group, sequence_parallel
        self.own = share(in_features, group, unit, "the inputs of a row-parallel layer")
        self._take(drawn(in_features, out_features, bias, group, dtype, device))

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
        self.weight = part_of(whole.weight, (slice(None), slice(self.own.start, self.own.stop)))
        self.bias = None if whole.bias is None else part_of(whole.bias, slice(None))

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
