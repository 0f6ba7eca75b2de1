"""Models of transformers that train on shares of the tokens to the weights of one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import minidist as md
from minidist.model.loss import cross_entropy
from minidist.parallel.sequence_share.sequence_share import SequenceShare
from tests.conftest import Clusters
from tests.helpers import contract, models
from tests.helpers.models import Logits
from tests.helpers.on_ranks import on_ranks

transformers = pytest.importorskip("transformers", reason="the models are those of transformers")

PRELOAD = ["transformers.models.llama.modeling_llama"]

PARSE = md.Layout.parse
SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.9)


OWN_SCALES = {"scale_attn_by_inverse_layer_idx": True}  # one for each layer
MODELS: dict[str, dict[str, Any]] = {"Llama": {}, "GPT-2": OWN_SCALES, "BERT": {}}
tokens = partial(models.tokens, length=7)  # one rank has 3, the other 4


def case(name: str) -> contract.Case:
    return contract.Case(partial(Logits, name, **MODELS[name]), tokens, SGD, batches=(4, 5, 4))


DEEP = [
    "cp=2,zero=3",
    "cp=2,pp=2,micro_batches=2",
    "cp=2,tp=2",
    "cp=2,recompute=true,micro_batches=2",
    "cp=4",
]


# Each model in every second layout of `-m deep`.
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, layout) for name in MODELS for layout in ("cp=2", "cp=2,dp=2")),
        *(
            pytest.param(name, layout, marks=pytest.mark.deep)
            for number, name in enumerate(MODELS)
            for layout in DEEP[number % 2 :: 2]
        ),
    ],
)
def test_they_train_as_in_one_process(cluster_of: Clusters, name: str, layout: str) -> None:
    options = {"example": torch.zeros(1, 3, dtype=torch.int64)} if "pp" in layout else {}
    contract.check(cluster_of, case(name), layout, **options)


def test_positions_that_count_from_0_on_every_rank_are_seen(cluster_of: Clusters) -> None:
    from_0 = contract.patched(SequenceShare, "positions_of", lambda _, ids: torch.arange(ids.shape[1]))
    contract.check_catches(cluster_of, from_0, case("Llama"), "cp=2")


def batch(**others: Any) -> tuple[dict[str, Tensor], Tensor]:
    ids, targets = tokens(torch.Generator().manual_seed(1), 2)
    return {"input_ids": ids, **others}, targets


def loss_of(outputs: Any, targets: Tensor) -> Tensor:
    return cross_entropy(outputs.logits, targets)


def prepared(model: Any) -> Any:
    return md.prepare(model.double(), SGD, PARSE("cp=2"), loss=loss_of)


@on_ranks(2)
def test_batches_of_loaders_beside_a_model_with_the_same_config() -> None:
    """Batches as loaders give them, in a process where another model has the same config."""
    ids = batch()[0]["input_ids"]
    config = models.hugging_face("Llama", 0).config
    other, model, whole = (models.hugging_face("Llama", 0, config=config) for _ in range(3))
    before, name = other(ids).logits, config._attn_implementation
    engine = prepared(model)
    assert config._attn_implementation == other.config._attn_implementation == name
    assert torch.equal(other(ids).logits, before)
    given, targets = batch(attention_mask=torch.ones_like(ids), position_ids=torch.arange(7).expand(2, 7))
    expected = whole(**given)
    outputs = engine.predict(given)
    torch.testing.assert_close(outputs.logits, expected.logits, rtol=1e-10, atol=1e-10)
    assert "past_key_values" not in outputs  # which would be keys of some of the tokens
    loss = float(loss_of(expected, targets).detach())
    assert engine.evaluate(given, targets) == pytest.approx(loss, rel=1e-10)
    assert engine.step(given, targets) == pytest.approx(loss, rel=1e-10)


@on_ranks(2)
def test_what_ring_attention_cannot_do_is_refused() -> None:
    engine, ones = prepared(models.hugging_face("Llama")), torch.ones(2, 7, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"attention_mask hides . tokens of padding"):
        engine.step(*batch(attention_mask=ones * 0))
    with pytest.raises(ValueError, match="position_ids are not those of one text"):
        engine.step(*batch(position_ids=torch.tensor([0, 1, 2, 0, 1, 2, 3]).expand(2, 7)))
    with pytest.raises(ValueError, match="window of 4 tokens"):
        prepared(models.hugging_face("Mistral", sliding_window=4)).step(*batch())
    with pytest.raises(ValueError, match=r"dropout is 0\.5 in attention"):
        prepared(models.hugging_face("Llama", attention_dropout=0.5)).step(*batch())
    small = transformers.T5Config(vocab_size=17, d_model=8, d_ff=8, num_layers=1, num_heads=2, d_kv=4)
    for model, why in (
        (transformers.RobertaForMaskedLM(transformers.RobertaConfig(**models.TEXT)), "that are not padding"),
        (transformers.T5ForConditionalGeneration(small), "no argument `position_ids`"),
    ):
        forward, config = model.forward, model.config
        with pytest.raises(ValueError, match=why):
            prepared(model)
        assert (model.forward, model.config) == (forward, config)
