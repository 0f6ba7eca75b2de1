"""Traces: they agree with the ledger and the schedule, their times are possible, and planted faults show."""

from __future__ import annotations

import copy
import json
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import minidist as md
from minidist import comm
from minidist.cli import train
from minidist.comm import ledgers
from minidist.model import GPT, MLP, GPTConfig
from minidist.parallel import schedules
from minidist.scale.trace import clocks
from minidist.scale.trace.all_ranks import RankTrace, Stretch, matched
from minidist.scale.trace.clocks import Clock, Reading
from minidist.scale.trace.perfetto import PROCESS, document
from minidist.scale.trace.record_events import Atom, Slice, lanes, passes
from minidist.scale.trace.tracer import Trace, trace
from tests.conftest import Clusters, Run
from tests.helpers.contract import own_rows
from tests.helpers.models import tokens
from tests.helpers.trace_problems import check, problems

TINY = GPTConfig(vocabulary=13, context=8, layers=2, heads=2, width=8)
SGD = partial(torch.optim.SGD, lr=0.1)
MICRO = "pp=2,micro_batches=3"


FACTS = ("algorithm", "dtype", "shape", "group", "bytes_sent", "bytes_on_wire")


def plain(call: ledgers.Call) -> tuple[Any, ...]:
    values = (getattr(call, name) for name in FACTS)
    return (call.name, *([*value] if isinstance(value, tuple) else value for value in values))


def told(each: Slice) -> tuple[Any, ...]:
    return (each.name, *(each.args[name] for name in FACTS))


def traced(layout: str, shift: float = 0.0) -> tuple[Trace | None, list[Any], bool]:
    """A tiny GPT's second step, its ledger, and whether an untraced twin did the same."""
    chosen = md.Layout.parse(layout)
    engine, twin = (md.prepare(GPT(TINY), SGD, chosen) for _ in range(2))
    rows = own_rows(engine, tokens(torch.Generator().manual_seed(1), 6, vocabulary=13))
    for each in (engine, twin):
        each.step(*rows)
    own, clock = time.perf_counter, time.perf_counter
    if md.rank() and shift:
        began = own()
        clock = lambda: own() + shift + 1e-3 * (own() - began)  # noqa: E731 (a clock that is off, and too fast)
    time.perf_counter = clock  # type: ignore[assignment]
    try:
        with trace(engine) as t, comm.ledger() as ledger:
            engine.step(*rows)
        found = t.gather()
    finally:
        time.perf_counter = own  # type: ignore[assignment]
    twin.step(*rows)
    theirs = twin.full_state_dict()
    alike = all(torch.equal(value, theirs[name]) for name, value in engine.full_state_dict().items())
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in engine.model.modules())
    twins = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in twin.model.modules())
    return found, [*map(plain, ledger.calls)], alike and hooks == twins and not ledgers.watchers


LAYOUTS = [
    "dp=2,zero=1,micro_batches=2",
    "dp=2,zero=2",
    "dp=2,zero=3,recompute=true",
    "tp=2,recompute=true",
    "cp=2",
    MICRO,
    f"{MICRO},schedule=zero_bubble",
    "pp=2,micro_batches=4,schedule=interleaved,chunks=2",
    "tp=2,pp=2,sequence_parallel=true,micro_batches=2",
]


