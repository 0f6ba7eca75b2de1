"""Collectives from messages, with no process: that they end, are right, and send what the formulas say."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from math import lcm
from typing import Any

import matplotlib
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.comm import algorithms
from minidist.comm.algorithms import (
    ALGORITHMS,
    CollectiveSchedule,
    Message,
    ScheduleError,
    Step,
    check,
    schedule,
)
from minidist.comm.algorithms.execute import Receive, cut_into_segments
from minidist.comm.algorithms.ring import all_gather_among
from tests.helpers.fresh_python import output_of
from tests.helpers.refusals import refuses

matplotlib.use("Agg")
execute = importlib.import_module("minidist.comm.algorithms.execute")

RANKS = [*range(1, 10), 16]
ALL = [(operation, name) for operation, names in ALGORITHMS.items() for name in names]


@st.composite
def schedules(draw: st.DrawFn, operation: str, name: str, least: int = 0) -> CollectiveSchedule:
    ranks, elements = draw(st.sampled_from(RANKS)), draw(st.integers(least, 40))
    options: dict[str, Any] = {}
    if operation == "broadcast":
        options["source"] = draw(st.integers(0, ranks - 1))
        if name == "ring":
            options["segment"] = draw(st.integers(1, 12))
    if name == "hierarchical":
        nodes = draw(
            st.lists(st.integers(1, 5), min_size=1, max_size=5).filter(lambda sizes: sum(sizes) <= 16)
        )
        options["node"] = draw(st.sampled_from([None, 1, 2, 3, nodes]))
        ranks = sum(nodes) if options["node"] is nodes else ranks
    if operation == "all_to_all" and draw(st.booleans()):
        cells = st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks)
        options["counts"] = draw(st.lists(cells, min_size=ranks, max_size=ranks))
    return schedule(operation, name, ranks, elements, **options)


@pytest.mark.parametrize(("operation", "name"), ALL)
def test_schedules_end_and_are_right(operation: str, name: str) -> None:
    for ranks in RANKS:
        for elements in (0, 1, ranks - 1, ranks, 2 * ranks + 1, 40):
            check(schedule(operation, name, ranks, elements))

    @settings(max_examples=60, deadline=None)
    @given(one=schedules(operation, name))
    def ends(one: CollectiveSchedule) -> None:
        check(one)

    ends()


@pytest.mark.parametrize(("operation", "name"), ALL)
@pytest.mark.parametrize("ranks", RANKS)
def test_bytes_are_the_formulas(operation: str, name: str, ranks: int) -> None:
    elements = lcm(ranks, 16) * 3
    for source in {0, ranks // 2} if operation == "broadcast" else {0}:
        options = {"source": source} if operation == "broadcast" else {}
        one = schedule(operation, name, ranks, elements, **options)
        for rank, steps in enumerate(one.steps):
            wanted = algorithms.formula(operation, name, rank, ranks, 8 * elements, **options)
            assert algorithms.bytes_sent(steps, 8, rank) == wanted


@pytest.mark.parametrize("node", [1, 2, 3, 4, 6, 12])
def test_bytes_of_a_hierarchy_are_the_formulas(node: int) -> None:
    one = schedule("all_reduce", "hierarchical", 12, 144, node=node)
    between = 0
    for rank, steps in enumerate(one.steps):
        wanted = algorithms.formula("all_reduce", "hierarchical", rank, 12, 144 * 2, node=node)
        assert algorithms.bytes_sent(steps, 2) == wanted
        sent = [message for step in steps for message in step.sends if message.peer // node != rank // node]
        between += sum(message.elements for message in sent)
    nodes = 12 // node
    assert between == nodes * (2 * (nodes - 1) * 144 // nodes)  # 2 (M - 1) / M S from each node


@given(ranks=st.sampled_from(RANKS), elements=st.integers(0, 40))
def test_ragged_tensors_send_as_much_over_all_ranks(ranks: int, elements: int) -> None:
    power = 1 << (ranks.bit_length() - 1)
    totals = {
        "ring": 2 * (ranks - 1),
        "tree": 2 * (ranks - 1),
        "naive": 2 * (ranks - 1),
        "halving_doubling": 2 * (power - 1) + 2 * (ranks - power),
    }
    for name, times_the_tensor in totals.items():
        steps = schedule("all_reduce", name, ranks, elements).steps
        assert sum(algorithms.bytes_sent(one, 1) for one in steps) == times_the_tensor * elements


def changed(
    one: CollectiveSchedule, rank: int, step: int, sends: Any = None, receives: Any = None
) -> CollectiveSchedule:
    """The schedule with one rank's step made anew."""
    steps = [list(of_rank) for of_rank in one.steps]
    old = steps[rank][step]
    steps[rank][step] = Step(
        old.sends if sends is None else sends, old.receives if receives is None else receives
    )
    return replace(one, steps=tuple(map(tuple, steps)))


