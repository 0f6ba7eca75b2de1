"""The recomputation policies that a layout can name: one record for each, with all that is true of it.

A policy chooses parts of a model that keep only their inputs in the forward pass, and compute the rest again
in the backward pass. To add one, write the function that chooses, and its record. training/recompute.py makes
a model's parts recompute; the models of memory and time ask the same function about the parts of a
transformer (`BLOCK`: a finer choice trains, and is not predicted); planner, docs, playground and tests read
the record.

Sources: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", section 4; Korthikanti et al.
2022, "Reducing Activation Recomputation in Large Transformer Models", section 5 (attention alone).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

Names = Sequence[str]


class RecomputePolicy(NamedTuple):
    """Which parts of a model are recomputed."""

    chooses: Callable[[Names, Names], Names]  # from the names of the layers, and of all submodules, in order
    keeps: str  # in words, for tables
    planned: bool = True  # whether the planner tries it


def every_layer(layers: Names, parts: Names) -> Names:
    """All layers."""
    return layers


def every_second_layer(layers: Names, parts: Names) -> Names:
    """The second layer, the fourth, and so on."""
    return layers[1::2]


def attention_alone(layers: Names, parts: Names) -> Names:
    """The modules called attention, attn, self_attn and the like, each with all that it contains."""
    found: list[str] = []
    for name in parts:
        inside = found and name.startswith(f"{found[-1]}.")
        if not inside and re.fullmatch(r"(\w+_)?(attention|attn)", name.rpartition(".")[2]):
            found.append(name)
    return found


EVERY_LAYER = "every layer"
POLICIES = {
    "attention alone": RecomputePolicy(attention_alone, "all but what attention computes of its input"),
    "every second layer": RecomputePolicy(every_second_layer, "half of the layers, and the others' inputs"),
    EVERY_LAYER: RecomputePolicy(every_layer, "each layer's input"),
}
"""By name, as `Layout(recompute=...)` takes it; True is every layer. The later ones keep less."""
WHOLE = ""
"""Among a layer's parts: all of it."""
BLOCK = ("attention_norm", "attention", "mlp_norm", "mlp")
"""The parts of a transformer's block, by the names that minidist's models give them."""


def policy_of(recompute: bool | str) -> RecomputePolicy | None:
    """The record of a layout's `recompute`; None if nothing is recomputed."""
    return POLICIES[EVERY_LAYER if recompute is True else recompute] if recompute else None


@lru_cache(maxsize=256)
def recomputed_parts(recompute: bool | str, blocks: int) -> tuple[frozenset[str], ...]:
    """For each layer of a transformer with so many blocks between its ends, which parts are recomputed."""
    policy = policy_of(recompute)
    layers = [f"layers.{i}" for i in range(blocks + 2)]
    names = []
    for layer in layers:
        names += [layer, *(f"{layer}.{part}" for part in BLOCK if layer not in (layers[0], layers[-1]))]
    chosen = {*policy.chooses(layers, names)} if policy else set()
    return tuple(
        frozenset([WHOLE] if layer in chosen else [p for p in BLOCK if f"{layer}.{p}" in chosen])
        for layer in layers
    )


def share_recomputed(recompute: bool | str, blocks: int, layers: Sequence[int], part: str) -> float:
    """The share of some layers of a transformer in which a part is recomputed, alone or with the whole layer.

    It counts blocks alone; layers without a block count as one that is recomputed as a whole, or not.
    """
    parts = recomputed_parts(recompute, blocks)
    among = [parts[i] for i in layers if 1 <= i <= blocks] or [parts[i] for i in layers]
    return sum(bool({WHOLE, part} & each) for each in among) / len(among)
