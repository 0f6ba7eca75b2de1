"""`moved_results`: move the last bit of every module's results at random, to see what rounding changes.

Two layouts add the same numbers in another order, so they never agree to the last bit. How far they differ
depends on the model: a sum that cancels magnifies errors in its terms. So the effect is measured.

Source: Parker 1997, "Monte Carlo Arithmetic: exploiting randomness in floating-point arithmetic", section 2.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

MARGIN = 16
"""Rounding explains this many times the change that moving the last bits causes. Layouts that train alike
differ by up to four times that change: a sum in another order rounds many times while a result is moved once,
and a few random trials need not contain the worst. A wrong gradient differs by thousands of times, except in
16 bits."""


@contextmanager
def forward_hooks(modules: Iterable[tuple[str, nn.Module]], after: Callable[..., Any]) -> Iterator[None]:
    """Inside, call `after` with the name of each module, and what a forward hook gets."""
    handles = [module.register_forward_hook(partial(after, name)) for name, module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def last_bit(x: Tensor) -> float:
    """The last bit that a product of this type keeps: 10 bits of a float32 where a GPU may use TF32."""
    by_tf32 = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
    if x.is_cuda and x.dtype == torch.float32 and by_tf32:
        return 2.0**-10
    return torch.finfo(x.dtype).eps


def move(name: str, x: Tensor, trial: int, least: float = 0.0) -> Tensor:
    """Move the last bit of a tensor's elements at random, or as much as `least` times the elements."""
    # The same in every call: recomputed activations have to be the same, and so do copies on other ranks.
    seed = zlib.crc32(f"{name} {trial}".encode())
    noise = torch.as_tensor(np.random.default_rng(seed).uniform(-1.0, 1.0, x.shape))
    return torch.addcmul(x, x, noise.mul_(max(least, last_bit(x))).to(x))


def moved_results(model: nn.Module, trial: int, least: float = 0.0) -> AbstractContextManager[None]:
    """Inside, move the last bit of the results of all modules without children, forward and backward.

    least: the least to move by, where the model computes in a less precise type than it returns.
    """

    def after(name: str, module: nn.Module, inputs: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        result = move(name, output, trial, least)
        if result.requires_grad:
            result.register_hook(lambda grad: move(f"{name} backward", grad, trial, least))  # type: ignore[no-untyped-call]
        return result

    parts = [(name, part) for name, part in model.named_modules() if not [*part.children()]]
    return forward_hooks(parts, after)