@pytest.mark.parametrize(("operation", "name"), ALL)
def test_every_single_fault_is_found(operation: str, name: str) -> None:
    """Each message in turn left out at either end, or combined where it is to be stored and the reverse."""
    options = {"node": 3} if name == "hierarchical" else {}
    one = schedule(operation, name, 6, 24, **options)
    check(one)
    mutants = 0
    for rank, steps in enumerate(one.steps):
        for number, step in enumerate(steps):
            for i, message in enumerate(step.sends):
                if message.elements:
                    without = (*step.sends[:i], *step.sends[i + 1 :])
                    with pytest.raises(ScheduleError, match=f"rank {rank}|rank {message.peer}"):
                        check(changed(one, rank, number, sends=without))
                    mutants += 1
            for i, message in enumerate(step.receives):
                if message.elements:
                    before, after = step.receives[:i], step.receives[i + 1 :]
                    with pytest.raises(ScheduleError):
                        check(changed(one, rank, number, receives=(*before, *after)))
                    other = replace(message, reduce=not message.reduce)
                    with pytest.raises(ScheduleError, match="element"):
                        check(changed(one, rank, number, receives=(*before, other, *after)))
                    mutants += 2
    assert mutants >= 3 * 5


def wrong_part() -> CollectiveSchedule:
    """A ring whose all-gather begins with the part that another rank has."""
    steps = []
    for rank in range(4):
        halves = (
            algorithms.ring_reduce_scatter(rank, 4, 8),
            all_gather_among(range(4), rank - 1, [0, 2, 4, 6, 8]),
        )
        peers = [(rank - 1) % 4, (rank + 1) % 4]
        second = [
            Step((replace(step.sends[0], peer=peers[1]),), (replace(step.receives[0], peer=peers[0]),))
            for step in halves[1]
        ]
        steps.append((*halves[0], *second))
    return CollectiveSchedule("all_reduce", 8, tuple(steps))


def both_wait() -> CollectiveSchedule:
    """Two ranks that each receive before they send."""
    steps = [
        (Step(receives=(Message(1 - rank, 0, 4, reduce=True),)), Step(sends=(Message(1 - rank, 0, 4),)))
        for rank in range(2)
    ]
    return CollectiveSchedule("all_reduce", 4, tuple(steps))


def swapped() -> CollectiveSchedule:
    """A naive all-reduce whose rank 0 sends the result before it has it."""
    one = schedule("all_reduce", "naive", 3, 4)
    return replace(one, steps=(one.steps[0][::-1], *one.steps[1:]))


def two(first: Step, second: Step, elements: int = 4) -> CollectiveSchedule:
    return CollectiveSchedule("all_reduce", elements, ((first,), (second,)))


