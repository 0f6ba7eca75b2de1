"""A loss is a mean with a weight: in all its forms it trains to the weights of one process, or is refused."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import minidist as md
from minidist.model import GPT, config
from tests.conftest import Clusters
from tests.helpers.contract import Trained, compare, own_rows, plain_steps, steps
from tests.helpers.models import Chain
from tests.helpers.on_ranks import on_ranks
from tests.helpers.refusals import refuses

PARSE = md.Layout.parse
SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.9)
EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}


IGNORED = -100


class Tagger(nn.Module):
    """Tokens (B, T) -> {"scores": (B, T, 5)}, and a loss of its own of integer labels (B, T)."""

    loss_type = "ForTokenClassification"  # as a model of transformers says it

    def __init__(self, seed: int = 0, extra: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 5))
        self.double()

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        scores = self.layers(tokens)
        if labels is None:
            return {"scores": scores}
        return {"scores": scores, "loss": functional.cross_entropy(scores.flatten(0, 1), labels.flatten())}


def batch(rows: int, step: int) -> dict[str, Tensor]:
    """Rows of 7 tokens, of which later rows have fewer and fewer labels that count."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 11, (rows, 7), generator=generator)
    labels = torch.randint(0, 5, (rows, 7), generator=generator)
    for row in range(rows):
        labels[row, 7 - (row + step) % 7 :] = IGNORED
    return {"tokens": tokens, "labels": labels}


BATCHES = [batch(rows, step) for step, rows in enumerate((7, 9, 5))]


def in_one_process() -> Trained:
    model = Tagger()
    return plain_steps(model, SGD(model.parameters()), BATCHES, lambda model, batch: model(**batch)["loss"])


# The three forms of a loss.


