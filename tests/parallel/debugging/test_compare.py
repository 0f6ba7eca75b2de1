"""Comparing layouts: those that train alike are told so, and planted faults are named exactly."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from minidist.cli import train
from minidist.model import GPT, MLP, GPTConfig, cross_entropy
from minidist.parallel.debugging.compare import Comparison, differences
from minidist.parallel.debugging.recording import Recording, distance, record
from tests.conftest import Clusters, Run

TINY = GPTConfig(vocabulary=13, context=8, layers=2, heads=2, width=8)
SGD = partial(torch.optim.SGD, lr=0.1)
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
UP = "the update of layers.2.mlp.up.weight"
NORM = "the update of layers.2.mlp_norm.weight"
TABLE = "the update of layers.0.token.weight"
Plant = Callable[[nn.Module], object]
"""Puts a fault into a model."""


def gpt(dtype: torch.dtype) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(13, (2, rows, 8), generator=generator) for rows in (6, 5)]
    return GPT(TINY, dtype=dtype), [(each[0], each[1]) for each in tokens]


def mlp(dtype: torch.dtype) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(2)
    batches = []
    for rows in (7, 4):
        inputs = torch.randn(rows, 6, generator=generator, dtype=torch.float64).to(dtype)
        batches.append((inputs, torch.randint(3, (rows,), generator=generator)))
    return MLP((6, 9, 5, 3), dtype=dtype), batches


def recorded(
    layout: str,
    dtype: torch.dtype,
    make: Any = gpt,
    plant: Plant | None = None,
    optimizer: Any = SGD,
    loss: Any = cross_entropy,
) -> Recording | None:
    """Of rank 0. One with a fault is compared with one without, which measures rounding more often."""
    model, batches = make(dtype)
    engine = md.prepare(model, optimizer, md.Layout.parse(layout), loss=loss)
    if plant is not None:
        plant(model)
    before = engine.full_state_dict()
    recording = record(engine, batches, repeats=2 if plant is None else 1)
    torch.testing.assert_close(engine.full_state_dict(), before, rtol=0, atol=0)
    return recording if md.rank() == 0 else None


def compared(
    cluster_of: Clusters, a: str, b: str, dtype: torch.dtype = torch.float64, **options: Any
) -> Comparison:
    """The second has the fault, where one is planted."""
    right = {name: value for name, value in options.items() if name not in ("plant", "loss")}
    key = a, dtype, *right.values()
    if key not in RIGHT:
        RIGHT[key] = recording_of(cluster_of, a, dtype, **right)
    return differences(RIGHT[key], recording_of(cluster_of, b, dtype, **options))


def recording_of(cluster_of: Clusters, layout: str, dtype: torch.dtype, **options: Any) -> Recording:
    """By as many ranks as the layout needs."""
    found: list[Recording] = cluster_of(md.Layout.parse(layout).ranks).run(
        partial(recorded, layout, dtype, **options)
    )
    return found[0]


RIGHT: dict[Any, Recording] = {}
"""Of layouts without faults, kept for the tests that follow."""


def first(found: Comparison) -> tuple[int, str | None, str]:
    """Step, layer and description of the first difference."""
    assert found.first is not None
    return found.first.step, found.first.layer, found.first.what


# Layouts that train alike.


# Every axis and schedule; combined axes, and those that say less, only in `make test-more`.
DAILY = [
    "dp=3,zero=1",
    "dp=2,zero=3",
    "tp=2,sequence_parallel=true,micro_batches=2",
    "pp=3,micro_batches=2,schedule=gpipe",
    "pp=2,micro_batches=2,schedule=interleaved,chunks=2",
    "pp=2,micro_batches=3,schedule=zero_bubble",
    "cp=3,micro_batches=2",
    "tp=2,cp=2,sequence_parallel=true,zero=3",
]
MORE = [
    "dp=2,micro_batches=2",
    "tp=2",
    "pp=2,recompute=true",
    "dp=2,tp=2,zero=2",
    "dp=2,pp=2,micro_batches=2,zero=1",
    "tp=2,pp=2,sequence_parallel=true,micro_batches=2",
    "pp=2,cp=2,micro_batches=2",
]


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        *((layout, torch.float32) for layout in DAILY),
        *(pytest.param(each, torch.float64, marks=pytest.mark.deep) for each in (DAILY[0], *MORE)),
    ],
)
def test_layouts_that_train_alike_agree(cluster_of: Clusters, layout: str, dtype: torch.dtype) -> None:
    found = compared(cluster_of, "dp=1", layout, dtype)
    assert found.agree, str(found)
    assert 0 < found.closest < 0.5  # not the same to the last bit, and far from the margin
    assert found.tensors > 2 * len(GPT(TINY).layers)
    assert "they agree" in str(found)


def without_scores(dtype: torch.dtype) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """A GPT whose head begins with zeros, and gives its layers no gradient in the first step."""
    model = GPT(replace(TINY, tied=False, vocabulary=14), dtype=dtype)
    nn.init.zeros_(model.get_parameter("layers.3.output.weight"))
    return model, gpt(dtype)[1]


@pytest.mark.parametrize("layout", ["tp=2", "tp=2,sequence_parallel=true"])
def test_equal_parts_of_a_tensor_are_no_copies_of_it(cluster_of: Clusters, layout: str) -> None:
    found = compared(cluster_of, "dp=1", layout, make=without_scores)
    assert found.agree, str(found)


def uneven_gpt(dtype: torch.dtype) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """Heads, vocabulary, tokens and layers that the ranks do not divide; untied."""
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(17, (2, rows, 7), generator=generator) for rows in (3, 2)]
    model = GPT(GPTConfig(vocabulary=17, context=7, layers=3, heads=5, width=10, tied=False), dtype=dtype)
    return model, [(each[0], each[1]) for each in tokens]


@pytest.mark.parametrize("layout", ["tp=3", "cp=3", "dp=2,pp=2,zero=1"])
def test_uneven_parts_agree(cluster_of: Clusters, layout: str) -> None:
    found = compared(cluster_of, "dp=1", layout, torch.float64, make=uneven_gpt)
    assert found.agree, str(found)


def test_a_layout_in_16_bits_agrees_with_what_they_can_say(cluster_of: Clusters) -> None:
    found = compared(cluster_of, "dp=1", "dp=2,precision=bf16", torch.float32)
    assert found.agree, str(found)


# Planted faults.


def negate_weight_gradient(model: nn.Module) -> None:
    model.get_parameter("layers.2.mlp.up.weight").register_hook(torch.neg)


def scale_output(model: nn.Module, factor: float = 1.0001) -> None:
    model.get_submodule("layers.1").register_forward_hook(lambda module, inputs, output: output * factor)


class Negated(torch.autograd.Function):
    """What a layer passes back with the wrong sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


