"""Evaluation mode for a while, put back as it was: also of parts that were not in training mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, these modules and their parts are in evaluation mode, and nothing keeps a graph."""
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
    """RuntimeError where a backward pass would find no graph."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        raise RuntimeError(
            "gradients are off here, as in torch.no_grad() or torch.inference_mode(), and a step trains; "
            "call it outside, or evaluate"
        )
