"""Mixed precision, with whole and sharded state: float32's losses, and steps that all ranks skip together."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from minidist import comm
from minidist.model import MLP, accuracy
from minidist.parallel.training.precision import LossScale, Precision
from tests.conftest import Clusters
from tests.helpers import contract
from tests.helpers.on_ranks import on_ranks
from tests.helpers.refusals import refuses

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


SGD = partial(torch.optim.SGD, lr=0.5)
"""Not Adam, which hardly sees a gradient that is a thousand times too large."""


def mlp(seed: int) -> nn.Module:
    return MLP((6, 5, 3), seed=seed)


def vectors(count: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator)


@pytest.mark.parametrize(("precision", "clip_norm"), [("bf16", None), ("fp16", None), ("bf16", 0.5)])
@pytest.mark.parametrize(("ranks", "zero"), [(1, 0), (2, 0), (3, 0), (2, 1), (2, 2), (2, 3)])
def test_ranks_learn_what_one_process_does(
    cluster_of: Clusters, precision: str, clip_norm: float | None, ranks: int, zero: int
) -> None:
    batch = vectors()

    def train() -> tuple[list[float], dict[str, Tensor], dict[str, Any]]:
        model = mlp(md.rank())
        layout = md.Layout(dp=md.size(), zero=zero, precision=precision, micro_batches=2)
        engine = md.prepare(model, SGD, layout, clip_norm=clip_norm)
        own = contract.own_rows(engine, batch)
        history = [engine.step(*own) for _ in range(20)]
        state = engine.full_state_dict()
        seen = {"right": engine.evaluate(*own, accuracy), "skipped": engine.skipped}
        return history, state, {**seen, "dtypes": {value.dtype for value in state.values()}}

    alone = md.prepare(mlp(0), SGD, clip_norm=clip_norm)
    expected = [alone.step(*batch) for _ in range(20)]
    results = cluster_of(ranks).run(train)
    for history, state, seen in results:
        assert seen == {"right": seen["right"], "dtypes": {HALF[precision]}, "skipped": 0}
        assert seen["right"] == alone.evaluate(*batch, accuracy)
        # bfloat16 rounds weights and activations to 3 digits; the losses fall from 1.8 to 0.3.
        torch.testing.assert_close(history, expected, rtol=0.03, atol=0.03)
        torch.testing.assert_close(state, results[0][1], rtol=0, atol=0)


def train_with_overflow(zero: int) -> list[tuple[Any, ...]]:
    """Five steps on two ranks. In the second, rank 1 overflows: one gradient, or with zero=3 all."""
    inputs, targets = (each[md.rank() :: 2] for each in vectors())
    layout, rule = md.Layout(dp=2, zero=zero, precision="fp16"), LossScale(2.0**10, good_steps=2)
    engine = md.prepare(mlp(md.rank()), partial(torch.optim.AdamW, lr=0.1), layout, loss_scale=rule)
    history = []
    for step in range(5):
        before, own, hooks = engine.full_state_dict(), inputs.clone(), []
        if (step, md.rank()) == (1, 1) and zero == 3:  # which has no parameters to put hooks on
            own[0, 0] = float("inf")
        elif (step, md.rank()) == (1, 1):
            weight = engine.model.get_parameter("layers.1.linear.bias")
            hooks = [weight.register_hook(partial(torch.mul, other=float("inf")))]
        with comm.ledger() as ledger:
            engine.step(own, targets)
        for hook in hooks:
            hook.remove()
        state = engine.full_state_dict()
        changed = any(not torch.equal(before[name], value) for name, value in state.items())
        norms = sum(call.shape == () and call.name == "all_reduce" for call in ledger.calls)
        history.append((engine.loss_scale, engine.skipped, changed, norms, state))
    return history


@pytest.mark.parametrize("zero", range(4))
def test_all_ranks_skip_a_step_that_overflows_on_one(cluster_of: Clusters, zero: int) -> None:
    first, second = cluster_of(2).run(train_with_overflow, zero)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    scales, skipped, changed, norms, _ = zip(*first, strict=True)
    assert scales == (1024, 512, 512, 1024, 1024)
    assert skipped == (0, 1, 1, 1, 1)
    assert changed == (True, False, True, True, True)
    # Agreeing costs a message only where a rank does not see all gradients; the first step tells the rows.
    assert norms == ((2, 1, 1, 1, 1) if zero else (1, 0, 0, 0, 0))


def test_an_overflow_at_the_smallest_scale_is_an_error() -> None:
    engine = md.prepare(
        mlp(0), torch.optim.SGD, md.Layout(precision="fp16"), loss_scale=LossScale(2.0, smallest=1.0)
    )
    inputs, targets = vectors()
    inputs[0, 0] = float("inf")
    engine.step(inputs, targets)
    assert (engine.loss_scale, engine.skipped) == (1.0, 1)
    with pytest.raises(
        FloatingPointError, match="not finite although the loss scale is 1, the smallest; look for"
    ):
        engine.step(inputs, targets)


def test_gradients_that_float16_cannot_hold_are_kept_by_the_scale(cluster_of: Clusters) -> None:
    """The scale is taken out in float32: the gradient is 2^-26, and float16's smallest number 2^-24."""

    def moved(layout: md.Layout, start: float) -> float:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        engine = md.prepare(
            model,
            partial(torch.optim.SGD, lr=2.0**20),
            layout,
            loss=lambda outputs, targets: outputs.sum() * 2.0**-26,
            loss_scale=LossScale(start) if layout.precision == "fp16" else None,
        )
        engine.step(torch.ones(1, 1), torch.zeros(1))
        return float(engine.full_state_dict()["weight"])

    right = -(2.0**-6)
    assert [moved(md.Layout(precision=each), 2.0**16) for each in ("fp32", "bf16", "fp16")] == [right] * 3
    assert moved(md.Layout(precision="fp16"), 1.0) == 0.0
    for zero in range(4):
        layout = md.Layout(dp=2, zero=zero, precision="fp16")
        assert cluster_of(2).run(moved, layout, 2.0**16) == [right] * 2


