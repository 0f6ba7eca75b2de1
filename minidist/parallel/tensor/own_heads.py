"""Attention that counts its heads: it works on this rank's heads as if there were no others.

Attributes such as `num_heads` and `split_size` become those of this rank. Many a `forward` also reads the
width from its input, as in `B, T, C = x.shape` and later `reshape(B, T, C)`. So it gets a view of its input
that is as narrow as this rank's heads, and the cut layers inside, which it passes the view to, read the whole
input. Dropout of attention weights differs between ranks; dropout after the last layer must not.

The style "attention" of parallelize.py; two streams of random numbers as in random_state.py.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from minidist.comm.work import Group
from minidist.parallel.tensor.column_parallel import ColumnParallelLinear
from minidist.parallel.tensor.row_parallel import RowParallelLinear
from minidist.parallel.tensor.sequence_parallel import Forward, wrap
from minidist.parallel.training.random_state import own_random_state

HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")
WIDTHS = ("split_size", "all_head_size", "attn_dim", "inner_dim", "embed_dim", "hidden_size", "n_embd")
COUNTS = HEADS + KEY_HEADS + WIDTHS
"""The attributes by which modules count heads, and the features of all heads."""


def work_on_own_heads(part: nn.Module, group: Group) -> None:
    """Let an attention module, whose layers are cut, count this rank's heads. Sends nothing."""
    layers = [layer for layer in part.modules() if isinstance(layer, ColumnParallelLinear)]
    if layers:
        own, whole = len(layers[0].own), layers[0].out_features // layers[0].packed
        for name in COUNTS:
            count = vars(part).get(name)
            if isinstance(count, int) and count * own % whole == 0:
                setattr(part, name, count * own // whole)
        wrap(part, _OwnHeads(part, layers).forward, group)


class _OwnHeads:
    def __init__(self, part: nn.Module, layers: list[ColumnParallelLinear]) -> None:
        self._narrow: Tensor | None = None
        self._whole: Tensor | None = None
        self._seed = 0  # of the random numbers after the last layer
        self._own, width = layers[0].own, layers[0].in_features
        # A norm of the input, say, needs all of it.
        inside = {parameter for layer in layers for parameter in layer.parameters()}
        others = [p for p in part.parameters() if p not in inside and p.dim() == 1 and len(p) == width]
        rows = [row for row in part.modules() if isinstance(row, RowParallelLinear)]
        biases = [row.bias for row in rows]
        self._narrows = all(any(p is bias for bias in biases) for p in others)
        self._drops = any(isinstance(x, nn.Dropout) and x.p > 0 for x in part.modules()) or any(
            "drop" in name and isinstance(value, float) and value > 0 for name, value in vars(part).items()
        )
        for layer in layers:
            layer.register_forward_pre_hook(self._give_whole)
        for row in rows:
            row.register_forward_hook(self._draw_alike)

    def forward(self, part: nn.Module, group: Group, own: Forward, *args: Any, **kwargs: Any) -> Any:
        drops = self._drops and part.training
        self._seed = int(torch.randint(2**62, ())) if drops else 0
        if self._narrows and args and isinstance(args[0], Tensor):
            self._whole = args[0]
            self._narrow = args[0][..., : len(self._own)]
            args = (self._narrow, *args[1:])
        try:
            with own_random_state(group) if drops else nullcontext():
                return own(*args, **kwargs)
        finally:
            self._whole = self._narrow = None

    def _give_whole(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._whole, *args[1:]) if args and args[0] is self._narrow else args

    def _draw_alike(self, row: nn.Module, args: Any, output: Any) -> None:
        if self._seed:
            torch.manual_seed(self._seed)
