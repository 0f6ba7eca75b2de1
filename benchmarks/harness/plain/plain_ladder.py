"""The training ladder as a table: each rung in each of its forms, and the engine's form of the same idea.

Both train the ladder's own GPT on the same batches. So the ratio of their times is what the engine's
generality costs or gains. The ideas come from the table in `minidist.plain`, and the lines are counted.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from minidist import plain
from minidist.benchmarks.harness.steps.training_steps import SEED
from minidist.benchmarks.harness.strategy_table.strategies import BATCHES, EVERY, Work
from minidist.model.data import dataset
from minidist.model.sampler import Sampler
from minidist.plain import pipeline
from minidist.plain.gpt import gpt


@dataclass(frozen=True)
class LadderWork(Work):
    """A training step of the ladder's GPT on bytes of text."""

    layers: int = 4
    width: int = 128
    tokens: int = 64  # in a row

    def build(self) -> nn.Sequential:
        """Build the model, the same on every rank."""
        return gpt(self.layers, self.width, heads=4, vocabulary=256, seed=SEED)

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Return the global batches, the same on every rank."""
        data = dataset("bytes", length=self.tokens, limit=self.rows * BATCHES)
        sampler = Sampler(len(data.train), self.rows, drop_last=True, seed=SEED)
        return [data.train[sampler.share(step)] for step in range(BATCHES)]


@dataclass(frozen=True)
class RungForm:
    """A rung in one of its forms, and the engine's form of it."""

    name: str
    rung: str  # its module
    engine: str  # a name in `plain_forms.FORMS`; if empty, the engine has no such form
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


def _sharded(row: str, engine: str, idea: str) -> RungForm:
    return RungForm(f"sharded: {row}", "sharded", engine, {"row": row}, idea)


FORMS = (
    RungForm("one process", "one_process", "Layout()", ranks=1),
    RungForm("data parallel", "data_parallel", "DataParallel, bucket_mb=0, overlap=False"),
    RungForm("buckets", "buckets", "DataParallel, overlap=False"),
    RungForm("overlap", "overlap", "DataParallel"),
    _sharded("data parallel", "Layout(dp=2, zero=0)", "parameters, gradients and state stay whole"),
    _sharded("ZeRO 1", "Layout(dp=2, zero=1)", "parameters and gradients stay whole"),
    _sharded("ZeRO 2", "Layout(dp=2, zero=2)", "parameters stay whole"),
    _sharded("ZeRO 3", "Layout(dp=2, zero=3)", "nothing stays whole"),
    RungForm(
        "parameter server",
        "parameter_server",
        "ParameterServer",
        ranks=3,
        exact=False,
        alike=False,
        note="a server and two workers",
    ),
    RungForm(
        "local SGD",
        "local_sgd",
        "LocalSGD",
        {"k": EVERY},
        period=EVERY,
        exact=False,
        note=f"an average every {EVERY} steps",
    ),
    RungForm("layer by layer", "layer_by_layer", "LayerByLayer"),
    RungForm(
        "pipeline: GPipe",
        "pipeline",
        'Layout(pp=2), "gpipe"',
        {"schedule": pipeline.gpipe},
        "micro-batches; all forward passes first",
        note="4 micro-batches",
    ),
    RungForm(
        "pipeline: 1F1B",
        "pipeline",
        'Layout(pp=2), "1f1b"',
        {"schedule": pipeline.one_f_one_b},
        "micro-batches; a backward pass as soon as there is one",
        note="4 micro-batches",
    ),
    RungForm("tensor parallel", "tensor_parallel", "Layout(tp=2)"),
    RungForm("sequence parallel", "sequence_parallel", "Layout(tp=2), sequence_parallel"),
    RungForm("ring attention", "ring_attention", "Layout(cp=2)"),
    RungForm(
        "experts",
        "experts",
        "",
        exact=False,
        note="4 experts in place of each MLP, so a larger model; the engine has none",
    ),
)
"""All rungs in the order of reading."""
BY_NAME = {form.name: form for form in FORMS}
