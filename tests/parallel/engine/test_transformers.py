"""Models of transformers with their own loss: micro-batches, schedules and predictions.

Layouts with one axis are in tests/parallel/test_models.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import minidist as md
from tests.helpers.contract import Trained, own_rows, plain_steps

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

PRELOAD = ["transformers.models.llama.modeling_llama"]

Clusters = Callable[[int], md.Cluster]
PARSE = md.Layout.parse
SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.9)
EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}
SMALL = {"vocab_size": 19, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=12, max_position_embeddings=16))
    for name, part in [*model.named_modules()]:
        if name.endswith("norm"):  # its own rounds to float32
            model.set_submodule(name, nn.RMSNorm(part.weight.shape, eps=part.variance_epsilon))
    return model


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropped = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=19, n_embd=8, n_layer=2, n_head=2, n_positions=16, **dropped)
    )


def bert() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    dropped = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    return BertForMaskedLM(BertConfig(**SMALL, intermediate_size=12, max_position_embeddings=16, **dropped))


MODELS = {"llama": llama, "gpt2": gpt2, "bert": bert}


def causal(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """The loss of the next token as transformers computes it, but without rounding to float32."""
    return functional.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1))


PLAN = {
    **{f"model.layers.*.self_attn.{name}_proj": "column" for name in "qkv"},
    "model.layers.*.self_attn.o_proj": "row",
    **{f"model.layers.*.mlp.{name}_proj": "column" for name in ("gate", "up")},
    "model.layers.*.mlp.down_proj": "row",
}
"""For Llama; the first step compares the cut model with the uncut one."""


def built(name: str, seed: int) -> Any:
    torch.manual_seed(seed)
    model = MODELS[name]().double()
    if name != "bert":
        model.loss_function = causal
    return model


def batch(rows: int, step: int) -> dict[str, Tensor]:
    """Padded rows of up to 9 tokens: padding is not seen, and its labels are ignored, and others, too."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 19, (rows, 9), generator=generator)
    lengths = torch.randint(3, 10, (rows,), generator=generator)
    seen = torch.arange(9) < lengths[:, None]
    labels = tokens.masked_fill(~seen | (torch.rand(rows, 9, generator=generator) < 0.2), -100)
    return {"input_ids": tokens, "attention_mask": seen.long(), "labels": labels}


BATCHES = [batch(rows, step) for step, rows in enumerate((5, 8, 6))]


def in_one_process(name: str) -> Trained:
    model = built(name, 0)
    return plain_steps(model, SGD(model.parameters()), BATCHES, lambda model, batch: model(**batch).loss)


def train(name: str, layout: str) -> tuple[list[float], dict[str, Tensor], float, Any]:
    from transformers import BatchEncoding

    parsed = PARSE(layout)
    engine = md.prepare(built(name, md.rank()), SGD, parsed, plan=PLAN if parsed.tp > 1 else None)
    losses = []
    for each in BATCHES:
        own = BatchEncoding(own_rows(engine, each))
        losses.append(engine.step(own))
    last = engine.evaluate(own)
    return losses, engine.full_state_dict(), last, engine.predict({"input_ids": own["input_ids"]}).logits


CASES = [
    ("llama", "dp=2,micro_batches=2"),
    ("llama", "dp=2,zero=1,recompute=true"),
    ("gpt2", "dp=2,zero=2,micro_batches=2"),
    ("gpt2", "dp=2,zero=3,recompute=true"),
    ("bert", "dp=2,micro_batches=2,recompute=true"),
    ("llama", "tp=2,pp=2,micro_batches=2"),
    ("gpt2", "dp=2,pp=2,zero=1,micro_batches=2"),
    ("llama", "tp=2,micro_batches=2"),
]
# Each model in every second stage, and each of both with and without recomputation.
REST = [
    (name, f"dp=2,zero={zero},micro_batches=3,recompute={('true', 'false')[(number + zero) % 2]}")
    for number, name in enumerate(MODELS)
    for zero in range(number % 2, 4, 2)
]
ORDERS = "gpipe", "zero_bubble"
REST += [(name, f"pp=2,micro_batches=3,schedule={ORDERS[n % 2]}") for n, name in enumerate(MODELS)]


@pytest.mark.parametrize(
    ("name", "layout"), [*CASES, *(pytest.param(*case, marks=pytest.mark.deep) for case in REST)]
)
def test_they_train_as_in_one_process(cluster_of: Clusters, name: str, layout: str) -> None:
    expected = in_one_process(name)
    model = built(name, 0)
    model.load_state_dict(expected.state)
    with torch.no_grad():
        loss, logits = model(**BATCHES[-1]).loss, model.eval()(BATCHES[-1]["input_ids"]).logits
    for found in cluster_of(PARSE(layout).ranks).run(train, name, layout):
        torch.testing.assert_close(found[:2], (expected.losses, expected.state), **EXACT)
        torch.testing.assert_close(found[2:], (float(loss), logits), **EXACT)
