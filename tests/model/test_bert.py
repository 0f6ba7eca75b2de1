"""A BERT that guesses masked bytes: what is hidden, its loss, and its training in every layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import minidist as md
from minidist.cli.train import TrainConfig, train
from minidist.model import BERT, BERTConfig, GPTConfig, Rows, masked, masked_accuracy, masked_cross_entropy
from minidist.model.loss import IGNORED
from tests.conftest import Clusters
from tests.helpers import contract

SHAPE = BERTConfig(vocabulary=17, context=10, layers=2, heads=2, width=8, head="masked_lm")


def hidden_rows(generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(16, (count, 10), generator=generator)
    return masked(Rows(text, text), 16, seed=count)[:]


CASE = contract.Case(
    lambda seed: BERT(SHAPE, seed=seed, dtype=torch.float64), hidden_rows, loss=masked_cross_entropy
)


@pytest.mark.parametrize(
    "layout",
    ["dp=2", "dp=2,zero=3,micro_batches=2", "tp=2", "pp=2,micro_batches=2"],
)
def test_layouts_train_it_as_one_process_does(cluster_of: Clusters, layout: str) -> None:
    contract.check(cluster_of(2), CASE, md.Layout.parse(layout))


def test_every_row_hides_as_many_tokens() -> None:
    text = torch.randint(256, (500, 40), dtype=torch.uint8)
    inputs, targets = masked(Rows(text, text), 256)[:]
    known = targets != IGNORED
    assert torch.equal(known.sum(1), torch.full((500,), 6))
    assert torch.equal(targets[known], text[known].long())
    assert torch.equal(inputs[~known], text[~known].long())
    shown, original = inputs[known], targets[known]
    assert (shown == 256).double().mean().item() == pytest.approx(0.8, abs=0.03)
    assert (shown == original).double().mean().item() == pytest.approx(0.1, abs=0.03)
    assert known.any(0).all(), "each place is hidden in some row"
    again = masked(Rows(text, text), 256)
    assert torch.equal(again.inputs, inputs.short())


def test_the_loss_is_that_of_hidden_tokens() -> None:
    outputs = torch.randn(3, 4, 5, dtype=torch.float64)
    targets = torch.full((3, 4), IGNORED)
    targets[:, 1] = torch.tensor([2, 0, 4])
    expected = -outputs.log_softmax(-1)[torch.arange(3), 1, targets[:, 1]].mean()
    torch.testing.assert_close(masked_cross_entropy(outputs, targets), expected)
    assert masked_accuracy(outputs, outputs.argmax(-1)) == 1
    with pytest.raises(ValueError, match="are empty"):
        masked_cross_entropy(outputs, torch.full((3, 4), IGNORED))


def test_each_token_sees_the_whole_row() -> None:
    model = BERT(SHAPE)
    tokens = torch.zeros(1, 10, dtype=torch.int64)
    other = tokens.clone()
    other[0, 9] = 3
    assert not torch.equal(model(tokens)[0, 0], model(other)[0, 0])
    with pytest.raises(TypeError, match="give a BERTConfig"):
        BERT(GPTConfig(context=10, layers=2, heads=2, width=8))


def test_minidist_train_teaches_it_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    from minidist.cli import train_config as command

    whole = command.dataset
    monkeypatch.setattr(command, "dataset", lambda name, length: whole(name, length=length, limit=64))
    result = train(TrainConfig("bytes", "bert-tiny-mlm", steps=8, batch=8))
    assert result.losses[-1] < result.losses[0] - 0.5
    assert 0 < result.test_accuracy < 1
    with pytest.raises(ValueError, match="the layout has cp, which divides the tokens"):
        TrainConfig("bytes", "bert-tiny-mlm", md.Layout(cp=2))
