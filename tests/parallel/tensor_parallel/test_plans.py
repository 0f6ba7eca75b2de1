"""Plans that are found: models of transformers, timm's attention, torch's own layers, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import minidist as md
from minidist.parallel.tensor_parallel.cuts import Cut, cuts
from minidist.parallel.tensor_parallel.plans import plan_for
from minidist.parallel.tensor_parallel.replace_layers import parallelize
from tests.conftest import Clusters
from tests.helpers import contract
from tests.helpers.models import HUGGING_FACE, FusedAttention, Logits, hugging_face, images, tokens
from tests.helpers.on_ranks import on_ranks
from tests.parallel.tensor_parallel.test_encoder_layers import Classifier
from tests.parallel.tensor_parallel.test_heads import Blocks

PRELOAD = ["transformers.models.llama.modeling_llama"]


def case_of(name: str) -> contract.Case:
    """Batches are of one size: some of these models compute norms in float32.

    Gradients that are weighted with other numbers of rows, and scaled back later, are rounded there.
    """
    rows = images if name == "ViT" else partial(tokens, vocabulary=13)
    sgd = partial(torch.optim.SGD, lr=0.1)
    return contract.Case(partial(Logits, name, exact=False), rows, sgd, batches=(4, 4, 4))


FIRST = ["Llama", "Llama with one table", "Qwen2", "Qwen3", "GPT-2", "BERT", "BERT of 3 heads", "ViT"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FIRST else [pytest.mark.deep]) for name in HUGGING_FACE]
)
def test_models_of_transformers_train_to_the_weights_of_one_process(cluster_of: Clusters, name: str) -> None:
    contract.check(cluster_of, case_of(name), md.Layout(tp=2))


@on_ranks(2)
def test_each_rank_holds_its_part_under_the_names_of_the_model() -> None:
    model = hugging_face("GPT-2", 0)
    parallelize(model, plan_for(model))
    attention = model.transformer.h[0].attn
    rank, plain, found = md.rank(), hugging_face("GPT-2", 0), cuts(model)
    whole = plain.transformer.h[0].attn.c_attn.weight.detach()  # (in, out)
    own = whole.unflatten(1, (3, 16))[..., 8 * rank : 8 * rank + 8].flatten(1)
    torch.testing.assert_close(attention.c_attn.weight.detach(), own, rtol=0, atol=0)
    assert found["transformer.h.0.attn.c_attn.weight"] == Cut((16, 48), (0, 8 * rank), (16, 8), 3, 1)
    assert found["transformer.h.0.attn.c_attn.bias"] == Cut((48,), (8 * rank,), (8,), 3)
    assert found["lm_head.weight"] == found["transformer.wte.weight"]
    assert attention.split_size == 8
    assert [*model.state_dict()] == [*plain.state_dict()]


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)


@pytest.mark.parametrize("normed", [nn.utils.parametrizations.weight_norm, nn.utils.spectral_norm])
def test_what_cannot_be_cut_is_refused(normed: Callable[[nn.Module], nn.Module]) -> None:
    with pytest.raises(TypeError, match=r"known for a Convolutions; give one, .* and no convolutions"):
        plan_for(Convolutions())
    with pytest.raises(TypeError, match="a Conv2d cannot be cut between ranks; give a"):
        parallelize(Convolutions(), {"conv": "column"})
    with pytest.raises(TypeError, match="a MultiheadAttention holds queries, keys and values in one matrix"):
        parallelize(Classifier(0), {"encoder.layers.*.self_attn": "column"})
    model = Blocks(FusedAttention, 0)
    normed(model.blocks[1].attn.qkv)
    with pytest.raises(ValueError, match=r"blocks.1.attn.qkv has a .*Norm, and the cut layer .* remove it"):
        parallelize(model, plan_for(model))


@on_ranks(2)
def test_more_ranks_than_key_heads_are_refused() -> None:
    model = Logits("Llama", 0, num_key_value_heads=1)
    with pytest.raises(ValueError, match="has 1 heads of keys and values, which 2 tensor-parallel ranks"):
        md.prepare(model, torch.optim.AdamW, md.Layout(tp=2))
