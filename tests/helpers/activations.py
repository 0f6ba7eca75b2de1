"""How many bytes a forward pass leaves for the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from minidist.parallel.training.activation_memory import ActivationCounter


def saved_activations(fn: Callable[[], Any], module: nn.Module | None = None) -> int:
    """Bytes that are kept once `fn`, a forward pass, has returned and its result is still held."""
    with ActivationCounter(module) as counter:
        outputs = fn()
    saved = counter.saved
    del outputs
    return saved
