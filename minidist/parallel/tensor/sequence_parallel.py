"""What lies between the cut layers under sequence parallelism: norms and dropout on a share of the sequence.

Each rank then computes them for its own tokens alone, and keeps those activations alone. Their parameters are
whole on every rank, and each rank's gradient is that of its tokens: it is summed as it leaves the part. What
they draw is for other tokens on other ranks, and so are their random numbers.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn

from minidist.comm.work import Group
from minidist.parallel.tensor.operators import check_sequence, copy_all_to_ranks, split_to_ranks
from minidist.parallel.training.random_state import own_random_state

_DRAW_NOTHING = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
"""Parts that need no random numbers, and are spared the time that a stream of them takes."""


class _Around(ABC):
    """Another `forward` for a module that is there, around its own."""

    def __init__(self, part: nn.Module, group: Group) -> None:
        self.part, self.group = part, group
        # Where somebody else has replaced that of the class, it stays inside.
        self.own = part.__dict__.get("forward") or partial(type(part).forward, part)
        part.forward = self

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's `forward` is now."""


class OnOwnTokens(_Around):
    """Works on this rank's share of the sequence.

    Forward: sends nothing. Backward: the gradients of the part's parameters are summed, an all-reduce of all
    of them in one message; sends 2 (n - 1) / n of their bytes.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the part returns."""
        places = [
            (module._parameters, name, parameter)
            for module in self.part.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.requires_grad
        ]
        summed = copy_all_to_ranks([parameter for *_, parameter in places], self.group) if places else []
        for (parameters, name, _), copy in zip(places, summed, strict=True):
            parameters[name] = copy  # type: ignore[assignment]
        try:
            draws = self.part.training and not isinstance(self.part, _DRAW_NOTHING)
            with own_random_state(self.group) if draws else nullcontext():
                return self.own(*args, **kwargs)
        finally:
            for parameters, name, parameter in places:
                parameters[name] = parameter


class WithOwnRandomNumbers(_Around):
    """Draws other random numbers on each rank, while it trains. Sends nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the part returns."""
        if not self.part.training:
            return self.own(*args, **kwargs)
        with own_random_state(self.group):
            return self.own(*args, **kwargs)


class SplitAfter(_Around):
    """Computes for the whole sequence, and returns this rank's share: (..., T, D) -> (..., T / n, D).

    Forward: sends nothing. Backward: an all-gather of the gradient, (n - 1) / n of its bytes. Raises
    ValueError where the ranks do not divide T.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """This rank's share of what the part returns."""
        x: Tensor = self.own(*args, **kwargs)
        check_sequence(x.shape[-2], self.group)
        return split_to_ranks(x, -2, self.group)
