"""Linear layers cut between ranks by their outputs: each rank computes some of the features, of all inputs.

The first half of a pair; the other is row_parallel.py. y = f(x A) B takes one message each way where A is
cut by columns, so that each rank has some of the hidden features and applies f to them, and B by the rows
that multiply these. The names are those of the paper, where y = x A; `weight` is A^T, as torch has it, so
that a column of A is a row of `weight`.

Source: Shoeybi et al. 2019, "Megatron-LM", section 3; sequence parallelism: Korthikanti et al. 2022,
section 4.2. n is the number of ranks; sizes that it does not divide are cut as evenly as can be.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from minidist.comm.work import Group
from minidist.parallel.tensor.column_function import column_linear
from minidist.parallel.tensor.cuts import Cut, TensorParallel, share
from minidist.parallel.tensor.operators import gather_from_ranks
from minidist.parallel.tensor.whole_layers import Device, check_linear, drawn, part_of


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
        self._take(drawn(in_features, out_features, bias, group, dtype, device))

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
        self.weight = part_of(whole.weight, rows)
        self.bias = None if whole.bias is None else part_of(whole.bias, rows)

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