def negate_input_gradient(model: nn.Module) -> None:
    norm = model.get_submodule("layers.2.attention_norm")
    norm.register_forward_pre_hook(lambda module, inputs: Negated.apply(*inputs))


def forget_on_one_rank(model: nn.Module) -> None:
    if md.rank() == 1:
        model.get_parameter("layers.1.attention.value.weight").register_hook(torch.zeros_like)


@pytest.mark.parametrize(
    ("plant", "layer", "what", "dtype"),
    [
        (negate_weight_gradient, "layers.2", "the update of layers.2.mlp.up.weight", torch.float32),
        (scale_output, "layers.1", "its output", torch.float32),
        (scale_output, "layers.1", "its output", torch.float64),
        (negate_input_gradient, "layers.2", "the gradient of its input", torch.float64),
        (forget_on_one_rank, "layers.1", "the update of layers.1.attention.value.weight", torch.float32),
    ],
)
def test_a_fault_is_named_exactly(
    cluster_of: Clusters, plant: Plant, layer: str, what: str, dtype: torch.dtype
) -> None:
    found = compared(cluster_of, "dp=1", "dp=2", dtype, plant=plant)
    assert first(found) == (1, layer, what)
    assert found.first.difference > 5 * found.first.explained
    assert f"First {layer}: {what} differs in step 1" in str(found)


