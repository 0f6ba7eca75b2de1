"""The order in which layers are compared is that in which they run, whatever their lists are called."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import minidist as md
from minidist.parallel.debugging.compare import differences
from minidist.parallel.debugging.recording import Recording, in_order, record
from tests.conftest import Clusters
from tests.parallel.pipeline.test_model_stage import EXAMPLES, case

SGD = partial(torch.optim.SGD, lr=0.1)


def test_layers_are_ordered_as_they_run() -> None:
    layers = ["head", "token", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "unused"]
    ordered = ["token", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head", "unused"]
    assert in_order(layers, ordered[:-1], chunked=False) == ordered
    two_stages = ["token", "blocks.0", "blocks.2", "blocks.1", "blocks.3", "head"]
    assert in_order(layers, two_stages, chunked=True) == ordered
    reverse = ["blocks.3", "blocks.2", "blocks.1", "blocks.0"]
    assert in_order(layers[2:6], reverse, chunked=False) == reverse


def recorded(layout: str, faulty: bool) -> Recording:
    model = case("own").model(0)
    options = {"example": EXAMPLES["own"]} if "pp" in layout else {}
    engine = md.prepare(model, SGD, md.Layout.parse(layout), **options)
    names = {name for name, _ in model.named_parameters()}
    if faulty and "blocks.3.mix.weight" in names:
        model.get_submodule("blocks.3").register_forward_hook(lambda _, args, out: (out[0] * 1.001, out[1]))
    return record(engine, case("own").global_batches()[:1], repeats=1)


@pytest.mark.parametrize("layout", ["pp=2,micro_batches=2", "pp=2,schedule=interleaved,chunks=2"])
def test_a_fault_in_a_list_of_any_name_is_named_exactly(cluster_of: Clusters, layout: str) -> None:
    (alone,) = cluster_of(1).run(recorded, "dp=1", False)
    right, _ = cluster_of(2).run(recorded, layout, False)
    found = differences(alone, right)
    assert found.agree, str(found)
    wrong, _ = cluster_of(2).run(recorded, layout, True)
    first = differences(alone, wrong).first
    assert first is not None
    assert (first.layer, first.what) == ("blocks.3", "its output")


class Reentrant(nn.Module):
    """Its middle layer runs without gradients first, and once more in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Through the three layers."""
        first, middle, last = self.layers
        outputs: Tensor = last(checkpoint(middle, first(x).tanh(), use_reentrant=True).tanh())
        return outputs


def recorded_reentrant(layout: str) -> Recording:
    torch.manual_seed(0)
    engine = md.prepare(Reentrant(), SGD, md.Layout.parse(layout), nn.functional.mse_loss, rehearse=False)
    return record(engine, [(torch.randn(5, 6), torch.randn(5, 6)) for _ in range(2)], repeats=1)


def test_outputs_without_gradients_are_not_recorded(cluster_of: Clusters) -> None:
    """A layer's rows would be there twice, in another order on two ranks."""
    (alone,) = cluster_of(1).run(recorded_reentrant, "dp=1")
    two, _ = cluster_of(2).run(recorded_reentrant, "dp=2")
    assert {"output layers.1", "gradient layers.1"} <= alone.steps[0].keys()
    assert [len(copy) for copy in alone.steps[0]["output layers.1"]] == [5]
    assert differences(alone, two).agree, str(differences(alone, two))
