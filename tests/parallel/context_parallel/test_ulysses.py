"""Ulysses: heads traded for tokens; exact on ragged shares, alone and with a ring, bytes to the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import minidist as md
from minidist import comm
from minidist.comm.mesh import Mesh
from minidist.model import GPT, GPTConfig
from minidist.parallel.context_parallel import ulysses, zigzag_order
from minidist.parallel.context_parallel.attention_in_a_ring import TILE, TOLD
from minidist.parallel.context_parallel.ulysses import ulysses_attention
from minidist.scale.step_time.layer_work import RING_TILE, LayerWork
from tests.conftest import Clusters
from tests.helpers.contract import patched, with_fault
from tests.helpers.models import hugging_face
from tests.helpers.on_ranks import on_ranks
from tests.helpers.refusals import refused_on_ranks
from tests.parallel.context_parallel.test_ring_attention import EXACT, drawn, in_full, own

CASES = [
    (length, heads, causal)
    for length in (1, 3, 8, 29)
    for heads in ((4, 4), (8, 4))
    for causal in (True, False)
]


def by_ulysses(inputs: list[torch.Tensor], causal: bool, trading: int) -> list[torch.Tensor]:
    """The result and the gradients at this rank's positions; `trading` neighbours trade heads."""
    *qkv, gradient = own(inputs)
    qkv = [x.requires_grad_() for x in qkv]
    blocks = None if trading == md.size() else Mesh(cp=md.size()).blocks("cp", trading)
    result = ulysses_attention(*qkv, causal, length=inputs[0].shape[2], blocks=blocks)
    return [result.detach(), *torch.autograd.grad(result, qkv, gradient)]


def check_all(trading: int) -> None:
    for length, heads, causal in CASES:
        inputs = drawn(length, *heads)
        expected = own(in_full(inputs, causal))
        for actual, wanted in zip(by_ulysses(inputs, causal, trading), expected, strict=True):
            torch.testing.assert_close(actual, wanted, **EXACT)


@pytest.mark.parametrize(("ranks", "trading"), [(1, 1), (2, 2), (3, 3), (4, 4), (4, 2), (4, 1)])
def test_it_is_full_attention_forward_and_backward(cluster_of: Clusters, ranks: int, trading: int) -> None:
    cluster_of(ranks).run(check_all, trading)


class InArrivalOrder:
    """A fault: positions stay in the order in which the ranks sent them, so the mask hides others."""

    @staticmethod
    def positions(length: int, ranks: int, rank: int) -> torch.Tensor:
        return torch.arange(zigzag_order.size(length, ranks, rank))


def test_positions_out_of_order_are_seen(cluster_of: Clusters) -> None:
    with pytest.raises(md.RankError, match="Tensor-likes are not close"):
        cluster_of(2).run(with_fault, patched(ulysses, "zigzag_order", InArrivalOrder), check_all, 2)


def forward_products(
    q: Any, k: Any, v: Any, dropout: float = 0.0, is_causal: bool = False, **_: Any
) -> float:
    """Operations of a fused kernel's two products, for the pairs that its mask leaves."""
    batch, heads, length, width = q
    return 4 * batch * heads * width * length * ((length + 1) / 2 if is_causal else length)


def backward_products(g: Any, q: Any, k: Any, v: Any, y: Any, s: Any, *more: Any, **named: Any) -> float:
    """The same of its five products."""
    return 2.5 * forward_products(q, k, v, *more, **named)


def counted(trading: int) -> tuple[int, float]:
    """Bytes that this rank sends, and its operations in attention, causal."""
    inputs, fused = drawn(64, 4, 4), torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    uncounted: Any = {fused: forward_products, backward: backward_products}  # by torch
    with comm.ledger() as ledger, FlopCounterMode(display=False, custom_mapping=uncounted) as flops:
        by_ulysses(inputs, True, trading)
    return ledger.bytes_sent, flops.get_total_flops()


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_are_those_of_the_formula(cluster_of: Clusters, ranks: int) -> None:
    found = cluster_of(ranks).run(counted, ranks)
    forward = 4 * (ranks - 1) * (2 * 64 * 4 * 5 * 8) // ranks**2  # 4 (n - 1) / n^2 B T D b, and again
    assert [sent - 8 * TOLD * (ranks - 1) for sent, _ in found] == [2 * forward] * ranks


def check_work(ranks: list[tuple[int, float]], trading: int) -> None:
    """All ranks do the same work, within 5%: what the planner counts, forward and 2.5 times that backward."""
    work, shape = [operations for _, operations in ranks], GPTConfig(context=64, layers=1, heads=4, width=20)
    assert max(work) <= 1.05 * min(work)
    assert RING_TILE == TILE
    pairs = LayerWork(shape, 2, 64 // len(ranks), 64, trading=trading).pairs
    assert sum(work) / len(work) == 3.5 * 4 * pairs * 20


def without_a_mask(patch: pytest.MonkeyPatch) -> None:
    """A fault: ranks compute what the mask hides."""
    ring, fused = zigzag_order.sight, ulysses.functional.scaled_dot_product_attention
    patch.setattr(zigzag_order, "sight", lambda *args: ring(*args[:4], False))
    plain = lambda *x, is_causal, **more: fused(*x, **more)  # noqa: E731
    patch.setattr(ulysses.functional, "scaled_dot_product_attention", plain)


@pytest.mark.parametrize(("ranks", "trading"), [(2, 2), (2, 1), (4, 4), (4, 2), (4, 1)])
def test_every_rank_has_the_same_work(cluster_of: Clusters, ranks: int, trading: int) -> None:
    check_work(cluster_of(ranks).run(counted, trading), trading)
    with pytest.raises(AssertionError):
        check_work(cluster_of(ranks).run(with_fault, without_a_mask, counted, trading), trading)


def test_more_ranks_than_key_heads_are_refused(cluster_of: Clusters) -> None:
    said = "2 key heads for the 3 ranks that trade heads"
    refused_on_ranks(cluster_of(3), ValueError, said, by_ulysses, drawn(6, 4, 2), True, 3)


FEW = [
    ("cp=4,cp_kind=ulysses", "GPT", 2),
    ("cp=2,tp=2,cp_kind=ulysses", "GPT", 1),
    ("cp=4,cp_kind=4x1", "Llama", 2),
]


@on_ranks(4, few=FEW)
def test_too_few_key_heads_are_refused_before_training(few: tuple[str, str, int]) -> None:
    layout, name, heads = few
    shape = GPTConfig(vocabulary=13, context=16, layers=1, heads=2, width=8)
    model = GPT(shape) if name == "GPT" else hugging_face(name)
    with pytest.raises(ValueError, match=rf"ranks trade heads, and with tp=\d they have {heads} key heads"):
        md.prepare(model, torch.optim.SGD, md.Layout.parse(layout))
