"""The training ladder as a table: each rung in each of its forms, and the engine's form of the same idea.

Both train the ladder's own GPT on the same batches. So the ratio of their times is what the engine's
generality costs or gains. The ideas come from the table in `minidist.plain`, and the lines are counted.

The ladder's GPT is written for a page, so two small classes tell the engine what it can't read there: which
layers a pipeline may cut, and how attention works with a part of the heads or of the tokens.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from minidist import plain
from minidist.benchmarks.harness.training.programs import EVERY, LOOPS, Program, engine
from minidist.benchmarks.harness.training.what_is_trained import BATCHES, MUON, SEED, Batch, Work, drawn
from minidist.model import GPT, GPTConfig
from minidist.model.blocks import attend
from minidist.model.data import dataset
from minidist.plain import pipeline
from minidist.plain.gpt import Attention, Block, gpt
from minidist.plain.local_sgd import DILOCO


@dataclass(frozen=True)
class LadderWork(Work):
    """A training step of the ladder's GPT on bytes of text."""

    layers: int = 4
    width: int = 128
    tokens: int = 64  # in a row

    def build(self) -> nn.Sequential:
        """Build the model, the same on every rank."""
        return gpt(self.layers, self.width, heads=4, vocabulary=256, seed=SEED)

    def batches(self) -> list[Batch]:
        """Return the global batches, the same on every rank."""
        return drawn(dataset("bytes", length=self.tokens, limit=self.rows * BATCHES), self.rows)


class Chain(nn.Module):
    """The model as the chain of `layers` that a pipeline cuts."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:  # (B, T) -> (B, T, V)
        """Call one layer after the other."""
        for layer in self.layers:
            x = layer(x)
        return x


class OpenAttention(Attention):
    """The ladder's attention, for any part of the heads, and with an `attend` that can be replaced."""

    def __init__(self, whole: Attention) -> None:
        nn.Module.__init__(self)
        self.query, self.key, self.value, self.out = whole.query, whole.key, whole.value, whole.out
        self.head_size = whole.out.in_features // whole.heads
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        """Split what the layers return into heads, attend, and map the result."""
        projected = (project(x) for project in (self.query, self.key, self.value))
        q, k, v = (y.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for y in projected)
        y: Tensor = self.out(self.attend(q, k, v, 0.0).transpose(1, 2).flatten(2))
        return y


def opened(model: nn.Sequential) -> nn.Sequential:
    """Replace the attention of each block in place."""
    for layer in model:
        if isinstance(layer, Block):
            layer.attention = OpenAttention(layer.attention)
    return model


CUT = {"*.attention.query|key|value": "column", "*.attention.out": "row", "*.up": "column", "*.down": "row"}
"""The plan for tensor parallelism: as in the rung, embedding, norms and head stay whole."""


def cut_along_tokens(model: nn.Sequential) -> dict[str, str]:
    """Return the plan for sequence parallelism, which names every layer.

    The engine's outputs cover all tokens, so its head is cut by the vocabulary; the rung's head is whole, and
    sees a rank's own tokens.
    """
    norm, head = len(model) - 2, len(model) - 1
    outside = {"0": "split", "*.norm1": "sequence", "*.norm2": "sequence", f"{norm}": "sequence"}
    return {**CUT, **outside, f"{head}": "vocabulary"}


Make = Callable[[Work], Program]


def _tokens(work: Any) -> Program:
    """Make the engine of sequence parallelism, whose plan names every layer of the model."""
    plan = cut_along_tokens(work.build())
    return engine("tp=2,sequence_parallel=True", work, opened, plan=plan)


def _mixture(work: Any) -> Program:
    """Make the engine of a GPT with as many experts as the rung's."""
    sizes = {"context": work.tokens, "layers": work.layers, "heads": 4, "width": work.width}
    model = GPT(GPTConfig(**sizes, experts=4, experts_per_token=1), seed=SEED)
    return engine("dp=2,ep=2", work, lambda _: model)


@dataclass(frozen=True)
class RungForm:
    """A rung in one of its forms, and the engine's form of it."""

    name: str
    rung: str  # its module
    engine: str  # what a user of minidist writes instead
    make: Make  # makes the program of the engine's form
    options: Mapping[str, Any] = field(default_factory=dict)  # of `train`
    own_idea: str = ""  # if the rung has several forms
    ranks: int = 2
    period: int = 1  # steps after which its communication repeats
    exact: bool = True  # has the losses of one process, up to rounding
    alike: bool = True  # has the losses of the engine's form, up to rounding
    note: str = ""

    @property
    def module(self) -> ModuleType:
        """The rung itself."""
        return importlib.import_module(f"minidist.plain.{self.rung}")

    @property
    def lines(self) -> int:
        """Lines of the rung's file, with its docstring."""
        return len(inspect.getsource(self.module).splitlines())

    @property
    def idea(self) -> str:
        """The one idea, in a few words."""
        [idea] = re.findall(rf"\| ([^|]+) \| {self.rung}\.py \|", plain.__doc__ or "")
        return self.own_idea or idea