test_faults_are_named = refuses(
    lambda make: check(make()),
    (wrong_part, "element 0 of rank 0 ends with rank .* once; it should be rank 0's once, rank 1's once"),
    (
        both_wait,
        "no rank goes on: rank 0 waits in step 0 for a message from rank 1; "
        "rank 1 waits in step 0 for a message from rank 0",
    ),
    (swapped, "rank 0 waits in step 0 for rank 1 to take a message and for rank 2 to take a message; rank 1"),
    (
        lambda: two(Step((Message(1, 0, 3),)), Step((), (Message(0, 0, 4, True),))),
        "rank 0 in step 0 sends 3 elements to rank 1, which in step 0 expects 4",
    ),
    (
        lambda: two(Step((Message(1, 0, 2),)), Step((), (Message(0, 2, 4, True),))),
        "rank 0 in step 0 sends elements from 0 on to rank 1, which in step 0 puts them from 2 on",
    ),
    (
        lambda: two(Step((Message(1, 0, 5),)), Step((), (Message(0, 0, 5, True),))),
        r"rank 0 in step 0 sends \[0, 5\); the buffer has 4 elements",
    ),
    (lambda: two(Step((Message(2, 0, 4),)), Step()), "names rank 2; the ranks are 0 to 1"),
    (
        lambda: replace(schedule("all_to_all", "pairwise", 2, 4), counts=((2, 2), (1, 3))),
        "all_to_all: element|the buffer has",
    ),
    (
        lambda: CollectiveSchedule("all_gather", 4, ((), ())),
        "element 2 of rank 0 ends with what was there before; it should be rank 1's once",
    ),
    error=ScheduleError,
)
test_wrong_arguments_are_told_in_a_sentence = refuses(
    lambda call: call(),
    (lambda: schedule("allreduce", "ring", 2, 4), "unknown operation 'allreduce': did you mean 'all_reduce'"),
    (lambda: schedule("all_gather", "naive", 2, 4), "unknown algorithm 'naive': .*known are ring, tree"),
    (lambda: schedule("all_reduce", "hierarchical", 4, 4, node=0), "node is 0; give the number of ranks"),
    (
        lambda: schedule("all_reduce", "hierarchical", 4, 4, node=[3, 2]),
        r"node is \[3, 2\]; the ranks of the nodes, 1 or more each, have to add up to 4",
    ),
)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_plan_waits_for_what_it_must_and_no_more(data: st.DataObject) -> None:
    """Against all pairs of segments, where the plan looks at a few."""
    operation, name = data.draw(st.sampled_from([pair for pair in ALL if pair[0] != "all_to_all"]))
    one = data.draw(schedules(operation, name))
    rank = data.draw(st.integers(0, one.ranks - 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execute, "SEGMENT_BYTES", data.draw(st.sampled_from([(4, 8), (8, 40), (20, 20)])))
        sends, receives = cut_into_segments(one.steps[rank], 4, rank, in_place=True)
        steps = [
            index
            for index, step in enumerate(one.steps[rank])
            for message in step.receives
            for _ in execute._segments(message, 4)
        ]
    assert 4 * sum(send.stop - send.start for send in sends) == algorithms.bytes_sent(one.steps[rank], 4)

    def meet(a: Any, b: Any) -> bool:
        return bool(a.start < b.stop and b.start < a.stop)

    for send in sends:
        assert steps[: send.reached] == [step for step in steps if step < send.step]
        earlier = [one.number for one in receives[: send.reached] if meet(one, send)]
        assert send.needs == max(earlier, default=0)
    for receive, step in zip(receives, steps, strict=True):
        before: list[Receive] = [one for one in receives[: receive.number - 1] if meet(one, receive)]
        reached = [send.reached for send in receive.overwrites]
        assert receive.needs == max([*(one.number for one in before), *reached], default=0)
        waited = [send for one in (*before, receive) for send in one.overwrites]
        for send in sends:
            if send.step < step and meet(send, receive):
                assert any(send is one for one in waited)


@pytest.mark.parametrize("name", ["ring", "halving_doubling", "naive"])
def test_a_drawing_has_an_arrow_for_each_message(name: str) -> None:
    one = schedule("all_reduce", name, 4, 16)
    (axes,) = algorithms.draw(one).axes
    texts = [text.get_text() for text in axes.texts]
    sent = [message for steps in one.steps for step in steps for message in step.sends]
    assert sorted(text for text in texts if text) == sorted(f"{m.start}:{m.stop}" for m in sent)
    assert texts.count("") == len(sent)  # the arrows
    assert axes.get_title(loc="left") == f"all_reduce, {name}: 4 ranks, 16 elements"
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"rank {rank}" for rank in range(4)]


def test_without_matplotlib_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.style", None)
    with pytest.raises(
        ImportError, match=r"^matplotlib is missing, and drawing needs it: pip install 'minidist\[bench\]'$"
    ):
        algorithms.draw(schedule("all_reduce", "ring", 2, 2))


def test_steps_need_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from minidist.comm import algorithms\n"
        "list(algorithms.ring_all_reduce(0, 4, 8))\n"
        "print(*{'torch', 'numpy', 'matplotlib'} & set(sys.modules))\n"
    )
    assert output_of(program) == ""
