"""The training ladder's figures: rungs and engines train alike, and send and hold what the pages say."""

import copy
import json
import math
import time
from pathlib import Path

import pytest

from minidist import plain
from minidist.benchmarks import bench_plain
from minidist.benchmarks.bench_plain import ONE, check, enter
from minidist.benchmarks.harness import results
from minidist.benchmarks.harness.training import plain_programs
from minidist.benchmarks.harness.training.plain_ladder import FORMS, LadderWork, RungForm
from minidist.benchmarks.harness.training.plain_programs import (
    ClockedBatches,
    jobs,
    program_name,
    whole_periods,
)
from minidist.benchmarks.harness.training.programs import EVERY
from minidist.benchmarks.harness.training.rounds import measure_jobs
from tests.benchmarks.harness.test_turns import FakeBenchmark

BY_NAME = {form.name: form for form in FORMS}
TINY = LadderWork("ladder", rows=4, layers=2, width=32, tokens=16)
SIZE = sum(4 * p.numel() for p in TINY.build().parameters())
ACTIVATIONS = 4 * TINY.rows * TINY.tokens * TINY.width
RUN = (
    *("one process", "overlap", "sharded: ZeRO 1", "sharded: ZeRO 3", "parameter server", "local SGD"),
    *(
        "local SGD: DiLoCo",
        "layer by layer",
        "pipeline: 1F1B",
        "tensor parallel",
        "sequence parallel",
        "ring attention",
        "experts",
        "Muon",
    ),
)
"""The rungs that the tests run, each beside its engine's form: one of each kind."""


@pytest.fixture(scope="module")
def measured(cluster_of):
    """One round. The server has one worker."""
    several = jobs(TINY, [BY_NAME[name] for name in RUN])
    return measure_jobs(lambda ranks: cluster_of(min(ranks, 2)), several, 1)


def of(measured, name, plain=True):
    return measured[program_name(name, plain)]


def test_every_rung_has_a_row_and_every_engines_form_a_rung():
    rungs = dict.fromkeys(form.rung for form in FORMS)
    assert tuple(rungs) == plain.LADDER
    assert len(BY_NAME) == len(FORMS)


def test_ideas_and_lines_are_those_of_the_pages():
    assert BY_NAME["buckets"].idea == "many gradients in one message"
    assert BY_NAME["sharded: ZeRO 2"].idea == "parameters stay whole"
    for form in FORMS:
        assert form.lines == len(Path(form.module.__file__).read_text().splitlines())
        assert "|" not in form.idea


