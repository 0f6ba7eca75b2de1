"""ZeRO stages 1 and 2: the contract, the bytes, state that really is 1/N, planted faults, use in a loop."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from minidist import comm
from minidist.comm.mesh import Mesh
from minidist.parallel.engine.partition_model import partition_model
from minidist.parallel.engine.training_step import Engine
from minidist.parallel.flat.buckets import Bucket
from minidist.parallel.sharding import gradient_rounds, optimizer_slices
from minidist.parallel.sharding.optimizer_slices import OptimizerSlices
from minidist.parallel.sharding.residency import ROWS
from minidist.parallel.sharding.sharded import Sharded
from minidist.parallel.training.precision import Precision
from tests.helpers import contract
from tests.parallel.sharding import test_data_parallel as data_parallel

Clusters = Callable[[int], md.Cluster]
CASES = data_parallel.CASES
vectors, mlp, doubled = data_parallel.vectors, data_parallel.mlp, data_parallel.doubled
sizes_of = data_parallel.sizes_of
OPTIM = torch.optim


def in_groups(parameters: Any) -> torch.optim.Optimizer:
    """Decay for matrices alone, and a rate of its own for the rest, as people write it."""
    each = list(parameters)
    matrices = [p for p in each if p.dim() > 1]
    others = [p for p in each if p.dim() <= 1]
    return OPTIM.AdamW([{"params": matrices, "weight_decay": 0.3}, {"params": others, "lr": 0.003}], lr=0.01)


class Normed(torch.optim.Optimizer):
    """An optimizer of one's own that looks at whole parameters, and makes its state at once."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"steps": 0, "sum": torch.zeros_like(parameter)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["steps"] += 1
                    state["sum"] += parameter.grad / (1 + parameter.grad.norm())
                    parameter.sub_(state["sum"], alpha=group["lr"] / state["steps"])


class Matrices(nn.Module):
    """No biases."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(6, 5, bias=False), nn.Linear(5, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x)))
        return out


class Mixed(nn.Module):
    """Parameters of two dtypes, of no elements and of no dimension."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.narrow, self.wide = nn.Linear(6, 4), nn.Linear(4, 3).double()
        self.scale, self.empty = nn.Parameter(torch.tensor(1.5).double()), nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.wide(torch.tanh(self.narrow(x.float())).double()) * self.scale + self.empty.sum()
        return out


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(OPTIM.SGD, lr=0.1),
    "SGD, nesterov": partial(OPTIM.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam, amsgrad": partial(OPTIM.Adam, lr=0.01, amsgrad=True),
    "Adamax": partial(OPTIM.Adamax, lr=0.01),
    "NAdam": partial(OPTIM.NAdam, lr=0.01),
    "RAdam": partial(OPTIM.RAdam, lr=0.01),
    "Adagrad": partial(OPTIM.Adagrad, lr=0.1, initial_accumulator_value=0.1),
    "Adadelta": partial(OPTIM.Adadelta, lr=0.1),
    "RMSprop": partial(OPTIM.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "ASGD": partial(OPTIM.ASGD, lr=0.1),
    "Rprop": partial(OPTIM.Rprop, lr=0.01),
    "Adafactor": partial(OPTIM.Adafactor, lr=0.1),
    "Muon": partial(OPTIM.Muon, lr=0.01),
    "one's own": Normed,
    "groups": in_groups,
}


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("name", "ranks"), data_parallel.on_ranks(CASES))
def test_every_parameter_equals_one_process(cluster_of: Clusters, name: str, ranks: int, stage: int) -> None:
    contract.check(cluster_of(ranks), CASES[name], md.Layout(dp=ranks, zero=stage))


