"""torch.compile with every axis of a layout: the weights of one uncompiled process, under the model's names.

The backend "aot_eager" traces forward and backward passes as the others do, and compiles nothing: what goes
wrong in tracing shows, in a second or two. A model is compiled whole or in parts, in a wrapper or in place.
Each layout is tried in one of these four ways, in turn, and in a second one with `-m scale`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from minidist import comm
from tests.helpers import contract
from tests.helpers.models import gpt, tokens

PRELOAD = ["functorch.compile", "torch._inductor.pattern_matcher"]

SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.9)
LAYOUTS = {
    "micro_batches": md.Layout(dp=2, micro_batches=2),
    "recompute": md.Layout(dp=2, zero=1, recompute=True),
    "zero2": md.Layout(dp=2, zero=2),
    "zero3": md.Layout(dp=2, zero=3),
    "sequence": md.Layout(tp=2, sequence_parallel=True),
    "tp": md.Layout(tp=2),
    "pp": md.Layout(pp=2, micro_batches=2),
    "cp": md.Layout(cp=2),
}
WAYS = [("in place", "a wrapped layer"), ("model", "layers")]
QUICK = {("tp", "model"), ("zero3", "layers")}
OTHER_SIZES = {("zero3", "model"), ("pp", "in place")}
"""Cases in which the batches change their sizes, and the first step checks the loss on fewer rows. torch then
compiles again, for sizes that it does not know, which costs seconds."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[md.Cluster]:
    """Two ranks with time to compile."""
    with md.Cluster(2, timeout=200.0) as cluster:
        yield cluster


# 2 ranks have 2 and 3 rows.
CASE = contract.Case(partial(gpt, layers=1), tokens, SGD, batches=(5, 5, 5), clip_norm=0.5)


def compiled(model: Any, how: str) -> nn.Module:
    """The model, its layers, or one of them in torch.compile's wrapper."""
    if how == "model":
        return torch.compile(model, backend="aot_eager")  # type: ignore[return-value]
    if how == "a wrapped layer":
        model.layers[1] = torch.compile(model.layers[1], backend="aot_eager")
    for part in {"in place": [model], "layers": model.layers}.get(how, []):
        part.compile(backend="aot_eager")
    return model  # type: ignore[no-any-return]


def train(case: contract.Case, layout: md.Layout, how: str, check_loss: bool) -> contract.Trained:
    torch._dynamo.reset()  # type: ignore[no-untyped-call]
    case = replace(case, model=lambda seed: compiled(gpt(seed, layers=1), how))
    return contract.train_on_this_rank(case, layout, {"check_loss": check_loss})


def mark_of(layout: str, how: str, first: bool) -> list[pytest.MarkDecorator]:
    if (layout, how) in QUICK:
        return []
    return [pytest.mark.deep if first or (layout, how) in OTHER_SIZES else pytest.mark.scale]


@pytest.mark.parametrize(
    ("layout", "how"),
    [
        pytest.param(layout, how, marks=mark_of(layout, how, first=place == number // 2 % 2))
        for number, layout in enumerate(LAYOUTS)
        for place, how in enumerate(WAYS[number % 2])
    ],
)
def test_a_compiled_model_trains_to_the_weights_of_one_process(
    ranks: md.Cluster, layout: str, how: str
) -> None:
    sizes_change = (layout, how) in OTHER_SIZES
    case = replace(CASE, batches=(4, 5, 4)) if sizes_change else CASE
    expected = contract.train_in_one_process(case)
    for trained in ranks.run(train, case, LAYOUTS[layout], how, sizes_change):
        contract.compare(trained, expected)


def trace(function: Callable[[Tensor], Tensor]) -> tuple[Tensor, list[str]]:
    """The result of a compiled function, and the source lines of all that was traced."""
    torch._dynamo.reset()  # type: ignore[no-untyped-call]
    traced: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        traced.extend(node.stack_trace or "" for node in graph.graph.nodes)
        return graph.forward

    return torch.compile(function, backend=backend)(torch.ones(3)), traced


def test_a_collective_is_not_traced(ranks: md.Cluster) -> None:
    """Traced, it would add tensors whose memory other ranks write to."""

    def through() -> tuple[Tensor, list[str]]:
        return trace(lambda x: 2 * comm.all_reduce(x + 1))

    for result, lines in ranks.run(through):
        torch.testing.assert_close(result, torch.full((3,), 8.0))
        assert len(lines) > 2
        assert not any("minidist/comm" in line for line in lines)