def of_outputs(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    labels = batch["labels"]
    mean = functional.cross_entropy(outputs["scores"].flatten(0, 1), labels.flatten())
    return mean, (labels != IGNORED).sum()


def of_model(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    outputs = model(batch["tokens"])
    mean, weight = of_outputs(outputs, batch)
    return mean, int(weight)


FORMS: dict[str, Any] = {"outputs": of_outputs, "model": of_model, "own": None}
LAYOUTS = [
    "dp=2,micro_batches=2",
    "dp=2,zero=1,micro_batches=2",
    "dp=2,zero=2,micro_batches=2",
    "dp=2,zero=3,micro_batches=4",  # more than some ranks have rows
    "dp=2,recompute=true",
]


def train(loss: Any, layout: str) -> Trained:
    return steps(md.prepare(Tagger(md.rank()), SGD, PARSE(layout), loss), BATCHES)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", FORMS)
def test_ignored_labels_do_not_count(cluster_of: Clusters, form: str, layout: str) -> None:
    for found in cluster_of(2).run(train, FORMS[form], layout):
        compare(found, in_one_process())


@on_ranks(2)
def test_a_models_own_loss_cannot_share_tokens() -> None:
    model = GPT(config("byte-tiny", vocabulary=11, context=16, layers=1, heads=2, width=8))
    model.register_forward_hook(lambda module, _, scores: {"loss": scores.mean()})
    engine = md.prepare(model, SGD, md.Layout(cp=2))
    with pytest.raises(ValueError, match="the model computes its loss itself, and cp=2 gives each rank"):
        engine.step({"tokens": batch(2, 0)["tokens"]})


# What is refused in the first step, on all ranks.


def hits(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    seen = batch["labels"] != IGNORED
    return (outputs["scores"].argmax(-1) == batch["labels"])[seen].double().mean(), seen.sum()


@pytest.mark.parametrize("layout", ["dp=2,micro_batches=2", "dp=2,zero=3", "dp=1"])
def test_a_metric_may_take_the_model(cluster_of: Clusters, layout: str) -> None:
    def of_batch(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return hits(model(batch["tokens"]), batch)

    def of_pair(model: Any, batch: tuple[Tensor, dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
        return hits(model(batch[0]), batch[1])

    def of_the_pair(model: Any, batch: tuple[Tensor, dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
        return of_outputs(model(batch[0]), batch[1])

    def evaluate() -> list[Any]:
        found = []
        for loss, metric in ((of_model, of_batch), (of_outputs, of_pair), (of_the_pair, hits)):
            engine = md.prepare(Tagger(md.rank()), SGD, PARSE(layout), loss)
            own = own_rows(engine, batch(5, 0))
            given = (own,) if loss is of_model else (own["tokens"], own)
            found.append(engine.evaluate(*given, metrics={"loss": None, "hits": metric}))
        return found

    whole = batch(5, 0)
    outputs = Tagger(0)(whole["tokens"])
    expected = {"loss": of_outputs(outputs, whole)[0].item(), "hits": hits(outputs, whole)[0].item()}
    for found in cluster_of(PARSE(layout).ranks).run(evaluate):
        torch.testing.assert_close(found, [expected] * 3, **EXACT)


class Unknown(Tagger):
    """Not a model of transformers: its own loss counts by rows."""

    @property
    def loss_type(self) -> str:  # type: ignore[override]
        raise AttributeError


@on_ranks(2)
def test_a_models_own_loss_that_is_no_mean_is_refused() -> None:
    engine = md.prepare(Unknown(), SGD, PARSE("dp=2,zero=1"), None, rehearse=True)
    before = engine.full_state_dict()
    own = batch(1 + 3 * engine.data_rank, 3)
    with pytest.raises(ValueError, match="trains otherwise than one process") as caught:
        engine.step(own)
    after = engine.full_state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert re.search(r"the loss is \d.* and not \d.*, and the gradient of", str(caught.value))
    assert "or (mean, weight)" in str(caught.value)


def test_a_pipeline_cannot_call_the_model() -> None:
    with pytest.raises(
        ValueError, match=r"takes the model, and the layout has pp=2.*; give a loss of outputs"
    ):
        md.prepare(Tagger().layers, SGD, md.Layout(pp=2), of_model)


@on_ranks(2)
def test_a_pipelines_metric_cannot_call_it_either() -> None:
    engine = md.prepare(Chain(*Tagger(md.rank()).layers), SGD, PARSE("pp=2"), lambda scores, _: scores.mean())
    with pytest.raises(ValueError, match=r"the metric takes the model, and the layout has pp=2"):
        engine.evaluate(batch(2, 0)["tokens"], batch(2, 0), of_model)


def test_a_model_without_a_loss() -> None:
    engine = md.prepare(Tagger(), SGD)
    with pytest.raises(
        TypeError, match="the model gave a dict without a loss of its own; pass what it needs"
    ):
        engine.step({"tokens": batch(2, 0)["tokens"]})


test_a_loss_that_is_no_number_is_refused = refuses(
    lambda loss: md.prepare(nn.Linear(3, 3), SGD, loss=loss).step(torch.randn(4, 3), torch.randn(4, 3)),
    (partial(functional.mse_loss, reduction="none"), r"the loss or metric returned .*shape \(4, 3\)"),
    (lambda outputs, targets: 1.0, "the loss or metric returned .*1.0;"),
    error=TypeError,
)


def detached(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.detach().flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("layout", ["dp=1", "pp=2,micro_batches=2"])
def test_a_detached_loss_is_refused(cluster_of: Clusters, layout: str) -> None:
    def refused() -> None:
        engine = md.prepare(Chain(*Tagger().layers), SGD, PARSE(layout), loss=detached)
        engine.step(torch.ones(4, 7, dtype=torch.int64), torch.ones(4, 7, dtype=torch.int64))

    with pytest.raises(
        md.RankError, match="the loss has no gradient, and the outputs that it was given have"
    ):
        cluster_of(PARSE(layout).ranks).run(refused)
