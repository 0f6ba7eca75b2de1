"""What tensor-parallel ranks draw: the same outside of the parts that they share, other numbers inside."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from minidist.parallel.tensor_parallel import replace_layers as tensor_parallel
from minidist.parallel.tensor_parallel.plans import plan_for
from minidist.parallel.tensor_parallel.replace_layers import parallelize
from minidist.parallel.tensor_parallel.vocabulary import vocab_parallel_cross_entropy
from minidist.parallel.training.recompute import recompute
from tests.conftest import Clusters
from tests.helpers import models

VOCABULARY, TOKENS = 11, 8


gpt = partial(models.gpt, 0, heads=4, width=16, dropout=0.3)


def batch() -> tuple[Tensor, Tensor]:
    text = torch.randint(0, VOCABULARY, (3, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    return text[:, :-1], text[:, 1:]


def seen_in_a_pass(model: nn.Module) -> tuple[list[Tensor], list[Tensor], list[Tensor | None]]:
    """In the order of the calls: the random state inside attention, what dropout dropped; the gradients."""
    inside: list[Tensor] = []
    dropped: list[Tensor] = []
    model.get_submodule("layers.1.attention.output").register_forward_pre_hook(
        lambda *_: inside.append(torch.get_rng_state())
    )
    model.get_submodule("layers.1.dropout").register_forward_hook(lambda *call: dropped.append(call[-1] == 0))
    inputs, targets = batch()
    torch.manual_seed(3)
    loss = vocab_parallel_cross_entropy(model(inputs), targets, vocabulary=VOCABULARY)
    loss.backward()  # type: ignore[no-untyped-call]
    return inside, dropped, [parameter.grad for parameter in model.parameters()]


def train(sequence_parallel: bool, recomputed: Any = False) -> Any:
    model = gpt()
    parallelize(model, plan_for(model), sequence_parallel=sequence_parallel)
    if recomputed is not False:
        recompute(model, recomputed)
    return seen_in_a_pass(model)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_masks_differ_where_ranks_have_a_part_and_nowhere_else(
    cluster_of: Clusters, sequence_parallel: bool
) -> None:
    (inside, dropped, _), (inside_2, dropped_2, _) = cluster_of(2).run(train, sequence_parallel)
    assert len(inside) == len(inside_2) == 1
    assert not torch.equal(inside[0], inside_2[0])  # each its heads
    for first, second in zip(dropped, dropped_2, strict=True):  # after attention, and after the MLP
        assert first.any()
        assert not first.all()
        assert first.shape == (3, TOKENS // 2 if sequence_parallel else TOKENS, 16)
        assert torch.equal(first, second) is not sequence_parallel  # each its tokens


@pytest.mark.parametrize("parts", [None, ["layers.*.attention"], ["layers.*.dropout", "layers.1.attention"]])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_what_is_computed_again_drops_the_same(
    cluster_of: Clusters, sequence_parallel: bool, parts: Any
) -> None:
    plain, again = (cluster_of(2).run(train, sequence_parallel, form) for form in (False, parts))
    for (inside, dropped, grads), (inside_2, dropped_2, grads_2) in zip(plain, again, strict=True):
        assert len(inside_2) == 2
        assert all(torch.equal(state, inside[0]) for state in inside_2)
        assert all(torch.equal(a, b) for a, b in zip(dropped, dropped_2, strict=False))
        torch.testing.assert_close(grads_2, grads, rtol=0, atol=0)


@pytest.mark.parametrize("shared", [True, False])
def test_copies_stay_equal_as_their_ranks_start_alike(cluster_of: Clusters, shared: bool) -> None:
    """Without the first rank's state, a planted fault, they part."""

    def gradient() -> Tensor:
        torch.manual_seed(md.rank())
        with pytest.MonkeyPatch.context() as patch:
            if not shared:
                patch.setattr(tensor_parallel, "share_random_state", lambda group: None)
            model = gpt()
            parallelize(model, plan_for(model))
        inputs, targets = batch()
        loss = vocab_parallel_cross_entropy(model(inputs), targets, vocabulary=VOCABULARY)
        loss.backward()  # type: ignore[no-untyped-call]
        grad = model.get_parameter("layers.1.attention_norm.weight").grad
        assert grad is not None
        return grad

    first, second = cluster_of(2).run(gradient)
    assert torch.equal(first, second) is shared
