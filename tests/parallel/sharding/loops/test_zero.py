"""ZeRO stages 1 and 2: state that really is 1/N, and use in a loop as of an optimizer of torch."""

from __future__ import annotations

import copy
import gc
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import minidist as md
from tests.conftest import Clusters
from tests.helpers.on_ranks import on_ranks
from tests.helpers.refusals import refuses
from tests.parallel.sharding.cases import CASES, OPTIM, OPTIMIZERS, sizes_of, storage_bytes


@on_ranks(1, 3, stage=[1, 2])
def test_a_rank_keeps_its_share_and_no_more(stage: int) -> None:
    case, ranks = CASES["gpt"], md.size()
    model = case.model(0)
    layout = md.Layout(dp=ranks, zero=stage)
    engine = md.prepare(model, case.optimizer, layout, data_parallel={"bucket_mb": 0.001})
    for inputs, targets in case.global_batches()[:3]:
        engine.step(inputs[:4], targets[:4])
    assert all(parameter.grad is None for parameter in model.parameters())
    alone = OPTIM.AdamW(case.model(0).parameters())
    for group in alone.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    alone.step()
    whole = storage_bytes(v for s in alone.state.values() for v in s.values())
    elements, parameters = sizes_of(model)
    padding = 16 * ranks * parameters
    held, buckets = engine.strategy.held(), engine.strategy.buckets
    grads = storage_bytes(held.gradients)
    assert abs(storage_bytes(held.optimizer) - whole / ranks) <= padding
    if stage == 1:
        assert abs(grads - 8 * elements) <= padding
    else:
        shares = storage_bytes(bucket.gradients.reduced for bucket in buckets)
        assert grads <= shares + 2 * 8 * max(bucket.layout.length for bucket in buckets)
        assert abs(shares - 8 * elements / ranks) <= padding
        assert grads < 8 * elements or ranks < 3


@on_ranks(2)
def test_gradients_are_freed_as_backward_goes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(12))).double()
    zero = md.ZeroOptimizer(model.parameters(), OPTIM.SGD, stage=2, bucket_mb=512 / 2**20, lr=0.1)
    held: list[int] = []
    for _ in range(2):
        held.clear()
        x = torch.randn(2, 8, dtype=torch.float64)
        for layer in model:
            x = layer(x)
            x.register_hook(lambda _: held.append(sum(p.grad is not None for p in model.parameters())))
        x.sum().backward()
        zero.step()
    assert held == [0] * 12
    assert len(zero.shared.buckets) == 12
    assert not [b for b in zero.shared.buckets if b.gradients.holds]
    assert storage_bytes(zero.shared.sets[0].tensors()) == 12 * 512 // 2 + 2 * 512


@on_ranks(2)
def test_a_bucket_of_empty_parameters_gives_its_memory_back() -> None:
    """Others use that memory too: they would need new one in each round."""
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), AddsNothing(), nn.Linear(8, 8)).double()
    zero = md.ZeroOptimizer(layers.parameters(), OPTIM.SGD, stage=2, bucket_mb=0, lr=0.1)
    for _ in range(3):
        layers(torch.ones(2, 8, dtype=torch.float64)).sum().backward()
        gradients = [bucket.gradients for bucket in zero.shared.buckets]
        assert [each.layout.length for each in gradients].count(0) == 1
        assert not [each for each in gradients if each.holds]
        assert {each.memory.holder for each in gradients} == {None}
        zero.step()


class AddsNothing(nn.Module):
    """Adds a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.nothing.sum()


# In a loop of one's own, as torch's ZeroRedundancyOptimizer is used.


def small(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def pair(make: Any, stage: int) -> tuple[Any, Any, nn.Module, Any]:
    """A model and its ZeroOptimizer, and those of one process, from rank 0's weights."""
    model, peer_model = small(md.rank()), small()
    return model, md.ZeroOptimizer(model.parameters(), make, stage), peer_model, make(peer_model.parameters())


def train_both(
    model: nn.Module, zero: Any, peer_model: nn.Module, peer: Any, steps: int = 1, scheduler: Any = ()
) -> None:
    """The same rows on all ranks, so that one process's optimizer goes the same way; compared each step."""
    generator = torch.Generator().manual_seed(11)
    for _ in range(steps):
        x = torch.randn(3, 4, generator=generator, dtype=torch.float64)
        for module, optimizer in ((model, zero), (peer_model, peer)):
            optimizer.zero_grad()
            module(x).square().sum().backward()
            optimizer.step()
        for each in scheduler:
            each.step()
        compare_models(model, peer_model)


