"""Data parallelism in every form: the contract, the bytes, and planted faults that the contract catches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from minidist import comm
from minidist.kernels import CPU_LADDER
from minidist.model import GPT, MLP, config
from minidist.model.loss import accuracy
from minidist.model.matmul import Linear
from minidist.parallel.flat.buckets import Bucket
from minidist.parallel.flat.gradient_comm import GradientComm
from minidist.parallel.sharding import reducer, whole_parameters
from minidist.parallel.sharding.gradient_rounds import GradientRounds
from tests.helpers import contract
from tests.helpers.step_bytes import bytes_of_a_step

Clusters = Callable[[int], md.Cluster]
ADAMW = contract.ADAMW


def vectors(generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 3, (count,), generator=generator)


def tokens(generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(0, 11, (count, 9), generator=generator)
    return text[:, :-1], text[:, 1:]


def mlp(seed: int) -> nn.Module:
    return MLP((6, 5, 3), seed=seed, dtype=torch.float64)


def mlp_on_rung(seed: int) -> nn.Module:
    return MLP((6, 5, 3), seed=seed, dtype=torch.float64, linear=partial(Linear, rung=CPU_LADDER[3]))


def gpt(seed: int) -> nn.Module:
    shape = config("byte-tiny", vocabulary=11, context=8, layers=2, heads=2, width=8)
    return GPT(shape, seed=seed, dtype=torch.float64)


def frozen(seed: int) -> nn.Module:
    model = mlp(seed)
    for parameter in list(model.parameters())[:2]:
        parameter.requires_grad_(False)
    return model


class Tied(nn.Module):
    """Two layers that share one weight."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.relu(self.second(torch.relu(self.first(x)))))
        return out


class Choosing(nn.Module):
    """A layer that only rows with a positive first number go through, and one that none does."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.always, self.sometimes, self.never = (nn.Linear(6, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, 0] > 0
        out: Tensor = self.always(x)
        if chosen.any():
            out = out.index_add(0, chosen.nonzero()[:, 0], self.sometimes(x[chosen]))
        return out


class Counting(nn.Module):
    """A model with a buffer, which starts differently on every rank and takes no gradient."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(6, 3)
        self.register_buffer("scale", torch.full((3,), 1.0 + seed))
        self.register_buffer("mask", torch.tensor([True, seed == 0, True]))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * self.scale * self.mask
        return out


def doubled(build: Callable[[int], nn.Module]) -> Callable[[int], nn.Module]:
    return lambda seed: build(seed).double()


CASES = {
    "mlp": contract.Case(mlp, vectors),
    "mlp on our matmul": contract.Case(mlp_on_rung, vectors),
    "gpt": contract.Case(gpt, tokens),
    "sgd": contract.Case(mlp, vectors, partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    "adafactor": contract.Case(mlp, vectors, partial(torch.optim.Adafactor, lr=0.1)),
    "frozen": contract.Case(frozen, vectors),
    "tied": contract.Case(doubled(Tied), vectors),
    "unused": contract.Case(doubled(Choosing), vectors),
    "buffers": contract.Case(doubled(Counting), vectors),
    "squares": contract.Case(mlp, vectors, loss=lambda y, t: (y - t[:, None]).square().mean()),
}


def on_ranks(names: Iterable[str]) -> list[tuple[str, int]]:
    """Each case on 3 ranks, whose shares are uneven; two cases also on other numbers of ranks."""
    return [*((name, 3) for name in names), *((name, n) for name in ("gpt", "unused") for n in (1, 2, 4))]


@pytest.mark.parametrize(("name", "ranks"), on_ranks(CASES))
def test_every_parameter_equals_one_process(cluster_of: Clusters, name: str, ranks: int) -> None:
    contract.check(cluster_of(ranks), CASES[name], md.Layout(dp=ranks))


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 3), (2, 2), (2, 3), (2, 50)])
def test_micro_batches_change_nothing(cluster_of: Clusters, ranks: int, micro_batches: int) -> None:
    contract.check(cluster_of(ranks), CASES["gpt"], md.Layout(dp=ranks, micro_batches=micro_batches))


