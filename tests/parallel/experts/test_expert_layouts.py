"""Layouts whose ranks share the experts train to the weights of one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import minidist as md
from minidist.comm.mesh import Mesh
from minidist.parallel.engine import prepare, training_step
from minidist.parallel.experts.load_balance import balance_experts
from minidist.parallel.flat.gradients import GradientComm
from minidist.parallel.sharding.sets.parameter_set import ParameterSet
from tests.conftest import Clusters
from tests.helpers import contract, models
from tests.helpers.models import tokens

SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.9, weight_decay=0.1)
gpt = partial(models.gpt, context=16, heads=4, width=16, experts=4, balance_rate=0.01)
CASE = contract.Case(gpt, tokens, SGD, batches=(5, 4, 4), clip_norm=0.5)
LAYOUTS = (
    "dp=2,ep=2",
    "dp=2,ep=2,zero=1,micro_batches=2",
    "dp=4,ep=2,zero=1",
    "dp=4,ep=2,zero=2,micro_batches=2",
    "dp=4,ep=2,zero=3,recompute=True",
    "dp=2,ep=2,zero=3",
    "dp=4,ep=4,recompute=True",
    "dp=2,cp=2,ep=4,zero=1",
    "dp=2,ep=2,pp=2,micro_batches=2",
    "dp=2,ep=2,tp=2",
    "dp=2,ep=2,tp=2,sequence_parallel=True,micro_batches=2,zero=1",
    "dp=2,zero=1",
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shared_experts_train_to_the_weights_of_one_process(layout: str, cluster_of: Clusters) -> None:
    contract.check(cluster_of, CASE, layout)
    expected = contract.train_in_one_process(CASE)
    assert any(value.any() for name, value in expected.state.items() if name.endswith("router.bias"))


def with_unequal_loaders(layout: md.Layout) -> tuple[contract.Trained, Tensor]:
    """All have rows of the first batch, and one rank has those of the others, and those to predict."""
    engine = md.prepare(gpt(md.rank()), SGD, layout, clip_norm=0.5)
    first, *others = CASE.global_batches()
    own = [contract.own_rows(engine, first), *([] if engine.data_rank else others)]
    losses = [engine.step(batch) for batch in engine.batches(own)]
    inputs, targets = (x[: 0 if engine.data_rank else 3] for x in first)
    assert engine.evaluate(inputs, targets) > 0
    return contract.Trained(losses, engine.full_state_dict()), engine.predict(inputs)


@pytest.mark.parametrize(
    "layout",
    [
        "dp=2,ep=2",
        "dp=2,ep=2,zero=1",
        "dp=2,ep=2,zero=2",
        "dp=2,ep=2,zero=3",
        "dp=2,ep=2,pp=2,micro_batches=4",
        "dp=2,ep=2,pp=2,micro_batches=4,schedule=zero_bubble_v,chunks=2",
    ],
)
def test_experts_learn_from_rows_of_ranks_whose_loaders_have_not_ended(
    layout: str, cluster_of: Clusters
) -> None:
    chosen, alone, expected = md.Layout.parse(layout), gpt(0), contract.train_in_one_process(CASE)
    alone.load_state_dict(expected.state)
    for trained, predicted in cluster_of(chosen.ranks).run(with_unequal_loaders, chosen):
        contract.compare(trained, expected)
        torch.testing.assert_close(predicted, alone(CASE.global_batches()[0][0][:3]).detach())


def compressed(layout: md.Layout) -> tuple[bool, bool]:
    """Whether a set of parameters is compressed: all others, and the experts."""
    engine = md.prepare(gpt(0), SGD, layout, data_parallel={"compression": "powersgd"})
    inputs, targets = CASE.global_batches()[0]
    engine.step(inputs[md.rank() :: md.size()], targets[md.rank() :: md.size()])
    sets: Any = engine.strategy.sets  # type: ignore[attr-defined]
    return bool(sets[0].reductions), bool(sets[1].reductions)


@pytest.mark.parametrize(("layout", "sent"), [("dp=2,ep=2", False), ("dp=4,ep=2", True)])
def test_gradients_that_no_rank_sends_are_not_compressed(
    layout: str, sent: bool, cluster_of: Clusters
) -> None:
    chosen = md.Layout.parse(layout)
    assert {*cluster_of(chosen.ranks).run(compressed, chosen)} == {(True, sent)}


def by_own_tokens(routers: Any, group: Any) -> None:
    balance_experts(routers, Mesh(dp=md.size()).group("tp"))


@property
def dense_counts_here(own: ParameterSet) -> bool:
    return own.names is None and md.rank() < (1 if own.residency.whole_state else own.gradient_comm.owners)


FAULTS: dict[str, tuple[str, contract.Fault]] = {
    # The experts' gradients are summed over all ranks, of which each pair has other experts.
    "averaged over all": (
        "zero=1",
        contract.patched(prepare, "GradientComm", lambda *_, **__: GradientComm(None)),
    ),
    "counted by each rank": ("zero=1", contract.patched(training_step, "balance_experts", by_own_tokens)),
    "a norm with copies": ("zero=0", contract.patched(ParameterSet, "counts_here", True)),
    "no experts' norm": ("zero=1", contract.patched(ParameterSet, "counts_here", dense_counts_here)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_contract_catches_a_planted_fault(name: str, cluster_of: Clusters) -> None:
    zero, fault = FAULTS[name]
    contract.check_catches(cluster_of, fault, CASE, f"dp=4,ep=2,{zero}", rehearse=False)


def test_a_checkpoint_goes_on_with_other_ranks_for_the_experts(cluster_of: Clusters, tmp_path: Path) -> None:
    layouts = "dp=4,ep=2,zero=1", "dp=2,ep=2,zero=3", "dp=4,ep=4"
    contract.check_continues(cluster_of, tmp_path, CASE, *layouts)


def test_ranks_that_the_experts_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="ep is 3, which does not divide the 4 ranks"):
        md.Layout(dp=4, ep=3)
    with pytest.raises(ValueError, match="shard is 2 with ep=2"):
        md.Layout(dp=4, ep=2, zero=1, shard=2)