def test_a_step_lasts_from_one_batch_to_the_next(monkeypatch):
    """What a loop does before its first batch and after its last is no step."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    class Rung:
        @staticmethod
        def train(model, batches, make_optimizer):
            now[0] += 100
            for i, seconds in enumerate(batches):
                assert batches[i] == seconds
                now[0] += seconds
            now[0] += 1000
            return [0.0] * len(batches)

    monkeypatch.setattr(RungForm, "module", Rung)
    program = plain_programs.RungProgram(FORMS[0], TINY)
    program._memory = "counted before"
    assert program.timed([50.0, 9.0, 2.0, 4.0], warm=2).seconds == 3.0  # without the two that warm up
    assert program.timed([5.0]).seconds == 5.0
    clocked = ClockedBatches([1, 2])
    assert [batch for batch in clocked for now[0] in [now[0] + batch]] == [1, 2]
    assert [b - a for a, b in zip(clocked.times, clocked.times[1:], strict=False)] == [1, 2]


def test_turns_are_whole_periods():
    assert [whole_periods(2, BY_NAME[name]) for name in ("overlap", "local SGD")] == [2, EVERY]


def test_rungs_and_engines_train_alike_and_one_that_does_not_is_found(measured):
    for name in RUN:
        check(BY_NAME[name], measured)
    for name, spoilt in (("overlap", ONE), ("local SGD", program_name("local SGD", False))):
        wrong = copy.deepcopy(measured)
        for facts in wrong[spoilt].facts:
            facts.losses[2] *= 1.01  # planted: another third step
        with pytest.raises(AssertionError, match=f"the losses of {name} are .*, not .* as for {spoilt}"):
            check(BY_NAME[name], wrong)


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("one process", 0),
        ("overlap", SIZE),
        ("sharded: ZeRO 1", SIZE),
        ("sharded: ZeRO 3", 1.5 * SIZE),
        ("parameter server", SIZE),  # one worker
        ("local SGD", SIZE / EVERY),
        ("local SGD: DiLoCo", SIZE / EVERY),
        ("layer by layer", ACTIVATIONS),
        ("pipeline: 1F1B", ACTIVATIONS),
        ("tensor parallel", 8 * TINY.layers / 2 * ACTIVATIONS),
    ],
)
def test_bytes_sent_are_those_of_the_pages(measured, name, sent):
    """For 2 ranks, and the bytes of one loss on top."""
    found = max(facts.bytes_per_step for facts in of(measured, name).facts)
    assert sent <= found <= sent + 8


@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("one process", 4),
        ("overlap", 4),
        ("sharded: ZeRO 1", 3),
        ("sharded: ZeRO 3", 2),
        ("parameter server", 4),
        ("local SGD", 4),
        ("local SGD: DiLoCo", 7),  # and the anchor, its gradient and its momentum
        ("ring attention", 4),
    ],
)
def test_bytes_held_are_those_of_the_pages(measured, name, held):
    """In sizes of the parameters; AdamW also counts its steps, four bytes for each parameter."""
    ranks = [facts.memory for facts in of(measured, name).facts]
    assert max(memory.states for memory in ranks) == pytest.approx(held * SIZE, rel=0.01)
    assert {memory.buffers for memory in ranks} == {0}


def test_who_holds_what(measured):
    server, worker = (facts.memory for facts in of(measured, "parameter server").facts)
    assert server.activations == 0
    assert (worker.parameters, worker.gradients, worker.optimizer) == (SIZE, SIZE, 0)
    layers = [facts.memory.parameters for facts in of(measured, "layer by layer").facts]
    assert sum(layers) == SIZE
    whole, own = (of(measured, name).fullest.activations for name in ("one process", "overlap"))
    assert own == pytest.approx(whole / 2, rel=0.05)
    assert of(measured, "experts").fullest.parameters > SIZE
    hidden = sum(4 * p.numel() for layer in TINY.build()[1:-2] for p in layer.parameters() if p.dim() == 2)
    muon = of(
        measured, "Muon"
    ).fullest.optimizer  # half of the hidden matrices' momentum, and AdamW's of the rest
    assert muon == pytest.approx(hidden / 2 + 2 * (SIZE - hidden), rel=0.01)


def test_what_is_entered(measured):
    benchmark = FakeBenchmark()
    enter(benchmark, BY_NAME["sharded: ZeRO 1"], measured, TINY)
    extra = benchmark.extra_info
    ours, engine, one = (
        each.seconds[0]
        for each in (of(measured, "sharded: ZeRO 1"), of(measured, "sharded: ZeRO 1", False), measured[ONE])
    )
    assert benchmark.stats.stats.data == pytest.approx([ours])
    assert (extra["peer"], extra["ratio"]) == ("Layout(dp=2, zero=1)", pytest.approx(ours / engine))
    assert (extra["yardstick"], extra["over_yardstick"]) == (
        "the rung one_process",
        pytest.approx(ours / one),
    )
    assert (extra["idea"], extra["ranks"]) == ("parameters and gradients stay whole", 2)
    assert extra["held"] == sum(extra["memory"].values()) - extra["memory"]["activations"]
    assert extra["peer_memory"] == of(measured, "sharded: ZeRO 1", False).fullest.total
    json.dumps(results.rounded(extra))
    first = FakeBenchmark()
    enter(first, BY_NAME["one process"], measured, TINY)
    assert "over_yardstick" not in first.extra_info


def test_the_title_says_the_size():
    size = sum(p.numel() for p in bench_plain.WORK.build().parameters())
    assert f"{math.ceil(size / 1e5) / 10} M parameters" in bench_plain.GROUP