def compare_models(actual: nn.Module, expected: nn.Module) -> None:
    for a, b in zip(actual.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def same_state(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual["state"], expected["state"], rtol=1e-12, atol=1e-12)
    assert actual["param_groups"] == expected["param_groups"]


@pytest.mark.parametrize(
    ("optimizer", "stage"),
    [
        ("Adam, amsgrad", 2),
        ("SGD, nesterov", 1),
        ("NAdam", 2),
        ("Adafactor", 1),
        ("one's own", 1),
        ("one's own", 2),
    ],
)
def test_states_go_to_and_from_a_plain_optimizer(cluster_of: Clusters, optimizer: str, stage: int) -> None:
    make = OPTIMIZERS[optimizer]

    def save() -> Any:
        model, zero, peer_model, peer = pair(make, stage)
        train_both(model, zero, peer_model, peer, 3)
        with pytest.raises(RuntimeError, match="spread over 3 ranks; let every rank call consolidate_state"):
            zero.state_dict()
        zero.consolidate_state_dict(to=1)
        if md.rank() != 1:
            with pytest.raises(RuntimeError, match="spread over 3 ranks"):
                zero.state_dict()
            return None
        same_state(zero.state_dict(), peer.state_dict())
        return zero.state_dict(), model.state_dict()

    def go_on(saved: Any) -> None:
        state, weights = saved
        model, zero, peer_model, peer = pair(make, stage)
        model.load_state_dict(weights)
        peer_model.load_state_dict(weights)
        before = pickle.dumps(state)
        zero.load_state_dict(state)
        peer.load_state_dict(state)
        assert pickle.dumps(state) == before
        train_both(model, zero, peer_model, peer, 3)
        zero.consolidate_state_dict()
        if md.rank() == 0:
            same_state(zero.state_dict(), peer.state_dict())

    _, saved, _ = cluster_of(3).run(save)
    for ranks in (1, 2):
        cluster_of(ranks).run(go_on, saved)


@on_ranks(2, stage=[1, 2])
def test_a_parameter_that_is_frozen_when_its_state_comes_keeps_it(stage: int) -> None:
    make = partial(OPTIM.Adam, lr=0.1)
    _, _, peer_model, peer = pair(make, stage)
    peer_model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    peer.step()
    model = copy.deepcopy(peer_model)
    model[0].requires_grad_(False)
    zero = md.ZeroOptimizer(model.parameters(), make, stage)
    zero.load_state_dict(copy.deepcopy(peer.state_dict()))
    zero.consolidate_state_dict()
    if md.rank() == 0:
        same_state(zero.state_dict(), peer.state_dict())
    for frozen in (True, False):
        model[0].requires_grad_(not frozen)
        peer_model[0].requires_grad_(not frozen)
        train_both(model, zero, peer_model, peer, 2)
    zero.consolidate_state_dict()
    if md.rank() == 0:
        same_state(zero.state_dict(), peer.state_dict())


def test_a_loaded_state_does_not_settle_the_order_of_gradients() -> None:
    def train(saved: Any) -> md.ZeroOptimizer:
        first, second = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        zero = md.ZeroOptimizer([*second.parameters(), *first.parameters()], OPTIM.AdamW, 2, lr=0.1)
        if saved is not None:
            zero.load_state_dict(saved)
        second(first(torch.ones(2, 4, dtype=torch.float64))).sum().backward()
        zero.step()
        zero.consolidate_state_dict()
        return zero

    one = train(None)
    other = train(one.state_dict())
    assert [bucket.layout.param_indices for bucket in other.shared.buckets] == [
        bucket.layout.param_indices for bucket in one.shared.buckets
    ]
    assert float(other.state_dict()["state"][0]["step"]) == 2


@on_ranks(2, stage=[1, 2])
def test_parameters_that_are_added_thawed_and_scheduled(stage: int) -> None:
    model, peer_model = small(md.rank()), small()
    last, peer_last = nn.Linear(2, 4).double(), nn.Linear(2, 4).double()
    with torch.no_grad():
        for parameter, peer in zip(last.parameters(), peer_last.parameters(), strict=True):
            peer.fill_(0.5)
            parameter.fill_(0.5 if md.rank() == 0 else 7.0)
    model[0].bias.requires_grad_(False)
    peer_model[0].bias.requires_grad_(False)
    zero: Any = md.ZeroOptimizer(model.parameters(), OPTIM.AdamW, stage, lr=0.1)
    plain = OPTIM.AdamW(peer_model.parameters(), lr=0.1)
    pair = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (zero, plain)]
    train_both(model, zero, peer_model, plain, 3, pair)
    assert zero.param_groups[0]["lr"] == plain.param_groups[0]["lr"] == 0.05
    zero.add_param_group({"params": last.parameters(), "lr": 0.03})
    plain.add_param_group({"params": peer_last.parameters(), "lr": 0.03})
    model.append(last)
    peer_model.append(peer_last)
    compare_models(model, peer_model)
    train_both(model, zero, peer_model, plain, 3)
    for each in (model, peer_model):
        each[0].bias.requires_grad_(True)
        each[2].weight.requires_grad_(False)
    train_both(model, zero, peer_model, plain, 2)
    memories = {id(each.memory) for each in zero.shared.sets[0].gradients}
    assert len(memories) <= 2  # the buckets of before take turns in it, too
    with pytest.raises(ValueError, match="more than one parameter group"):
        zero.add_param_group({"params": last.parameters()})
    zero.consolidate_state_dict()
    if md.rank() == 0:
        same_state(zero.state_dict(), plain.state_dict())