@pytest.fixture(scope="module")
def trace_of(cluster_of: Clusters) -> Callable[[str], tuple[Trace, list[list[Any]]]]:
    """A trace of each layout, and every rank's ledger."""
    kept: dict[str, tuple[Trace, list[list[Any]]]] = {}

    def get(layout: str) -> tuple[Trace, list[list[Any]]]:
        if layout not in kept:
            found = cluster_of(md.Layout.parse(layout).ranks).run(traced, layout)
            assert all(alike for _, _, alike in found), "tracing changed what was computed, or left hooks"
            assert [each is None for each, *_ in found] == [rank > 0 for rank in range(len(found))]
            kept[layout] = found[0][0], [calls for _, calls, _ in found]
        return kept[layout]

    return get


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_trace_tells_what_the_ledger_and_the_schedule_do(trace_of: Any, layout: str) -> None:
    found, calls = trace_of(layout)
    chosen = md.Layout.parse(layout)
    assert found.layout == str(chosen)
    # Every call, with its bytes, in the ledger's order.
    for rank, own in zip(found.ranks, calls, strict=True):
        assert [told(each) for each in rank.calls] == own
        assert rank.bytes_sent == sum(call[5] for call in own)
    # Every message has both ends, and the file has no problems.
    kinds = Counter(each.kind for rank in found.ranks for each in rank.slices)
    assert len(found.arrows) == kinds["send"] == kinds["recv"]
    assert all(arrow.sent.start < arrow.received.end for arrow in found.arrows)
    assert all(arrow.sent.start <= arrow.arrival.start <= arrow.received.end for arrow in found.arrows)
    file = json.loads(json.dumps(document(found)))
    check(file)
    in_file = sum(event["ph"] == "X" for event in file["traceEvents"])
    assert in_file == sum(kinds.values()) + len(found.arrows)
    # A pipeline's instructions are those of its schedule.
    if chosen.pp > 1:
        whole = schedules.by_name(chosen.schedule, chosen.pp, chosen.micro_batches, chosen.chunks)
        for rank in found.ranks:
            own = [tuple(each.args.values()) for each in rank.instructions]
            assert own == [tuple(vars(each).values()) for each in whole[rank.place["pp"]]]
            assert [each.name for each in rank.instructions] == [*map(str, whole[rank.place["pp"]])]
    # Every layer of a rank goes forward as often as backward; the shares add up to 1.
    for rank in found.ranks:
        passes = Counter((each.kind, each.name) for each in rank.slices)
        layers = {name for kind, name in passes if kind == "forward" and name.count(".") == 1}
        assert layers
        assert layers == {n for kind, n in passes if kind == "backward" and n.count(".") == 1}
        if chosen.schedule != "zero_bubble":
            assert all(passes["forward", name] == passes["backward", name] for name in layers)
        assert any(kind == "recompute" for kind, _ in passes) == chosen.recompute
        assert passes["optimizer", "SGD.step"] >= 1
        assert sum(found.shares(rank.rank).values()) == pytest.approx(1)
        timeline = found.timelines[rank.rank]
        assert (timeline[0].start, timeline[-1].end) == (found.start, found.end)
        assert all(before.end == after.start for before, after in pairwise(timeline))


def test_what_runs_in_the_background_is_on_a_lane_of_its_own(trace_of: Any) -> None:
    found, _ = trace_of("dp=2")
    for rank in found.ranks:
        beside = [each for each in rank.slices if each.lane == "background"]
        assert {each.kind for each in beside} == {"collective"}
        waits = [each for each in rank.slices if each.kind == "wait"]
        numbers = {each.args["number"] for each in beside}
        assert numbers
        assert numbers == {each.args["number"] for each in waits}
        assert all(each.on_thread and each.lane == "main" for each in waits)


# Clocks.


def test_a_clock_that_is_off_is_put_right(cluster_of: Clusters) -> None:
    found = cluster_of(2).run(traced, MICRO, 1000.0)[0][0]
    assert found.ranks[0].offset == found.ranks[0].error == 0
    assert found.ranks[1].offset == pytest.approx(-1000, abs=1)
    assert 0 < found.ranks[1].error < 1  # half of the time of a message there and back
    assert found.end - found.start < 500  # seconds, not 1000
    check(document(found))
    late = sum(arrow.sent.start > arrow.received.end + found.ranks[1].error for arrow in found.arrows)
    assert found.arrows
    assert not late
    # Without the correction, the problem is found.
    for each in found.ranks[1].slices:
        each.start, each.end = each.start + 1000, each.end + 1000
    assert "the clocks are not aligned" in "; ".join(problems(document(found)))


