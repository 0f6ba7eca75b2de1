"""A schedule may place its stages anywhere, as in a V, where rank r holds the stages r and 2 p - 1 - r.

Two do: our own, and one that is added by a record, and runs all forward passes, then all backward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import minidist as md
from minidist.model import GPT, config
from minidist.model.loss import cross_entropy
from minidist.parallel import schedules
from minidist.parallel.contract.schedule_kinds import SCHEDULES, ScheduleKind, StagePlacement
from minidist.parallel.schedules import Instruction
from minidist.parallel.schedules.instructions import placement_of
from minidist.scale.dryrun import dryrun
from minidist.scale.memory import estimate
from minidist.scale.step_time import predict_step
from tests.conftest import Clusters
from tests.helpers import contract
from tests.parallel.pipeline.test_execution import check, run, train_here
from tests.parallel.test_layouts import CASE
from tests.parallel.test_layouts import case as gpt_of

PLAIN = "plain V"
NAMES = [PLAIN, "zero_bubble_v"]
SIZES = [(p, m) for p in (1, 2, 3, 4) for m in (1, 2, 5, 8)]


def v_shaped(ranks: int, chunks: int) -> StagePlacement:
    """The stages go down the ranks and up again."""
    return StagePlacement([[rank, 2 * ranks - 1 - rank] for rank in range(ranks)])


def plain_v(ranks: int, micro_batches: int, chunks: int) -> list[list[Instruction]]:
    passes = [("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0)]
    order = [Instruction(kind, i, chunk) for kind, chunk in passes for i in range(micro_batches)]
    return [order] * ranks


RECORDS = {
    PLAIN: ScheduleKind(PLAIN, f"{__name__}:plain_v", (2, 2), v_shaped, live="2 * m"),
}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, kind in RECORDS.items():
            patch.setitem(SCHEDULES, name, kind)
        yield


def with_records(function: Callable[..., Any], *given: Any) -> Callable[[], Any]:
    """The function on a rank, whose process gets the records too."""

    def call() -> Any:
        from minidist.parallel.contract import schedule_kinds  # the rank's own

        with pytest.MonkeyPatch.context() as patch:
            for name, kind in RECORDS.items():
                patch.setitem(schedule_kinds.SCHEDULES, name, kind)
            return function(*given)

    return call


@pytest.mark.parametrize("name", NAMES)
def test_a_v_is_proved_and_simulated(name: str) -> None:
    for p, m in SIZES:
        schedule = schedules.by_name(name, p, m, 2)
        schedules.check(schedule, m, 2)
        assert placement_of(schedule).ranks == (*range(p), *reversed(range(p)))
        sends = [each for own in schedule for each in own if each.kind.startswith("send")]
        assert len(sends) == 2 * m * 2 * (p - 1)  # none between the stages p - 1 and p, both on the last rank
        found = schedules.simulate(schedule, {"forward": [*range(1, 2 * p + 1)]})
        for rank, events in enumerate(found.timeline):
            seconds = {e.end - e.start for e in events if e.instruction == Instruction("forward", 0, 1)}
            assert seconds == {2 * p - rank}  # that of stage 2 p - 1 - rank
    # The first rank has both ends: it computes the loss, and begins with its gradient.
    last = [each for each in schedules.by_name(PLAIN, 2, 1, 2)[0] if each.computes]
    assert list(map(str, last)) == ["F0", "F0 of chunk 1", "B0 of chunk 1", "B0"]


def test_mistakes_in_a_v_are_named() -> None:
    wrong, v = plain_v(2, 1, 2), v_shaped(2, 2)
    wrong[1] = [wrong[1][i] for i in (1, 0, 2, 3)]
    with pytest.raises(ValueError, match="rank 1 has F0 of chunk 1 before F0, which it needs"):
        schedules.check(schedules.with_messages(wrong, v))
    with pytest.raises(ValueError, match="has 2 ranks with 2 chunks each, and its placement is"):
        schedules.with_messages(
            schedules.forward_only(plain_v(2, 1, 2))[:1] * 2, StagePlacement([[0], [1], [2]])
        )
    with pytest.raises(ValueError, match="give each rank as many, and each stage from 0 on to one rank"):
        StagePlacement([[0, 3], [1, 3]])


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_pipeline_executes_a_v(cluster_of: Clusters, name: str, ranks: int) -> None:
    check(run(cluster_of, ranks, with_records(train_here, name, 2, 4)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["pp=2,micro_batches=4", "dp=2,pp=2,zero=1,micro_batches=2", "tp=2,pp=2"])
def test_layouts_with_a_v_train_as_one_process(cluster_of: Clusters, name: str, form: str) -> None:
    layout, trained = md.Layout.parse(f"{form},schedule={name},chunks=2"), gpt_of(2, 11)
    expected = contract.train_in_one_process(trained)
    for found in cluster_of(layout.ranks).run(with_records(contract.train_on_this_rank, trained, layout)):
        contract.compare(found, expected)


def test_checkpoints_metrics_and_predictions_of_a_v(cluster_of: Clusters, tmp_path: Path) -> None:
    inputs, targets = CASE.global_batches()[0]
    layout = md.Layout(pp=2, schedule=PLAIN, chunks=2)

    def save() -> tuple[float, torch.Tensor, list[str]]:
        model = CASE.model(md.rank())
        engine = md.prepare(model, CASE.optimizer, layout)
        md.save(engine, tmp_path / "saved").wait()
        return (
            engine.evaluate(inputs, targets),
            engine.predict(inputs),
            [n for n, _ in model.named_parameters()],
        )

    def load() -> float:
        engine = md.prepare(CASE.model(7), CASE.optimizer, md.Layout(pp=2))
        md.load(engine, tmp_path / "saved")
        return engine.evaluate(inputs, targets)

    outputs = CASE.model(0)(inputs).detach()
    expected = float(cross_entropy(outputs, targets))
    both = cluster_of(2).run(with_records(save))
    for loss, predicted, _ in both:
        assert loss == pytest.approx(expected, rel=1e-12)
        torch.testing.assert_close(predicted, outputs, rtol=1e-12, atol=1e-12)
    held = [{name.split(".")[1] for name in names} for _, _, names in both]
    assert held == [{"0", "3"}, {"1", "2"}]
    assert cluster_of(2).run(load) == [pytest.approx(expected, rel=1e-12)] * 2


def counted(layout: md.Layout) -> Any:
    engine = md.prepare(GPT(SHAPE), partial(torch.optim.AdamW, lr=1e-3), layout)
    tokens = torch.randint(0, SHAPE.vocabulary, (8, SHAPE.context))
    for _ in range(2):
        engine.step(tokens, torch.zeros_like(tokens))
    return engine.memory()


SHAPE = config("byte-tiny", vocabulary=61, context=24, layers=3, heads=4, width=32)


@pytest.mark.parametrize("name", NAMES)
def test_the_models_know_where_the_stages_are(cluster_of: Clusters, name: str) -> None:
    layout = md.Layout(pp=2, micro_batches=4, schedule=name, chunks=2)
    for rank, found in enumerate(cluster_of(2).run(with_records(counted, layout))):
        expected = estimate(SHAPE, layout, batch=(8, SHAPE.context), rank=rank)
        for part in ("parameters", "gradients", "optimizer", "activations"):
            assert getattr(found, part) == pytest.approx(getattr(expected, part), rel=0.01), part
        dry = dryrun(SHAPE, layout, (8, SHAPE.context), rank)
        assert dry.memory.parameters == found.parameters
    other = md.Layout(pp=2, micro_batches=4, schedule="interleaved", chunks=2)
    step, apart = (predict_step(SHAPE, each, (8, SHAPE.context), "a100") for each in (layout, other))
    assert step.seconds > 0
    assert step.parts["pp"] < apart.parts["pp"]  # no tied copies, and the middle stages are on one rank
