"""A model of your own, measured on two small batches: its memory and messages are those of real ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from minidist import comm
from minidist.model import GPT, config
from minidist.scale.dryrun.one_rank import dryrun
from minidist.scale.dryrun.own_model import OwnModel
from minidist.scale.memory import estimate
from minidist.scale.memory.training_setup import TrainingSetup
from minidist.scale.planner.plan_report import answer
from minidist.scale.planner.ranking import plan
from minidist.scale.step_time.hardware import hardware
from minidist.scale.step_time.prediction import predict_step
from tests.conftest import Clusters
from tests.helpers.models import Logits
from tests.helpers.refusals import refuses

ADAMW = partial(torch.optim.AdamW, lr=1e-3)
PARSE = md.Layout.parse


class Residual(nn.Module):
    """Two convolutions, each with a norm, around which the input goes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)])

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(x + self.norms[1](self.second(y)))


class ResNet(nn.Module):
    """Images (B, 3, H, W) to ten scores."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layers = nn.Conv2d(3, 8, 3), nn.Sequential(*(Residual(8) for _ in range(3)))
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layers(self.stem(x)).mean((2, 3)))
        return scores


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(12, 3, 9, 9, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 10


def resnet() -> OwnModel:
    return OwnModel("a ResNet", ResNet, images)


def gpt() -> OwnModel:
    tokens = torch.zeros(1, 64, dtype=torch.int64)
    return OwnModel("a GPT", lambda: GPT(config("byte-tiny")), lambda: (tokens, tokens))


def llama() -> OwnModel:
    def make() -> nn.Module:
        return Logits("Llama", 0, exact=False, num_hidden_layers=3).float()

    tokens = torch.arange(12 * 10).view(12, 10) % 13
    return OwnModel("a Llama", make, lambda: (tokens[:, :-1].clone(), tokens[:, 1:].clone()))


def train(layout: md.Layout, own: Callable[[], OwnModel] = resnet) -> tuple[dict[str, int], int]:
    """The bytes that a rank holds after two steps, and those that it sends in the second."""
    model = own()
    example = model.batch(1)[0] if layout.pp > 1 else None
    engine = md.prepare(model.make(), ADAMW, layout, model.loss, example=example, rehearse=False)
    rows = [x[engine.data_rank :: engine.data_ranks].clone() for x in model.rows]
    engine.step(*rows)
    with comm.ledger() as ledger:
        engine.step(*rows)
    return vars(engine.memory()), ledger.bytes_sent


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=1,recompute=true", "dp=2,zero=2", "dp=2,zero=3"])
def test_predictions_are_what_ranks_hold_and_send(cluster_of: Clusters, layout: str) -> None:
    found, sent = cluster_of(2).run(train, PARSE(layout))[0]
    model = resnet()
    dry = dryrun(model, PARSE(layout), 12, way="shared_memory")
    assert dry.bytes_sent == sent
    assert dry.parameters == model.parameters()
    predicted = model.estimate(TrainingSetup(PARSE(layout), 12))
    for name, value in found.items():
        tolerance = 0.1 if name == "activations" else 0.01
        assert getattr(dry.memory, name) == pytest.approx(value, rel=0.01), name
        assert getattr(predicted, name) == pytest.approx(value, rel=tolerance), name


@pytest.mark.parametrize(
    ("own", "layout"),
    [
        (resnet, "dp=2,pp=2,zero=1,micro_batches=3"),
        (llama, "tp=2"),
        (llama, "cp=2"),
        (llama, "pp=2,micro_batches=2,precision=bf16"),
        pytest.param(llama, "dp=2,tp=2,zero=2", marks=pytest.mark.deep),
        pytest.param(llama, "cp=2,pp=2,recompute=true", marks=pytest.mark.deep),
    ],
)
def test_a_dry_run_of_a_cut_model_is_what_each_rank_holds_and_sends(
    cluster_of: Clusters, own: Callable[[], OwnModel], layout: str
) -> None:
    if own is llama:
        pytest.importorskip("transformers", reason="the Llama is its")
    cut = PARSE(layout)
    for rank, (found, sent) in enumerate(cluster_of(cut.ranks).run(train, cut, own)):
        dry = dryrun(own(), cut, 12, rank, way="shared_memory")
        assert dry.bytes_sent == sent
        assert vars(dry.memory) == found


def test_a_gpt_is_predicted_as_by_its_shape() -> None:
    own, layout, machine = gpt(), PARSE("dp=4,zero=2,recompute=true"), hardware("a100")
    by_shape, by_passes = (
        estimate("byte-tiny", layout, batch=32, attention="fused"),
        own.estimate(TrainingSetup(layout, 32)),
    )
    for name in ("parameters", "gradients", "optimizer", "activations"):
        assert getattr(by_passes, name) == pytest.approx(getattr(by_shape, name), rel=0.1), name
    times = predict_step("byte-tiny", layout, 32, machine), own.predict(TrainingSetup(layout, 32), machine)
    assert times[1].flops == pytest.approx(times[0].flops, rel=0.15)  # a shape counts half of the scores
    assert times[1].parts["dp"] == pytest.approx(times[0].parts["dp"], rel=0.05)
    assert times[1].seconds == pytest.approx(times[0].seconds, rel=0.5)


def test_the_work_of_linear_layers_is_the_formula() -> None:
    data = torch.zeros(1, 30), torch.zeros(1, dtype=torch.int64)
    model = OwnModel("a map", lambda: nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 10)), lambda: data)
    passes = model.passes(md.Layout(), 100)
    assert passes.forward.products == 2 * 100 * (30 * 20 + 20 * 10)
    assert passes.backward.products == 2 * 100 * (30 * 20 + 2 * 20 * 10)  # nobody asks for the input's


class ByValue(nn.Module):
    """Keeps the rows whose sum is above zero: their number depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.map(x)
        return scores[scores.sum(1) > -1e9]