def elsewhere(plant: Plant, model: nn.Module) -> None:
    """On the stage that has the layer."""
    with suppress(AttributeError):
        plant(model)


def negate_on_one_rank(name: str, model: nn.Module) -> None:
    if md.rank() == 1:
        model.get_parameter(name).register_hook(torch.neg)


@pytest.mark.parametrize(
    ("layout", "plant", "layer", "what"),
    [
        ("pp=2,micro_batches=2", partial(elsewhere, negate_weight_gradient), "layers.2", UP),
        ("pp=2,micro_batches=2", partial(elsewhere, scale_output), "layers.1", "its output"),
        ("tp=2,pp=2", partial(elsewhere, negate_input_gradient), "layers.2", "the gradient of its input"),
        # A part of a matrix, a copy that all have, and one of two copies of a tied table.
        ("tp=2", partial(negate_on_one_rank, "layers.2.mlp.up.weight"), "layers.2", UP),
        ("tp=2", partial(negate_on_one_rank, "layers.2.mlp_norm.weight"), "layers.2", NORM),
        ("pp=2", partial(negate_on_one_rank, "layers.3.output.weight"), "layers.0", TABLE),
        ("cp=2", partial(negate_on_one_rank, "layers.2.mlp.up.weight"), "layers.2", UP),
        ("tp=2,sequence_parallel=true", scale_output, "layers.1", "its output"),
    ],
)
def test_a_fault_is_named_where_a_model_is_divided(
    cluster_of: Clusters, layout: str, plant: Plant, layer: str, what: str
) -> None:
    found = compared(cluster_of, "dp=1", layout, plant=plant)
    assert first(found) == (1, layer, what)


@pytest.mark.parametrize("layout", ["dp=2,zero=1", "dp=2,zero=2"])
def test_a_wrong_sign_is_named_where_gradients_are_sharded(cluster_of: Clusters, layout: str) -> None:
    found = compared(cluster_of, "dp=1", layout, plant=negate_weight_gradient, optimizer=ADAMW)
    assert first(found) == (1, "layers.2", UP)
    assert found.first.difference == pytest.approx(2, rel=0.02)  # AdamW's decay is left out


def uneven(parameters: Any) -> torch.optim.Optimizer:
    """A fault: rank 1 updates its copies by more."""
    return torch.optim.SGD(parameters, lr=0.1 * (1 + 0.01 * md.rank()))


def test_copies_that_drift_apart_are_seen(cluster_of: Clusters) -> None:
    found = compared(cluster_of, "dp=1", "dp=2", optimizer=uneven)
    assert first(found) == (1, "layers.3", "the update of layers.3.norm.weight")
    assert found.first.difference == pytest.approx(0.01, rel=0.02)


def scaled_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets) * 1.01


def test_a_fault_of_the_loss_is_nobody_elses(cluster_of: Clusters) -> None:
    found = compared(cluster_of, "dp=1", "dp=2", loss=scaled_loss)
    assert first(found) == (1, None, "the loss's gradient")
    assert str(found.first).startswith("the model: the loss's gradient differs in step 1, by 0.0")


def poison(model: nn.Module) -> None:
    scale_output(model, float("nan"))


def test_nan_is_a_difference(cluster_of: Clusters) -> None:
    found = compared(cluster_of, "dp=1", "dp=1", plant=poison)
    assert first(found) == (1, "layers.1", "its output")
    assert "not finite" in str(found)
    poisoned = recording_of(cluster_of, "dp=1", torch.float64, plant=poison)
    assert differences(poisoned, poisoned).agree


def stop_gradient(model: nn.Module) -> None:
    model.get_submodule("layers.1").register_forward_hook(lambda module, inputs, output: output.detach())