def test_clocks_that_drift_are_aligned_in_between() -> None:
    clock = Clock(Reading(100.0, -10.0, 1e-6), Reading(200.0, -12.0, 3e-6))
    assert [clock.align(at) for at in (100, 150, 200)] == pytest.approx([90, 139, 188])
    assert clock.error == 3e-6
    one = Clock(Reading(5.0, 2e-6, 3e-6), Reading(9.0, -1e-6, 1e-6))  # as on one host
    assert (one.same, one.error, one.align(7.0)) == (True, 0.0, 7.0)
    assert Clock(Reading(5.0, 1.0, 0.1), Reading(5.0, 1.0, 0.1)).align(5.0) == 6.0


def test_a_world_of_one_reads_its_own_clock() -> None:
    assert (clocks.read().offset, clocks.read().error) == (0.0, 0.0)


# What a trace consists of.


def two_steps() -> tuple[list[str], Trace | None]:
    engine = md.prepare(MLP((6, 5, 3)), SGD, md.Layout(dp=2))
    t = trace(engine)
    with t, t.span("two steps"):
        for _ in range(2):
            engine.step(torch.randn(4, 6), torch.tensor([0, 1, 2, 0]))
    with suppress(RuntimeError), t:
        raise AssertionError("a trace is taken once")
    return [name for name, _ in engine.model.named_modules() if name and name != "layers"], t.gather()


def test_a_module_that_is_called_in_others_is_in_their_slices(cluster_of: Clusters) -> None:
    inner, found = cluster_of(2).run(two_steps)[0]
    slices = found.ranks[0].slices
    assert [each.name for each in slices if each.kind == "forward"] == ["MLP", *inner] * 2
    assert [each.name for each in slices if each.kind == "span"] == ["step", "two steps"]
    back = [each for each in slices if each.kind == "backward"]
    layers = [each for each in inner if each.count(".") == 1]
    assert [each.name for each in back if each.name in layers] == [*reversed(layers)] * 2
    whole = [each for each in back if each.name == "MLP"]
    assert len(whole) == 2
    assert all(any(one.start <= each.start <= each.end <= one.end for one in whole) for each in back)
    check(document(found))


def own_loop(kind: str, algorithm: str) -> tuple[Trace | None, list[Any]]:
    torch.manual_seed(0)
    x, y = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])
    if kind == "pipeline":
        module: Any = md.Pipeline([nn.Linear(6, 5), nn.Linear(5, 3)][md.rank()], micro_batches=2)
        parts = [module]

        def step() -> None:
            with module.timed() as events:
                module.step(x, y)
            assert len(events) == len(t._events[0])

    else:
        module = md.DataParallel(MLP((6, 5, 3)), overlap=False)
        parts = [module] if kind == "module" else []

        def step() -> None:
            nn.functional.cross_entropy(module(x), y).backward()
            module.synchronize()

    way = comm.using(algorithm) if algorithm else nullcontext()
    with way, trace(*parts) as t, comm.ledger() as ledger:
        step()
    return t.gather(), [*map(plain, ledger.calls)]


@pytest.mark.parametrize("algorithm", ["", "torch", "ring"])
@pytest.mark.parametrize("kind", ["module", "pipeline", "nothing"])
def test_a_loop_of_ones_own_is_traced(cluster_of: Clusters, kind: str, algorithm: str) -> None:
    ranks = cluster_of(2).run(own_loop, kind, algorithm)
    found = ranks[0][0]
    for rank, (_, calls) in zip(found.ranks, ranks, strict=True):
        assert [told(each) for each in rank.calls] == calls
        assert algorithm in {"", *(call[1] for call in calls)} or (kind, algorithm) == ("pipeline", "ring")
        kinds = {each.kind for each in rank.slices}
        assert ("forward" in kinds, "instruction" in kinds) == (kind != "nothing", kind == "pipeline")
    check(document(found))


def test_backward_passes_are_put_together_from_operations() -> None:
    def atom(start: float, path: str, pass_: int = 0) -> Atom:
        return Atom(start, start + 0.5, tuple(path.split()), pass_)

    around = [Slice("main", "span", "step", 0, 20), Slice("main", "instruction", "W0", 9, 13)]
    atoms = [
        *(atom(1, "m m.1"), atom(2, "m m.1"), atom(3, "m"), atom(4, "m m.0")),
        *(atom(6, "m m.0", 1), atom(10, "m m.0", 2), atom(11, "m m.0", 3)),
    ]
    found = [(each.name, each.start, each.end) for each in passes("main", reversed(atoms), around)]
    assert found == [
        *(("m", 1, 4.5), ("m.1", 1, 2.5), ("m.0", 4, 4.5)),
        *(("m", 6, 6.5), ("m.0", 6, 6.5)),  # another backward pass
        *(("m", 10, 11.5), ("m.0", 10, 11.5)),  # several of one instruction
    ]