def test_micro_batches_are_as_many_as_asked(cluster_of: Clusters) -> None:
    def count() -> list[int]:
        rows: list[int] = []

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            rows.append(len(outputs))
            return torch.nn.functional.cross_entropy(outputs, targets)

        layout = md.Layout(dp=md.size(), micro_batches=3)
        engine = md.prepare(mlp(0), ADAMW, layout, loss=loss, check_loss=False)
        engine.step(*vectors(torch.Generator().manual_seed(0), 7))
        return rows

    assert cluster_of(2).run(count) == [[3, 2, 2]] * 2


def test_a_group_averages_by_itself(cluster_of: Clusters) -> None:
    def reduce() -> float:
        groups = [torch.distributed.new_group(members) for members in ([0], [1, 2])]
        model = md.DataParallel(nn.Linear(1, 1, bias=False), group=groups[min(md.rank(), 1)])
        (model(torch.ones(1, 1)) * md.rank()).sum().backward()
        model.synchronize()
        (weight,) = model.parameters()
        assert weight.grad is not None
        return float(weight.grad)

    assert cluster_of(3).run(reduce) == [0.0, 1.5, 1.5]


def test_evaluation_drops_nothing_out() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.dropout = nn.Linear(6, 3), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.dropout(self.linear(x))
            return out

    model = Dropping().double()
    inputs, targets = vectors(torch.Generator().manual_seed(0), 50)
    engine = md.prepare(model, ADAMW)
    assert len({engine.evaluate(inputs, targets) for _ in range(5)}) == 1
    assert model.training


