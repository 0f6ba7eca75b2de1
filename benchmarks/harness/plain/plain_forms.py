"""The engine's form of each rung of the training ladder: what a user of minidist writes instead.

Each of `FORMS` is a function from the work to a program. All ranks call it. The ladder's GPT is written for a
page, so two small classes tell the engine what it can't read there: which layers a pipeline may cut, and how
attention works with a part of the heads or of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

import minidist as md
from minidist.benchmarks.harness.steps.training_steps import ADAMW
from minidist.benchmarks.harness.strategy_table.programs import EngineProgram, Program
from minidist.benchmarks.harness.strategy_table.strategies import Work
from minidist.benchmarks.harness.strategy_table.strategy_loops import LOOPS
from minidist.model.blocks import attend
from minidist.parallel.contract.layout import Layout
from minidist.plain.gpt import Attention, Block

Make = Callable[[Work], Program]


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


CUT = {
    "*.attention.query|key|value": "column",
    "*.attention.out": "row",
    "*.up": "column",
    "*.down": "row",
}
"""The plan for tensor parallelism: as in the rung, embedding, norms and head stay whole."""


def cut_along_tokens(model: nn.Sequential) -> dict[str, str]:
    """Return the plan for sequence parallelism, which names every layer.

    The engine's outputs cover all tokens, so its head is cut by the vocabulary; the rung's head is whole, and
    sees a rank's own tokens.
    """
    norm, head = len(model) - 2, len(model) - 1
    outside = {"0": "split", "*.norm1": "sequence", "*.norm2": "sequence", f"{norm}": "sequence"}
    return {**CUT, **outside, f"{head}": "vocabulary"}


def _same(model: nn.Sequential) -> nn.Module:
    return model


def _engine(
    layout: str,
    adapt: Callable[[Any], nn.Module] = _same,
    plan: Callable[[Any], Mapping[str, str]] | None = None,
    **options: Any,
) -> Make:
    """Return the function that makes a layout's engine; `options` are those of `DataParallel`."""

    def make(work: Work) -> Program:
        model: Any = work.build()
        cut = plan(model) if plan else None
        given: Any = {"plan": cut, "data_parallel": options or None, "rehearse": False}
        engine = md.prepare(adapt(model), ADAMW, Layout.parse(layout), **given)
        return EngineProgram(engine)

    return make


FORMS: dict[str, Make] = {
    "Layout()": _engine("dp=1"),
    "DataParallel, bucket_mb=0, overlap=False": _engine("dp=2", bucket_mb=0, overlap=False),
    "DataParallel, overlap=False": _engine("dp=2", overlap=False),
    "DataParallel": _engine("dp=2"),
    **{f"Layout(dp=2, zero={stage})": _engine(f"dp=2,zero={stage}") for stage in (0, 1, 2, 3)},
    "ParameterServer": LOOPS["asynchronous server"],
    "LocalSGD": LOOPS["local SGD"],
    "LayerByLayer": LOOPS["layer by layer"],
    'Layout(pp=2), "gpipe"': _engine("pp=2,micro_batches=4,schedule=gpipe", Chain),
    'Layout(pp=2), "1f1b"': _engine("pp=2,micro_batches=4,schedule=1f1b", Chain),
    "Layout(tp=2)": _engine("tp=2", opened, lambda model: CUT),
    "Layout(tp=2), sequence_parallel": _engine("tp=2,sequence_parallel=True", opened, cut_along_tokens),
    "Layout(cp=2)": _engine("cp=2", opened),
}
"""By what the user writes."""