def test_slices_that_overlap_get_lanes() -> None:
    slices = [Slice("", "collective", "x", *times) for times in ((0, 3), (1, 2), (2, 4), (3, 5))]
    lanes(slices, "background")
    assert [each.lane for each in slices] == ["background", "background 2", "background 2", "background"]


def hand_made(send: bool = True) -> Trace:
    """Rank 1 waits from 1 s to 4 s for what rank 0 sends at 3 s; they meet at 6 s, where rank 0 is at 5 s."""
    message = {"message": [0, 1, 7, 0], "group": [0, 1], "bytes_sent": 0}
    ranks = []
    for rank in range(2):
        own = [Slice("main", "span", "step", 0, 10), Slice("main", "optimizer", "step", 8, 9)]
        own.append(
            Slice("main", "collective", "barrier", 5 + rank, 8)
            if rank
            else Slice("main", "collective", "barrier", 5, 8)
        )
        own[-1].args = {"number": 1, "called": own[-1].start, "group": [0, 1], "bytes_sent": 0}
        if rank:
            own.append(Slice("main", "recv", "recv", 1, 4, {"number": 0, "called": 1, **message}))
        else:
            own.append(Slice("main", "forward", "layer", 1, 3))
            if send:
                sent = {"number": 0, "called": 3, **message, "bytes_sent": 8}
                own.append(Slice("main", "send", "send", 3, 3.5, sent))
        ranks.append(RankTrace(rank, {"pp": rank}, own))
    return Trace(ranks, "pp=2", 0, *matched(ranks))


def test_waiting_for_a_rank_is_told_from_waiting_for_its_message() -> None:
    found = hand_made()
    assert found.timelines[1] == [
        Stretch("other", 0, 1),
        Stretch("idle", 1, 3),
        Stretch("communication", 3, 4),
        Stretch("other", 4, 6),
        Stretch("communication", 6, 8),
        Stretch("optimizer", 8, 9),
        Stretch("other", 9, 10),
    ]
    assert found.shares(0) == pytest.approx(
        {"compute": 0.3, "other": 0.35, "communication": 0.25, "idle": 0.1}
    )
    lines = found.table().splitlines()
    assert lines[1].split() == ["0", "pp0", "30.0%", "35.0%", "25.0%", "10.0%", "2", "8"]


# Planted faults.


def test_a_trace_that_lacks_a_send_is_found_out(trace_of: Any) -> None:
    whole, _ = trace_of(MICRO)
    for place, each in enumerate(whole.ranks[0].slices):
        if each.kind == "send":
            ranks = [replace(rank, slices=[*rank.slices]) for rank in whole.ranks]
            del ranks[0].slices[place]
            # Later messages with the same tag take its role, and the last one has no partner.
            found = problems(document(Trace(ranks, "", 0, *matched(ranks))))
            assert sum("rank 1 has a recv at" in each and "nobody has sent" in each for each in found) == 1
    check(document(hand_made()))
    with pytest.raises(ValueError, match=r"rank 1 has a recv at 1000000\.0 us that nobody has sent"):
        check(document(hand_made(send=False)))


