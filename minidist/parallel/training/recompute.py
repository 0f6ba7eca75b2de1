"""Activation recomputation: keep a part's inputs only, and compute the rest again for its backward pass.

A layer's activations are many times its input. Where each layer keeps its input and computes the others again
when the backward pass arrives, what a model keeps at one time is an input a layer and the activations of one:
for a third more computation, one more forward pass. Chosen parts alone, such as attention, save most of it
for less. Random numbers are drawn as the first time, so dropout drops the same; gradients are the same to
the last bit.

Sources: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", section 4; Korthikanti et al.
2022, "Reducing Activation Recomputation in Large Transformer Models", section 5 (chosen parts).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from minidist.parallel.guards.name_patterns import fits, fits_none
from minidist.parallel.training.activation_memory import ActivationCounter


def recompute(module: nn.Module, parts: str | Sequence[str] | None = None) -> nn.Module:
    """Have parts of `module` compute their activations again in the backward pass, from now on.

    >>> recompute(model)  # whole layers
    >>> recompute(model, ["layers.*.attention", "layers.*.mlp"])

    Parts may lie in one another. Buffers that a part changes, such as BatchNorm's statistics, change once.
    Outside of training, where no gradient is wanted, nothing is kept nor computed again.

    Args:
        module: changed in place: parts get another `forward`, and every name stays.
        parts: names of submodules, as `named_modules` gives them, where "*" in a name between two dots stands
            for any letters; None for the layers: the children of each `ModuleList` and `Sequential` that is
            in no other.

    Returns:
        `module`.

    Raises:
        ValueError: a pattern fits no part, or there are no layers.
    """
    names = [name for name, _ in module.named_modules() if name]
    if parts is None:
        chosen = _layers(module)
        if not chosen:
            raise ValueError(
                f"a {type(module).__name__} has no ModuleList or Sequential whose layers could be "
                'recomputed; name its parts, such as recompute(model, ["encoder.*"])'
            )
    else:
        patterns = [parts] if isinstance(parts, str) else [*parts]
        chosen = [name for name in names if any(fits(name, pattern) for pattern in patterns)]
        for pattern in patterns:
            if not any(fits(name, pattern) for name in names):
                raise fits_none(pattern, names)
    for name in chosen:
        part = module.get_submodule(name)
        if not isinstance(part.forward, _Recomputed):
            part.forward = _Recomputed(part)
    return module


def recomputes(module: nn.Module) -> bool:
    """Whether `recompute` was called for a part of it."""
    return any(isinstance(part.__dict__.get("forward"), _Recomputed) for part in module.modules())


def _layers(module: nn.Module, prefix: str = "") -> list[str]:
    """The children of the outermost lists of layers."""
    found = []
    for name, child in module.named_children():
        # A ModuleList among the layers is never called itself; a Sequential is.
        if isinstance(module, nn.ModuleList | nn.Sequential) and not isinstance(child, nn.ModuleList):
            found.append(prefix + name)
        else:
            found += _layers(child, f"{prefix}{name}.")
    return found


class _Recomputed:
    """The `forward` of a part whose activations are computed again."""

    def __init__(self, part: nn.Module) -> None:
        self._part = part
        self._own = part.__dict__.get("forward")  # where somebody else has replaced that of the class

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = partial(self._own or partial(type(self._part).forward, self._part), **kwargs)
        if not torch.is_grad_enabled():
            return forward(*args)
        counter = ActivationCounter.active()
        contexts = nullcontext(), _again(self._part, counter)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=lambda: contexts)


@contextmanager
def _again(part: nn.Module, counter: ActivationCounter | None) -> Iterator[None]:
    """While a part computes a second time, its buffers are copies, and a counter counts what it keeps."""
    kept = [(module._buffers, dict(module._buffers)) for module in part.modules() if module._buffers]
    for buffers, originals in kept:
        buffers.update({name: b if b is None else b.clone() for name, b in originals.items()})
    try:
        with nullcontext() if counter is None else counter.beside():
            yield
    finally:
        for buffers, originals in kept:
            buffers.update(originals)
