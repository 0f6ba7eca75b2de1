"""DataParallel in loops that users write: what torch's users expect of gradients, messages, mistakes told."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import cloudpickle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import minidist as md
from minidist import comm
from tests.conftest import Clusters
from tests.helpers.on_ranks import on_ranks
from tests.helpers.refusals import refuses
from tests.parallel.sharding.cases import CASES

FORMS: list[dict[str, Any]] = [
    {},
    {"overlap": False},
    {"bucket_mb": 0},
    {"bucket_mb": 0, "overlap": False},
    {"bucket_mb": 0.0002},
]


class Net(nn.Module):
    """Two layers that are tied, a frozen one, and one of another dtype."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.frozen = (nn.Linear(4, 4).double() for _ in range(3))
        self.second.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.single = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return self.single(x.float()).double()


def batches(count: int, rows: int = 8) -> Iterator[tuple[Tensor, Tensor]]:
    """Global batches, the same on all ranks."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        yield tuple(  # type: ignore[misc]
            torch.randn(rows, columns, generator=generator, dtype=torch.float64) for columns in (4, 2)
        )


def mine(x: Tensor) -> Tensor:
    return x.tensor_split(md.size())[md.rank()]


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def same_gradients(model: nn.Module, reference: nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)


def step_of_both(
    model: md.DataParallel, reference: nn.Module, x: Tensor, y: Tensor, create_graph: bool = False
) -> None:
    """The gradients of this rank's rows, averaged, are those of all."""
    model.zero_grad()
    reference.zero_grad()
    loss_of(model, mine(x), mine(y)).backward(create_graph=create_graph)
    loss_of(reference, x, y).backward()
    model.synchronize()
    same_gradients(model.module, reference)


@on_ranks(1, 2, form=FORMS, all_inside=[False, True])
def test_no_sync_sends_the_sum_once(form: dict[str, Any], all_inside: bool) -> None:
    model, reference = md.DataParallel(Net(), **form), Net()
    for step, (x, y) in enumerate(batches(3, rows=14)):
        model.zero_grad(set_to_none=step == 1)
        reference.zero_grad()
        loss_of(reference, x, y).backward()
        # The last micro-batch is smaller: each is weighted with its rows.
        parts = [*zip(mine(x).split(3), mine(y).split(3), strict=True)]
        with comm.ledger() as ledger:
            with model.no_sync():
                for part in parts if all_inside else parts[:-1]:
                    (loss_of(model, *part) * len(part[0]) / len(mine(x))).backward()
            assert not ledger.calls
            if not all_inside:
                (loss_of(model, *parts[-1]) * len(parts[-1][0]) / len(mine(x))).backward()
            model.synchronize()
            if step:
                assert ledger.bytes_sent == model.bytes_per_step()
        same_gradients(model.module, reference)


@on_ranks(1, 2, 3, form=FORMS)
def test_the_mean_over_rows_of_unequal_shares(form: dict[str, Any]) -> None:
    model, reference = md.DataParallel(Net(), **form), Net()
    for x, y in batches(3, rows=7):
        model.zero_grad()
        reference.zero_grad()
        loss_of(reference, x, y).backward()
        share = slice(0, 7) if md.size() == 1 else [slice(0, 5), slice(5, 7), slice(7, 7)][md.rank()]
        with model.no_sync():
            for v, w in zip(x[share].split(2), y[share].split(2), strict=True):
                if len(v):
                    (loss_of(model, v, w) * len(v)).backward()
        model.synchronize(rows=len(x[share]))
        same_gradients(model.module, reference)


@on_ranks(2)
def test_rows_have_to_be_somewhere() -> None:
    with pytest.raises(ValueError, match="rows is 0, and over all ranks 0; give each rank's number"):
        md.DataParallel(nn.Linear(1, 1)).synchronize(rows=0)


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4).double(), nn.Linear(4, 2).double()

    def forward(self, x: Tensor, failing: bool = False) -> Any:
        x = self.a(x)
        if failing:
            x.register_hook(raising)  # type: ignore[no-untyped-call]
        return self.b(x)


def raising(_: Tensor) -> None:
    raise ArithmeticError("on purpose")


@on_ranks(2, form=FORMS, who=[(0, 1), (1,)], set_to_none=[True, False])
def test_after_an_exception_the_next_step_works(
    form: dict[str, Any], who: tuple[int, ...], set_to_none: bool
) -> None:
    model, reference = md.DataParallel(Failing(), **form), Failing()
    for step, (x, y) in enumerate(batches(5)):
        model.zero_grad(set_to_none=set_to_none)
        reference.zero_grad()
        if step in (0, 2) and md.rank() in who:
            with pytest.raises(ArithmeticError, match="on purpose"):
                loss_of(partial(model, failing=True), mine(x), mine(y)).backward()
            if len(who) == 1:  # the others wait for this rank's part of the step
                model.synchronize()
            continue
        loss_of(model, mine(x), mine(y)).backward()
        loss_of(reference, x, y).backward()
        model.synchronize()
        if step not in (0, 2):
            same_gradients(model.module, reference)


