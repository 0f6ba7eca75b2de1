"""The rungs that cut the model: equal to one process, bytes as their formulas say, and the point of each."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import minidist as md
from minidist.comm import ledgers
from minidist.parallel.training.activation_memory import ActivationCounter
from minidist.plain import experts, one_process, pipeline, ring_attention, sequence_parallel
from minidist.plain.gpt import Block
from minidist.plain.mistakes.formulas import CUT, sent_by
from tests.conftest import Clusters
from tests.helpers.plain_rungs import (
    ADAMW,
    LAYERS,
    ROWS,
    STEPS,
    Parameters,
    T,
    assert_equal,
    draw_batches,
    module_of,
    parameters_of,
    small,
    train,
)

D, ELEMENT = 32, 8  # of small()
A = ROWS * T * D * ELEMENT
MLPS = re.compile(r"\.mlps\.")
CASES: list[tuple[str, dict[str, Any]]] = [
    ("layer_by_layer", {}),
    ("pipeline", {"schedule": pipeline.gpipe}),
    ("pipeline", {"schedule": pipeline.one_f_one_b}),
    ("pipeline", {"schedule": pipeline.one_f_one_b, "m": 8}),
    ("tensor_parallel", {}),
    ("sequence_parallel", {}),
    ("ring_attention", {}),
    ("ulysses", {}),
    ("experts", {}),
    ("experts", {"E": 8}),
]
# Those that minidist.plain.mistakes has not: ranks as processes show them, too.
MISTAKES = [
    (
        "layer_by_layer",
        "y.backward(comm.recv(torch.empty_like(y), rank + 1))",
        "y.backward(comm.recv(torch.empty_like(y), rank + 1).sign())",
    ),
    ("ulysses", "pieces.unbind()", "pieces.flip(0).unbind()"),
    ("ulysses", "HEADS, TOKENS = -3, -2", "HEADS, TOKENS = -2, -3"),
    *((rung, "same_weights(model)", "pass") for rung in dict(CASES)),
]


# Equal to one process.


class AllExperts(experts.ExpertBlock):
    """All MLPs in one process, by the definition: the sum over MLPs of mask x weight x result."""

    chosen: list[Tensor]  # in each step, (B, T)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        tokens = self.norm2(x)
        weights = self.router(tokens).softmax(-1)
        self.chosen.append(weights.argmax(-1))
        masked = weights * nn.functional.one_hot(self.chosen[-1], len(self.mlps))
        return x + torch.stack([masked[..., i, None] * mlp(tokens) for i, mlp in enumerate(self.mlps)]).sum(0)


@functools.cache
def train_alone(count: int, steps: int) -> tuple[list[float], nn.Sequential]:
    """Train in one process; with `count`, blocks that have so many experts."""
    model = small()
    for i, block in enumerate(model):
        if count and isinstance(block, Block):
            model[i] = experts.ExpertBlock(block, count).double()
            model[i].__class__, model[i].chosen = AllExperts, []
    return one_process.train(model, draw_batches(steps), ADAMW), model


def optimized_by(rung: str, rank: int, n: int, whole: Parameters) -> int:
    """Elements of the parameters that the optimizer of this rank has to get."""
    size = 0
    for name, p in whole.items():
        if rung in ("layer_by_layer", "pipeline"):
            layer, layers = int(name.partition(".")[0]), LAYERS + 3
            size += p.numel() if layers * rank // n <= layer < layers * (rank + 1) // n else 0
        else:
            shared = {"tensor_parallel": CUT, "sequence_parallel": CUT, "experts": MLPS}.get(rung)
            size += p.numel() // (n if shared and shared.search(name) else 1)
    return size


def sent_with_tokens(chosen: Tensor, count: int, rank: int, n: int) -> int:
    """What a rank sends in one step for one block with `count` experts, of which the tokens chose (B, T)."""
    at = chosen // (count // n)  # the rank of each token's expert, (B, T)
    home = torch.cat([torch.full((len(rows), T), i) for i, rows in enumerate(at.tensor_split(n))])
    o, g = (
        int(tokens.sum()) * D * ELEMENT
        for tokens in ((home == rank) & (at != rank), (home != rank) & (at == rank))
    )
    return 2 * (o + g) + 8 * (n - 1) * count // n


def check(
    cluster: md.Cluster,
    rung: str,
    options: dict[str, Any],
    steps: int = STEPS,
    mistake: tuple[str, str] = ("", ""),
) -> None:
    found = cluster.run(train, rung, options, draw_batches(steps), ADAMW, mistake)
    losses, model = train_alone(options.get("E", 4) if rung == "experts" else 0, steps)
    whole, start, n = parameters_of(model), parameters_of(small()), len(found)
    assert not any(torch.equal(p, start[name]) for name, p in whole.items() if name in start)
    for rank, trained in enumerate(found):
        assert_equal(trained, losses, whole)
        assert trained.optimized == optimized_by(rung, rank, n, whole)
        r = sum(p.nbytes for name, p in model.named_parameters() if not MLPS.search(name))
        sent = steps * (
            2 * (n - 1) * r // n if rung == "experts" else sent_by(rung, rank, n, model, ROWS * T) or 0
        )
        for block in (layer for layer in model if isinstance(layer, AllExperts)):
            sent += sum(sent_with_tokens(chosen, len(block.mlps), rank, n) for chosen in block.chosen)
        assert trained.sent == sent


# On 2 ranks, where mistakes are planted, each rung once.
@pytest.mark.parametrize(
    ("rung", "options", "ranks"),
    [*((*case, 4) for case in CASES), *((*case, 2) for case in dict(reversed(CASES)).items())],
)
def test_it_is_one_process_and_sends_what_it_says(
    cluster_of: Clusters, rung: str, options: dict[str, Any], ranks: int
) -> None:
    """Every parameter on every rank, and no more than its part in the optimizer."""
    check(cluster_of(ranks), rung, options)


@pytest.mark.parametrize(("rung", "old", "new"), MISTAKES)
def test_a_mistake_is_caught(cluster_of: Clusters, rung: str, old: str, new: str) -> None:
    with pytest.raises(AssertionError, match=r"not close|not equal"):
        check(cluster_of(2), rung, {}, 2, (old, new))


# Pipelines: ranks work at the same time, and 1F1B holds less.


def played(schedule: pipeline.Schedule, p: int, m: int) -> list[list[str]]:
    """What each rank does in each tick, if a pass takes one tick and a message none."""
    queues, done, ticks = [schedule(rank, p, m) for rank in range(p)], set[tuple[str, int, int]](), []
    while any(queues):
        row = []
        for rank, queue in enumerate(queues):
            kind, i = queue[0] if queue else ("", 0)
            needs = (kind, i, rank - 1 if kind == "F" else rank + 1)
            ready = needs in done or needs[2] == -1 or (needs[2] == p and ("F", i, rank) in done)
            row.append(f"{kind}{i}" if queue and ready else ".")
        for rank, name in enumerate(row):
            if name != ".":
                kind, i = queues[rank].pop(0)
                done.add((kind, i, rank))
        ticks.append(row)
    return [list(rank) for rank in zip(*ticks, strict=True)]


def test_the_schedules_are_those_of_the_picture_and_as_short_as_they_can_be() -> None:
    drawn = re.findall(r"rank \d  (.*)", inspect.getdoc(pipeline) or "")
    shown = [*played(pipeline.gpipe, 3, 4), *played(pipeline.one_f_one_b, 3, 4)]
    assert [line.split() for line in drawn] == shown
    for p, m in ((1, 3), (2, 1), (2, 8), (4, 3), (4, 8)):
        for schedule in (pipeline.gpipe, pipeline.one_f_one_b):
            assert len(played(schedule, p, m)[0]) == 2 * (m + p - 1)


def activations(rung: str, **options: Any) -> int:
    """The most bytes that were kept for backward passes at one time."""
    model, batches, counters = small(), draw_batches(1, rows=8), []

    def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        counters.append(ActivationCounter(model, batches[0]))  # not earlier: a cut makes new parameters
        counters[0].__enter__()
        return ADAMW(parameters)

    module_of(rung).train(model, batches, make_optimizer, **options)
    counters[0].__exit__(None, None, None)
    return int(counters[0].peak)


@pytest.mark.parametrize("ranks", [2, 4])
def test_1f1b_holds_p_minus_rank_micro_batches(cluster_of: Clusters, ranks: int) -> None:
    m = 8
    schedules = (pipeline.gpipe, pipeline.one_f_one_b)
    all_of_them, few = (
        cluster_of(ranks).run(partial(activations, "pipeline", schedule=s, m=m)) for s in schedules
    )
    for rank in range(ranks):
        assert few[rank] * m == all_of_them[rank] * (ranks - rank)


# Sequences and rings: what a rank holds, and when it waits.


class Shapes(TorchDispatchMode):
    """The sizes of all tensors that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                self.seen.update(tensor.shape)
        return result


