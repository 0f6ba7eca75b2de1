"""The table of strategies: that it is complete, and that its rows train alike, are counted and entered."""

import copy
import importlib
import json
import statistics
from dataclasses import replace

import pytest
import torch

import minidist as md
from minidist.benchmarks.harness import columns, results
from minidist.benchmarks.harness.training import rounds
from minidist.benchmarks.harness.training.peers import INEXACT, OUTSIDE, PEERS, missing
from minidist.benchmarks.harness.training.programs import EVERY
from minidist.benchmarks.harness.training.rounds import beside, check, enter, key, measure
from minidist.benchmarks.harness.training.strategies import ROWS, YARDSTICK, Pair, pairs
from minidist.benchmarks.harness.training.what_is_trained import Work
from minidist.parallel.contract.schedule_kinds import DEFAULT_SCHEDULE, SCHEDULES
from tests.benchmarks.harness.test_turns import FakeBenchmark

TINY = Work("byte-tiny", rows=4)
ALL = (
    *("one process", "recompute", "local SGD", "layer by layer", "tensor parallel", "context parallel"),
    *("parameter server, synchronous", "parameter server, asynchronous", "tensor and sequence parallel"),
    *("ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-3, offload", "data parallel and pipeline"),
    *("data parallel, overlap", "data parallel, PowerSGD", "pipeline, GPipe", "pipeline, 1F1B"),
    *("pipeline, interleaved", "pipeline, zero bubble", "data and tensor parallel"),
    *("hybrid ZeRO-1", "hybrid ZeRO-3", "ZeRO-3, secondary shares"),
)
RUN = ("data parallel, overlap", "local SGD", "parameter server, synchronous", "pipeline, interleaved")
"""Of the rows those that the tests run: an engine, and loops and peers of each kind."""


def row(strategy, peers=True):
    found = next(each for each in ROWS if each.strategy == strategy and each.family not in OUTSIDE)
    return found if peers else replace(found, peers=())


@pytest.fixture(scope="module")
def measured(cluster_of):
    family = [pair for name in RUN for pair in pairs("byte-tiny") if pair.row is row(name)]
    return measure(lambda ranks: cluster_of(2), TINY, family, 1)  # a server then has one worker


def test_every_strategy_has_a_row_and_every_peer_is_known():
    assert set(ALL) <= {each.strategy for each in ROWS}
    assert {peer for each in ROWS for peer in each.peers} <= set(PEERS)
    assert set(INEXACT) <= set(PEERS)
    for schedule in SCHEDULES.keys() - {DEFAULT_SCHEDULE}:
        assert any(f"schedule={schedule}" in each.layout for each in ROWS)
    for each in ROWS:
        if not each.loop:
            assert md.Layout.parse(each.layout).ranks == each.ranks


@pytest.mark.parametrize("model", ["byte-small", "mlp"])
def test_lines_have_names_of_their_own(model):
    labels = [(pair.label, pair.row.layout, pair.peer) for pair in pairs(model)]
    assert len(set(labels)) == len(labels)
    assert len({pair.label for pair in pairs(model)}) == len(labels)
    assert ("context parallel" in {pair.row.strategy for pair in pairs(model)}) == (model != "mlp")


