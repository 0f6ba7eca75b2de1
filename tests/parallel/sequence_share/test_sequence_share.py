"""A share of a sequence: cut and put together, and a GPT that trains on it to one process's weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from minidist import comm
from minidist.model import GPT, MLP, GPTConfig, cross_entropy
from minidist.parallel.context_parallel import zigzag_order
from minidist.parallel.sequence_share.sequence_share import SequenceShare, apply
from minidist.parallel.training.recompute import recompute
from tests.conftest import Clusters
from tests.helpers.contract import of_outputs, plain_steps
from tests.helpers.on_ranks import on_ranks
from tests.helpers.refusals import refused_on_ranks

TINY = GPTConfig(vocabulary=11, context=16, layers=2, heads=2, width=8)
LENGTHS = (13, 16, 3, 1)  # fewer than a position a rank, too
CLOSE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}
"""As in helpers/contract.py."""


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randint(11, (2, 3, length), generator=generator) for length in LENGTHS]
    return [(tokens[0], tokens[1]) for tokens in drawn]


def train(whole_outputs: bool, recomputed: bool = False) -> tuple[list[float], dict[str, Tensor]]:
    """A user's own loop over this rank's shares; one process where there is one rank."""
    model, share = GPT(TINY, dtype=torch.float64), SequenceShare()
    apply(model, share)
    if recomputed:
        recompute(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for tokens, targets in batches():
        optimizer.zero_grad()
        outputs = model(share.cut(tokens))
        if whole_outputs:
            loss = mean = cross_entropy(share.gather(outputs), targets)
        else:
            own = share.cut(targets)
            loss = cross_entropy(outputs, own) * share.part if own.numel() else outputs.sum()
            mean = comm.all_reduce(loss.detach().clone())
        loss.backward()
        for parameter in model.parameters():
            comm.all_reduce(parameter.grad)
        optimizer.step()
        losses.append(float(mean))
    return losses, dict(model.state_dict())


def train_whole() -> tuple[list[float], dict[str, Tensor]]:
    model = GPT(TINY, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trained = plain_steps(model, optimizer, batches(), of_outputs(cross_entropy))
    return trained.losses, trained.state


def compare(actual: Any, expected: Any) -> None:
    assert actual[1].keys() == expected[1].keys()
    torch.testing.assert_close(actual, expected, **CLOSE)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_gpt_trains_to_the_weights_of_one_process(cluster_of: Clusters, ranks: int) -> None:
    for trained in cluster_of(ranks).run(train, False):
        compare(trained, train_whole())


# Cutting.


def cut_and_gathered(length: int, dim: int) -> None:
    x = torch.arange(3.0 * length).view(length, 3).movedim(0, dim).contiguous().requires_grad_()
    share = SequenceShare()
    part = share.cut(x, dim)
    assert part.shape[dim] == share.size == len(share.positions)
    with comm.ledger() as ledger:
        whole = share.gather(2 * part, dim)
    longest = max(zigzag_order.size(length, share.ranks, rank) for rank in range(share.ranks))
    assert ledger.bytes_sent == (share.ranks - 1) * longest * 3 * 4
    assert torch.equal(whole, 2 * x)
    assert whole.is_contiguous()  # as the whole is in one process, which may be viewed
    (gradient,) = torch.autograd.grad((whole * x.detach()).sum(), x)
    expected = torch.zeros_like(x).index_copy(dim, share.positions, share.cut(2 * x.detach(), dim))
    assert torch.equal(gradient, expected)


@on_ranks(1, 3, 4)
def test_what_is_cut_is_gathered_again() -> None:
    for length, dim in ((7, 0), (1, 1), (12, 1), (5, -1)):
        cut_and_gathered(length, dim)


def all_parts(length: int) -> list[Tensor]:
    return [zigzag_order.positions(length, 3, rank)[None] for rank in range(3)]


def restored(parts: list[Tensor]) -> Tensor:
    return SequenceShare().restore(parts)


def test_parts_of_all_ranks_are_put_together(cluster_of: Clusters) -> None:
    for length in (0, 1, 7, 12):
        for whole in cluster_of(3).run(restored, all_parts(length)):
            assert torch.equal(whole, torch.arange(length)[None])
    told = r"the parts have \[2, 2, 3\] positions.*cut into \[3, 2, 2\]"
    refused_on_ranks(cluster_of(3), ValueError, told, restored, all_parts(7)[::-1])


# Mistakes.


def test_models_that_it_does_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="a MLP has no attention"):
        apply(MLP(), SequenceShare())
    with pytest.raises(ValueError, match=r"dropout is 0\.1 in the model's attention"):
        apply(GPT(GPTConfig(context=8, layers=1, heads=1, width=4, dropout=0.1)), SequenceShare())


def test_sequences_that_do_not_fit_are_refused() -> None:
    share = SequenceShare()
    model = apply(GPT(TINY), share)
    tokens = torch.zeros(1, 12, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"give the model share\.cut\(tokens\)"):
        model(tokens)
    with pytest.raises(ValueError, match="x has 12 positions"):
        share.gather(tokens)
    share.cut(tokens)
    with pytest.raises(ValueError, match="give the model"):
        model(tokens[:, :5])


def longer_than_the_context() -> None:
    share = SequenceShare()
    apply(GPT(TINY), share)(share.cut(torch.zeros(1, 20, dtype=torch.int64)))


def test_a_sequence_longer_than_the_context_is_refused(cluster_of: Clusters) -> None:
    told = "the sequence has 20 tokens; give at most 16"
    refused_on_ranks(cluster_of(2), ValueError, told, longer_than_the_context)
