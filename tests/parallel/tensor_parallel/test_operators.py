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
    copy_all_to_ranks,
    copy_to_ranks,
    gather_from_ranks,
    gather_sequence,
    reduce_from_ranks,
    scatter_sequence,
    split_to_ranks,
)
from tests.helpers.on_ranks import Clusters

B, T, D = 2, 6, 5
"""Rows, tokens (which 1, 2 and 3 ranks divide) and features (which they do not)."""


def own_factor(shape: tuple[int, ...]) -> Tensor:
    """What a rank multiplies with in its shared part: another on each."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(md.rank()), dtype=torch.float64)


def copied_and_reduced(x: Tensor) -> Tensor:
    return reduce_from_ranks(copy_to_ranks(x) * own_factor((B, T, D)))


def several_copied(x: Tensor) -> Tensor:
    first, second = copy_all_to_ranks([x, x[0].sin()])
    return reduce_from_ranks(first * own_factor((B, T, D)) + second)


def split_and_gathered(x: Tensor) -> Tensor:
    part = split_to_ranks(x, -1)
    return gather_from_ranks(part * own_factor(tuple(part.shape)), -1, D)


def sequence_gathered_and_scattered(x: Tensor) -> Tensor:
    inside = gather_sequence(split_to_ranks(x, -2)) * own_factor((B, T, D))
    return gather_from_ranks(scatter_sequence(inside), -2, T)


def mapped_by_columns(x: Tensor, *weights: Tensor) -> Tensor:
    parts = [split_to_ranks(w, 0) for w in weights]
    outputs = column_linear(x, parts, [None, split_to_ranks(weights[1][:, 0], 0)])
    return sum(gather_from_ranks(y, -1, D) for y in outputs)  # type: ignore[return-value]


def mapped_from_a_share(x: Tensor, *weights: Tensor) -> Tensor:
    parts = [split_to_ranks(w, 0) for w in weights]
    outputs = column_linear(split_to_ranks(x, -2), parts, [None, None], sequence_parallel=True)
    return sum(gather_from_ranks(y, -1, D) for y in outputs)  # type: ignore[return-value]


def lost(x: Tensor) -> Tensor:
    targets = torch.randint(0, D, (B, T), generator=torch.Generator().manual_seed(1))
    return md.vocab_parallel_cross_entropy(split_to_ranks(x), targets, vocabulary=D)


WEIGHTS = ((D, D), (D, D))
OPERATIONS: dict[Callable[..., Tensor], tuple[tuple[int, ...], ...]] = {
    copied_and_reduced: (),
    several_copied: (),
    split_and_gathered: (),
    sequence_gathered_and_scattered: (),
    mapped_by_columns: WEIGHTS,
    mapped_from_a_share: WEIGHTS,
    lost: (),
}
"""From tensors that all ranks have to one that all have: differences can be taken on all at once."""


def check_gradients(operation: Callable[..., Tensor], shapes: tuple[tuple[int, ...], ...]) -> None:
    generator = torch.Generator().manual_seed(5)
    inputs = [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((B, T, D), *shapes)
    ]
    # Two ranks take the difference for each element; three take one, in a random direction.
    torch.autograd.gradcheck(operation, inputs, fast_mode=md.size() > 2)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_gradients_equal_differences(
    cluster_of: Clusters, operation: Callable[..., Tensor], ranks: int
) -> None:
    cluster_of(ranks).run(check_gradients, operation, OPERATIONS[operation])


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


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", SENT)
def test_operators_send_what_they_say(cluster_of: Clusters, name: str, ranks: int) -> None:
    operator, forward, backward = SENT[name]

    def count() -> tuple[int, int]:
        x = torch.ones(B, T, D, requires_grad=True)
        with comm.ledger() as there:
            y = operator(x)
        with comm.ledger() as back:
            y.sum().backward()
        return there.bytes_sent, back.bytes_sent

    size = B * T * D * 4
    assert cluster_of(ranks).run(count) == [(forward(ranks, size), backward(ranks, size))] * ranks


def test_a_sequence_that_ranks_do_not_divide_is_refused(cluster_of: Clusters) -> None:
    with pytest.raises(md.RankError, match="a sequence of 5 tokens is not divided by 2 tensor-parallel"):
        cluster_of(2).run(lambda: scatter_sequence(torch.ones(2, 5, 3)))


def test_a_part_of_another_size_is_refused(cluster_of: Clusters) -> None:
    with pytest.raises(md.RankError, match="rank 0 of 2 has 2 of 5; give the size of the whole"):
        cluster_of(2).run(lambda: gather_from_ranks(torch.ones(2, 3), -1, 5))
    with pytest.raises(md.RankError, match="cannot be shared by 2 tensor-parallel ranks; use at most 1"):
        cluster_of(2).run(lambda: split_to_ranks(torch.ones(2, 1)))


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