@on_ranks(2)
def test_a_forgotten_synchronize_is_noticed() -> None:
    model = md.DataParallel(nn.Linear(4, 2).double(), overlap=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    ((x, y),) = batches(1)
    loss_of(model, x, y).backward()
    other.step()  # has nothing to do with it
    wanted = "^the optimizer was to step on gradients of this rank alone; call the DataParallel's synchronize"
    with pytest.raises(RuntimeError, match=wanted):
        optimizer.step()
    model.synchronize()
    optimizer.step()


@on_ranks(2, name=[r"1\.weight", "extra", r"0\.weight"])
def test_a_parameter_added_later_is_an_error(name: str) -> None:
    model = md.DataParallel(nn.Sequential(nn.Linear(4, 2)))
    if name == "extra":
        model.module.register_parameter("extra", nn.Parameter(torch.ones(1)))
    elif "1" in name:
        model.module.append(nn.Linear(2, 2))
    else:
        model.module[0].weight = nn.Parameter(torch.ones(2, 4))
    with pytest.raises(ValueError, match=f"the parameter {name} was added after the DataParallel was made"):
        model(torch.ones(1, 4))


@on_ranks(2)
def test_a_wrapper_loads_a_state_and_is_not_copied() -> None:
    model, reference = md.DataParallel(Net(), bucket_mb=0.0002), Net()
    (x, y), (v, w) = batches(2)
    loss_of(model, mine(x), mine(y)).backward()
    model.synchronize()
    ddp = nn.parallel.DistributedDataParallel(Net())
    assert list(model.state_dict()) == list(ddp.state_dict())
    model.load_state_dict(ddp.state_dict())
    for refused in (copy.deepcopy, pickle.dumps, cloudpickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled; save its state_dict"):
            refused(model)
    for each in (model, md.DataParallel(copy.deepcopy(model.module))):
        step_of_both(each, reference, v, w)
    with torch.no_grad():
        assert not model(x).requires_grad


class Table(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 3, sparse=sparse).double()
        self.bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, words: Tensor) -> Tensor:
        return self.table(words) + self.bias


@on_ranks(1, 2, 3, form=FORMS)
def test_sparse_gradients_are_gathered(form: dict[str, Any]) -> None:
    model, reference = md.DataParallel(Table(True), **form), Table(False)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, reference)]
    words = torch.tensor([[3, 3, 7], [7, 9, 9], [1, 9, 49]])
    shares = [words[rank, : 3 - rank] for rank in range(md.size())]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=step < 2)
        users = [rank for rank in range(md.size()) if step < 2 or rank != 1]  # in the end, all but rank 1
        for rank in users:
            (reference(shares[rank]).square().sum() / md.size()).backward()
        if md.rank() in users:
            model(shares[md.rank()]).square().sum().backward()
        model.synchronize()
        grad = model.module.table.weight.grad
        assert grad is not None
        assert grad.is_sparse
        torch.testing.assert_close(grad.to_dense(), reference.table.weight.grad, rtol=1e-12, atol=1e-12)
        touched = {word for rank in users for word in shares[rank].tolist()}
        assert grad.coalesce().indices()[0].tolist() == sorted(touched)
        for optimizer in optimizers:
            optimizer.step()


@on_ranks(2, set_to_none=[True, False])
def test_gradients_are_stored_once(set_to_none: bool) -> None:
    """After a step the gradients' memory is the buckets': each parameter's is a view into one."""
    model = md.DataParallel(nn.Sequential(*(nn.Linear(50, 50) for _ in range(6))))
    for _ in range(3):
        model.zero_grad(set_to_none=set_to_none)
        model(torch.ones(2, 50)).sum().backward()
        model.synchronize()
    buckets = model.shared.buckets
    storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None}
    assert storages == {bucket.gradients.flat.untyped_storage().data_ptr() for bucket in buckets}
    assert len(storages) == 1
    parameters = sum(p.numel() for p in model.parameters())
    assert parameters == 6 * (50 * 50 + 50)
    assert sum(b.gradients.flat.numel() for b in buckets) == parameters + 12 + 2, "and the counts"


