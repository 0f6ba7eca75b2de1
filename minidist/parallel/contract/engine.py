"""An engine's arguments, its functions and batches; and evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]
"""From outputs and targets to a scalar, the mean over their rows."""
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""From parameters to a torch optimizer, such as `partial(torch.optim.AdamW, lr=3e-4)`."""


@contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, all parts of these modules are in evaluation mode without gradients; then each as it was."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    try:
        for module in modules:
            module.eval()  # which a module may have overridden
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training