class Mixed(nn.Module):
    """A normed layer, and buffers of several kinds."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm, self.last = nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.register_buffer("scale", torch.full((3,), 0.5))
        self.register_buffer("order", torch.tensor([2, 1, 0]))

    def forward(self, x: Tensor) -> Tensor:
        return (self.last(torch.relu(self.norm(self.first(x)))) * self.scale)[..., self.order]


@on_ranks(2, precision=[*HALF])
def test_statistics_stay_in_float32_and_integers_as_they_are(precision: str) -> None:
    inputs, targets = vectors()
    model = Mixed(md.rank())
    engine = md.prepare(
        model, partial(torch.optim.AdamW, lr=0.1), md.Layout(dp=md.size(), precision=precision)
    )
    history = [engine.step(inputs[md.rank() :: 2], targets[md.rank() :: 2]) for _ in range(10)]
    dtypes = {name: value.dtype for name, value in engine.full_state_dict().items()}
    assert history[-1] < history[0]
    normal = {name: dtype for name, dtype in dtypes.items() if not name.startswith("norm.")}
    assert normal.pop("order") == torch.int64
    assert set(normal.values()) == {HALF[precision]}
    assert dtypes["norm.num_batches_tracked"] == torch.int64
    assert dtypes["norm.running_mean"] == dtypes["norm.weight"] == torch.float32


def test_settings_take_the_scale_along() -> None:
    before, after, another = Precision("fp16"), Precision("fp16"), Precision("bf16")
    assert before.skips(float("nan"))
    assert not before.skips(1.0)
    after.load_settings(before.settings())
    another.load_settings(before.settings())
    assert after.settings() == before.settings() == {"scale": 2.0**15, "good": 1, "skipped": 1}
    assert (another.scale, another.skipped) == (1.0, 1)
    after.load_settings(another.settings())
    assert after.scale == 2.0**15


test_wrong_scales = refuses(
    LossScale,
    ({"start": float("inf")}, "cannot start at inf and be at least 1.0; give 0 < smallest"),
    ({"start": 2.0, "smallest": 4.0}, "cannot start at 2.0 and be at least 4.0; give 0 < smallest"),
    ({"good_steps": 0}, "good_steps is 0; give at least 1"),
)
