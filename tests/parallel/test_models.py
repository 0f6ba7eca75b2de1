"""A matrix: eight models that people have, times the layouts, each equal to one process or refused.

A pair trains three steps, on batches whose rows the ranks share unequally and whose labels are partly
ignored, evaluates and predicts. The losses, every parameter and buffer, the evaluation and the outputs are
those of a plain loop in one process, in float64. `REFUSED` lists all other pairs. `cases` says which pairs
run every day.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import minidist as md
from minidist.parallel.engine import step_executor
from tests.conftest import Clusters
from tests.helpers.contract import TOLERANCE, Trained, compare, own_rows, plain_steps
from tests.helpers.models import FusedAttention, hugging_face, images
from tests.parallel.engine import test_compiled

PRELOAD = ["transformers.models.llama.modeling_llama", "functorch.compile", "torch._inductor.pattern_matcher"]

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
"""Its steps grow with the gradients, so that a sum that counts twice shows."""


@dataclass(frozen=True)
class Model:
    """What is trained. make(): the model. batch(generator, rows): the arguments of `engine.step`."""

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int], tuple[Any, ...]]
    loss: Callable[..., Any] | None = None  # None for the model's own
    options: dict[str, Any] = field(default_factory=dict)  # of `md.prepare`


# Models in plain torch.


class Attention(nn.Module):
    """Causal attention with the name `attend` for what computes it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.v_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.attend = causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(self.attend(q, k, v, 0.0).transpose(1, 2).flatten(-2))


def causal(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)


class Block(nn.Module):
    def __init__(self, width: int, attention: nn.Module) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(width), attention, nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class OwnGPT(nn.Module):
    """Its list is called `blocks`, and its head is its token table."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(13, 16), nn.Embedding(16, 16)
        self.blocks = nn.ModuleList(Block(16, Attention(16, 2)) for _ in range(2))
        self.norm = nn.LayerNorm(16)

    def positions(self, tokens: Tensor) -> Tensor:
        return torch.arange(tokens.shape[1])

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, 13)
        x = self.token(tokens) + self.position(self.positions(tokens))
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.token.weight.T


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.skip = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(y)) + self.skip(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        self.stages = nn.Sequential(Residual(8, 8, 1), Residual(8, 16, 2))
        self.fc = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:  # (B, 3, 8, 8) -> (B, 4)
        return self.fc(self.stages(functional.relu(self.norm(self.stem(x)))).mean((2, 3)))


class Encoder(nn.Module):
    """Classes of sequences by torch's encoder layers, of which the last tokens are padding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
        self.token = nn.Embedding(13, 16)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 4)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, 4)
        return self.head(self.encoder(self.token(tokens), src_key_padding_mask=tokens == 0)[:, 0])


class TimmViT(nn.Module):
    """Patches, a class token, and a Sequential called `blocks`."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 16, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 16))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, 16))
        self.blocks = nn.Sequential(*(Block(16, FusedAttention(16, 2, bias=False)) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:  # (B, 3, 8, 8) -> (B, 4)
        patches = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), patches], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


# Batches. Padding, ignored labels and classes are drawn anew, so that ranks have other numbers of them.


def tokens_and_labels(generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
    """Rows of 8 tokens, and the next ones, of which some are -100."""
    text = torch.randint(0, 13, (rows, 9), generator=generator)
    return text[:, :-1], text[:, 1:].masked_fill(torch.rand(rows, 8, generator=generator) < 0.3, -100)


def padded(generator: torch.Generator, rows: int) -> tuple[dict[str, Tensor]]:
    """As a collator gives them: padding is not seen, and its labels and some more are ignored."""
    tokens = torch.randint(0, 13, (rows, 8), generator=generator)
    seen = torch.arange(8) < torch.randint(3, 9, (rows, 1), generator=generator)
    labels = tokens.masked_fill(~seen | (torch.rand(rows, 8, generator=generator) < 0.3), -100)
    return ({"input_ids": tokens, "attention_mask": seen.long(), "labels": labels},)


def sequences(generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(1, 13, (rows, 8), generator=generator)
    seen = torch.arange(8) < torch.randint(3, 9, (rows, 1), generator=generator)
    return tokens * seen, torch.randint(0, 4, (rows,), generator=generator)


def pixel_values(generator: torch.Generator, rows: int) -> tuple[dict[str, Tensor]]:
    pixels, labels = images(generator, rows)
    return ({"pixel_values": pixels, "labels": labels},)


def counted(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over the labels that are not ignored, and their number."""
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten()), (labels != -100).sum()


