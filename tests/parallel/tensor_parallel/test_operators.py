"""The pairs of operators: gradients against differences in lockstep on all ranks, bytes, and wrong signs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import minidist as md
from minidist import comm
from minidist.parallel.tensor_parallel import linear_layers
from minidist.parallel.tensor_parallel import operators as operators
from minidist.parallel.tensor_parallel.linear_layers import column_linear
from minidist.parallel.tensor_parallel.operators import (
    copy_to_ranks,
    gather_from_ranks,
    gather_sequence,
    reduce_from_ranks,
    scatter_sequence,
    split_to_ranks,
)
from tests.conftest import Clusters
from tests.helpers.on_ranks import on_ranks

B, T, D = 2, 6, 5
"""Rows, tokens (which 1, 2 and 3 ranks divide) and features (which they do not)."""


def own_factor(shape: tuple[int, ...]) -> Tensor:
    """What a rank multiplies with in its shared part: another on each."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(md.rank()), dtype=torch.float64)


def sequence_gathered_and_scattered(x: Tensor) -> Tensor:
    inside = gather_sequence(split_to_ranks(x, -2)) * own_factor((B, T, D))
    return gather_from_ranks(scatter_sequence(inside), -2, T)


@on_ranks(1, 3)
def test_gradients_equal_differences() -> None:
    """Of a function from what all ranks have to what all have: differences can be taken on all at once.

    Layers use the other operators, and are held to the gradients of one process.
    """
    x = torch.randn(B, T, D, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    # One rank takes the difference for each element; three take one, in a random direction.
    torch.autograd.gradcheck(sequence_gathered_and_scattered, x.requires_grad_(), fast_mode=md.size() > 1)


SENT: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[int, int], int], Callable[[int, int], int]]] = {
    "copy": (copy_to_ranks, lambda n, s: 0, lambda n, s: 2 * (n - 1) * s // n),
    "reduce": (reduce_from_ranks, lambda n, s: 2 * (n - 1) * s // n, lambda n, s: 0),
    "split": (split_to_ranks, lambda n, s: 0, lambda n, s: (n - 1) * (s // D * -(-D // n))),
    "gather": (gather_from_ranks, lambda n, s: (n - 1) * s, lambda n, s: 0),
    "gather_sequence": (gather_sequence, lambda n, s: (n - 1) * s, lambda n, s: (n - 1) * s),
    "scatter_sequence": (
        scatter_sequence,
        lambda n, s: (n - 1) * s // n,
        lambda n, s: (n - 1) * s // n,
    ),
}


@on_ranks(1, 2, 3, name=[*SENT])
def test_operators_send_what_they_say(name: str) -> None:
    operator, forward, backward = SENT[name]
    x = torch.ones(B, T, D, requires_grad=True)
    with comm.ledger() as there:
        y = operator(x)
    with comm.ledger() as back:
        y.sum().backward()
    size = B * T * D * 4
    assert there.bytes_sent == forward(md.size(), size)
    assert back.bytes_sent == backward(md.size(), size)


@on_ranks(2)
def test_a_sequence_that_ranks_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="a sequence of 5 tokens is not divided by 2 tensor-parallel"):
        scatter_sequence(torch.ones(2, 5, 3))


@on_ranks(2)
def test_a_part_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=f"rank {md.rank()} of 2 has {2 + md.rank()} of 5; give the size of"):
        gather_from_ranks(torch.ones(2, 4), -1, 5)
    with pytest.raises(ValueError, match="cannot be shared by 2 tensor-parallel ranks; use at most 1"):
        split_to_ranks(torch.ones(2, 1))


def test_the_sum_is_under_way_while_weights_get_their_gradients(cluster_of: Clusters) -> None:
    def order(overlap: bool) -> list[str]:
        events: list[str] = []

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func is torch.ops.aten.mm.default:
                    events.append("product")
                return func(*args, **(kwargs or {}))

        start = linear_layers.start_all_reduce

        def watched(x: Tensor, group: Any, overlap: bool) -> Callable[[], Tensor]:
            events.append("launch")
            finish = start(x, group, overlap)

            def wait() -> Tensor:
                events.append("wait")
                return finish()

            return wait

        comm.all_reduce(torch.ones(1))
        x = torch.ones(4, 3, requires_grad=True)
        weight = torch.ones(2, 3, requires_grad=True)
        (y,) = column_linear(x, [weight], [None], overlap=overlap)
        with pytest.MonkeyPatch.context() as patch, Watch(), comm.ledger() as ledger:
            patch.setattr(linear_layers, "start_all_reduce", watched)
            y.sum().backward()
        assert len(ledger.calls) == 1
        return events

    for overlap in (True, False):
        events = ["product", "launch", "product", "wait"]
        assert cluster_of(2).run(order, overlap) == [events, events]