class Recomputing(nn.Module):
    """Two layers whose activations are not kept; they share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.b.weight = self.a.weight
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for layer in (self.a, self.b):
            x = checkpoint(layer, x, use_reentrant=True)
        return self.last(x)


@on_ranks(2)
def test_a_gradient_that_comes_twice_is_told() -> None:
    def train() -> None:
        model = md.DataParallel(Recomputing())
        for x, y in batches(3):
            model.zero_grad()
            loss_of(model, mine(x), mine(y)).backward()
            model.synchronize()

    with pytest.raises(RuntimeError, match=r"a\.weight came twice in one backward.* use_reentrant=False"):
        train()


@on_ranks(2, broadcast_buffers=[False, True])
def test_buffers_follow_rank_0_on_request(broadcast_buffers: bool) -> None:
    model = md.DataParallel(nn.BatchNorm1d(1), broadcast_buffers=broadcast_buffers)
    seen = []
    for _ in range(2):
        model(torch.full((2, 1), 10.0 * md.rank())).sum().backward()
        model.synchronize()
        seen.append(float(model.module.running_mean))
    model.eval()
    model(torch.zeros(2, 1))
    last = 1.0 if broadcast_buffers else 1.9  # it started from rank 0's again
    assert seen == ([pytest.approx(1.0), pytest.approx(last)] if md.rank() else [0, 0])


SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16])


@settings(max_examples=25, deadline=None)
@given(
    parameters=st.lists(st.tuples(SHAPES, DTYPES), max_size=5),
    ranks=st.integers(2, 4),
    bucket_bytes=st.sampled_from([0, 8, 30, 10**6]),
    overlap=st.booleans(),
    data=st.data(),
)
def test_any_parameters_used_on_any_ranks(
    cluster_of: Clusters,
    parameters: list[tuple[tuple[int, ...], torch.dtype]],
    ranks: int,
    bucket_bytes: int,
    overlap: bool,
    data: st.DataObject,
) -> None:
    """The mean over the ranks, within the rounding of bfloat16; none where nobody has one."""
    some = st.lists(st.booleans(), min_size=len(parameters), max_size=len(parameters))
    used = data.draw(st.lists(st.lists(some, min_size=2, max_size=2), min_size=ranks, max_size=ranks))

    def train() -> None:
        module = nn.ParameterList(nn.Parameter(torch.ones(shape, dtype=d)) for shape, d in parameters)
        model = md.DataParallel(module, bucket_mb=bucket_bytes / 2**20, overlap=overlap)
        for step in range(2):
            model.zero_grad()
            mine = [p for p, is_used in zip(module, used[md.rank()][step], strict=True) if is_used]
            if mine:
                torch.stack([(p * ranks * (md.rank() + 1)).sum().double() for p in mine]).sum().backward()
            model.synchronize()
            for place, parameter in enumerate(module):
                users = [rank for rank in range(ranks) if used[rank][step][place]]
                if not users:
                    assert parameter.grad is None
                    continue
                wanted = torch.full_like(parameter, float(sum(rank + 1 for rank in users)))
                torch.testing.assert_close(parameter.grad, wanted, rtol=1e-2, atol=0)

    cluster_of(ranks).run(train)


test_wrong_arguments = refuses(
    lambda **given: md.DataParallel(**{"module": nn.Linear(1, 1), **given}),
    ({"module": 3}, TypeError, "module is a int; give a torch.nn.Module"),
    ({"bucket_mb": -1}, "bucket_mb is -1; give megabytes"),
    ({"bucket_mb": "25"}, "bucket_mb is '25'; give megabytes"),
    ({"bucket_mb": float("inf")}, "bucket_mb is inf; give megabytes"),
    ({"bucket_mb": float("nan")}, "bucket_mb is nan; give megabytes"),
)


@on_ranks(2, overlap=[True, False])
def test_synchronize_sends_its_gradients_and_their_counts(overlap: bool) -> None:
    model = md.DataParallel(nn.Linear(3, 2), overlap=overlap)
    for _ in range(2):
        with comm.ledger() as ledger:
            model(torch.ones(1, 3)).sum().backward()
            before = ledger.bytes_sent
            model.synchronize()
    whole = 4 * (3 * 2 + 2) + 4 * (2 + 2)  # two counts, and room for rows and loss
    assert (before, ledger.bytes_sent) == (whole if overlap else 0, whole)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fault", [False, True])
def test_weighted_losses_give_the_weighted_mean(cluster_of: Clusters, overlap: bool, fault: bool) -> None:
    """Ranks have several micro-batches or none, of unequal numbers of labels that count. Twice, as a loop."""
    inputs, targets = CASES["mlp"].rows(torch.Generator().manual_seed(3), 11)
    targets[4:9] = -100
    shares = [[slice(0, 3), slice(3, 7)], [slice(7, 11)], []]
    loss_of = nn.functional.cross_entropy

    def train() -> list[Tensor | None]:
        model = md.DataParallel(CASES["mlp"].model(0), overlap=overlap)
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

    reference = CASES["mlp"].model(0)
    loss_of(reference(inputs), targets).backward()
    wanted = [parameter.grad for parameter in reference.parameters()]
    for found in cluster_of(3).run(train):
        if fault:
            assert not torch.allclose(found[0], wanted[0], rtol=1e-3)
        else:
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@on_ranks(1, 2)
def test_bytes_are_known_after_a_step() -> None:
    if md.size() == 1:
        assert md.DataParallel(nn.Linear(1, 1)).bytes_per_step() == 0
        return
    with pytest.raises(RuntimeError, match="the buckets follow from the first backward pass; train a step"):
        md.DataParallel(nn.Linear(1, 1)).bytes_per_step()