def test_a_gradient_that_never_comes_is_a_difference(cluster_of: Clusters) -> None:
    found = compared(cluster_of, "dp=1", "dp=1", plant=stop_gradient)
    assert first(found) == (1, "layers.2", "the gradient of its input")
    assert "lacks it" in str(found)


# In one world.


def both(seed: int) -> Comparison:
    layouts = md.Layout(dp=2), md.Layout(dp=2, zero=2)
    engines = [
        md.prepare(GPT(TINY, seed=s), SGD, layout) for layout, s in zip(layouts, (0, seed), strict=True)
    ]
    return md.compare(*engines, gpt(torch.float32)[1], repeats=1)


def test_two_engines_of_the_same_ranks_are_compared(cluster_of: Clusters) -> None:
    found = cluster_of(2).run(both, 0)
    assert found[0] == found[1]
    assert found[0].agree
    assert (found[0].a, found[0].b) == ("dp=2", "dp=2,zero=2")
    assert first(cluster_of(2).run(both, 1)[0]) == (0, "layers.0", "its layers.0.token.weight")


def test_distances_are_of_equal_shapes_and_see_nan() -> None:
    x, nan = torch.tensor([1.0, 2.0]), torch.tensor([1.0, torch.nan])
    assert distance([x], [x]) == distance([nan], [nan]) == 0
    assert distance([x], [nan]) == distance([x], [x[:1]]) == torch.inf
    assert distance([x, x + 1], [x]) == 1
    assert distance([torch.empty(0)], [torch.empty(0)]) == 0
    # Equal parts of a last dimension are one copy; whole ones are not made of them.
    parts = torch.zeros(2, 3)
    assert distance([torch.zeros(2, 6)], [parts]) == distance([parts], [torch.zeros(2, 6)]) == 0
    assert distance([torch.ones(2, 6)], [parts]) == 1
    assert distance([parts], [torch.zeros(3, 6)]) == distance([parts], [torch.zeros(2, 5)]) == torch.inf
    halves, quarters = torch.arange(16.0).view(2, 8).chunk(2, -1), torch.arange(16.0).view(2, 8).chunk(4, -1)
    assert distance([*halves], [*quarters]) == 0


# What it leaves behind.

OPTIMIZERS: dict[str, Any] = {
    "dampened": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5),
    "NAdam": partial(torch.optim.NAdam, lr=1e-2),
    "Rprop": partial(torch.optim.Rprop, lr=1e-2),
    "ASGD": partial(torch.optim.ASGD, lr=1e-2),
}
"""Whose state does not begin with zeros."""


def left_by(layout: str, steps: int) -> list[str]:
    """The optimizers with which an engine trains otherwise after it was compared; `steps` come before."""
    _, batches = mlp(torch.float32)
    changed = []
    for name, optimizer in OPTIMIZERS.items():
        plain, seen = (md.prepare(mlp(torch.float32)[0], optimizer, md.Layout.parse(layout)) for _ in "ab")
        rows = [
            tuple(x.tensor_split(plain.data_ranks)[plain.data_rank] for x in batch) for batch in batches * 2
        ]
        for engine in (plain, seen):
            for inputs, targets in rows[:steps]:
                engine.step(inputs, targets)
        record(seen, batches, repeats=1)
        losses = [[engine.step(*each) for each in rows] for engine in (plain, seen)]
        pairs = zip(plain.full_state_dict().values(), seen.full_state_dict().values(), strict=True)
        if losses[0] != losses[1] or not all(torch.equal(a, b) for a, b in pairs):
            changed.append(name)
    return changed


@pytest.mark.parametrize(
    ("layout", "steps"),
    [
        ("dp=1", 0),
        ("dp=1", 2),
        ("dp=2", 2),
        ("dp=2,zero=1", 0),
        ("dp=2,zero=1,precision=bf16", 2),
        ("dp=2,zero=3", 0),
        ("pp=2", 2),
        ("tp=2,zero=2", 0),
    ],
)
def test_an_engine_is_left_as_it_was(cluster_of: Clusters, layout: str, steps: int) -> None:
    assert not any(cluster_of(2).run(left_by, layout, steps) if layout != "dp=1" else left_by(layout, steps))