def _sharded(row: str, zero: int, idea: str) -> RungForm:
    written, make = f"Layout(dp=2, zero={zero})", partial(engine, f"dp=2,zero={zero}")
    return RungForm(f"sharded: {row}", "sharded", written, make, {"row": row}, idea)


def _pipeline(name: str, schedule: str, rows: Any, idea: str) -> RungForm:
    make = partial(engine, f"pp=2,micro_batches=4,schedule={schedule}", adapt=Chain)
    options, note, written = {"schedule": rows}, "4 micro-batches", f'Layout(pp=2), "{schedule}"'
    return RungForm(f"pipeline: {name}", "pipeline", written, make, options, idea, note=note)


def _local_sgd(name: str, engine: str, make: Make, idea: str = "", **options: Any) -> RungForm:
    note, given = f"an average every {EVERY} steps", {"k": EVERY, **options}
    return RungForm(name, "local_sgd", engine, make, given, idea, period=EVERY, exact=False, note=note)


_in_turn = partial(engine, "dp=2", data_parallel={"overlap": False})
_bare = partial(engine, "dp=2", data_parallel={"bucket_mb": 0, "overlap": False})
_opened = partial(engine, adapt=opened)
_muon = partial(engine, "dp=2,zero=1", optimizer=MUON)
_apart = partial(RungForm, exact=False, alike=False)
_emulated = partial(RungForm, ranks=1, exact=False, note="FP8 is emulated")
_WORKERS, _OUTER = "a server and two workers", "the average is a step of an outer optimizer"
_EXPERTS = "4 experts in place of each MLP, so a larger model; the engine's is GPT(experts=4)"
_ASYNCHRONOUS = LOOPS["asynchronous server"]
FORMS = (
    RungForm("one process", "one_process", "Layout()", partial(engine, "dp=1"), ranks=1),
    RungForm("data parallel", "data_parallel", "DataParallel, bucket_mb=0, overlap=False", _bare),
    RungForm("buckets", "buckets", "DataParallel, overlap=False", _in_turn),
    RungForm("overlap", "overlap", "DataParallel", partial(engine, "dp=2")),
    _sharded("data parallel", 0, "parameters, gradients and state stay whole"),
    _sharded("ZeRO 1", 1, "parameters and gradients stay whole"),
    _sharded("ZeRO 2", 2, "parameters stay whole"),
    _sharded("ZeRO 3", 3, "nothing stays whole"),
    _apart("Muon", "muon", "Layout(dp=2, zero=1), Muon", _muon, {"lr": 0.01}, note="the rest is AdamW's"),
    _apart("parameter server", "parameter_server", "ParameterServer", _ASYNCHRONOUS, ranks=3, note=_WORKERS),
    _local_sgd("local SGD", "LocalSGD", LOOPS["local SGD"]),
    _local_sgd("local SGD: DiLoCo", "LocalSGD, outer=nesterov", LOOPS["DiLoCo"], _OUTER, make_outer=DILOCO),
    RungForm("layer by layer", "layer_by_layer", "LayerByLayer", LOOPS["layer by layer"]),
    _pipeline("GPipe", "gpipe", pipeline.gpipe, "micro-batches; all forward passes first"),
    _pipeline("1F1B", "1f1b", pipeline.one_f_one_b, "micro-batches; a backward pass as soon as there is one"),
    RungForm("tensor parallel", "tensor_parallel", "Layout(tp=2)", partial(_opened, "tp=2", plan=CUT)),
    RungForm("sequence parallel", "sequence_parallel", "Layout(tp=2), sequence_parallel", _tokens),
    RungForm("ring attention", "ring_attention", "Layout(cp=2)", partial(_opened, "cp=2")),
    RungForm("Ulysses", "ulysses", 'Layout(cp=2), "ulysses"', partial(_opened, "cp=2,cp_kind=ulysses")),
    _apart("experts", "experts", "Layout(dp=2, ep=2)", _mixture, note=_EXPERTS),
    _emulated("low precision", "low_precision", 'Layout(precision="fp8")', partial(engine, "precision=fp8")),
)
"""All rungs in the order of reading."""
