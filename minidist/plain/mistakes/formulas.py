"""What the rungs' pages say that a rank sends in a step and holds after it, their formulas as functions.

Experts send what depends on the tokens, and averaging does not send in every step: they have none here.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from minidist.plain.gpt import Block

CUT = re.compile(r"(query|key|value|up)\.(weight|bias)|(out|down)\.weight")
"""Names of the parameters of which tensor parallel ranks have a part."""


def sent_by(
    rung: str, rank: int, n: int, model: nn.Sequential, tokens: int, options: dict[str, Any] | None = None
) -> int | None:
    """Return the bytes that a rank sends in a step with so many tokens, or None. The model is float64's."""
    sizes = {name: p.nbytes for name, p in model.named_parameters()}
    S, layers = sum(sizes.values()), sum(isinstance(layer, Block) for layer in model)
    A = tokens * next(iter(model.parameters())).shape[1] * 8  # activations between two layers
    if rung in ("data_parallel", "buckets", "overlap"):
        return 2 * (n - 1) * S // n
    if rung == "recipe":
        return 2 * (n - 1) * (S + 8) // n
    if rung == "sharded":
        padded = sum(-(-sum(p.numel() for p in layer.parameters()) // n) * n * 8 for layer in model)
        return (2 + ((options or {}).get("row", "ZeRO 3") == "ZeRO 3")) * (n - 1) * padded // n
    if rung == "parameter_server":
        return S if rank else (n - 1) * S
    if rung in ("layer_by_layer", "pipeline"):
        return A * ((rank < n - 1) + (rank > 0))
    if rung == "tensor_parallel":
        return 8 * layers * (n - 1) * A // n
    if rung == "sequence_parallel":
        R = sum(size for name, size in sizes.items() if not CUT.search(name))
        return (8 * layers * (n - 1) * A + 2 * (n - 1) * R) // n
    if rung == "ring_attention":
        return layers * ((n - 1) + (2 * n - 1)) * (2 * A // n) + 2 * (n - 1) * S // n
    if rung == "ulysses":
        return (layers * 8 * (n - 1) * A // n + 2 * (n - 1) * S) // n
    return None


def held_by(
    rung: str, rank: int, n: int, model: nn.Sequential, options: dict[str, Any] | None = None
) -> int | None:
    """Return the bytes of parameters, gradients and AdamW's state that a rank holds after a step, or None."""
    sizes = {name: p.nbytes for name, p in model.named_parameters()}
    S, layers = sum(sizes.values()), list(model)
    if rung in ("experts", "muon"):  # experts are each rank's own, and muon has another state
        return None
    if rung == "recipe":
        return 6 * S  # 4 S of masters, and of what is rounded parameters and gradients
    if rung == "parameter_server":
        return 0 if rank else 4 * S
    if rung == "sharded":
        padded = sum(-(-sum(p.numel() for p in layer.parameters()) // n) * n * 8 for layer in layers)
        row = (options or {}).get("row", "ZeRO 3")  # ZeRO 1's gradients are whole in the step alone
        return padded // (n if row == "ZeRO 3" else 1) + 3 * padded // (1 if row == "data parallel" else n)
    if rung in ("layer_by_layer", "pipeline"):
        own = layers[len(layers) * rank // n : len(layers) * (rank + 1) // n]
        return S + 3 * sum(p.nbytes for layer in own for p in layer.parameters())
    if rung in ("tensor_parallel", "sequence_parallel"):
        R = sum(size for name, size in sizes.items() if not CUT.search(name))
        return 4 * (R + (S - R) // n)
    return 4 * S
