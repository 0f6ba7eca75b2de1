"""Linear layers cut by their inputs: each rank computes a summand of all outputs.

This is the second half of a pair; column_parallel.py has the first.

Sources: Shoeybi et al. 2019, "Megatron-LM", section 3; sequence parallelism: Korthikanti et al. 2022, section
4.2. n is the number of ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from minidist.comm.opaque import opaque
from minidist.comm.work import Group
from minidist.parallel.tensor.cuts import (
    Cut,
    Device,
    TensorParallel,
    is_conv1d,
    linear_sizes,
    part_of,
    send_whole,
    share,
)
from minidist.parallel.tensor.operators import (
    copy_to_ranks,
    reduce_from_ranks,
    scatter_sequence,
    split_to_ranks,
)


class RowParallelLinear(TensorParallel):
    """y = x W^T + b, where each rank has some of the inputs: x (..., in / n) -> y (..., out) on every rank.

    Forward: the map of this rank's part, `reduce_from_ranks`, and the bias, which every rank has whole. Under
    sequence parallelism `scatter_sequence` replaces the sum, y is (..., T / n, out), and the backward pass
    also sends 2 (n - 1) / n of the bias. The other arguments, new weights and errors are as for
    `ColumnParallelLinear`.

    input_is_parallel: x is this rank's part; if False, x is whole and is split here, which raises ValueError
    with sequence_parallel.
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
                "sequence_parallel needs input_is_parallel: give input_is_parallel=True after a "
                "column-parallel layer, or sequence_parallel=False"
            )
        self.in_features, self.out_features = in_features, out_features
        self.input_is_parallel = input_is_parallel
        self.group, self.sequence_parallel = group, sequence_parallel
        self.own = share(in_features, group, unit, "the inputs of a row-parallel layer")
        whole = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        send_whole(whole, group)
        self._take(whole)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Module,
        input_is_parallel: bool = True,
        group: Group = None,
        sequence_parallel: bool = False,
        *,
        unit: int = 1,
    ) -> RowParallelLinear:
        """Keep this rank's part of a layer; see `ColumnParallelLinear.from_linear`."""
        sizes = (*linear_sizes(linear), False)
        layer = cls(*sizes, input_is_parallel, group, sequence_parallel, unit=unit, device="meta")
        layer.transposed = is_conv1d(linear)
        layer._take(linear)
        return layer.train(linear.training)

    def _take(self, whole: nn.Module) -> None:
        bias = (self.out_features,)
        self.weight = part_of(whole.weight, self.cuts()["weight"])
        self.bias = None if whole.bias is None else part_of(whole.bias, Cut(bias, (0,), bias))

    @opaque
    def forward(self, x: Tensor) -> Tensor:  # (..., in / n) -> (..., out)
        """Return the sum over the ranks, plus the bias."""
        if not self.input_is_parallel:
            x = split_to_ranks(x, -1, self.group)
        y = functional.linear(x, self.matrix)
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
        shape = (self.out_features, self.in_features)
        return {"weight": self.turned(Cut(shape, (0, self.own.start), (self.out_features, len(self.own))))}

    def extra_repr(self) -> str:
        """The text between the brackets of print(layer)."""
        return f"{self.own.start}-{self.own.stop} of {self.in_features}, {self.out_features}"