def first(events: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return next(event for event in events if fields.items() <= event.items())


def shift(events: list[dict[str, Any]]) -> None:
    for event in events:
        if event["pid"] == PROCESS and "ts" in event:
            event["ts"] += 2e6


@pytest.mark.parametrize(
    ("plant", "told"),
    [
        (shift, "arrow 1 from rank 0 to rank 1 ends 1000000.001 us before it begins"),
        (
            lambda events: first(events, name="layer").update(dur=2.2e6),
            "on thread 1000 of rank 0 send ends after layer, in which it began",
        ),
        (lambda events: events.append(first(events, ph="s")), "two arrows have the id 1"),
        (lambda events: events.remove(first(events, ph="s")), "arrow 1 has no beginning"),
        (lambda events: events.remove(first(events, ph="f")), "arrow 1 has no end"),
        (lambda events: first(events, ph="f").update(tid=9), "arrow 1 has its end in no recv"),
        (lambda events: events.append("?"), "is no object"),
        *(
            (lambda events, changed=changed: first(events, ph="X").update(changed), told)
            for changed, told in [
                ({"ts": -1}, "has ts -1, which is no time"),
                ({"dur": float("nan")}, "has dur nan, which is no time"),
                ({"name": None}, "has name None"),
                ({"tid": True}, "has tid True"),
                ({"ph": "?"}, "has phase '?'"),
                ({"ph": "M"}, "names 'step'"),
            ]
        ),
    ],
)
def test_a_fault_in_a_file_is_told(plant: Any, told: str) -> None:
    file = copy.deepcopy(document(hand_made()))
    plant(file["traceEvents"])
    assert told in "; ".join(problems(file))


def test_what_is_no_trace_is_told() -> None:
    for wrong in ([], {}, {"traceEvents": 3}):
        with pytest.raises(ValueError, match="no object with a list of traceEvents"):
            check(wrong)


# Bad input.


def test_bad_input_gets_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"trace was given a int; give an engine of md\.prepare"):
        trace(3)  # type: ignore[arg-type]
    with trace() as t:
        with pytest.raises(RuntimeError, match="no whole trace to gather: leave its `with` first"):
            t.gather()
        with pytest.raises(RuntimeError, match="a trace is open in this process already"), trace():
            pass
    broken = trace()
    with pytest.raises(KeyError), broken:
        raise KeyError
    with pytest.raises(RuntimeError, match="without an error"):
        broken.gather()
    found = hand_made()
    for act in (found.save, found.plot):
        with pytest.raises(TypeError, match="path is 3; give the name of a file"):
            act(3)  # type: ignore[operator]
    with pytest.raises(OSError, match="No such file"):
        found.save(tmp_path / "not" / "there.json")


# The picture, and the command.


def test_the_picture_has_every_micro_batch(trace_of: Any, tmp_path: Path) -> None:
    found, _ = trace_of("pp=2,micro_batches=4,schedule=interleaved,chunks=2")
    axes = found.plot(tmp_path / "trace.svg")
    assert (tmp_path / "trace.svg").read_text().startswith("<?xml")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0\npp0", "rank 1\npp1"]
    texts = {text.get_text() for text in axes.texts if text.get_text()}
    assert texts <= {f"{kind}{number}\nc{chunk}" for kind in "FB" for number in range(4) for chunk in (0, 1)}
    assert sum(not text.get_text() for text in axes.texts) == len(found.arrows)


def test_the_command_writes_a_trace_and_says_what_is_in_it(
    cluster_of: Clusters, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Run
) -> None:
    runs: dict[int, list[Trace | None]] = {}  # one for both

    def launch(fn: Any, ranks: int, args: Any, timeout: float | None) -> list[Trace | None]:
        runs[ranks] = runs.get(ranks) or cluster_of(ranks).run(fn, *args)
        return runs[ranks]

    monkeypatch.setattr(train, "launch", launch)
    out, plot = tmp_path / "t.json", tmp_path / "t.png"
    small = ("--model", "gpt", "--layout", "dp=2", "--steps", "1", "--out", str(out))
    code, text, _ = run("trace", *small, "--plot", str(plot))
    assert code == 0
    check(json.loads(out.read_text()))
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "dp1" in text
    assert "t.json, which ui.perfetto.dev opens; as a picture:" in text
    code, text, _ = run("trace", *small, "--json")
    assert code == 0
    found = json.loads(text)
    assert [each["rank"] for each in found["ranks"]] == [0, 1]
    assert found["ranks"][0]["bytes_sent"] > 0
    assert 0 < found["ranks"][0]["compute"] <= 1