def sizes_made(length: int) -> set[int]:
    batches = [tuple(x.contiguous() for x in batch) for batch in draw_batches(1, rows=3, length=length)]
    with Shapes() as shapes:
        module_of("ring_attention").train(small(), batches, ADAMW)
    return shapes.seen


@pytest.mark.parametrize("ranks", [2, 4])
def test_no_tensor_of_ring_attention_has_the_whole_row(cluster_of: Clusters, ranks: int) -> None:
    for seen in cluster_of(ranks).run(sizes_made, 44):
        assert 44 // ranks in seen
        assert 44 not in seen


class Events(TorchDispatchMode):
    """Messages, waits and merged blocks of a softmax, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) == "aten.logaddexp.default":
            self.order.append("compute")
        return func(*args, **(kwargs or {}))

    def called(self, call: ledgers.Call, *_: Any) -> None:
        self.order.append(call.name)

    def waited(self, call: ledgers.Call, *_: Any) -> None:
        self.order.append("wait")


def events_of_a_ring() -> list[str]:
    with Events() as events, torch.no_grad():
        ledgers.watchers.append(events)
        try:
            ring_attention.RingSoftmax.apply(*torch.ones(3, 1, 1, 2, 2))
        finally:
            ledgers.watchers.remove(events)
    return events.order


def test_a_block_travels_while_a_rank_computes(cluster_of: Clusters) -> None:
    *_, last = cluster_of(4).run(events_of_a_ring)  # the last rank's queries see all blocks
    assert last == ["send", "recv", "compute", "wait", "wait"] * 3 + ["compute"]


def norms_see() -> set[torch.Size]:
    shapes, model = set(), small()
    for norm in model.modules():
        if isinstance(norm, nn.LayerNorm):
            norm.register_forward_hook(lambda module, args, output: shapes.add(output.shape))
    sequence_parallel.train(model, draw_batches(1), ADAMW)
    return shapes


@pytest.mark.parametrize("ranks", [2, 4])
def test_between_the_pairs_a_rank_has_its_own_tokens_only(cluster_of: Clusters, ranks: int) -> None:
    assert cluster_of(ranks).run(norms_see) == [{(ROWS, T // ranks, D)}] * ranks
    shared, whole = (cluster_of(ranks).run(activations, r) for r in ("sequence_parallel", "tensor_parallel"))
    assert max(shared) < min(whole)
