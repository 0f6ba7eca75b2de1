"""The training ladder: each rung in turns with one process, and with the engine's form of the same idea.

All train the ladder's GPT on the same bytes of text, on ranks with one thread each, so a rank stands for a
device. A rung runs as it stands: its `train` on a new model, in which only later steps are timed. Each round
runs every program once. The losses of the first steps have to agree. Memory is that of the fullest rank.
"""

from __future__ import annotations

from typing import Any

import pytest

from minidist.benchmarks.harness.training import rounds
from minidist.benchmarks.harness.training.plain_ladder import FORMS, LadderWork, RungForm
from minidist.benchmarks.harness.training.plain_programs import COUNTED, jobs, program_name
from minidist.benchmarks.harness.turns import Benchmark, compared, record

pytestmark = pytest.mark.no_finding

WORK = LadderWork("ladder", rows=8)
GROUP = f"The training ladder: a GPT of 0.9 M parameters, {WORK.rows} rows of {WORK.tokens}"
ONE = program_name(FORMS[0].name, plain=True)


def measured(_: rounds.Worlds, full: bool) -> rounds.Measured:
    """All programs in turns, on ranks with one thread each."""
    with rounds.warm_worlds(threads=1) as worlds:
        return rounds.measure_jobs(worlds, jobs(WORK, FORMS), 30 if full else 7)


@compared(GROUP)
@pytest.mark.parametrize("form", [pytest.param(form, id=form.name) for form in FORMS])
def test_rung(benchmark: Benchmark, timed: Any, form: RungForm) -> None:
    """One step: forward, backward, communication, update."""
    enter(benchmark, form, timed(), WORK)


def check(form: RungForm, measured: rounds.Measured) -> None:
    """Raise AssertionError if programs that should train alike have different losses."""
    if form.exact:
        rounds.require_alike(measured, program_name(form.name, plain=True), ONE)
    if form.alike:
        rounds.require_alike(
            measured, program_name(form.name, plain=True), program_name(form.name, plain=False)
        )


def enter(benchmark: Benchmark, form: RungForm, measured: rounds.Measured, work: LadderWork) -> None:
    """Store a rung's figures as the benchmark's result."""
    check(form, measured)
    ours = measured[program_name(form.name, plain=True)]
    engine = measured[program_name(form.name, plain=False)]
    record(benchmark, ours.seconds, engine.seconds, form.engine)
    extra = benchmark.extra_info
    extra |= {"label": form.name, "idea": form.idea, "lines": form.lines}
    extra |= {**ours.figures(work.rows), **ours.memory, "memory_source": COUNTED}
    extra["held"] = max(facts.memory.states for facts in ours.facts if facts.memory)
    extra["peer_memory"] = engine.fullest.total
    if form is not FORMS[0]:
        extra |= rounds.over_yardstick(ours.seconds, measured[ONE].seconds) | {
            "yardstick": "the rung one_process"
        }
    if form.note:
        extra["note"] = form.note
