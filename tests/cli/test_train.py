"""Training from a description: it learns, equals itself on any number of ranks, and checks its input."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import minidist as md
from minidist import comm
from minidist.cli import train, train_config
from minidist.cli.train import TrainConfig, TrainResult
from minidist.cli.train_config import build, engine_of
from tests.conftest import Clusters
from tests.helpers.on_ranks import on_ranks
from tests.helpers.refusals import refuses


def train_briefly(config: TrainConfig) -> TrainResult:
    """With 23 held-out rows, which neither batches nor ranks divide evenly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "TEST_ROWS", 23)
        return train.train(config)


def test_the_digits_are_learned(cluster_of: Clusters) -> None:
    (result,) = cluster_of(1).run(train.train, TrainConfig())
    assert result.test_accuracy > 0.93
    assert result.losses[-1] < result.losses[0] / 5
    assert result.bytes_sent == 0
    assert result.parameters == 64 * 128 + 128 + 128 * 10 + 10


@pytest.mark.parametrize(
    ("config", "layouts"),
    [
        (TrainConfig(steps=12, batch=13, dtype="float64"), ("dp=2", "dp=4")),
        (
            TrainConfig(steps=12, batch=13, dtype="float64", rung="s4_loop_order", optimizer="sgd"),
            ("dp=2", "dp=4"),
        ),
        (TrainConfig(data="bytes", steps=4, batch=5, dtype="float64", clip_norm=0.5), ("dp=2", "dp=4")),
        (TrainConfig(steps=6, batch=13, dtype="float64"), ("dp=2,tp=2",)),
        (TrainConfig(data="bytes", steps=2, batch=64, dtype="float64"), ("tp=2,pp=2,micro_batches=2",)),
    ],
)
def test_any_layout_learns_the_same(
    cluster_of: Clusters, config: TrainConfig, layouts: tuple[str, ...]
) -> None:
    (alone,) = cluster_of(1).run(train_briefly, config)
    for layout in map(md.Layout.parse, layouts):
        for result in cluster_of(layout.ranks).run(train_briefly, replace(config, layout=layout)):
            # Float64 and some sums in another order, over a few steps.
            torch.testing.assert_close(result.losses, alone.losses, rtol=1e-10, atol=1e-10)
            assert result.test_loss == pytest.approx(alone.test_loss, rel=1e-10)
            assert result.test_accuracy == pytest.approx(alone.test_accuracy, rel=1e-12)
            assert result.parameters == alone.parameters
            assert result.bytes_sent > 0


@pytest.mark.parametrize(
    ("rung", "device"), [(None, "meta"), ("s2_coalesced", "meta"), ("s4_loop_order", "cpu")]
)
def test_the_model_lies_where_its_products_run(
    monkeypatch: pytest.MonkeyPatch, rung: str | None, device: str
) -> None:
    """On the rank's GPU, in whose place stands a device of the tests; on the CPU for a rung of the CPU."""
    pytest.importorskip("numba_cuda", reason="the CUDA ladder is an extra")
    monkeypatch.setattr(comm, "device", lambda: torch.device("meta"))
    model, _ = build(TrainConfig(rung=rung))
    assert {parameter.device.type for parameter in model.parameters()} == {device}


def test_a_gpts_rung_is_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm, "device", lambda: torch.device("meta"))
    model, _ = build(TrainConfig(data="bytes", rung="s7"))
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert {block.attention.attend.rung.name for block in list(model.layers)[1:-1]} == {"s7_backward"}


@pytest.mark.parametrize(("name", "momentum"), [("momentum", 0.9), ("sgd", 0)])
def test_sgd_is_plain_and_momentum_is_not(name: str, momentum: float) -> None:
    config = TrainConfig(optimizer=name, learning_rate=0.5)
    (group,) = engine_of(config, *build(config)).optimizer.param_groups
    assert (group["momentum"], group["lr"]) == (momentum, 0.5)


@on_ranks(2)
def test_ranks_that_end_with_different_weights_are_found() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "broadcast", lambda x, **_: x)
        with pytest.raises(RuntimeError, match="the final weights of rank 1 is not that of rank 0"):
            train.train(TrainConfig(steps=1, seed=md.rank(), layout=md.Layout(dp=2)))


@on_ranks(2)
def test_ranks_with_different_data_are_found() -> None:
    with pytest.MonkeyPatch.context() as patch:
        build = train.build

        def other(config: TrainConfig) -> Any:
            model, data = build(config)
            data.train.inputs[0, 0] += md.rank()
            return model, data

        patch.setattr(train, "build", other)
        with pytest.raises(RuntimeError, match="the data set of rank 1 is not that of rank 0: install"):
            train.train(TrainConfig(steps=1, layout=md.Layout(dp=2)))


test_wrong_descriptions = refuses(
    TrainConfig,
    ({"data": "digit"}, "did you mean 'digits'"),
    ({"model": "mpl"}, "did you mean 'mlp'"),
    ({"model": "byte-tiny"}, "the model byte-tiny cannot train on digits; give the mlp"),
    ({"data": "bytes", "model": "mlp"}, "the model mlp cannot train on bytes"),
    ({"data": "bytes", "model": "bert-tiny"}, "unknown model 'bert-tiny'"),
    ({"optimizer": "adammw"}, "did you mean 'adamw'"),
    ({"dtype": "float23"}, "unknown dtype 'float23'"),
    ({"rung": "?"}, "unknown rung ...: the ladder is"),
    ({"data": "bytes", "rung": "s9"}, "unknown rung 's9': .*the ladder is s1_three_passes"),
    ({"data": "bytes", "model": "bert-tiny-mlm", "rung": "s4"}, "a rung .s4. is for the mlp or a GPT, and"),
    ({"learning_rate": float("inf")}, "learning_rate is inf"),
    ({"steps": 0}, "steps is 0; give at least 1"),
    ({"clip_norm": 0.0}, "clip_norm is 0.0; give the largest norm"),
    (
        {"dtype": "float64", "layout": md.Layout(precision="bf16")},
        "precision=bf16 needs dtype float32, and dtype is float64; leave one of",
    ),
    ({"learning_rate": float("nan")}, "learning_rate is nan"),
    ({"batch": 3, "layout": md.Layout(dp=4)}, "a global batch of 3 rows is too small for 4 data-parallel"),
    ({"layout": md.Layout(cp=2)}, "cp is 2 in the layout, and the mlp has no attention; leave it out"),
    ({"layout": md.Layout(dp=2, ep=2)}, "ep is 2 in the layout, and the mlp has no experts; leave it"),
    ({"layout": md.Layout(tp=2, sequence_parallel=True)}, "sequence_parallel is True in the layout, and"),
    ({"layout": md.Layout(pp=3)}, "pp is 3 with chunks=1 in the layout, and the mlp has 2 layers; give"),
    ({"layout": md.Layout(tp=129)}, "tp is 129 in the layout, and the mlp's hidden layer has 128 fea"),
    ({"batch": 1438}, "batch is 1438, and digits has 1437 rows; give at most so many"),
)


def test_the_largest_description_fits_the_mlp_and_the_digits() -> None:
    config = TrainConfig(batch=train_config.DIGITS, layout=md.Layout(tp=train_config.HIDDEN))
    model, data = build(config)
    assert (len(model.layers), len(data.train)) == (train_config.MLP_LAYERS, config.batch)
