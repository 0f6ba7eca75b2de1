"""Precision, clipping and recomputation where the training state is sharded: as where it is not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from minidist.model import GPT, MLP, config
from minidist.parallel.training.precision import LossScale
from tests.helpers import contract

Clusters = Callable[[int], md.Cluster]


def gpt(seed: int) -> nn.Module:
    shape = config("byte-tiny", vocabulary=11, context=8, layers=2, heads=2, width=8)
    return GPT(shape, seed=seed, dtype=torch.float64)


def tokens(generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(0, 11, (count, 9), generator=generator)
    return text[:, :-1], text[:, 1:]


@pytest.mark.parametrize(("zero", "recompute"), [(0, True), (1, False), (2, True), (3, False), (3, True)])
def test_clipping_and_recomputation_meet_the_contract(
    cluster_of: Clusters, zero: int, recompute: bool
) -> None:
    case = contract.Case(
        gpt, tokens, partial(torch.optim.SGD, lr=0.5, momentum=0.9), batches=(12, 13, 7), clip_norm=0.3
    )
    layout = md.Layout(dp=3, zero=zero, micro_batches=2, recompute=recompute)
    contract.check(cluster_of(3), case, layout)


def mlp(seed: int) -> nn.Module:
    return MLP((6, 5, 3), seed=seed, dtype=torch.float32)


def vectors() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize(("precision", "clip_norm"), [("bf16", 0.5), ("fp16", None)])
def test_ranks_learn_what_one_process_does_in_float32(
    cluster_of: Clusters, zero: int, precision: str, clip_norm: float | None
) -> None:
    inputs, targets = vectors()
    optimizer = partial(
        torch.optim.SGD, lr=0.5
    )  # not Adam: it hardly sees gradients a thousand times as long

    def train() -> tuple[list[float], dict[str, Tensor], int]:
        layout = md.Layout(dp=2, zero=zero, precision=precision, micro_batches=2)
        engine = md.prepare(mlp(md.rank()), optimizer, layout, clip_norm=clip_norm)
        losses = [engine.step(inputs[md.rank() :: 2], targets[md.rank() :: 2]) for _ in range(20)]
        return losses, engine.full_state_dict(), engine.skipped

    alone = md.prepare(mlp(0), optimizer, clip_norm=clip_norm)
    expected = [alone.step(inputs, targets) for _ in range(20)]
    results = cluster_of(2).run(train)
    for losses, state, skipped in results:
        assert skipped == 0
        # bfloat16 rounds weights and activations to 3 digits; the losses fall from 1.8 to 0.3.
        torch.testing.assert_close(losses, expected, rtol=0.03, atol=0.03)
        for name, value in state.items():
            assert torch.equal(value, results[0][1][name]), name


@pytest.mark.parametrize("zero", range(4))
def test_the_loss_scale_is_taken_out_in_float32(cluster_of: Clusters, zero: int) -> None:
    def train() -> float:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        layout = md.Layout(dp=2, zero=zero, precision="fp16")
        # The gradient is 2^-26, and float16's smallest number 2^-24.
        engine = md.prepare(
            model,
            partial(torch.optim.SGD, lr=2.0**20),
            layout,
            loss=lambda outputs, _: outputs.sum() * 2.0**-26,
        )
        engine.step(torch.ones(1, 1), torch.zeros(1))
        return float(engine.full_state_dict()["weight"])

    assert cluster_of(2).run(train) == [-(2.0**-6)] * 2


@pytest.mark.parametrize("zero", range(4))
def test_all_ranks_skip_a_step_that_overflows(cluster_of: Clusters, zero: int) -> None:
    inputs, targets = vectors()

    def train() -> list[tuple[float, int, bool]]:
        layout, rule = md.Layout(dp=2, zero=zero, precision="fp16"), LossScale(2.0**10, good_steps=2)
        engine = md.prepare(mlp(md.rank()), partial(torch.optim.AdamW, lr=0.1), layout, loss_scale=rule)
        history = []
        for step in range(5):
            own = inputs[md.rank() :: 2].clone()
            if (step, md.rank()) == (1, 1):
                own[0, 0] = float("inf")
            before = engine.full_state_dict()
            engine.step(own, targets[md.rank() :: 2])
            changed = any(not torch.equal(before[name], v) for name, v in engine.full_state_dict().items())
            history.append((engine.loss_scale, engine.skipped, changed))
        return history

    first, second = cluster_of(2).run(train)
    assert first == second
    assert first == [(1024, 0, True), (512, 1, False), (512, 1, True), (1024, 1, True), (1024, 1, True)]