@pytest.mark.parametrize("stage", [1, 2])
def test_who_replaces_an_optimizer_is_rid_of_it_at_once(stage: int) -> None:
    """As a notebook's cell that runs again does: the old hooks must not take the new gradients."""
    weight = nn.Parameter(torch.tensor([1.0]))
    gc.disable()
    try:
        for _ in range(2):
            zero = md.ZeroOptimizer([weight], OPTIM.SGD, stage, lr=0.25)
            weight.sum().backward()  # type: ignore[no-untyped-call]
            zero.step()
            zero.zero_grad()
        assert weight.item() == 0.5
    finally:
        gc.enable()


@on_ranks(2, zero=[1, 2])
def test_the_state_of_an_engines_slices_is_refused(zero: int) -> None:
    engine = md.prepare(nn.Linear(2, 2), OPTIM.AdamW, md.Layout(dp=2, zero=zero))
    with pytest.raises(RuntimeError, match=r"this rank.s share of the state.*md\.save"):
        engine.optimizer.state_dict()
    with pytest.raises(RuntimeError, match=r"md\.load"):
        engine.optimizer.load_state_dict({})


test_wrong_arguments = refuses(
    lambda **given: md.ZeroOptimizer(
        **{"params": [nn.Parameter(torch.zeros(3))], "optimizer_class": OPTIM.SGD, **given}
    ),
    ({"stage": 3}, "stage is 3; give 1 or 2, or use FullyShard"),
    ({"stage": True}, "stage is True"),
    ({"params": []}, "empty parameter list"),
    ({"params": torch.zeros(2)}, TypeError, "Tensor"),
    ({"params": [1.0]}, TypeError, "Tensors"),
    ({"lr": -1.0}, "Invalid learning rate"),
    ({"rate": 1.0}, TypeError, "rate"),
    ({"bucket_mb": -1}, "bucket_mb is -1"),
    ({"params": [torch.zeros(2, 3).to_sparse()]}, "one of layout torch.sparse_coo"),
    ({"master": "float32"}, TypeError, "master is 'float32'; give a floating-point dtype"),
    ({"optimizer_class": "AdamW"}, TypeError, "optimizer_class is 'AdamW'; give a class"),
    ({"optimizer_class": list}, TypeError, "optimizer_class made a list"),
    ({"optimizer_class": OPTIM.LBFGS}, "LBFGS, which cannot be shared by parts, since its steps"),
    ({"optimizer_class": OPTIM.SparseAdam}, "SparseAdam, which cannot .* gradients are sparse"),
)


def test_states_of_other_groups_and_layouts_are_refused() -> None:
    zero = md.ZeroOptimizer([nn.Parameter(torch.zeros(3))], OPTIM.SGD)
    with pytest.raises(ValueError, match=r"groups of \[2\] parameters and the optimizer of \[1\]"):
        zero.load_state_dict({"state": {}, "param_groups": [{"params": [0, 1]}]})
    with pytest.raises(ValueError, match="to is 1; the group's ranks are 0 to 0"):
        zero.consolidate_state_dict(1)
    with pytest.raises(RuntimeError, match="train a step first"):
        zero.bytes_per_step()
    with pytest.raises(ValueError, match="compression is 'topk' with zero=1"):
        md.prepare(CASES["mlp"].model(0), OPTIM.SGD, md.Layout(zero=1), data_parallel={"compression": "topk"})


@on_ranks(2)
def test_ranks_whose_parameters_differ_are_told() -> None:
    with pytest.raises(ValueError, match="parameters of rank 1 in the group differ from rank 0's"):
        md.ZeroOptimizer([nn.Parameter(torch.zeros(2 + md.rank()))], OPTIM.SGD)