# Mistakes, and the command.


def test_the_recorded_steps_are_those_of_training() -> None:
    """Results are moved only in the repetitions, which measure the effect of rounding."""
    model, batches = mlp(torch.float64)
    engine = md.prepare(model, SGD)
    recording = record(engine, batches, repeats=1)
    assert recording.losses == [engine.step(*each) for each in batches]
    assert max(recording.rounding[0].values()) > 0


class Both(nn.Linear):
    """A layer that returns a tuple."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = super().forward(x)
        return x.tanh(), x


class WithLoss(nn.Module):
    """Returns a dict, with a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 5), Both(5, 4), nn.Linear(4, 3)]).double()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x, _ = self.layers[1](self.layers[0](inputs))
        scores = self.layers[2](x)
        return {"scores": scores, "loss": cross_entropy(scores, labels)}


def test_batches_may_be_dicts(cluster_of: Clusters) -> None:
    def compare(fault: bool) -> Comparison:
        engines = [md.prepare(WithLoss(), SGD, md.Layout(dp=2, zero=zero)) for zero in (0, 2)]
        if fault:
            engines[1].model.layers[1].register_forward_hook(
                lambda module, _, output: (output[0] * 1.01,) * 2
            )
        batches = [{"inputs": inputs, "labels": labels} for inputs, labels in mlp(torch.float64)[1]]
        return md.compare(*engines, batches)

    assert cluster_of(2).run(compare, False)[0].agree
    assert first(cluster_of(2).run(compare, True)[0])[:2] == (1, "layers.1")


def test_mistakes_are_refused() -> None:
    model, batches = gpt(torch.float32)
    engine = md.prepare(model, SGD)
    with pytest.raises(ValueError, match="batches is empty"):
        record(engine, [])
    with pytest.raises(TypeError, match="engine is a GPT"):
        record(model, batches)  # type: ignore[arg-type]
    dropping = md.prepare(GPT(replace(TINY, dropout=0.5)), SGD)
    with pytest.raises(ValueError, match=r"layers\.0\.dropout has dropout 0\.5"):
        record(dropping, batches)
    two, one = record(engine, batches, 0), record(engine, batches[:1], 0)
    with pytest.raises(ValueError, match="took 2 steps and dp=1 1"):
        differences(two, one)
    with pytest.raises(ValueError, match="other layers or parameters"):
        differences(two, record(md.prepare(mlp(torch.float32)[0], SGD), mlp(torch.float32)[1], 0))


def test_the_command_compares_two_layouts(
    run: Run, monkeypatch: pytest.MonkeyPatch, cluster_of: Clusters
) -> None:
    def on_warm_ranks(fn: Any, ranks: int, args: tuple[Any, ...], timeout: float | None) -> Any:
        return cluster_of(ranks).run(fn, *args)

    monkeypatch.setattr(train, "launch", on_warm_ranks)
    words = ["compare", "--model", "mlp", "--a", "dp=1", "--b", "dp=2,zero=1", "--json"]
    code, out, _ = run(*words)
    assert code == 0
    found = json.loads(out)
    assert found["agree"] is True
    assert (found["a"], found["b"], found["steps"]) == ("dp=1", "dp=2,zero=1", 2)
    assert found["differences"] == []


def test_the_command_exits_with_1_where_layouts_differ(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_here(fn: Any, ranks: int, args: tuple[Any, ...], timeout: float | None) -> list[Any]:
        config = replace(args[0], layout=md.Layout())
        if args[0].layout.zero == 1:
            config = replace(config, learning_rate=0.2)  # as if the update were twice as long
        return [fn(config)]

    monkeypatch.setattr(train, "launch", run_here)
    code, out, _ = run("compare", "--model", "mlp", "--a", "dp=1", "--b", "dp=2,zero=1")
    assert code == 1
    assert "First layers.1: the update of layers.1.linear.weight differs in step 1, by 0.5 of" in out
