"""The count of activations: every storage once, for as long as backward needs it, and no parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from minidist.parallel.training.activation_memory import ActivationCounter


def saved_activations(forward: Callable[[], Tensor]) -> int:
    """Bytes that are kept while a forward pass's result is held."""
    with ActivationCounter() as counter:
        _held = forward()
    return counter.saved


def test_a_linear_layer_keeps_its_input() -> None:
    linear, inputs = nn.Linear(3, 5), torch.randn(7, 3)
    assert saved_activations(lambda: linear(inputs)) == 7 * 3 * 4
    assert saved_activations(lambda: torch.relu(linear(inputs))) == 7 * 3 * 4 + 7 * 5 * 4
    assert saved_activations(lambda: linear(inputs[:0])) == 7 * 3 * 4  # a view keeps its whole storage
    with torch.no_grad():
        assert saved_activations(lambda: linear(inputs)) == 0


def test_the_peak_is_what_was_live_at_one_time() -> None:
    size = 1000 * 4

    def square_root_of(x: Tensor) -> None:
        torch.exp(torch.sqrt(x)).sum().backward()  # type: ignore[no-untyped-call]

    x = torch.rand(1000, requires_grad=True)
    with ActivationCounter() as counter:
        for _ in range(3):
            square_root_of(x)
            assert (counter.saved, counter.peak) == (0, 2 * size)  # not the sum over passes
    counter.peak = counter.saved
    with pytest.raises(RuntimeError), counter:
        raise RuntimeError
    with counter:
        y = torch.exp(x)
    assert (counter.saved, counter.peak) == (size, size)
    torch.exp(x)  # outside
    assert counter.peak == size
    del y
    assert counter.saved == 0
