"""Layouts whose ranks share the experts train to the weights of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import minidist as md
from minidist.comm.mesh import Mesh
from minidist.model import GPT, GPTConfig
from minidist.parallel.engine import prepare, training_step
from minidist.parallel.experts.load_balance import balance_experts
from minidist.parallel.flat.buckets import GradientComm
from minidist.parallel.sharding.sets.parameter_set import ParameterSet
from tests.helpers import contract
from tests.helpers.models import tokens

Clusters = Callable[[int], md.Cluster]
SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.9, weight_decay=0.1)
TINY = GPTConfig(vocabulary=11, context=16, layers=2, heads=4, width=16, experts=4, balance_rate=0.01)


def gpt(seed: int) -> GPT:
    return GPT(TINY, seed=seed, dtype=torch.float64)


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


@pytest.fixture(scope="module")
def expected() -> contract.Trained:
    return contract.train_in_one_process(CASE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shared_experts_train_to_the_weights_of_one_process(
    layout: str, expected: contract.Trained, cluster_of: Clusters
) -> None:
    chosen = md.Layout.parse(layout)
    contract.check(cluster_of(chosen.ranks), CASE, chosen)
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
    layout: str, expected: contract.Trained, cluster_of: Clusters
) -> None:
    chosen, alone = md.Layout.parse(layout), gpt(0)
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


def averaged_over_all(patch: pytest.MonkeyPatch) -> None:
    """The experts' gradients are summed over all ranks, of which each pair has other experts."""
    patch.setattr(prepare, "GradientComm", lambda group: GradientComm(None))


def counted_by_each_rank(patch: pytest.MonkeyPatch) -> None:
    """Each rank balances by its own tokens."""
    patch.setattr(training_step, "balance_experts", lambda routers, group: balance_experts(routers, alone()))


def dense_alone(patch: pytest.MonkeyPatch) -> None:
    """The norm that clips leaves the experts out."""
    patch.setattr(ParameterSet, "counts_here", property(lambda self: self.names is None and counts(self)))


def counts(own: ParameterSet) -> bool:
    return md.rank() < (1 if own.residency.state else own.gradient_comm.owners)


def alone() -> Any:
    return Mesh(dp=md.size()).group("tp")


@pytest.mark.parametrize("fault", [averaged_over_all, counted_by_each_rank, dense_alone])
def test_the_contract_catches_a_planted_fault(
    fault: Callable[[pytest.MonkeyPatch], None], expected: contract.Trained, cluster_of: Clusters
) -> None:
    given = CASE, md.Layout(dp=4, ep=2, zero=1), {"rehearse": False}
    trained = cluster_of(4).run(contract.with_fault, fault, contract.train_on_this_rank, *given)[0]
    with pytest.raises(AssertionError):
        contract.compare(trained, expected)


def go_on(folder: Path, layout: md.Layout, first: int, last: int) -> contract.Trained:
    """Take steps `first` to `last`, from the checkpoint of the step before, and save."""
    engine = md.prepare(gpt(md.rank()), SGD, layout, clip_norm=0.5)
    if first:
        md.load(engine, folder, latest=True)
    trained = contract.steps(engine, [*CASE.global_batches()][first:last])
    md.save(engine, folder, step=last)
    return trained


def test_a_checkpoint_goes_on_with_other_ranks_for_the_experts(
    expected: contract.Trained, cluster_of: Clusters, tmp_path: Path
) -> None:
    for number, text in enumerate(("dp=4,ep=2,zero=1", "dp=2,ep=2,zero=3", "dp=4,ep=4")):
        layout = md.Layout.parse(text)
        found = cluster_of(layout.ranks).run(go_on, tmp_path, layout, number, number + 1)
    for trained in found:
        contract.compare(trained, contract.Trained(expected.losses[2:], expected.state))


def held() -> tuple[int, int]:
    """Elements of parameters and optimizer state on this rank, after a step beside a single process."""
    engine = md.prepare(gpt(0), SGD, md.Layout(dp=4, ep=2, zero=1), rehearse=True)
    inputs, targets = next(iter(CASE.global_batches()))
    engine.step(inputs[md.rank() :: 4], targets[md.rank() :: 4])
    return engine.memory().parameters // 8, engine.memory().optimizer // 8


def test_a_rank_holds_half_of_the_experts_and_a_share_of_their_state(cluster_of: Clusters) -> None:
    whole = gpt(0)
    experts = sum(p.numel() for name, p in whole.named_parameters() if ".experts." in name)
    dense = sum(p.numel() for p in whole.parameters()) - experts
    for parameters, state in cluster_of(4).run(held):
        assert parameters == dense + experts // 2
        assert state == pytest.approx(dense / 4 + experts / 4, rel=0.01)  # two ranks share a half


def test_ranks_that_the_experts_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="ep is 3, which does not divide the 4 ranks"):
        md.Layout(dp=4, ep=3)
    with pytest.raises(ValueError, match="shard is 2 with ep=2"):
        md.Layout(dp=4, ep=2, zero=1, shard=2)