# Both stages give an optimizer the same slices, or whole parameters to those that look at them.
@pytest.mark.parametrize(
    ("optimizer", "stage"),
    [
        *((name, 1 + number % 2) for number, name in enumerate(OPTIMIZERS)),
        ("SGD", 2),
        ("Adafactor", 1),
        ("one's own", 2),
        ("groups", 1),
    ],
)
def test_every_optimizer_equals_one_process(cluster_of: Clusters, optimizer: str, stage: int) -> None:
    case = replace(CASES["mlp"], optimizer=OPTIMIZERS[optimizer])
    if optimizer == "Muon":
        case = replace(case, model=doubled(Matrices))
    contract.check(cluster_of(3), case, md.Layout(dp=3, zero=stage))


@pytest.mark.parametrize(("ranks", "stage"), [(1, 2), (2, 1), (3, 2)])
def test_micro_batches_and_small_buckets_change_nothing(cluster_of: Clusters, ranks: int, stage: int) -> None:
    layout = partial(md.Layout, dp=ranks, zero=stage)
    for name in ("gpt", "unused", "adafactor"):
        case = CASES[name]
        contract.check(cluster_of(ranks), case, layout(micro_batches=2), data_parallel={"bucket_mb": 0.0003})
    for options in ({"bucket_mb": 0}, {"algorithm": "ring"}, {"overlap": False}):
        contract.check(cluster_of(ranks), case, layout(micro_batches=3), data_parallel=options)
    contract.check(cluster_of(ranks), case, layout(micro_batches=50))  # as many as rows, which differ


@pytest.mark.parametrize("stage", [1, 2])
def test_groups_with_parameters_of_which_some_are_unused(cluster_of: Clusters, stage: int) -> None:
    case = replace(CASES["unused"], optimizer=in_groups)
    contract.check(cluster_of(3), case, md.Layout(dp=3, zero=stage, micro_batches=2))


def test_pieces_of_any_length_are_updated_alike(cluster_of: Clusters) -> None:
    def train(name: str, stage: int) -> contract.Trained:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(optimizer_slices, "SLICE_BYTES", 7 * 8)  # 7 elements
            return contract.train_on_this_rank(CASES[name], md.Layout(dp=2, zero=stage))

    for name, stage in (("gpt", 1), ("unused", 2), ("adafactor", 1)):
        for trained in cluster_of(2).run(train, name, stage):
            contract.compare(trained, contract.train_in_one_process(CASES[name]))


@pytest.mark.parametrize("algorithm", ["torch", "ring"])
def test_any_algorithm_of_the_collectives_will_do(cluster_of: Clusters, algorithm: str) -> None:
    def train(stage: int) -> contract.Trained:
        with comm.using(algorithm):
            return contract.train_on_this_rank(CASES["gpt"], md.Layout(dp=3, zero=stage))

    for stage in (1, 2):
        for trained in cluster_of(3).run(train, stage):
            contract.compare(trained, contract.train_in_one_process(CASES["gpt"]))


@pytest.mark.parametrize("stage", [1, 2])
def test_several_dtypes_no_elements_and_no_dimension(cluster_of: Clusters, stage: int) -> None:
    case = replace(CASES["mlp"], model=Mixed)
    expected = contract.train_in_one_process(case)
    for ranks in (1, 3):
        for trained in cluster_of(ranks).run(
            contract.train_on_this_rank, case, md.Layout(dp=ranks, zero=stage), {}
        ):
            for name, wanted in expected.state.items():  # half of the model rounds to float32
                torch.testing.assert_close(trained.state[name], wanted, rtol=1e-4, atol=1e-5)


# Planted faults.


def without_gathering_the_last_bucket(patch: pytest.MonkeyPatch) -> None:
    gather = Bucket.gather

    def wrong(self: Bucket, blocking: bool = False) -> None:
        if 0 not in self.param_indices:
            gather(self, blocking)

    patch.setattr(Bucket, "gather", wrong)


def another_ranks_share(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: Bucket) -> slice:
        other = (md.rank() + 1) % md.size()
        return slice(other * self.share, (other + 1) * self.share)

    patch.setattr(Bucket, "own", property(wrong, lambda self, value: None), raising=False)