def test_a_model_that_looks_at_values_is_measured_for_real() -> None:
    model = OwnModel("by value", ByValue, lambda: (torch.ones(3, 4), torch.arange(3)))
    assert model.passes(md.Layout(), 6).forward.products == 2 * 6 * 4 * 3
    assert model.estimate(TrainingSetup(md.Layout(), 6)).activations > 0


def test_a_plan_shards_what_does_not_fit() -> None:
    model = resnet()
    plain, sharded = (
        model.estimate(TrainingSetup(PARSE(f"dp=4,{more}"), 4)).peak for more in ("zero=0", "zero=3")
    )
    assert sharded < plain
    found = plan(model, ranks=4, memory=plain, hardware="t4", batch=4, precision="fp32")
    assert found.answer is not None
    assert found.answer.layout == md.Layout(4)
    found = plan(model, ranks=4, memory=(plain + sharded) // 2, hardware="t4", batch=4, precision="fp32")
    assert found.answer is not None
    assert found.answer.layout.zero > 0
    assert all(each.memory.peak <= found.question.memory for each in found.fitting)
    told = answer(plan(model, ranks=4, memory=1, hardware="t4", batch=4, precision="fp32"))
    assert "does not fit" in told
    assert told.endswith("ask minidist dryrun what a rank holds with tp=2 or pp=2.")


test_layouts_that_cut_it_are_refused = refuses(
    lambda given: dryrun(resnet(), PARSE(given[0]), given[1]),
    (("pp=4", 4), r"parts, and the model has 3 layers"),
    (("tp=2,pp=2,sequence_parallel=true", 4), r"pp=2 and sequence_parallel, and a ResNet is a model of"),
    (("dp=4", 3), r"rows"),
    (("dp=2", (4, 9)), r"batch is \(4, 9\) for a model of your own"),
)


def test_a_loss_of_the_model_runs_dry_beside_buffers() -> None:
    """The first step's check gives buffers back, of which a dry run has no values."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    own = OwnModel("a ResNet", ResNet, images, loss)
    assert dryrun(own, PARSE("dp=2"), 12).calls