def test_a_peer_that_is_not_installed_has_a_reason(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert missing("DeepSpeed ZeRO-2") == "deepspeed is not installed: pip install 'minidist[peers]'"
    assert missing("Accelerate") == "accelerate is not installed: pip install 'minidist[peers]'"
    assert missing("torch DDP") is None
    assert missing("") is None


def test_rows_train_alike_and_a_row_that_does_not_is_found(measured):
    lines = [Pair(row(name), (row(name).peers or ("",))[0]) for name in RUN]
    for pair in lines:
        check(pair, measured)
    for name in (key(lines[0].row), beside(lines[0])):  # ours, and the peer
        spoilt = copy.deepcopy(measured)
        for facts in spoilt[name].facts:
            facts.losses[2] *= 1.01  # planted: another third step
        with pytest.raises(AssertionError, match=r"the losses of .* are .*, not .* as for plain torch"):
            check(lines[0], spoilt)
    assert max(abs(a - b) for a, b in zip(measured[YARDSTICK].losses, [5.54, 5.4, 5.3], strict=True)) < 0.3


def test_rows_with_hybrid_sharding_and_secondary_shares_train_alike(cluster_of):
    lines = [Pair(row(name)) for name in ("hybrid ZeRO-3", "ZeRO-3, secondary shares")]
    found = measure(lambda ranks: cluster_of(ranks), TINY, lines, 1)
    for pair in lines:
        check(pair, found)
    hybrid, secondary = (found[key(pair.row)].facts[0].memory for pair in lines)
    size = 4 * sum(p.numel() for p in TINY.build().parameters())
    assert hybrid.parameters == pytest.approx(size / 2, rel=0.01)
    assert secondary.parameters == pytest.approx(size * 3 / 4, rel=0.01)


def test_what_is_entered(measured):
    benchmark, pair = FakeBenchmark(), Pair(row("data parallel, overlap"), "torch DDP")
    enter(benchmark, pair, TINY, measured)
    extra = benchmark.extra_info
    ours, peer, one = (measured[name].seconds for name in (key(pair.row), beside(pair), YARDSTICK))
    assert benchmark.stats.stats.data == pytest.approx(ours)
    assert extra["ratio"] == pytest.approx(statistics.median(a / b for a, b in zip(ours, peer, strict=True)))
    of_one = [a / b for a, b in zip(ours, one, strict=True)]
    assert extra["over_yardstick"] == pytest.approx(statistics.median(of_one))
    assert (extra["strategy"], extra["layout"], extra["model"], extra["ranks"], extra["peer"]) == (
        "data parallel, overlap",
        "dp=2",
        "byte-tiny",
        2,
        "torch DDP",
    )
    numel = sum(p.numel() for p in TINY.build().parameters())
    assert extra["memory"]["parameters"] == 4 * numel
    assert extra["memory"]["optimizer"] == pytest.approx(8 * numel, rel=1e-3)
    assert extra["bytes_per_step"] == pytest.approx(4 * numel, rel=1e-3)  # 2 (n - 1) / n of the gradients
    assert extra["peer_memory"] == pytest.approx(sum(extra["memory"].values()), rel=0.01)
    entry = {"stats": {"rounds": 2, "median": 1.0}, "extra_info": extra}
    assert columns.memory_of(entry) == sum(extra["memory"].values())
    json.dumps(results.rounded(extra))
    assert 0 <= extra["hidden"] <= 1
    silent = copy.deepcopy(measured)
    for facts in silent[key(pair.row)].facts:
        object.__setattr__(facts, "bytes_per_step", 0)
    enter(alone := FakeBenchmark(), pair, TINY, silent)
    assert "hidden" not in alone.extra_info  # nothing is hidden of what is not sent


def test_loops_of_users_are_counted_too(measured):
    local, server = (measured[key(row(name, peers=False))] for name in RUN[1:3])
    numel = sum(p.numel() for p in TINY.build().parameters())
    # An average of all parameters every few steps; a worker's push, and a server's answer to each pull.
    assert max(facts.bytes_per_step for facts in local.facts) == pytest.approx(4 * numel / EVERY)
    sent = [facts.bytes_per_step for facts in server.facts]
    assert sent[0] == pytest.approx(4 * numel, rel=0.01)  # the parameters to its one worker
    assert sent[1] == pytest.approx(4 * numel, rel=0.01)
    held = [facts.memory for facts in server.facts]
    assert (held[0].optimizer > 8 * numel, held[1].optimizer) == (True, 0)
    assert held[1].gradients == 4 * numel
    assert held[1].activations > 0


def test_a_server_of_this_world_has_the_workers_that_are_left(measured):
    assert [len(facts.losses) for facts in measured[key(row(RUN[2]))].facts] == [3, 3]
    assert measured[key(row(RUN[2]))].facts[0].losses == [None] * 3


def test_a_peer_takes_as_many_steps_a_turn_as_ours():
    """Post-local SGD of torch averages at every fourth step, too: most turns of one would send nothing."""
    ran = []

    class Ranks:
        def run(self, function, name="", *rest):
            if function is rounds.device_kind:
                return ["cpu"]
            if function is rounds.turn:
                ran.append((name, rest[0]))
                return [0.1]
            return [rounds.Facts([], 0.1, 0, 0.0, None)]

    pair = Pair(row("local SGD"), "torch PostLocalSGD")
    rounds.measure(lambda ranks: Ranks(), TINY, [pair], 1)
    assert ran == [(YARDSTICK, 1), (key(pair.row), EVERY), (beside(pair), EVERY)]


def test_turns_are_whole_periods(monkeypatch):
    facts = rounds.Facts([], 0.004, 0, 0.0, None)
    timed = rounds.Timed([facts, replace(facts, seconds=0.003)])
    assert rounds.steps_of(timed, 1) == 5  # to fill 20 ms at the slowest rank's pace
    assert rounds.steps_of(timed, 4) == 8
    assert rounds.steps_of(rounds.Timed([replace(facts, seconds=9.0)]), 4) == 4


def test_devices_train_alike(monkeypatch):
    """The suite is read with a GPU alone; its training runs on any device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    bench = importlib.import_module("minidist.benchmarks.bench_devices")
    monkeypatch.undo()
    losses = {}
    for name, way in bench.WAYS.items():
        trained = bench.Trained(TINY, "cpu", way)
        trained()
        losses[name] = trained.losses[0]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.02)
    assert losses["TF32"] == pytest.approx(losses["float32"], rel=1e-3)
    assert torch.get_float32_matmul_precision() == "highest"
