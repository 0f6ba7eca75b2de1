"""Every layout of up to 8 ranks that the axes allow trains to the weights of one process.

Each day those of two ranks train, one ZeRO stage of each mesh of three and four ranks, and of larger meshes
those with more axes. `-m deep` has all stages of four ranks and one stage of each other mesh, and `-m scale`
the rest.

A GPT with sizes that few ranks divide: a vocabulary of 11, 11 tokens in a row, batches that leave ranks with
unequal numbers of rows; the two ends tied. What else a layout has, micro-batches, recomputation, sequence
parallelism and schedules, changes from case to case.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

import minidist as md
from minidist import comm
from minidist.model import GPT, config
from minidist.parallel.contract.recompute_policies import POLICIES
from minidist.parallel.contract.schedule_kinds import DEFAULT_SCHEDULE, SCHEDULES
from minidist.parallel.engine import (
    partition_model,
    staged_passes,
    step_executor,
    tensor_map,
    training_step,
)
from minidist.parallel.sharding import sharded
from minidist.parallel.tensor_parallel import linear_layers
from tests.conftest import Clusters
from tests.helpers import contract, models
from tests.helpers.contract import nothing, patched
from tests.helpers.models import tokens

SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.9, weight_decay=0.1)
"""Unlike Adam's, its steps grow with the gradients: a sum that counts twice shows."""


gpt = partial(models.gpt, context=16, heads=8, width=16)


@cache
def case(layers: int, length: int) -> contract.Case:
    """A GPT of so many blocks, on rows of so many tokens."""
    model, rows = partial(gpt, layers=layers), partial(tokens, length=length)
    return contract.Case(model, rows, SGD, batches=(9, 8), clip_norm=0.5)


CASE = case(2, 11)


