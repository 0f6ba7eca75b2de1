"""Attention's heads: where its layers are cut, and modules that count them.

A layer of attention is cut between heads (`cut_between_heads`). A module with the style "attention" works on
this rank's heads as if there were no others: attributes such as `num_heads` and `split_size` become those of
this rank. Many a `forward` also reads the width from its input, as in `B, T, C = x.shape` and, later,
`reshape(B, T, C)`. So it gets a view of its input that is as narrow as this rank's heads; it passes the view
on to the cut layers, and they read the whole input instead.

Dropout of attention weights draws different numbers on each rank, dropout after the last layer the same ones;
random_state.py explains the two streams.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minidist.comm.work import Group
from minidist.model.seeding import random_state_of
from minidist.parallel.tensor_parallel.cuts import TensorParallel, base_of
from minidist.parallel.tensor_parallel.linear_layers import ColumnParallelLinear, RowParallelLinear
from minidist.parallel.tensor_parallel.sequence_parallel import Forward, wrap
from minidist.parallel.tensor_parallel.styles import StyledModule
from minidist.parallel.training.random_state import own_random_state

HEAD_SIZES = ("head_size", "head_dim", "attention_head_size")
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
"""The attributes by which attention modules have the features of a head, and the number of heads."""
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")
WIDTHS = ("split_size", "all_head_size", "attn_dim", "inner_dim", "embed_dim", "hidden_size", "n_embd")
COUNTS = HEADS + KEY_HEADS + WIDTHS
"""The attributes by which modules count heads, and the features of all heads."""


def cut_between_heads(
    module: nn.Module, parts: Mapping[str, StyledModule], together: Sequence[Sequence[str]], ranks: int
) -> None:
    """Set the units that the linear layers of attention can be cut into.

    Queries, keys and values are the layers that read one input, or all layers of their parent if the plan
    does not say. The layer that reads the heads' results has as many inputs as there are query features.
    """
    by_parent: dict[str, list[StyledModule]] = {}
    for part in parts.values():
        if part.style in ("column", "row"):
            by_parent.setdefault(part.parent, []).append(part)
    found: dict[str, dict[int, int]] = {}
    for parent, siblings in by_parent.items():
        above = module.get_submodule(parent)
        head = _head_size(above, siblings)
        if head is None:
            continue
        joined = [[parts[name] for name in names] for names in together if parts[names[0]].parent == parent]
        units: dict[int, int] = {}
        for members in joined or [siblings]:
            if not any(part.size % head for part in members):  # else these layers do not map to heads
                units |= _units_of(parent, members, head, ranks)
        found[parent] = units
        for part in siblings:
            part.unit = units.get(part.size, 1)
    for parent in by_parent.keys() - found.keys():  # such as the output of BERT's attention
        for part in by_parent[parent]:
            if part.style == "row":
                part.unit = _nearest(found, parent).get(part.size, 1)


def _nearest(found: Mapping[str, dict[int, int]], parent: str) -> dict[int, int]:
    """The units of the attention module that shares the closest ancestor with `parent`."""
    while parent:
        parent = parent.rpartition(".")[0]
        for name, units in found.items():
            if name.startswith(f"{parent}." if parent else ""):
                return units
    return {}


def _head_size(attention: nn.Module, layers: Sequence[StyledModule]) -> int | None:
    """The features of a head, from a module's attributes; None if it says nothing of heads."""
    sizes = [x for name in HEAD_SIZES if isinstance(x := getattr(attention, name, None), int)]
    counts = [x for name in HEADS if isinstance(x := getattr(attention, name, None), int)]
    width = max(part.size for part in layers)
    return sizes[0] if sizes else width // counts[0] if counts else None


def _units_of(parent: str, members: Sequence[StyledModule], head: int, ranks: int) -> dict[int, int]:
    """Return, for each size of these layers, how many features stay together with shared keys and values."""
    heads = min(part.size for part in members) // head
    if heads < ranks:
        raise ValueError(
            f"{parent} has {heads} heads of keys and values, which {ranks} tensor-parallel ranks cannot "
            f"share; use at most {heads}"
        )
    for part in members:
        if part.size % (heads * head):
            raise ValueError(
                f"{part.name} has size {part.size}, which is not a multiple of {heads} heads of {head}; make "
                f"the query heads of {parent} a multiple of its key and value heads"
            )
    return {part.size: part.size // heads for part in members}


def work_on_own_heads(part: nn.Module, group: Group) -> None:
    """Let an attention module, whose layers are cut, count this rank's heads. Sends nothing."""
    layers = [layer for layer in part.modules() if isinstance(layer, ColumnParallelLinear)]
    if layers:
        own, whole = len(layers[0].own), layers[0].out_features // layers[0].packed
        for name in COUNTS:
            count = vars(part).get(name)
            if isinstance(count, int) and count * own % whole == 0:
                setattr(part, name, count * own // whole)
        wrap(part, _OwnHeads(part, layers, group).forward, group)


class _OwnHeads:
    """The `forward` of an attention module, and the hooks of the layers in it.

    part: the module. layers: those that read its input.
    """

    def __init__(self, part: nn.Module, layers: Sequence[ColumnParallelLinear], group: Group) -> None:
        self._width = len(layers[0].own)
        self._whole: Tensor | None = None  # the input of the running call
        self._narrow: Tensor | None = None
        self._seed = 0  # of the random numbers after the last layer
        cut = [inner for inner in part.modules() if isinstance(inner, TensorParallel)]
        loras: Any = [
            x for x in part.modules() if isinstance(base_of(x), ColumnParallelLinear) and x not in cut
        ]
        parts = [getattr(x, name, nn.Module()) for x in loras for name in ("lora_dropout", "lora_A")]
        adapters = [each for part in parts for each in part.children()]
        ours = {parameter for layer in (*cut, *adapters) for parameter in layer.parameters()}
        # A norm of the input has parameters as wide as the input, and needs all of it.
        self._narrows = all(p.shape[-1:] != (layers[0].in_features,) for p in {*part.parameters()} - ours)
        chances = [inner.p for inner in part.modules() if isinstance(inner, nn.Dropout)]
        chances += [x for name, x in vars(part).items() if "drop" in name and isinstance(x, float)]
        self._drops = any(chances)
        for layer in (*layers, *adapters):
            layer.register_forward_pre_hook(self._give_whole)
        for last in cut:
            if isinstance(last, RowParallelLinear):
                last.register_forward_hook(self._draw_alike)
        for number, inner in enumerate(adapters):
            if isinstance(inner, nn.Dropout) and not layers[0].sequence_parallel:  # of what all ranks compute
                wrap(inner, partial(self._drop_alike, number), group)

    def forward(self, part: nn.Module, group: Group, own: Forward, *args: Any, **kwargs: Any) -> Any:
        drops = self._drops and part.training
        self._seed = int(torch.randint(2**62, ())) if drops else 0
        if self._narrows and args and isinstance(args[0], Tensor):
            self._whole, self._narrow = args[0], args[0][..., : self._width]
            args = (self._narrow, *args[1:])
        try:
            with own_random_state(group) if drops else nullcontext():
                return own(*args, **kwargs)
        finally:
            self._whole = self._narrow = None

    def _give_whole(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._whole, *args[1:]) if args and args[0] is self._narrow else args

    def _drop_alike(self, number: int, part: nn.Module, group: Group, own: Forward, x: Tensor) -> Any:
        with random_state_of(number, self._seed) if self._seed else nullcontext():
            return own(x)

    def _draw_alike(self, row: nn.Module, args: Any, output: Any) -> None:
        if self._seed:
            torch.manual_seed(self._seed)
