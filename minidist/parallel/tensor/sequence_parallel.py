"""Sequence parallelism between the cut layers: norms and dropout work on a share of the sequence.

Each rank computes them for its own tokens and keeps only those activations. Their parameters are whole on
every rank; each rank's gradient covers only its own tokens, so it is summed over the ranks in the backward
pass. Dropout draws for different tokens on each rank, so the ranks draw different random numbers.

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
"""Modules that draw no random numbers, so they need not spend time on a stream of their own."""


class _Around(ABC):
    """A `forward` that wraps the one that a module has."""

    def __init__(self, part: nn.Module, group: Group) -> None:
        self.part, self.group = part, group
        # Another wrapper may already have replaced the class's forward; it stays inside this one.
        self.own = part.__dict__.get("forward") or partial(type(part).forward, part)
        part.forward = self

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replaces the module's `forward`."""


class OnOwnTokens(_Around):
    """Make a module work on this rank's share of the sequence.

    Forward: sends nothing. Backward: one all-reduce sums the gradients of all its parameters; it sends 2 (n -
    1) / n of their bytes.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with copies of its parameters, whose gradients are summed."""
        trained = [
            (module._parameters, name, parameter)
            for module in self.part.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.requires_grad
        ]
        summed = copy_all_to_ranks([parameter for *_, parameter in trained], self.group) if trained else []
        for (parameters, name, _), copy in zip(trained, summed, strict=True):
            parameters[name] = copy  # type: ignore[assignment]
        try:
            draws = self.part.training and not isinstance(self.part, _DRAW_NOTHING)
            with own_random_state(self.group) if draws else nullcontext():
                return self.own(*args, **kwargs)
        finally:
            for parameters, name, parameter in trained:
                parameters[name] = parameter


class WithOwnRandomNumbers(_Around):
    """Make a module draw different random numbers on each rank while it trains. Sends nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with this rank's random numbers."""
        if not self.part.training:
            return self.own(*args, **kwargs)
        with own_random_state(self.group):
            return self.own(*args, **kwargs)


class SplitAfter(_Around):
    """Make a module compute on the whole sequence, but return this rank's share (..., T / n, D).

    Forward: sends nothing. Backward: an all-gather of the gradient, (n - 1) / n of its bytes. Raises
    ValueError if the number of ranks does not divide T.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return this rank's share of the module's output."""
        x: Tensor = self.own(*args, **kwargs)
        check_sequence(x.shape[-2], self.group)
        return split_to_ranks(x, -2, self.group)