MODELS = {
    "own GPT": Model(OwnGPT, tokens_and_labels, counted),
    "Llama": Model(partial(hugging_face, "Llama with one table", use_cache=False), padded),
    "GPT-2": Model(partial(hugging_face, "GPT-2", use_cache=False), padded),
    "BERT": Model(partial(hugging_face, "BERT"), padded),
    "ViT": Model(partial(hugging_face, "ViT"), pixel_values),
    "ResNet": Model(ResNet, images, md.cross_entropy, {"batch_norm": "synchronized"}),
    "encoder": Model(Encoder, sequences, md.cross_entropy),
    "timm ViT": Model(TimmViT, images, md.cross_entropy),
}
COMPILED = "dp=2, compiled"
LAYOUTS = {
    "dp=2": "ResNet",
    "dp=2,zero=1": "GPT-2",
    "dp=2,zero=2": "BERT",
    "dp=2,zero=3": "Llama",
    "tp=2": "timm ViT",
    "pp=2,micro_batches=2": "ViT",
    "cp=2": "own GPT",
    "dp=2,recompute=true": "encoder",
    COMPILED: "timm ViT",
    "dp=2,tp=2,zero=1": "own GPT",
    "dp=2,pp=2,micro_batches=2": "encoder",
}
"""Each layout, with the model of every day."""
NO_PLAN = "no plan is known for a ResNet"
NOT_WHOLE = "where a BatchNorm never sees a whole batch"
NO_ATTEND = "has no attention whose sequence could be cut"
PADDING = "tokens of padding; with cp attention is causal or sees all tokens"
"""Without padding these models train with cp: tests/parallel/sequence_share/test_transformers_models.py."""
REFUSED = {
    ("ResNet", "tp=2"): NO_PLAN,
    ("ResNet", "dp=2,tp=2,zero=1"): NO_PLAN,
    ("ResNet", "pp=2,micro_batches=2"): NOT_WHOLE,
    ("ResNet", "dp=2,pp=2,micro_batches=2"): NOT_WHOLE,
    **{(name, "cp=2"): NO_ATTEND for name in ("ResNet", "encoder", "timm ViT")},
    **{(name, "cp=2"): PADDING for name in ("Llama", "GPT-2", "BERT")},
    ("ViT", "cp=2"): "its forward has no argument `position_ids`",
}
"""All pairs that do not train, each with a part of the sentence that says why."""


def built(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name].make().double()


def batches(name: str, compiled: bool) -> list[tuple[Any, ...]]:
    """Ranks share 5 rows unequally; each other number of rows compiles a model again, which takes seconds."""
    generator = torch.Generator().manual_seed(7)
    return [MODELS[name].batch(generator, rows) for rows in ((4, 4, 4) if compiled else (5, 4, 5))]


def inputs_of(batch: tuple[Any, ...]) -> Any:
    """What a prediction takes of a batch."""
    first = batch[0]
    return {key: x for key, x in first.items() if key != "labels"} if isinstance(first, dict) else first


def loss_of(name: str, model: Any, batch: tuple[Any, ...]) -> Tensor:
    loss = MODELS[name].loss
    found = model(**batch[0]).loss if loss is None else loss(model(batch[0]), batch[1])
    return found[0] if isinstance(found, tuple) else found


@cache
def in_one_process(name: str, compiled: bool = False) -> tuple[Trained, Tensor]:
    """The reference: a plain loop, uncompiled, from rank 0's weights. compiled: which batches."""
    model, given = built(name, 0), batches(name, compiled)
    trained = plain_steps(model, SGD(model.parameters()), given, partial(loss_of, name))
    model.eval()
    inputs = inputs_of(given[-1])
    with torch.no_grad():
        outputs = model(**inputs) if isinstance(inputs, dict) else model(inputs)
        last = loss_of(name, model, given[-1]).item()
    return Trained([*trained.losses, last], trained.state), getattr(outputs, "logits", outputs)


def train(name: str, text: str) -> tuple[Trained, Any] | str:
    """The same on this rank; or the sentence with which `prepare`, or a step, refuses a pair in the table."""
    try:
        return train_on_this_rank(name, text)
    except (TypeError, ValueError) as error:
        if (name, text) not in REFUSED:
            raise  # with its traceback
        return str(error)


def train_on_this_rank(name: str, text: str, **more: Any) -> tuple[Trained, Any]:
    model: Any = built(name, md.rank())
    layout, options = md.Layout.parse(text.removesuffix(", compiled")), {**MODELS[name].options, **more}
    if text == COMPILED:
        torch._dynamo.reset()  # type: ignore[no-untyped-call]
        model = torch.compile(model, backend="aot_eager")
        options["check_loss"] = False  # it runs on fewer rows, for which the model would be compiled again
    if layout.pp > 1:
        (options["example"], *_) = MODELS[name].batch(torch.Generator(), 1)
    engine = md.prepare(model, SGD, layout, MODELS[name].loss, **options)
    own = [own_rows(engine, batch) for batch in batches(name, text == COMPILED)]
    losses = [engine.step(*batch) for batch in own]
    losses.append(engine.evaluate(*own[-1]))
    outputs = engine.predict(inputs_of(own[-1]))
    return Trained(losses, engine.full_state_dict()), getattr(outputs, "logits", outputs)


