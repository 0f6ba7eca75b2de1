"""`assert_in_sync`: silent where the ranks' copies are equal, exact about the first difference otherwise."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import minidist as md
from minidist import comm
from tests.conftest import Clusters
from tests.helpers.on_ranks import on_ranks
from tests.helpers.refusals import refuses


def model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 4, dtype=dtype), nn.BatchNorm1d(4, dtype=dtype), nn.Linear(4, 2, dtype=dtype)
    )


def told_here(*arguments: Any, **options: Any) -> tuple[int, str, str]:
    """Which rank and tensor the error names, and its text; "" where the ranks are in sync."""
    try:
        md.assert_in_sync(*arguments, **options)
    except md.OutOfSync as error:
        return error.rank, error.name, str(error)
    return -1, "", ""


def text_of(*arguments: Any, **options: Any) -> str:
    return told_here(*arguments, **options)[-1]


def told(
    cluster: md.Cluster, change: Callable[[nn.Module], Any], **options: Any
) -> list[tuple[int, str, str]]:
    """On each rank: which rank and tensor the error names, and its text, after `change` on the last rank."""

    def compare() -> tuple[int, str, str]:
        copy = model()
        if md.rank() == md.size() - 1:
            with torch.no_grad():
                change(copy)
        return told_here(copy, **options)

    return cluster.run(compare)


@on_ranks(1, 2, 3)
def test_equal_copies_cost_32_bytes_for_each_other_rank() -> None:
    copy = model()
    optimizer = torch.optim.AdamW(copy.parameters())
    copy(torch.ones(3, 3, dtype=torch.float64)).sum().backward()
    optimizer.step()
    with comm.ledger() as ledger:
        md.assert_in_sync(copy)
        md.assert_in_sync(copy, gradients=True, optimizer=optimizer)
    assert ledger.bytes_sent == 2 * 32 * (md.size() - 1)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_first_difference_is_said_with_its_size(cluster_of: Clusters, ranks: int) -> None:
    def change(copy: nn.Module) -> None:
        copy[2].weight[1, 3] += 0.25
        copy[0].bias[2] = 7.0
        copy[0].bias[1] = torch.nan

    value = model()[0].bias.tolist()[1]
    results = told(cluster_of(ranks), change)
    assert len(set(results)) == 1
    rank, name, text = results[0]
    assert (rank, name) == (ranks - 1, "0.bias")
    distance = abs(7.0 - model()[0].bias.tolist()[2])
    assert text == (
        f"the ranks are out of sync: parameter 0.bias, float64[4], differs between rank {ranks - 1} and "
        f"rank 0: 2 of 4 elements, by up to {distance:.3g}; the first, at [1], is nan and {value!r}"
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda m: m[1].running_mean.add_(1),
            r"buffer 1.running_mean, float64\[4\], .* 4 of 4 elements, by up to 1;",
        ),
        (
            lambda m: m[1].num_batches_tracked.add_(2),
            r"buffer .*_tracked, int64\[scalar\].* 1 of 1 .*by up to 2; it is 2",
        ),
        (lambda m: m.float(), r"parameter 0.weight is float32\[4x3\] on rank 1 and float64\[4x3\] on rank 0"),
        (lambda m: m.append(nn.Linear(1, 1)), "rank 0 has no parameter 3.weight, and rank 1 has"),
        (lambda m: m.pop(2), "rank 1 has no parameter 2.weight, and rank 0 has"),
        (lambda m: setattr(m[0], "bias", None), "rank 1 has no parameter 0.bias, and rank 0 has"),
        (lambda m: m[0].weight[0].zero_(), r"0.weight.* 3 of 12 elements"),
        (
            lambda m: setattr(m[2].bias, "grad", torch.ones(2, dtype=torch.float64)),
            "rank 0 has no gradient of 2.bias, and rank 1 has",
        ),
        (
            lambda m: setattr(m[2].weight, "data", torch.zeros(4, 2, dtype=torch.float64)),
            r"2.weight is float64\[4x2\] on rank 1 and float64\[2x4\] on rank 0",
        ),
    ],
)
def test_every_kind_of_difference_is_told(
    cluster_of: Clusters, change: Callable[[nn.Module], Any], text: str
) -> None:
    for rank, _, message in told(cluster_of(2), change, gradients=True):
        assert rank == 1
        assert re.search(text, message), message


@on_ranks(3)
def test_a_rank_without_the_tensor_goes_before_a_difference() -> None:
    copy = model()
    if md.rank() == 1:
        copy[2].bias.data += 1
    if md.rank() == 2:
        copy[2].bias = None
    wanted = "rank 2 has no parameter 2.bias, and rank 0 has; rank 1 differs from rank 0 too"
    assert text_of(copy) == f"the ranks are out of sync: {wanted}"


def test_zeros_and_nans_are_equal_whatever_their_bits(cluster_of: Clusters) -> None:
    class Values(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            bits: Any = {4: torch.int32, 2: torch.int16, 8: torch.int64}[dtype.itemsize]
            nan = torch.tensor([torch.nan], dtype=dtype).view(bits) + md.rank()  # another payload
            zero = torch.zeros(1, dtype=dtype) * (1 - 2 * md.rank())
            self.register_buffer("values", torch.cat([nan.view(dtype), zero]))

    def compare() -> list[list[int]]:
        seen = []
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            values = Values(dtype)
            assert values.values.isnan().tolist() == [True, False]
            md.assert_in_sync(values)
            seen.append(values.values.view(torch.uint8).tolist())
        return seen

    first, second = cluster_of(2).run(compare)
    assert all(one != other for one, other in zip(first, second, strict=True))


@on_ranks(2, dtype=[torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn, torch.uint8])
def test_dtypes_that_cannot_be_reduced_are_compared_too(dtype: torch.dtype) -> None:
    holder = nn.Module()
    holder.register_buffer("odd", torch.zeros(3, 1).to(dtype))
    holder.register_buffer("empty", torch.zeros(0, 2).to(dtype))
    md.assert_in_sync(holder)
    if md.rank() == 1:
        holder.odd.copy_(torch.tensor([[0.0], [1.0], [0.0]]).to(dtype))
    assert re.search(r"buffer odd, \w+\[3x1\], differs .*: 1 of 3 elements, by up to 1;", text_of(holder))


@on_ranks(2)
def test_an_optimizers_state_and_options_are_compared() -> None:
    texts = []
    for fault in range(3):
        copy = model()
        optimizer = torch.optim.AdamW(copy.parameters(), lr=0.5)
        if fault != 2 or md.rank() == 0:
            for parameter in copy.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        if md.rank() == 1 and fault == 0:
            optimizer.state[copy[0].bias]["exp_avg"][1] += 1
        if md.rank() == 1 and fault == 1:
            optimizer.param_groups[0]["lr"] = 0.25
        if fault == 2:
            copy.load_state_dict(model().state_dict())
        md.assert_in_sync(copy)
        texts.append(text_of(copy, optimizer=optimizer))
    state, option, missing = texts
    assert "optimizer's exp_avg of 0.bias, float64[4], differs between rank 1 and rank 0: 1 of 4" in state
    assert "optimizer's lr of its group 0 is 0.25 on rank 1 and 0.5 on rank 0" in option
    assert "rank 1 has no optimizer's exp_avg of 0.weight, and rank 0 has" in missing


def test_only_a_groups_ranks_are_compared(cluster_of: Clusters) -> None:
    def compare() -> str:
        group = dist.new_group([0, 2])
        copy = model()
        copy[0].weight.data += md.rank() == 1
        if md.rank() == 1:
            return ""
        md.assert_in_sync(copy, group)
        copy[0].weight.data += md.rank() == 2
        return text_of(copy, group)

    results = cluster_of(3).run(compare)
    assert results[0] == results[2]
    assert "differs between rank 2 and rank 0" in results[0]


@on_ranks(3)
def test_a_difference_costs_what_the_docstring_says() -> None:
    copy = model()
    copy[2].weight.data += md.rank()
    with comm.ledger() as ledger, pytest.raises(md.OutOfSync):
        md.assert_in_sync(copy)
    longest = ledger.calls[2].bytes_sent // 2
    assert [call.name for call in ledger.calls] == ["all_gather"] * 4
    assert ledger.bytes_sent == 2 * (32 + 8 + longest + 2 * 4 * 8)
    assert longest > 9 * 64  # a hash, in hexadecimal, of each tensor


test_wrong_arguments_are_told = refuses(
    lambda call: call(),
    (lambda: md.assert_in_sync(torch.ones(2)), "model is a Tensor; give a torch module"),
    (lambda: md.assert_in_sync(model(), optimizer=torch.optim.SGD), "optimizer is a type; give a torch opt"),
    error=TypeError,
)


def test_one_process_is_in_sync_with_itself() -> None:
    copy = model()
    before: dict[str, Tensor] = {name: value.clone() for name, value in copy.state_dict().items()}
    md.assert_in_sync(copy, gradients=True, optimizer=torch.optim.SGD(copy.parameters()))
    torch.testing.assert_close(dict(copy.state_dict()), before, rtol=0, atol=0)
