"""A parameter that several ranks hold: its gradients are summed, the same to the last bit on each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import minidist as md
from minidist import comm
from minidist.parallel.pipeline.tied_parameters import start_tied_equal, sum_tied

Clusters = Callable[[int], md.Cluster]


def test_the_holders_sum_their_gradients(cluster_of: Clusters) -> None:
    def train(holders: list[int]) -> tuple[list[int], Tensor | None, Tensor | None, int]:
        torch.manual_seed(md.rank())
        parameter = nn.Parameter(torch.randn(5, 3)) if md.rank() in holders else None
        ranks = start_tied_equal(parameter, None)
        if parameter is not None and md.rank() != 3:  # rank 3's copy was not used in this step
            parameter.grad = torch.full((5, 3), 0.1 + md.rank())
        with comm.ledger() as ledger:
            sum_tied(parameter, None, ranks)
        if parameter is None:
            return ranks, None, None, ledger.bytes_sent
        return ranks, parameter.detach(), parameter.grad, ledger.bytes_sent

    for holders in ([1], [0, 3], [0, 1, 3]):
        results = cluster_of(4).run(train, holders)
        _, first, total, _ = results[holders[0]]
        assert first is not None
        assert total is not None
        used = [rank for rank in holders if rank != 3]
        torch.testing.assert_close(total, torch.full((5, 3), sum(0.1 + rank for rank in used)))
        for rank, (ranks, values, gradient, sent) in enumerate(results):
            assert ranks == holders
            if rank in holders:
                assert values is not None
                assert gradient is not None
                assert torch.equal(values, first)
                assert torch.equal(gradient, total)
            assert sent == (4 * (15 + 1) * (len(holders) - 1) if rank in holders else 0)