def check(found: list[Any], name: str, layout: str) -> None:
    """Fail unless all ranks have trained as one process does, or refused as the table says."""
    (expected, outputs), sentence = in_one_process(name, layout == COMPILED), REFUSED.get((name, layout))
    for each in found:
        if sentence is not None:
            assert isinstance(each, str), (
                f"{name} trains with {layout}: take it from the table of refused pairs"
            )
            assert sentence in each
            continue
        compare(each[0], expected)
        torch.testing.assert_close(each[1], outputs, rtol=TOLERANCE, atol=TOLERANCE)


compiling = test_compiled.ranks


def cases(layouts: list[str]) -> list[Any]:
    """All of these layouts with all models.

    Each layout runs every day with one model, except the compiled one. `-m deep` runs every second of the
    other pairs, so that it meets each model and each layout often, and `-m scale` runs the rest.
    """
    pairs = []
    for number, name in enumerate(MODELS):
        for place, layout in enumerate(layouts):
            mark = pytest.mark.scale if (number + place) % 2 else pytest.mark.deep
            if LAYOUTS[layout] == name:
                mark = pytest.mark.deep
            daily = LAYOUTS[layout] == name and layout != COMPILED
            pairs.append(pytest.param(name, layout, marks=[] if daily else [mark]))
    return pairs


MORE = [
    ("Llama", "dp=2,zero=1,recompute=true"),
    ("Llama", "tp=2,micro_batches=2"),
    ("Llama", "tp=2,pp=2,micro_batches=2"),
    ("GPT-2", "dp=2,zero=3,micro_batches=2,recompute=true"),
    ("GPT-2", "dp=2,pp=2,zero=1,micro_batches=2"),
    ("BERT", "dp=2,zero=2,micro_batches=2,recompute=true"),
]
"""Models with losses of their own, whose weights differ from micro-batch to micro-batch."""
DEEP = [
    ("Llama", "pp=2,micro_batches=3,schedule=gpipe"),
    ("GPT-2", "pp=2,micro_batches=3,schedule=zero_bubble"),
]
DEEP += [("BERT", "pp=2,micro_batches=3,schedule=gpipe"), ("GPT-2", "dp=2,micro_batches=3")]
DEEP += [(name, "dp=2,tp=2,zero=3") for name in ("Llama", "GPT-2")] + [("BERT", "dp=2,tp=2,zero=2")]
DEEP += [("ViT", "tp=2,micro_batches=2,recompute=true")]
DEEP += [("Llama", "dp=2,zero=2,micro_batches=3"), ("BERT", "dp=2,zero=3,micro_batches=3,recompute=true")]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *cases([layout for layout in LAYOUTS if layout != COMPILED]),
        *MORE,
        *(pytest.param(*each, marks=pytest.mark.deep) for each in DEEP),
    ],
)
def test_each_model_trains_in_each_layout_as_in_one_process(
    cluster_of: Clusters, name: str, layout: str
) -> None:
    check(cluster_of(md.Layout.parse(layout).ranks).run(train, name, layout), name, layout)


@pytest.mark.parametrize(("name", "layout"), cases([COMPILED]))
def test_each_compiled_model_trains_as_in_one_process(compiling: md.Cluster, name: str, layout: str) -> None:
    check(compiling.run(train, name, layout), name, layout)


def test_every_model_runs_every_day_and_every_refusal_is_of_a_pair() -> None:
    assert {name for layout, name in LAYOUTS.items() if layout != COMPILED} == {*MODELS}
    assert {*REFUSED} <= {(name, layout) for name in MODELS for layout in LAYOUTS}


def test_faults_are_caught(cluster_of: Clusters, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that count rows instead of labels, another refusal, and a refused pair that trains."""

    def by_rows() -> tuple[Trained, Any]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step_executor, "weighted", lambda result, own: (result[0], own))
            return train_on_this_rank("own GPT", "dp=2", check_loss=False)

    with pytest.raises(AssertionError, match="not close"):
        check(cluster_of(2).run(by_rows), "own GPT", "dp=2")
    with pytest.raises(AssertionError, match="attention whose sequence"):
        check([NO_PLAN], "ResNet", "cp=2")
    monkeypatch.setitem(REFUSED, ("own GPT", "cp=2"), NO_ATTEND)
    with pytest.raises(AssertionError, match="own GPT trains with cp=2"):
        check([in_one_process("own GPT")], "own GPT", "cp=2")
