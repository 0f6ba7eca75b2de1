"""Ring attention: exact on any ragged share, balanced, overlapped, as many bytes as the formula says."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import minidist as md
from minidist import comm, kernels
from minidist.parallel.context_parallel import attention_in_a_ring as context_parallel
from minidist.parallel.context_parallel import blockwise_attention, zigzag_order
from minidist.parallel.context_parallel.attention_in_a_ring import ring_attention, ring_bytes
from minidist.parallel.training.activation_memory import ActivationCounter
from tests.conftest import Clusters
from tests.helpers.activations import Live
from tests.helpers.contract import instead_of, with_fault
from tests.helpers.on_ranks import on_ranks
from tests.helpers.refusals import error_of, refuses

EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}
"""Float64 holds 16 digits, and the longest sums here have some tens of terms."""
LENGTHS = (1, 2, 3, 5, 8, 29)  # fewer than a chunk for each rank, too
CASES = [(length, (4, 2), causal, 3) for length in LENGTHS for causal in (True, False)]
CASES += [(13, heads, causal, 512) for heads in ((2, 2), (3, 1)) for causal in (True, False)]
"""Length, heads of queries and keys, mask, tile."""


def drawn(length: int, heads: int = 2, key_heads: int = 2, batch: int = 2, width: int = 5) -> list[Tensor]:
    """Queries, keys, values and the gradient of the result, whole and the same on every rank."""
    generator = torch.Generator().manual_seed(length)
    shapes = [(batch, h, length, width) for h in (heads, key_heads, key_heads, heads)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def full_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """By the definition, with the whole matrix."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
    return scores.softmax(-1) @ v


def in_full(inputs: list[Tensor], causal: bool) -> list[Tensor]:
    """The result and the gradients of queries, keys and values."""
    *qkv, gradient = inputs
    qkv = [x.clone().requires_grad_() for x in qkv]
    result = full_attention(*qkv, causal)
    return [result.detach(), *torch.autograd.grad(result, qkv, gradient)]


def own(inputs: list[Tensor]) -> list[Tensor]:
    at = zigzag_order.positions(inputs[0].shape[2], md.size(), md.rank())
    return [x.index_select(2, at) for x in inputs]


def by_ring(inputs: list[Tensor], causal: bool = True, **options: Any) -> list[Tensor]:
    """The same for this rank's positions."""
    *qkv, gradient = own(inputs)
    qkv = [x.requires_grad_() for x in qkv]
    options = {"length": inputs[0].shape[2], **options}
    result = ring_attention(*qkv, causal, **options)
    return [result.detach(), *torch.autograd.grad(result, qkv, gradient)]


# The order.


