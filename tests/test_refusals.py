"""What would train wrongly, or fail in the middle of a step, is refused before anything is touched."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import minidist as md

Clusters = Callable[[int], md.Cluster]
SGD = partial(torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_tables_that_renormalise_their_rows(cluster_of: Clusters, kind: type[nn.Module]) -> None:
    def check() -> None:
        model = nn.Sequential(nn.Linear(1, 1), kind(5, 3, max_norm=0.5))
        makers: list[Callable[[], Any]] = [
            partial(md.prepare, model, SGD, md.Layout(dp=md.size(), zero=zero)) for zero in range(4)
        ]
        makers += [partial(md.DataParallel, model), partial(md.FullyShard, model, SGD)]
        for make in makers:
            with pytest.raises(ValueError, match=rf"1 is an {kind.__name__} with max_norm=0\.5, .*; leave"):
                make()
        whole = nn.Sequential(kind(5, 3))
        md.prepare(whole, SGD, md.Layout(dp=md.size()))

    cluster_of(2).run(check)


def test_one_rank_renormalises_as_torch_does() -> None:
    torch.manual_seed(0)
    models = [nn.Embedding(5, 3, max_norm=0.5) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    engine = md.prepare(models[0], SGD, md.Layout())
    optimizer = SGD(models[1].parameters())
    for _ in range(3):
        engine.step(torch.arange(4), torch.tensor([0, 1, 2, 0]))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(models[1](torch.arange(4)), torch.tensor([0, 1, 2, 0]))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    torch.testing.assert_close(models[0].weight, models[1].weight)
    for layout in (md.Layout(zero=3), md.Layout(precision="bf16")):
        with pytest.raises(ValueError, match=r"the model is an Embedding with max_norm=0\.5"):
            md.prepare(nn.Embedding(5, 3, max_norm=0.5), SGD, layout)