def layouts(ranks: int) -> Iterator[md.Layout]:
    """All of so many ranks, each with some of what else there is."""
    numbers = itertools.count()
    for dp, tp, pp, cp in itertools.product(range(1, ranks + 1), repeat=4):
        if dp * tp * pp * cp != ranks:
            continue
        for zero in range(2 if pp > 1 else 4):
            number = next(numbers)
            more: dict[str, Any] = {
                "micro_batches": 1 + number % 2,
                "sequence_parallel": tp > 1 and number % 4 > 1,
            }
            schedule = [*SCHEDULES][number % len(SCHEDULES)] if pp > 1 else DEFAULT_SCHEDULE
            kind = SCHEDULES[schedule]
            more |= {"schedule": schedule, "chunks": kind.least_chunks}
            policy = [*POLICIES][number // 5 % len(POLICIES)]
            more["recompute"] = policy if number % 5 == 0 and kind.allows_recompute else False
            if cp > 1 and cp * tp <= 8:  # heads
                more["cp_kind"] = ("ring", "ulysses", f"2x{cp // 2}" if cp % 2 == 0 else "ring")[number % 3]
            yield md.Layout(dp=dp, tp=tp, pp=pp, cp=cp, zero=zero, **more)


def case_for(layout: md.Layout) -> contract.Case:
    """With a layer for each part of a pipeline; sequence parallelism takes shares that tp divides."""
    length = 2 * layout.cp * layout.tp if layout.sequence_parallel else 11
    return case(max(1, layout.pp * layout.chunks - 2), length)


def cases() -> Iterator[Any]:
    """All of them, with marks. Five and seven ranks have one axis, as three have."""
    for ranks in range(2, 9):
        meshes = itertools.groupby(layouts(ranks), lambda a: (a.dp, a.tp, a.pp, a.cp))
        for number, (sizes, stages) in enumerate(meshes):
            same = [*stages]
            axes = sum(size > 1 for size in sizes)
            small = ranks == 2
            daily = ranks in (3, 4) or (ranks == 6 and axes == 2 and number % 2) or (ranks == 8 and axes == 3)
            for stage, layout in enumerate(same):
                mark = [] if daily else [pytest.mark.deep]
                if stage != number % len(same):
                    mark = [pytest.mark.scale] if ranks > 4 else [pytest.mark.deep]
                yield pytest.param(layout, id=str(layout), marks=[] if small else mark)


@pytest.mark.parametrize("layout", list(cases()))
def test_every_layout_trains_to_the_weights_of_one_process(cluster_of: Clusters, layout: md.Layout) -> None:
    contract.check(cluster_of, case_for(layout), layout)


def test_the_matrix_has_every_layout() -> None:
    found = {(a.dp, a.tp, a.pp, a.cp, a.zero) for ranks in range(2, 9) for a in layouts(ranks)}
    assert len(found) == 62 * 2 + 37 * 2  # 62 products of four axes; 37 of them without a pipeline
    assert all(math.prod(axes[:4]) <= 8 for axes in found)


# Planted faults.


def with_the_tied_sum_first(patch: pytest.MonkeyPatch) -> None:
    """Before gradients are summed over the data-parallel ranks, each stage in an order of its own."""
    begin_final_backward, train = (
        sharded.Sharded.begin_final_backward,
        staged_passes.StagedPasses.train,
    )
    engines: list[staged_passes.StagedPasses] = []

    def first(self: Any, *arguments: Any) -> None:
        engines[-1]._with_tied(staged_passes.sum_tied)
        begin_final_backward(self, *arguments)

    patch.setattr(staged_passes.StagedPasses, "overlaps", False)
    patch.setattr(
        staged_passes.StagedPasses, "train", lambda self, *a: (engines.append(self), train(self, *a))[1]
    )
    patch.setattr(sharded.Sharded, "begin_final_backward", first)
    patch.setattr(staged_passes.StagedPasses, "summed", lambda _: None)


without_the_first_copy = patched(staged_passes, "copy_from_first", nothing)


def with_equal_shares(*given: Any, own_tokens: Any = step_executor.StepExecutor.own_tokens) -> Any:
    """Each context-parallel rank counts alike, however many tokens it has."""
    return *own_tokens(*given)[:2], 0.5


none = property(lambda _: set(), nothing)
FAULTS: dict[str, tuple[str, Any, str, Any]] = {
    "no tied sum": ("pp=2,micro_batches=2", staged_passes, "sum_tied", nothing),
    # The gradient of a cut layer's input stays this rank's part of it.
    "no tensor-parallel sum": ("tp=2", linear_layers, "start_all_reduce", lambda x, *_: lambda: x),
    "equal shares of tokens": ("cp=2", step_executor.StepExecutor, "own_tokens", with_equal_shares),
    # Parameters that are whole on all tensor-parallel ranks count on each.
    "every rank's norm": ("tp=2", tensor_map.TensorMap, "_copies", none),
    "not the first stage's weights": ("pp=2", partition_model, "broadcast_together", nothing),
    "not the last stage's loss": ("pp=2", training_step.Engine, "_on_all_stages", lambda _, value: value),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(cluster_of: Clusters, name: str) -> None:
    layout, *fault = FAULTS[name]
    contract.check_catches(cluster_of, patched(*fault, raising=False), CASE, layout)


# Copies of one parameter on two stages.


def tables(layout: md.Layout, fault: Callable[[pytest.MonkeyPatch], None] | None = None) -> list[Tensor]:
    """This rank's copies of the token table after a few steps, in float32, by rings."""
    torch.manual_seed(md.rank())
    model = GPT(config("byte-tiny", vocabulary=53, context=16, layers=2, heads=2, width=16))
    with comm.using("ring"), pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            fault(patch)
        engine = md.prepare(model, partial(torch.optim.AdamW, lr=1e-2), layout, clip_norm=0.5)
        generator = torch.Generator().manual_seed(engine.data_rank)
        for _ in range(4):
            text = torch.randint(0, 53, (4, 17), generator=generator)
            engine.step(text[:, :-1], text[:, 1:])
    names = {name for name, _ in model.named_parameters()}
    return [model.get_parameter(n).detach() for n in ("layers.0.token.weight", LAST) if n in names]


LAST = "layers.3.output.weight"
DP_PP = md.Layout(dp=3, pp=2, micro_batches=2)


@pytest.mark.parametrize(
    "layout",
    [DP_PP, replace(DP_PP, zero=1), replace(DP_PP, schedule="zero_bubble"), replace(DP_PP, precision="bf16")],
    ids=str,
)
def test_tied_copies_stay_equal_to_the_last_bit(cluster_of: Clusters, layout: md.Layout) -> None:
    found = [table for each in cluster_of(6).run(tables, layout) for table in each]
    assert len(found) == 6
    for table in found:
        assert torch.equal(table, found[0])


@pytest.mark.parametrize(
    ("layout", "fault"),
    [
        (DP_PP, with_the_tied_sum_first),
        (replace(DP_PP, zero=1), patched(staged_passes, "copy_from_first", nothing)),
    ],
)
def test_copies_whose_sums_round_otherwise_drift_apart(
    cluster_of: Clusters, layout: md.Layout, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    found = [table for each in cluster_of(6).run(tables, layout, fault) for table in each]
    assert not all(torch.equal(table, found[0]) for table in found)
