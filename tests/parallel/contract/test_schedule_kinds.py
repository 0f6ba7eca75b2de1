"""A schedule is told to one record: the layout, the pipeline, the planner and the models then know it."""

from __future__ import annotations

import pytest

import minidist as md
from minidist.model.configs import GPTConfig
from minidist.parallel import schedules
from minidist.parallel.contract.schedule_kinds import SCHEDULES, ScheduleKind
from minidist.scale.memory import estimate
from minidist.scale.planner import plan

SHAPE = GPTConfig(vocabulary=64, context=16, width=32, layers=6, heads=2)


def late_backward(ranks: int, micro_batches: int, chunks: int) -> list[list[schedules.Instruction]]:
    """GPipe with the backward passes in reverse order."""
    numbers = range(micro_batches)
    own = [schedules.Instruction("forward", i) for i in numbers]
    own += [schedules.Instruction("backward", i) for i in reversed(numbers)]
    return schedules.with_messages([own] * ranks)


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> str:
    kind = ScheduleKind("late backward", f"{__name__}:late_backward")
    monkeypatch.setitem(SCHEDULES, "late_backward", kind)
    return "late_backward"


def test_a_schedule_in_the_record_is_known_everywhere(added: str) -> None:
    layout = md.Layout.parse(f"pp=2,micro_batches=4,schedule={added}")
    assert schedules.by_name(added, 3, 4) == late_backward(3, 4, 1)
    schedules.check(schedules.by_name(added, 3, 4), 4, 1)
    like_gpipe = md.Layout(pp=2, micro_batches=4, schedule="gpipe")
    for rank in (0, 1):
        found, expected = (estimate(SHAPE, each, batch=(8, 16), rank=rank) for each in (layout, like_gpipe))
        assert found.activations == expected.activations
    planned = plan(SHAPE, ranks=2, memory=10**9, batch=(8, 16), hardware="cpu-xeon-8480")
    tried = {each.layout.schedule for each in planned.fitting if each.layout.pp > 1}
    assert added in tried
    assert tried == {name for name, kind in SCHEDULES.items() if kind.planned}


def test_the_records_properties_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    made_by = f"{__name__}:late_backward"
    monkeypatch.setitem(SCHEDULES, "wide", SCHEDULES["interleaved"]._replace(title="wide"))
    monkeypatch.setitem(
        SCHEDULES, "split", ScheduleKind("split", made_by, splits_backward=True, planned=False)
    )
    md.Layout(pp=2, chunks=2, schedule="wide")
    with pytest.raises(ValueError, match=r"chunks is 1 with schedule='wide'.*interleaved or wide"):
        md.Layout(pp=2, schedule="wide")
    with pytest.raises(ValueError, match="recompute is True with schedule='split'"):
        md.Layout(pp=2, schedule="split", recompute=True)
    planned = plan(SHAPE, ranks=2, memory=10**9, batch=(8, 16), hardware="cpu-xeon-8480")
    assert "split" not in {each.layout.schedule for each in planned.fitting}
    monkeypatch.setitem(SCHEDULES, "stuck", ScheduleKind("stuck", made_by, chunks=(2, None)))  # has one chunk
    planned = plan(SHAPE, ranks=2, memory=10**9, batch=(8, 16), hardware="cpu-xeon-8480")
    with pytest.raises(
        ValueError, match=r"stuck for 2 ranks, .* has stages .*, and its record in SCHEDULES says"
    ):
        list(planned.fitting)


@pytest.mark.parametrize("page", ["strategies/pipeline.md", "guide/memory.md"])
def test_the_pages_tables_are_what_the_records_make(page: str) -> None:
    from docs import tables

    (found,) = tables.place_of(page).findall((tables.DOCS / page).read_text())
    assert len(found.splitlines()) > 4
    # The site adds the line of a new record.
    assert {*found.splitlines()} <= {*tables.TABLES[page][1]().splitlines()}, "run: python docs/tables.py"
