"""Sequence parallelism between the cut layers: norms and dropout work on a share of the sequence.

Each rank computes them for its own tokens and keeps only those activations. Their parameters are whole on
every rank; each rank's gradient covers only its own tokens, so the ranks' gradients are summed. Dropout draws
for different tokens on each rank, so the ranks draw different random numbers.

`wrap` replaces a module's `forward` by one of the functions below, which call the original as `own`.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn

from minidist.comm.opaque import opaque
from minidist.comm.work import Group
from minidist.parallel.tensor_parallel.operators import check_sequence, copy_all_to_ranks, split_to_ranks
from minidist.parallel.training.random_state import own_random_state

Forward = Callable[..., Any]
_DRAW_NOTHING = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
"""Modules that draw no random numbers, so they need not spend time on a stream of their own."""


def wrap(part: nn.Module, forward: Forward, group: Group) -> None:
    """Replace a module's `forward`. Another wrapper may have replaced it already; that one stays inside."""
    own = part.__dict__.get("forward") or partial(type(part).forward, part)
    part.forward = partial(forward, part, group, own)


@opaque
def on_own_tokens(part: nn.Module, group: Group, own: Forward, *args: Any, **kwargs: Any) -> Any:
    """Work on this rank's share of the sequence.

    Forward: sends nothing. Backward: one all-reduce sums the gradients of all parameters; it sends 2 (n - 1)
    / n of their bytes. To get there, the module runs with copies of its parameters.
    """
    trained = [
        (module._parameters, name, parameter)
        for module in part.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.requires_grad
    ]
    summed = copy_all_to_ranks([parameter for *_, parameter in trained], group) if trained else []
    for (parameters, name, _), copy in zip(trained, summed, strict=True):
        parameters[name] = copy  # type: ignore[assignment]
    try:
        draws = part.training and not isinstance(part, _DRAW_NOTHING)
        with own_random_state(group) if draws else nullcontext():
            return own(*args, **kwargs)
    finally:
        for parameters, name, parameter in trained:
            parameters[name] = parameter


def with_own_random_numbers(part: nn.Module, group: Group, own: Forward, *args: Any, **kwargs: Any) -> Any:
    """Draw different random numbers on each rank while the module trains. Sends nothing."""
    with own_random_state(group) if part.training else nullcontext():
        return own(*args, **kwargs)


def split_after(part: nn.Module, group: Group, own: Forward, *args: Any, **kwargs: Any) -> Tensor:
    """Compute on the whole sequence, but return this rank's share: (..., T, D) -> (..., T / n, D).

    Forward: sends nothing. Backward: an all-gather of the gradient, (n - 1) / n of its bytes. Raises
    ValueError if the number of ranks does not divide T.
    """
    x: Tensor = own(*args, **kwargs)
    check_sequence(x.shape[-2], group)
    return split_to_ranks(x, -2, group)