def without_broadcast(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(comm, "broadcast", lambda x, **_: x)


def without_one_bucket(patch: pytest.MonkeyPatch) -> None:
    """A bucket is sent, and what comes back is dropped."""
    reduce = Bucket._reduce_to_everyone

    def wrong(self: Bucket, over: GradientComm) -> Any:
        if self.gradients.numel() == 3:  # the last layer's bias
            yield over.all_reduce(self.gradients.clone())
        else:
            yield from reduce(self, over)

    patch.setattr(Bucket, "_reduce_to_everyone", wrong)


def mean_of_means(patch: pytest.MonkeyPatch) -> None:
    """Average over ranks and not over rows: wrong where shares differ in size."""
    synchronize = reducer.Reducer.synchronize

    def wrong(self: reducer.Reducer) -> GradientRounds:
        for parameter in self.parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(13 / md.size() / ROWS[md.size()][md.rank()])
        return synchronize(self)

    patch.setattr(reducer.Reducer, "synchronize", wrong)


def another_order_on_one_rank(patch: pytest.MonkeyPatch) -> None:
    agree = whole_parameters.agree_on_order

    def wrong(*arguments: Any) -> list[int]:
        return agree(*arguments)[:: 1 - 2 * md.rank()]

    patch.setattr(whole_parameters, "agree_on_order", wrong)


def without_what_backward_left(patch: pytest.MonkeyPatch) -> None:
    """Gradients that no hook has moved into their buckets are not moved at all."""
    patch.setattr(reducer.Reducer, "_complete", lambda *_: None)


ROWS = {2: (6, 7)}
FAULTS: dict[Callable[[pytest.MonkeyPatch], None], dict[str, Any]] = {
    without_broadcast: {},
    without_one_bucket: {"bucket_mb": 0},
    mean_of_means: {"overlap": False},
    another_order_on_one_rank: {},
    without_what_backward_left: {"overlap": False},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_contract_catches_a_planted_fault(
    cluster_of: Clusters, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    case = replace(CASES["mlp"], batches=(13, 13, 13))
    options = {"data_parallel": FAULTS[fault]}

    def train() -> contract.Trained:
        with pytest.MonkeyPatch.context() as patch:
            fault(patch)
            return contract.train_on_this_rank(case, md.Layout(dp=2), options)

    expected = contract.train_in_one_process(case)
    contract.check(cluster_of(2), case, md.Layout(dp=2), **options)
    _, trained = cluster_of(2).run(train)
    with pytest.raises(AssertionError, match="not close"):
        contract.compare(trained, expected)


FORMS: dict[str, dict[str, Any]] = {
    "naive": {"bucket_mb": 0, "overlap": False},
    "naive, overlapped": {"bucket_mb": 0},
    "buckets": {"overlap": False},
    "overlap": {},
    "small buckets": {"bucket_mb": 0.0003},
    "small buckets after backward": {"bucket_mb": 0.0003, "overlap": False},
    "buffers": {"broadcast_buffers": True},
}


# Every form on 3 ranks, and the one with most messages on other numbers of ranks.
@pytest.mark.parametrize(
    ("form", "ranks"), [*((form, 3) for form in FORMS), *(("small buckets", ranks) for ranks in (1, 2, 4))]
)
def test_every_form_meets_the_contract(cluster_of: Clusters, form: str, ranks: int) -> None:
    for name in ("gpt", "unused"):
        layout = md.Layout(dp=ranks, micro_batches=2)
        contract.check(cluster_of(ranks), CASES[name], layout, data_parallel=FORMS[form])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_step_sends_what_the_formula_says(cluster_of: Clusters, ranks: int) -> None:
    case = CASES["gpt"]

    def count(form: str) -> tuple[int, int, int, int, int, int]:
        model = case.model(0)
        engine = md.prepare(model, case.optimizer, md.Layout(dp=md.size()), data_parallel=FORMS[form])
        inputs, targets = case.rows(torch.Generator().manual_seed(md.rank()), 3)
        engine.step(inputs, targets)  # the ranks agree on the buckets
        with comm.ledger() as ledger:
            engine.step(inputs, targets)
        exact = engine.strategy.bytes_per_step()
        predicted = bytes_of_a_step(model, md.size(), FORMS[form].get("bucket_mb", 25))
        return ledger.bytes_sent, exact, predicted, len(ledger.calls), *sizes_of(model)

    for form in ("naive", "naive, overlapped", "buckets", "overlap", "small buckets"):
        for sent, exact, predicted, calls, elements, parameters in cluster_of(ranks).run(count, form):
            assert sent == exact
            # The exact share, but for less than one byte that each call's division drops.
            whole = 2 * (ranks - 1) / ranks * 8 * (elements + 2 + parameters)
            assert whole - calls <= sent <= whole
            assert abs(sent - predicted) < max(calls, 1)
            if ranks > 1:
                many = {"buckets": 1, "overlap": 1, "naive": parameters, "naive, overlapped": parameters}
                assert calls == many.get(form, calls)
                assert form != "small buckets" or 1 < calls < parameters


def sizes_of(model: nn.Module) -> tuple[int, int]:
    return sum(p.numel() for p in model.parameters()), len(list(model.parameters()))


def test_evaluation_is_the_mean_over_all_rows(cluster_of: Clusters) -> None:
    case = CASES["mlp"]
    inputs, targets = case.rows(torch.Generator().manual_seed(3), 7)

    def evaluate() -> tuple[float, float, float, bool, bool]:
        model = case.model(md.rank())
        engine = md.prepare(model, case.optimizer, md.Layout(dp=md.size()))
        share = slice(0, 7) if md.rank() == 0 else slice(0, 0)  # a rank may have none
        x, y = inputs[share], targets[share]
        before = engine.full_state_dict()
        results = engine.evaluate(x, y), engine.evaluate(x, y, accuracy), engine.evaluate(x[:0], y[:0])
        unchanged = all(torch.equal(before[name], value) for name, value in engine.full_state_dict().items())
        return *results, unchanged, model.training

    outputs = case.model(0)(inputs)
    for loss, right, nothing, unchanged, training in cluster_of(2).run(evaluate):
        assert loss == pytest.approx(float(case.loss(outputs, targets).detach()), rel=1e-12)
        assert right == pytest.approx(float((outputs.argmax(-1) == targets).double().mean()), rel=1e-12)
        assert nothing != nothing
        assert unchanged
        assert training


def test_the_module_works_in_a_loop_of_ones_own(cluster_of: Clusters) -> None:
    case = replace(CASES["unused"], batches=(8, 4, 12))

    def train() -> contract.Trained:
        model = md.DataParallel(case.model(md.rank()))
        optimizer = case.optimizer(model.parameters())
        losses = []
        for inputs, targets in case.global_batches():
            share = slice(*(len(inputs) * (md.rank() + i) // 2 for i in (0, 1)))
            optimizer.zero_grad()
            loss = case.loss(model(inputs[share]), targets[share])
            loss.backward()  # type: ignore[no-untyped-call]
            model.synchronize()
            optimizer.step()
            losses.append(float(comm.all_reduce(loss.detach(), "mean")))
        return contract.Trained(losses, model.module.state_dict())

    for trained in cluster_of(2).run(train):
        contract.compare(trained, contract.train_in_one_process(case))


@pytest.mark.parametrize("overlap", [True, False])
def test_synchronize_sends_its_gradients_and_their_counts(cluster_of: Clusters, overlap: bool) -> None:
    def count() -> list[int]:
        model = md.DataParallel(nn.Linear(3, 2), overlap=overlap)
        sent = []
        for _ in range(2):
            with comm.ledger() as ledger:
                model(torch.ones(1, 3)).sum().backward()
                before = ledger.bytes_sent
                model.synchronize()
            sent = [before, ledger.bytes_sent]
        return sent

    whole = 4 * (3 * 2 + 2) + 4 * (2 + 2)  # two counts, and room for rows and loss
    assert cluster_of(2).run(count) == [[whole if overlap else 0, whole]] * 2


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fault", [False, True])
def test_weighted_losses_give_the_weighted_mean(cluster_of: Clusters, overlap: bool, fault: bool) -> None:
    """Ranks have several micro-batches or none, of unequal numbers of labels that count. Twice, as a loop."""
    inputs, targets = vectors(torch.Generator().manual_seed(3), 11)
    targets[4:9] = -100
    shares = [[slice(0, 3), slice(3, 7)], [slice(7, 11)], []]
    loss_of = nn.functional.cross_entropy

    def train() -> list[Tensor | None]:
        model = md.DataParallel(mlp(0), overlap=overlap)
        for _ in range(2):
            model.zero_grad()
            own = shares[md.rank()]
            for rows in own:
                x, y = inputs[rows], targets[rows]
                weight = len(y) if fault else (y != -100).sum()  # a planted fault: rows that do not count
                with model.no_sync():
                    model.weighted(loss_of(model(x), y), weight).backward()
            model.synchronize(None if own else 0)
        return [parameter.grad for parameter in model.parameters()]

    reference = mlp(0)
    loss_of(reference(inputs), targets).backward()
    wanted = [parameter.grad for parameter in reference.parameters()]
    for found in cluster_of(3).run(train):
        if fault:
            assert not torch.allclose(found[0], wanted[0], rtol=1e-3)
        else:
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def test_a_rank_without_rows_is_told(cluster_of: Clusters) -> None:
    def train() -> None:
        engine = md.prepare(mlp(0), torch.optim.SGD, md.Layout(dp=2))
        rows = md.rank()
        engine.step(torch.zeros(rows, 6, dtype=torch.float64), torch.zeros(rows, dtype=torch.int64))

    with pytest.raises(md.RankError, match="rank 0 of 2 was given no rows; use a global batch of at least"):
        cluster_of(2).run(train)


def test_rows_and_targets_have_to_agree() -> None:
    engine = md.prepare(mlp(0), torch.optim.SGD)
    with pytest.raises(ValueError, match="inputs have 3 rows and targets 2"):
        engine.step(torch.zeros(3, 6, dtype=torch.float64), torch.zeros(2, dtype=torch.int64))