def computed_pairs(length: int, ranks: int, rank: int, causal: bool) -> int:
    """Pairs of a query and a key for which a rank computes scores, in one head."""
    queries, total = zigzag_order.size(length, ranks, rank), 0
    for owner in range(ranks):
        first, keys, diagonal = zigzag_order.sight(length, ranks, rank, owner, causal)
        total += queries * (queries + 1) // 2 if diagonal else (queries - first) * keys
    return total


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_every_position_is_somebodys_and_every_pair_is_computed_once(ranks: int) -> None:
    for length in range(40):
        held = [zigzag_order.positions(length, ranks, rank) for rank in range(ranks)]
        assert sorted(torch.cat(held).tolist()) == list(range(length))
        assert all(at.tolist() == sorted(at.tolist()) for at in held)
        sizes = [zigzag_order.size(length, ranks, rank) for rank in range(ranks)]
        assert sizes == [len(at) for at in held]
        assert max(sizes) - min(sizes) <= 2
        for causal, pairs in ((True, length * (length + 1) // 2), (False, length**2)):
            computed = [computed_pairs(length, ranks, rank, causal) for rank in range(ranks)]
            assert sum(computed) == pairs
            if length % (2 * ranks) == 0:
                assert len(set(computed)) == 1


# Exact.


@on_ranks(1, 2, 3, 4)
def test_it_is_full_attention_forward_and_backward() -> None:
    for length, heads, causal, tile in CASES:
        inputs = drawn(length, *heads)
        expected = own(in_full(inputs, causal))
        for actual, wanted in zip(by_ring(inputs, causal, tile=tile), expected, strict=True):
            torch.testing.assert_close(actual, wanted, **EXACT)


@instead_of(zigzag_order, "sight")
def seen_too_much(sight: Any, length: int, ranks: int, rank: int, owner: int, causal: bool) -> Any:
    """A fault: queries see the late chunk of the ranks before, too."""
    return sight(length, ranks, rank, owner, causal and owner >= rank)


def test_a_wrong_mask_is_seen(cluster_of: Clusters) -> None:
    found = cluster_of(2).run(with_fault, seen_too_much, by_ring, drawn(12))
    at = zigzag_order.positions(12, 2, 1)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(found[1][0], in_full(drawn(12), True)[0].index_select(2, at), **EXACT)


# Precision.


def errors(dtype: torch.dtype) -> list[list[float]]:
    """For the gradient of each of q, k and v the squares of its error and of itself, on this rank's part."""
    inputs = [x.to(dtype).double() for x in drawn(96, batch=1, width=16)]
    expected = own(in_full(inputs, True))
    actual = by_ring([x.to(dtype) for x in inputs], tile=16)
    assert all(x.dtype == dtype for x in actual)
    return [
        [float((a.double() - e).square().sum()), float(e.square().sum())]
        for a, e in zip(actual, expected, strict=True)
    ]


def relative(found: list[Any]) -> Tensor:
    """The relative error of each over all ranks."""
    wrong, whole = torch.tensor(found).sum(0).unbind(-1)
    return (wrong / whole).sqrt()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_error_does_not_grow_with_the_ring(cluster_of: Clusters, dtype: torch.dtype) -> None:
    alone = relative(cluster_of(1).run(errors, dtype))
    for ranks in (2, 4):
        together = relative(cluster_of(ranks).run(errors, dtype))
        # The same rounded products, added in another order.
        assert (together < 1.25 * alone).all(), (ranks, together, alone)


# On a rung.


def off_by(error: float) -> float:
    """The largest error of blocks on a rung whose logs are off, over float32's of 30 sums."""
    last = kernels.ATTENTION_LADDER[-1]

    def compute(*given: Any) -> None:
        last.compute(*given)
        given[4][...] += error

    worst, rung = 0.0, replace(last, compute=compute)
    for length, heads, causal, _ in CASES:
        inputs = drawn(length, *heads)
        expected = own(in_full(inputs, causal))
        actual = by_ring([x.float() for x in inputs], causal, rung=rung)
        for a, e in zip(actual, expected, strict=True):
            worst = max([worst, *((a - e).abs() / (1e-5 + 1e-5 * e.abs())).flatten().tolist()])
    return worst


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_blocks_on_a_rung_are_full_attention_to_float32s_rounding(cluster_of: Clusters, ranks: int) -> None:
    assert max(cluster_of(ranks).run(off_by, 0.0)) < 1
    assert max(cluster_of(ranks).run(off_by, 1e-3)) > 1


def test_a_dtype_that_the_rung_does_not_take_is_named() -> None:
    s6 = kernels.rung("s6", kernels.ATTENTION_LADDER)
    half = replace(s6, dtypes=("float16", "bfloat16"))
    for rung, message in (
        (s6, "q has dtype float64, but rung s6_causal takes float32; convert it"),
        ("s6_causal", "rung is 's6_causal'; give a rung of attention, such as named"),
        (half, "s6_causal takes float16 or bfloat16, and a ring gives its rung float32: take a CUDA rung"),
    ):
        with pytest.raises(TypeError, match=message):
            by_ring(drawn(3), rung=rung)


# What is sent, computed and held.


def sent(length: int, dtype: torch.dtype) -> tuple[int, int, int]:
    q, k, v, gradient = (x.to(dtype).requires_grad_() for x in own(drawn(length, 4, 2)))
    with comm.ledger() as forward:
        result = ring_attention(q, k, v, length=length)
    with comm.ledger() as backward:
        torch.autograd.grad(result, (q, k, v), gradient)
    with comm.ledger() as asking:
        ring_attention(q, k, v)
    return forward.bytes_sent, backward.bytes_sent, asking.bytes_sent - forward.bytes_sent


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_it_sends_what_the_formula_says(cluster_of: Clusters, ranks: int) -> None:
    for length, dtype in ((1, torch.float64), (24, torch.float32), (29, torch.bfloat16)):
        found = cluster_of(ranks).run(sent, length, dtype)
        given: dict[str, Any] = {"batch": 2, "key_heads": 2, "head_size": 5, "dtype": dtype}
        for rank, each in enumerate(found):
            forward, backward = (ring_bytes(length, ranks, rank, **given, backward=b) for b in (False, True))
            assert each == (forward, backward, 0)
        keys = 2 * 2 * length * 5 * dtype.itemsize
        assert sum(forward for forward, _, _ in found) == (ranks - 1) * (2 * keys + 64 * ranks)


def flops(causal: bool) -> tuple[int, int]:
    """Of the forward pass, and of the backward pass."""
    q, k, v, gradient = (x.requires_grad_() for x in own(drawn(96)))
    with FlopCounterMode(display=False) as forward:
        result = ring_attention(q, k, v, causal, length=96, tile=96 // (2 * md.size()))
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(result, (q, k, v), gradient)
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_work_is_balanced_and_what_the_mask_leaves_out_is_not_done(
    cluster_of: Clusters, ranks: int
) -> None:
    chunk = 96 // (2 * ranks)
    pair = 2 * 2 * 2 * chunk**2 * 5  # a product for a pair of chunks: 2 operations; batch 2, 2 heads
    computed = 2 * ranks + 1  # of the 4 ranks that there are
    assert cluster_of(ranks).run(flops, True) == [(2 * pair * computed, 5 * pair * computed)] * ranks
    assert cluster_of(ranks).run(flops, False) == [(2 * pair * 4 * ranks, 5 * pair * 4 * ranks)] * ranks


def held(length: int, tile: int) -> tuple[int, int, int]:
    """Elements of the largest tensor, bytes at the peak, and bytes kept for the backward pass."""
    q, k, v, gradient = (x.requires_grad_() for x in own(drawn(length, batch=1)))
    with Live() as live, ActivationCounter() as counter:
        result = ring_attention(q, k, v, length=length, tile=tile)
        kept = counter.saved
        torch.autograd.grad(result, (q, k, v), gradient)
    return live.largest, live.most, kept


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_a_rank_holds_is_its_share(cluster_of: Clusters, ranks: int) -> None:
    length, tile, heads, width = 768, 16, 2, 5
    share = length // ranks
    for largest, peak, kept in cluster_of(ranks).run(held, length, tile):
        assert largest == heads * share * tile  # a square of the whole sequence would be 768 * 768 * heads
        assert kept == heads * share * (4 * width + 1) * 8  # q, k, v, the result, and a number a row
        # At most, in the backward pass: scores, weights, their masked product and a product on its way; the
        # kept, wide copies of them, three blocks of keys and values and as many of gradients.
        assert largest * 8 < peak < (4 * tile + 25 * width) * heads * share * 8


def order() -> list[str]:
    """When blocks are sent, waited for and computed."""
    events: list[str] = []

    @instead_of(blockwise_attention.OnlineSoftmax, "add")
    def noted_add(add: Any, *given: Any) -> None:
        events.append("compute")
        add(*given)

    @instead_of(context_parallel._Ring, "pass_on")
    def noted_pass_on(pass_on: Any, *given: Any, **options: Any) -> list[Any]:
        events.append("launch")
        works = pass_on(*given, **options)
        return [SimpleNamespace(wait=lambda: (events.append("wait"), [work.wait() for work in works]))]

    q, k, v, _ = own(drawn(12))
    with pytest.MonkeyPatch.context() as patch:
        noted_add(patch)
        noted_pass_on(patch)
        ring_attention(q, k, v, length=12)
    return events


def test_the_next_block_is_on_its_way_while_this_one_is_computed(cluster_of: Clusters) -> None:
    expected = ["launch", "compute", "wait"] * 2 + ["compute"]
    assert cluster_of(3).run(order) == [expected] * 3


# Mistakes.


test_shapes_that_do_not_fit_are_refused = refuses(
    lambda shapes: ring_attention(*map(torch.zeros, shapes)),
    (((2, 4, 6), (2, 4, 6), (2, 4, 6)), r"give q \(B, H, T, D\)"),
    (((2, 4, 6, 5), (2, 4, 7, 5), (2, 4, 7, 5)), r"q is \(2, 4, 6, 5\), k \(2, 4, 7, 5\)"),
    (((2, 4, 6, 5), (2, 4, 6, 5), (2, 4, 6, 4)), "give q"),
    (((2, 4, 6, 5), (2, 4, 6, 4), (2, 4, 6, 4)), "one width"),
    (((2, 4, 6, 5), (2, 3, 6, 5), (2, 3, 6, 5)), "has to divide"),
)


x = torch.zeros(1, 1, 3, 2)
CUT = r"the ranks have \[3\] positions, but zigzag order cuts a sequence of 4 into \[4\]"
test_other_mistakes_are_refused = refuses(
    lambda call: call(),
    (lambda: ring_attention(x, x, x.double()), TypeError, "one floating dtype"),
    (lambda: ring_attention(x.long(), x.long(), x.long()), TypeError, r"torch\.int64"),
    (lambda: ring_attention(x, x, x, tile=0), "tile is 0"),
    (lambda: ring_attention(x, x, x, length=4), CUT),
)


@on_ranks(2)
def test_parts_that_zigzag_order_does_not_make_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"the ranks have \[3, 6\] positions.* cuts a sequence of 9 into \[5, 4\]"
    ):
        ring_attention(*[torch.zeros(1, 1, 3 * (1 + md.rank()), 2)] * 3)


def other(what: str) -> None:
    """Attention to which the last rank gives something else."""
    last = md.rank() == md.size() - 1
    q = torch.zeros(2, 2, 4, 8)
    k, options = q, {"length": 4 * md.size(), "causal": True}
    if what == "heads" and last:
        k = q[:, :1]
    elif what == "batch" and last:
        q = k = q[:1]
    elif what == "dtype" and last:
        q = k = q.double()
    elif what == "width":  # as many bytes
        q = k = q.view(2, 1, 4, 16) if last else q
    elif last:
        options[what] = {"length": 99, "causal": False}[what]
    ring_attention(q, k, k, **options)


@pytest.mark.parametrize("what", ["heads", "batch", "dtype", "width", "length", "causal"])
def test_ranks_that_give_other_arguments_are_named_on_all(cluster_of: Clusters, what: str) -> None:
    (told,) = {*cluster_of(3).run(error_of, ValueError, other, what)}
    assert "the ranks give attention different arguments" in told
    assert "rank 0 has q (2, 2, 4, 8)" in told
    assert "and rank 2 has q" in told
    shown = {"heads": "k (2, 1, 4, 8)", "batch": "q (1, 2, 4, 8)", "dtype": "torch.float64"}
    shown |= {"width": "q (2, 1, 4, 16)", "length": "length=99", "causal": "causal=False"}
    assert shown[what] in told.partition("rank 2")[2]
