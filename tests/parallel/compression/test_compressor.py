"""Compressed gradients: within their rounding, exact where nothing is left out, and nothing is lost."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from minidist import comm
from minidist.parallel.compression import by_name
from minidist.parallel.compression.compressor import Cast, Compression
from minidist.parallel.compression.top_k import largest
from tests.conftest import Clusters
from tests.helpers import contract, models
from tests.helpers.on_ranks import on_ranks
from tests.helpers.refusals import refuses
from tests.helpers.step_bytes import bytes_of_a_step

SGD = partial(torch.optim.SGD, lr=0.1)


vectors = partial(models.vectors, width=20, classes=12)
mlp = partial(models.mlp, sizes=(20, 16, 12))
CASE = contract.Case(mlp, vectors, SGD)


@pytest.mark.parametrize(
    ("options", "ranks"), [({}, 1), ({"overlap": False}, 2), ({"bucket_mb": 0}, 3)], ids=str
)
@pytest.mark.parametrize("compression", [md.TopK(ratio=1.0), md.PowerSGD(rank=16)], ids=str)
def test_exact_where_nothing_is_left_out(
    cluster_of: Clusters, compression: Compression, options: dict[str, Any], ranks: int
) -> None:
    options = {**options, "compression": compression}
    contract.check(cluster_of, CASE, md.Layout(dp=ranks), data_parallel=options)


@pytest.mark.parametrize("warm_start", [True, False])
def test_factors_are_exact_for_gradients_of_their_rank(cluster_of: Clusters, warm_start: bool) -> None:
    """A batch of 2 rows has gradients of rank 2, or less."""
    case = contract.Case(mlp, vectors, SGD, batches=(2,) * 6)
    options = {"data_parallel": {"compression": md.PowerSGD(rank=2, warm_start=warm_start)}}
    expected = contract.train_in_one_process(case)
    for trained in cluster_of(2).run(contract.train_on_this_rank, case, md.Layout(dp=2), options):
        for name, wanted in expected.state.items():
            # Where two rows are nearly parallel the second factor is small, and its rounding large.
            torch.testing.assert_close(trained.state[name], wanted, rtol=1e-8, atol=1e-8)


@on_ranks(2, 3, name=["float16", "bfloat16"], dtype=[torch.float32, torch.float64])
def test_a_rounded_mean_is_within_its_rounding(name: str, dtype: torch.dtype) -> None:
    gradients = torch.randn(md.size(), 50, generator=torch.Generator().manual_seed(1)).to(dtype)
    model = md.DataParallel(Vector(50, dtype), compression=name)
    (model() * gradients[md.rank()]).sum().backward()
    model.synchronize()
    assert model.module.weight.grad is not None
    mean, exact, size = model.module.weight.grad, gradients.mean(0), gradients.abs().mean(0)
    assert mean.dtype == dtype
    assert not torch.equal(mean, exact), "it was rounded"
    # Each rank's part is rounded once, and each of the n - 1 sums once.
    step = 2.0**-11 if name == "float16" else 2.0**-8
    assert torch.all((mean - exact).abs() <= (md.size() + 1) * step * size)


class Vector(nn.Module):
    """A parameter whose gradient is what its output is multiplied by."""

    def __init__(self, size: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, dtype=dtype))

    def forward(self) -> Tensor:
        return self.weight


class Matrix(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 9, 6, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(7, dtype=dtype))
        self.tall = nn.Parameter(torch.zeros(30, 8, dtype=dtype))

    def forward(self) -> Tensor:
        return torch.cat([p.flatten() for p in self.parameters()])


def applied_and_kept(compression: Compression, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Over some steps: the sum of the exact gradients, of those applied, and what is still kept back."""
    model = md.DataParallel(Matrix(dtype), compression=compression, bucket_mb=0.0005)
    numel = sum(p.numel() for p in model.parameters())
    generator = torch.Generator().manual_seed(2)
    exact, applied = torch.zeros(numel, dtype=dtype), torch.zeros(numel, dtype=dtype)
    for _ in range(5):
        gradients = torch.randn(md.size(), numel, generator=generator).to(dtype)
        model.zero_grad()
        (model() * gradients[md.rank()]).sum().backward()
        model.synchronize()
        exact += gradients.mean(0)
        applied += torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    plan = model.shared.sets[0]
    kept = torch.zeros(numel, dtype=dtype)
    starts = dict(zip(range(3), (0, 108, 115), strict=True))
    for bucket, reduction in zip(plan.buckets, plan.reductions, strict=True):
        if reduction.error is None:
            continue
        error = comm.all_reduce(reduction.error.clone())
        for place, view in zip(bucket.layout.param_indices, bucket.gradients.views, strict=True):
            start = view.storage_offset()
            kept[starts[place] : starts[place] + view.numel()] = error[start : start + view.numel()]
    return exact, applied, kept


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("compression", [md.TopK(ratio=0.2), md.PowerSGD(rank=1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_is_not_sent_is_kept(
    cluster_of: Clusters, compression: Compression, dtype: torch.dtype, ranks: int
) -> None:
    rounding = 1e-12 if dtype == torch.float64 else 1e-5
    for exact, applied, kept in cluster_of(ranks).run(applied_and_kept, compression, dtype):
        assert (exact - applied).abs().max() > 0.1, "something was left out"
        torch.testing.assert_close(applied + kept, exact, rtol=0, atol=rounding)


@pytest.mark.parametrize("compression", [md.TopK(ratio=0.2), md.PowerSGD(rank=1)], ids=str)
def test_sums_over_rows_keep_as_much_back_as_means(cluster_of: Clusters, compression: Compression) -> None:
    def train(by_rows: bool) -> Tensor:
        model = md.DataParallel(Matrix(torch.float64), compression=compression)
        optimizer = SGD(model.parameters())
        generator = torch.Generator().manual_seed(md.rank())
        for _ in range(4):
            optimizer.zero_grad()
            losses = model() * torch.randn(8, len(model()), generator=generator, dtype=torch.float64)
            (losses.sum() if by_rows else losses.sum(1).mean()).backward()
            model.synchronize(rows=8 if by_rows else None)
            optimizer.step()
        return model().detach()

    for one, other in zip(cluster_of(2).run(train, True), cluster_of(2).run(train, False), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "compression",
    [md.TopK(ratio=0.2, error_feedback=False), md.PowerSGD(rank=1, error_feedback=False)],
    ids=str,
)
def test_without_error_feedback_it_is_lost(cluster_of: Clusters, compression: Compression) -> None:
    """The planted fault."""
    exact, applied, kept = cluster_of(2).run(applied_and_kept, compression, torch.float64)[0]
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(applied + kept, exact, rtol=0, atol=0.1)


COMPRESSIONS: dict[str, str | Compression | None] = {
    "none": None,
    **{name: name for name in by_name.COMPRESSIONS},
    "top 5%": md.TopK(0.05),
    "rank 2": md.PowerSGD(2),
}


@pytest.mark.parametrize(("ranks", "bucket_mb"), [(1, 25), (2, 0), (2, 0.002), (2, 25), (3, 0.002)])
def test_bytes_are_the_formulas(cluster_of: Clusters, ranks: int, bucket_mb: float) -> None:
    def count(compression: str | Compression | None) -> tuple[int, int, int]:
        model = CASE.model(0)
        options = {"bucket_mb": bucket_mb, "compression": compression}
        engine = md.prepare(model, SGD, md.Layout(dp=md.size()), data_parallel=options)
        batch = vectors(torch.Generator().manual_seed(md.rank()), 3)
        engine.step(*batch)
        with comm.ledger() as ledger:
            engine.step(*batch)
        predicted = bytes_of_a_step(model, md.size(), **options)  # type: ignore[arg-type]
        return ledger.bytes_sent, engine.strategy.bytes_per_step(), predicted

    sizes = {}
    for name, compression in COMPRESSIONS.items():
        for sent, exact, predicted in cluster_of(ranks).run(count, compression):
            assert sent == exact == predicted
            sizes[name] = sent
    whole = 8 * (20 * 16 + 16 + 16 * 12 + 12)
    if ranks == 2:
        counts = 8 * (4 + 2)
        assert sizes["none"] == whole + counts
        assert sizes["float16"] == sizes["bfloat16"] == whole // 4 + counts
        first, second = 2 * (20 + 16), 2 * (16 + 12)
        assert sizes["rank 2"] == 8 * (first + second + 16 + 12) + counts
    if ranks == 2 and bucket_mb == 25:
        assert sizes["top 5%"] == 12 * round(0.05 * whole / 8) + counts


@pytest.mark.parametrize("count", [1, 7, 500, 50_000, 199_999, 200_000])
@pytest.mark.parametrize("kind", ["normal", "few", "equal", "at the sample", "nan"])
def test_the_largest_are_found(count: int, kind: str) -> None:
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(count)).abs()
    if kind == "few":
        x[1000:] = 0
    elif kind == "equal":
        x.fill_(1)
    elif kind == "at the sample":  # which then thinks that many are large
        x[::10] += 10
    elif kind == "nan":
        x[5] = torch.nan
    places = largest(x, count)
    assert len(set(places.tolist())) == count
    wanted = x.topk(count).values
    torch.testing.assert_close(x[places].sort(descending=True).values, wanted, equal_nan=True, rtol=0, atol=0)


test_wrong_compressions = refuses(
    lambda given: md.DataParallel(nn.Linear(1, 1), compression=given),
    ("float61", "unknown compression 'float61': did you mean 'float16'"),
    (16, TypeError, r"compression is 16; give one of float16, .*, an object such as TopK\(0.01\)"),
)


test_wrong_options = refuses(
    lambda make: make(),
    (lambda: md.TopK(0), "ratio is 0; give a share"),
    (lambda: md.TopK(1.1), "ratio is 1.1; give a share"),
    (lambda: md.PowerSGD(0), "rank is 0; give at least 1, the columns of a factor"),
    (lambda: Cast(torch.float32), "dtype is torch.float32; give torch.float16"),
)
