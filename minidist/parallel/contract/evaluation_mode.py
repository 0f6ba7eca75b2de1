"""Evaluation mode for a while, and the check that gradients are on before a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, all parts of these modules are in evaluation mode without gradients; then each as it was."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    for part, _ in modes:
        part.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training


def require_gradients() -> None:
    """RuntimeError if gradients are off."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        raise RuntimeError(
            "gradients are off here, as in torch.no_grad() or torch.inference_mode(), and a step trains; "
            "call it outside, or evaluate"
        )