def means_for_sums(patch: pytest.MonkeyPatch) -> None:
    make = gradient_rounds.GradientRounds.__init__

    def wrong(self: Any, *arguments: Any, **options: Any) -> None:
        *others, _, leaves_grad, compression, sparse = arguments
        make(self, *others, "mean", leaves_grad, compression, sparse, **options)

    patch.setattr(gradient_rounds.GradientRounds, "__init__", wrong)


def without_the_first_micro_batch(patch: pytest.MonkeyPatch) -> None:
    """Each round begins the sums anew."""
    patch.setattr(Bucket, "begun", property(lambda self: False, lambda self, value: None))


def unused_ones_updated(patch: pytest.MonkeyPatch) -> None:
    give = OptimizerSlices.give_gradients
    patch.setattr(OptimizerSlices, "give_gradients", lambda self, used: give(self, [1.0] * len(used)))


FAULTS: dict[Callable[[pytest.MonkeyPatch], None], tuple[str, int]] = {
    without_gathering_the_last_bucket: ("mlp", 1),
    another_ranks_share: ("mlp", 1),
    means_for_sums: ("mlp", 1),
    without_the_first_micro_batch: ("mlp", 2),
    unused_ones_updated: ("unused", 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_contract_catches_a_planted_fault(
    cluster_of: Clusters, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    name, micro_batches = FAULTS[fault]
    layout, options = md.Layout(dp=2, zero=2, micro_batches=micro_batches), {"bucket_mb": 0.0003}

    def train() -> contract.Trained:
        with pytest.MonkeyPatch.context() as patch:
            fault(patch)
            return contract.train_on_this_rank(CASES[name], layout, {"data_parallel": options})

    expected = contract.train_in_one_process(CASES[name])
    contract.check(cluster_of(2), CASES[name], layout, data_parallel=options)
    _, trained = cluster_of(2).run(train)
    with pytest.raises(AssertionError, match="not close"):
        contract.compare(trained, expected)


# Bytes and memory.


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_step_sends_what_data_parallelism_sends(cluster_of: Clusters, ranks: int) -> None:
    def count(stage: int, bucket_mb: float) -> tuple[int, int, int, int, int]:
        case = CASES["mlp"]
        model = case.model(0)
        inputs, targets = case.rows(torch.Generator().manual_seed(md.rank()), 3)
        layout = md.Layout(dp=md.size(), zero=stage)
        engine = md.prepare(model, case.optimizer, layout, data_parallel={"bucket_mb": bucket_mb})
        engine.step(inputs, targets)
        with comm.ledger() as ledger:
            engine.step(inputs, targets)
        elements, parameters = sizes_of(model)
        buckets = len(engine.strategy.shared.buckets)
        return ledger.bytes_sent, engine.strategy.bytes_per_step(), elements, parameters, buckets

    for stage in (1, 2):
        for bucket_mb in (0, 0.0003, 25):
            for sent, formula, elements, parameters, buckets in cluster_of(ranks).run(
                count, stage, bucket_mb
            ):
                assert sent == formula
                totals = 2 * (ranks - 1) * 8 * (parameters + 3) // ranks
                padded = range(elements, elements + (ranks - 1) * buckets + 1)
                assert sent - totals in {2 * (ranks - 1) * 8 * size // ranks for size in padded}
                assert buckets == {0: parameters, 25: 1}.get(bucket_mb, buckets)
                assert bucket_mb != 0.0003 or 1 < buckets < parameters


def test_stage_2_sends_more_for_each_micro_batch(cluster_of: Clusters) -> None:
    def count(stage: int) -> tuple[int, int, int]:
        case = CASES["gpt"]
        inputs, targets = case.rows(torch.Generator().manual_seed(md.rank()), 4)
        layout = md.Layout(dp=2, zero=stage, micro_batches=4)
        engine = md.prepare(case.model(0), case.optimizer, layout)
        engine.step(inputs, targets)
        with comm.ledger() as ledger:
            engine.step(inputs, targets)
        strategy = engine.strategy
        return ledger.bytes_sent, strategy.bytes_per_step(), strategy.shared.rounds.bytes_sent()

    for sent, once, _ in cluster_of(2).run(count, 1):
        assert sent == once
    for sent, once, a_round in cluster_of(2).run(count, 2):
        assert sent == once + 3 * a_round


def storage_bytes(tensors: Any) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_rank_keeps_its_share_and_no_more(cluster_of: Clusters, ranks: int) -> None:
    def measure(stage: int, name: str) -> tuple[int, int, int, int]:
        case = CASES[name]
        model = case.model(0)
        options = {"bucket_mb": 0.001}
        layout = md.Layout(dp=md.size(), zero=stage)
        engine = md.prepare(model, case.optimizer, layout, data_parallel=options)
        for inputs, targets in case.global_batches()[:3]:
            engine.step(inputs[:4], targets[:4])
        held = engine.strategy.held()
        alone = OPTIM.AdamW(case.model(0).parameters())
        for group in alone.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        alone.step()
        whole = storage_bytes(v for s in alone.state.values() for v in s.values())
        buckets = engine.strategy.shared.buckets
        largest = max(bucket.length for bucket in buckets) * 8
        grads = storage_bytes(held.gradients)
        assert all(parameter.grad is None for parameter in model.parameters())
        shares = storage_bytes(b.reduced for b in buckets) if stage == 2 else 0
        assert stage == 1 or grads <= shares + 2 * largest
        return storage_bytes(held.optimizer), whole, grads, shares

    elements, parameters = data_parallel.sizes_of(CASES["gpt"].model(0))
    for stage in (1, 2):
        for state, whole, grads, shares in cluster_of(ranks).run(measure, stage, "gpt"):
            padding = 16 * ranks * parameters
            assert abs(state - whole / ranks) <= padding
            if stage == 1:
                assert abs(grads - 8 * elements) <= padding
            else:
                assert abs(shares - 8 * elements / ranks) <= padding
                assert grads < 8 * elements or ranks < 3

    # Whole parameters: all ranks' states together are one process's.
    def factored() -> int:
        case = CASES["adafactor"]
        engine = md.prepare(case.model(0), case.optimizer, md.Layout(dp=md.size(), zero=1))
        engine.step(*vectors(torch.Generator().manual_seed(0), 4))
        return len(engine.optimizer.state)

    assert sum(cluster_of(ranks).run(factored)) == 4


def test_gradients_are_freed_as_backward_goes(cluster_of: Clusters) -> None:
    def watch() -> list[int]:
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
        plan = zero.shared.rounds
        assert plan is not None
        assert len(zero.shared.buckets) == 12
        private = [b for b in zero.shared.buckets if b.holds]
        assert not private
        return [*held, storage_bytes(plan.tensors())]

    for *held, memory in cluster_of(2).run(watch):
        assert held == [0] * 12
        assert memory == 12 * 512 // 2 + 2 * 512


# In a loop of one's own, as torch's ZeroRedundancyOptimizer is used.


def loop(case: contract.Case, make: Callable[[nn.Module], Any], accumulate: int = 1) -> contract.Trained:
    """Equal shares of each global batch, in `accumulate` backward passes."""
    model = case.model(md.rank())
    optimizer = make(model)
    losses = []
    for inputs, targets in case.global_batches():
        share = slice(*(len(inputs) * (md.rank() + i) // md.size() for i in (0, 1)))
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for x, y in zip(inputs[share].chunk(accumulate), targets[share].chunk(accumulate), strict=True):
            loss = case.loss(model(x), y) / accumulate
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        optimizer.step()
        losses.append(float(comm.all_reduce(total, "mean")))
    return contract.Trained(losses, {k: v.detach().clone() for k, v in model.state_dict().items()})


EVEN = replace(CASES["mlp"], batches=(12, 24, 12, 12))


@pytest.mark.parametrize(("ranks", "stage"), [(1, 1), (2, 2), (3, 1), (3, 2)])
def test_a_loop_equals_one_process(cluster_of: Clusters, ranks: int, stage: int) -> None:
    def make(model: nn.Module) -> md.ZeroOptimizer:
        return md.ZeroOptimizer(model.parameters(), OPTIM.AdamW, stage, lr=0.01, weight_decay=0.1)

    for name in ("mlp", "unused", "frozen"):
        case = replace(EVEN, model=CASES[name].model)
        expected = contract.train_in_one_process(case)
        for accumulate in (1, 2) if name != "unused" else (1,):
            for trained in cluster_of(ranks).run(loop, case, make, accumulate):
                contract.compare(trained, expected)


def test_averaged_gradients_may_be_averaged_again(cluster_of: Clusters) -> None:
    def train() -> contract.Trained:
        case, model = EVEN, EVEN.model(md.rank())
        wrapped = md.DataParallel(model)
        optimizer = md.ZeroOptimizer(model.parameters(), OPTIM.AdamW, lr=0.01, weight_decay=0.1)
        losses = []
        for inputs, targets in case.global_batches():
            share = slice(*(len(inputs) * (md.rank() + i) // md.size() for i in (0, 1)))
            optimizer.zero_grad()
            loss = case.loss(wrapped(inputs[share]), targets[share])
            loss.backward()  # type: ignore[no-untyped-call]
            wrapped.synchronize()
            before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            for parameter, grad in zip(model.parameters(), before, strict=True):
                torch.testing.assert_close(parameter.grad, grad, rtol=0, atol=0)  # as torch leaves it
            losses.append(float(comm.all_reduce(loss.detach(), "mean")))
        return contract.Trained(losses, model.state_dict())

    for trained in cluster_of(2).run(train):
        contract.compare(trained, contract.train_in_one_process(EVEN))


def small(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()


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
        model, peer_model = small(md.rank()), small()
        zero, peer = md.ZeroOptimizer(model.parameters(), make, stage), make(peer_model.parameters())
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
        model, peer_model = small(md.rank()), small()
        model.load_state_dict(weights)
        peer_model.load_state_dict(weights)
        zero, peer = md.ZeroOptimizer(model.parameters(), make, stage), make(peer_model.parameters())
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
    assert [bucket.param_indices for bucket in other.shared.buckets] == [
        bucket.param_indices for bucket in one.shared.buckets
    ]
    assert float(other.state_dict()["state"][0]["step"]) == 2


@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_that_are_added_thawed_and_scheduled(cluster_of: Clusters, stage: int) -> None:
    def train() -> None:
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
        assert zero.shared._before is None  # nor the memory of its buckets
        with pytest.raises(ValueError, match="more than one parameter group"):
            zero.add_param_group({"params": last.parameters()})
        zero.consolidate_state_dict()
        if md.rank() == 0:
            same_state(zero.state_dict(), plain.state_dict())

    cluster_of(2).run(train)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_closure_and_zero_grad(cluster_of: Clusters, stage: int) -> None:
    def train() -> None:
        model, peer_model = small(), small()
        zero = md.ZeroOptimizer(model.parameters(), OPTIM.SGD, stage, lr=0.1)
        plain = OPTIM.SGD(peer_model.parameters(), lr=0.1)
        x = torch.ones(2, 4, dtype=torch.float64)

        def closure(module: nn.Module, optimizer: Any) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = module(x).square().sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        for _ in range(2):
            ours = zero.step(partial(closure, model, zero))
            torch.testing.assert_close(ours, plain.step(partial(closure, peer_model, plain)))
            compare_models(model, peer_model)
        closure(model, zero)
        zero.zero_grad()  # and nothing is left of it
        assert all(parameter.grad is None for parameter in model.parameters())
        before = copy.deepcopy(model.state_dict())
        zero.step()
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name])
        assert zero.step() is None

    cluster_of(2).run(train)


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


def test_a_step_hands_on_what_the_optimizer_takes() -> None:
    class Scaled(torch.optim.SGD):
        def step(self, closure: Any = None, scale: float = 1.0) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad.mul_(scale)
            super().step()

    weight = nn.Parameter(torch.tensor([1.0]))
    zero = md.ZeroOptimizer([weight], Scaled, lr=0.25)
    weight.sum().backward()  # type: ignore[no-untyped-call]
    zero.step(scale=2.0)
    assert weight.item() == 0.5


def test_gradients_set_by_hand_and_fewer_elements_than_ranks(cluster_of: Clusters) -> None:
    def train(stage: int) -> list[float]:
        weight = nn.Parameter(torch.tensor([1.0, 2.0]))
        zero = md.ZeroOptimizer([weight], OPTIM.SGD, stage, lr=1.0)
        for _ in range(2):
            weight.grad = torch.tensor([float(md.rank()), 1.0])
            zero.step()
            zero.zero_grad()
        values: list[float] = weight.tolist()
        return values

    for stage in (1, 2):
        assert cluster_of(4).run(train, stage) == [[-2.0, 0.0]] * 4


def test_a_group_of_ranks_trains_by_itself(cluster_of: Clusters) -> None:
    def train() -> float:
        groups = [torch.distributed.new_group(members) for members in ([0], [1, 2])]
        weight = nn.Parameter(torch.tensor([float(md.rank())]))
        zero = md.ZeroOptimizer([weight], OPTIM.SGD, 2, groups[min(md.rank(), 1)], lr=1.0)
        (weight * md.rank()).sum().backward()  # type: ignore[no-untyped-call]
        zero.step()
        return float(weight.detach())

    assert cluster_of(3).run(train) == [0.0, -0.5, -0.5]


def test_a_backward_pass_that_failed_leaves_nothing(cluster_of: Clusters) -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ArithmeticError("in backward")

    def train() -> None:
        model, peer_model = small(), small()
        zero = md.ZeroOptimizer(model.parameters(), OPTIM.SGD, 2, lr=0.1)
        plain = OPTIM.SGD(peer_model.parameters(), lr=0.1)
        train_both(model, zero, peer_model, plain, 1)
        x = torch.ones(2, 4, dtype=torch.float64)
        with pytest.raises(ArithmeticError):
            model[2](Failing.apply(model[1](model[0](x)))).sum().backward()
        train_both(model, zero, peer_model, plain, 2)

    cluster_of(2).run(train)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"stage": 3}, ValueError, "stage is 3; give 1 or 2, or use FullyShard"),
        ({"stage": True}, ValueError, "stage is True"),
        ({"params": []}, ValueError, "empty parameter list"),
        ({"params": torch.zeros(2)}, TypeError, "Tensor"),
        ({"params": [1.0]}, TypeError, "Tensors"),
        ({"lr": -1.0}, ValueError, "Invalid learning rate"),
        ({"rate": 1.0}, TypeError, "rate"),
        ({"bucket_mb": -1}, ValueError, "bucket_mb is -1"),
        ({"params": [torch.zeros(2, 3).to_sparse()]}, ValueError, "one of layout torch.sparse_coo"),
        ({"master": "float32"}, TypeError, "master is 'float32'; give a floating-point dtype"),
        ({"optimizer_class": "AdamW"}, TypeError, "optimizer_class is 'AdamW'; give a class"),
        ({"optimizer_class": list}, TypeError, "optimizer_class made a list"),
        (
            {"optimizer_class": OPTIM.LBFGS},
            ValueError,
            "LBFGS, which cannot be shared by parts, since its steps",
        ),
        (
            {"optimizer_class": OPTIM.SparseAdam},
            ValueError,
            "SparseAdam, which cannot .* gradients are sparse",
        ),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    defaults = {"params": [nn.Parameter(torch.zeros(3))], "optimizer_class": OPTIM.SGD}
    with pytest.raises(error, match=text):
        md.ZeroOptimizer(**{**defaults, **arguments})


def test_states_of_other_groups_and_layouts_are_refused() -> None:
    zero = md.ZeroOptimizer([nn.Parameter(torch.zeros(3))], OPTIM.SGD)
    with pytest.raises(ValueError, match=r"groups of \[2\] parameters and the optimizer of \[1\]"):
        zero.load_state_dict({"state": {}, "param_groups": [{"params": [0, 1]}]})
    with pytest.raises(ValueError, match="to is 1; the group's ranks are 0 to 0"):
        zero.consolidate_state_dict(1)
    with pytest.raises(RuntimeError, match="train a step first"):
        zero.bytes_per_step()
    with pytest.raises(ValueError, match="compression is 'topk' with zero=1"):
        md.prepare(mlp(0), OPTIM.SGD, md.Layout(zero=1), data_parallel={"compression": "topk"})


def test_ranks_whose_parameters_differ_are_told(cluster_of: Clusters) -> None:
    def make() -> None:
        md.ZeroOptimizer([nn.Parameter(torch.zeros(2 + md.rank()))], OPTIM.SGD)

    with pytest.raises(md.RankError, match="parameters of rank 1 in the group differ from rank 0's"):
        cluster_of(2).run(make)


# Masters, and the state by names.


@pytest.mark.parametrize("stage", [1, 2])
def test_masters_keep_what_bfloat16_would_round_away(cluster_of: Clusters, stage: int) -> None:
    def train() -> list[Any]:
        weight = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        zero = md.ZeroOptimizer([weight], OPTIM.SGD, stage, lr=1e-3, master=torch.float32)
        for _ in range(8):
            weight.grad = torch.ones_like(weight)
            zero.step()
        masters = [piece.tensor for piece in zero.shared.slices.all]
        assert all(m.dtype == torch.float32 for m in masters)
        return [weight.float().tolist(), torch.cat([*masters, torch.zeros(0)]).tolist()]

    got = cluster_of(2).run(train)
    exact = 1 - 8e-3  # 8 steps of 0.001, each less than half of bfloat16's spacing below 1, which is 0.004
    for weight, _ in got:
        assert weight == [float(torch.tensor(exact).bfloat16())] * 5
    assert [*chain(*(masters for _, masters in got))] == pytest.approx([exact] * 5, rel=1e-6)


def whole_chunks(strategy: Any) -> dict[str, list[Any]]:
    return {
        f"{chunk.name} {chunk.offsets}": [chunk.name, chunk.shape, chunk.offsets, chunk.tensor.clone()]
        for chunk in strategy.chunks()
    }


def put_together(chunks: Any) -> dict[str, Tensor]:
    whole: dict[str, Tensor] = {}
    count: dict[str, Tensor] = {}
    for name, shape, offsets, tensor in chunks:
        box = tuple(slice(o, o + s) for o, s in zip(offsets, tensor.shape, strict=True))
        whole.setdefault(name, torch.zeros(shape, dtype=tensor.dtype))[box] = tensor
        count.setdefault(name, torch.zeros(shape))[box] += 1
    assert all((each > 0).all() for each in count.values()), "something lies on no rank"
    return whole


class Narrow(nn.Module):
    """A model of the contract in float32."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner.float()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x.float())
        return out.double()


@pytest.mark.parametrize("master", [None, torch.float64])
@pytest.mark.parametrize("name", ["unused", "tied", "adafactor", "frozen"])
def test_chunks_are_the_whole_state_and_any_layout_goes_on_from_them(
    cluster_of: Clusters, name: str, master: torch.dtype | None
) -> None:
    case = CASES[name]
    if master is not None:
        build = case.model
        case = replace(case, model=lambda seed: Narrow(build(seed)))
    batches = [case.rows(torch.Generator().manual_seed(seed), 12) for seed in range(5)]

    def strategy(zero: int) -> Any:
        model, layout = case.model(md.rank()), md.Layout(dp=md.size())
        if not zero:
            return md.prepare(model, case.optimizer, layout, loss=case.loss)
        sharded = Sharded(model, case.optimizer, ROWS[zero], {"bucket_mb": 0.0003}, master)
        part = partition_model(model, layout, Mesh(dp=md.size()))
        return Engine(part, sharded, layout, case.loss, Precision("fp32"))

    def step(engine: Any, batch: tuple[Tensor, Tensor]) -> None:
        n, r = md.size(), md.rank()
        engine.step(*(each[12 * r // n : 12 * (r + 1) // n] for each in batch))

    def save(zero: int) -> Any:
        engine = strategy(zero)
        with pytest.MonkeyPatch.context() as patch:
            if name == "unused":
                patch.setattr(optimizer_slices, "SLICE_BYTES", 5 * 8)
            for batch in batches[:3]:
                step(engine, batch)
            chunks, settings = [*whole_chunks(engine.strategy).values()], engine.strategy.settings()
            for batch in batches[3:]:
                step(engine, batch)
        return chunks, settings, engine.full_state_dict()

    def load(zero: int, whole: dict[str, Tensor], settings: Any) -> Any:
        engine = strategy(zero)
        state: dict[str, dict[str, Any]] = {}
        for full, value in whole.items():
            if full.startswith("optimizer."):
                parameter, key = full.removeprefix("optimizer.").rsplit(".", 1)
                state.setdefault(parameter, {})[key] = (tuple(value.shape), value.dtype)
        engine.strategy.load_settings(settings, state)
        for chunk in engine.strategy.chunks():
            sizes = zip(chunk.offsets, chunk.tensor.shape, strict=True)
            chunk.tensor.copy_(whole[chunk.name][tuple(slice(o, o + s) for o, s in sizes)])
        if zero:
            engine.strategy.loaded()
        for batch in batches[3:]:
            step(engine, batch)
        return engine.full_state_dict()

    plain = ((3, 1, ((2, 2), (1, 0))), (1, 0, ((3, 2),)))
    tolerance = 1e-10 if master is None else 1e-6  # another sum of gradients in float32
    for ranks, zero, others in plain if master is None else ((3, 1, ((2, 2),)), (2, 2, ((3, 1),))):
        saved = cluster_of(ranks).run(save, zero)
        whole = put_together(chunk for chunks, _, _ in saved for chunk in chunks)
        for more, other in others:
            for state in cluster_of(more).run(load, other, whole, saved[0][1]):
                torch.testing.assert_close(state, saved[0][2], rtol=tolerance, atol=tolerance)


class CountsInATensor(OPTIM.SGD):
    """One's own, whose count of steps is a tensor of one element."""

    elementwise = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    count = state.setdefault("step", torch.zeros(1)).add_(1)
                    mean = state.setdefault("mean", torch.zeros_like(parameter)).add_(parameter.grad)
                    parameter.sub_(mean / float(count), alpha=group["lr"])


def test_a_parameter_frozen_before_the_first_step_and_a_count_of_ones_own_are_saved(
    cluster_of: Clusters, tmp_path: Path
) -> None:
    def train() -> tuple[list[float], list[float]]:
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.ones(2, 4)
        make = partial(CountsInATensor, lr=0.1)
        buckets = {"bucket_mb": 0}
        layout, loss = md.Layout(dp=2, zero=1), nn.functional.mse_loss
        engine = md.prepare(model, make, layout, loss, data_parallel=buckets)
        model[2].weight.requires_grad_(False)
        engine.step(x, x)
        md.save(engine, tmp_path / "saved")
        after = [engine.step(x, x) for _ in range(2)]
        md.load(engine, tmp_path / "saved")
        return after, [engine.step(x, x) for _ in range(2)]

    for after, again in cluster_of(2).run(train):
        assert after == again
