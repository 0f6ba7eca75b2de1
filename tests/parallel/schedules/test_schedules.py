"""Schedules: the published formulas, torch's own checks, and planted mistakes that ours name."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from operator import le
from pathlib import Path

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from minidist.parallel import schedules
from minidist.parallel.contract.schedule_kinds import SCHEDULES
from minidist.parallel.schedules.instructions import Instruction, Schedule, placement_of
from tests.helpers.fresh_python import output_of

SIZES = [(p, m) for p in (1, 2, 3, 4, 5, 7) for m in (1, 2, 3, 4, 5, 7, 8, 10, 12)]
TIMES = ({}, {"forward": 1, "backward": 1}, {"forward": 3, "backward": 2}, {"forward": 1, "backward": 3})


def takes(name: str, chunks: int) -> bool:
    """Whether a schedule's function takes so many chunks: at least those that a layout may have."""
    try:
        schedules.by_name(name, 2, 4, chunks)
    except ValueError:
        assert not SCHEDULES[name].takes_chunks(chunks)
        return False
    return True


EVERY = [(name, p, m, v) for name in SCHEDULES for v in (1, 2, 3) if takes(name, v) for p, m in SIZES]


@pytest.mark.parametrize("name", SCHEDULES)
def test_bubbles_and_live_activations_are_those_of_the_record(name: str) -> None:
    kind, many = SCHEDULES[name], 0
    for p, m, v in [each for of, *each in EVERY if of == name and kind.takes_chunks(each[2])]:
        if kind.chunked and m % p:
            continue  # the formulas hold where p divides m
        for times in TIMES:
            found, sizes = (
                schedules.simulate(schedules.by_name(name, p, m, v), times),
                {"p": p, "m": m, "v": v},
            )
            if kind.bubble and not (kind.splits_backward and (times or m < p)):
                assert found.bubble == pytest.approx(value(kind.bubble, **sizes), abs=1e-12)
                if not kind.chunked:  # every rank waits as long
                    assert found.bubbles == pytest.approx([found.bubble] * p, abs=1e-12)
            if kind.live:
                assert found.peak_activations == [value(kind.live, r=r, **sizes) for r in range(p)]
            many += 1
    assert many > 20
    assert schedules.interleaved(3, 5, 1) == schedules.one_f_one_b(3, 5)


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_a_last_group_that_is_not_full_holds_no_more_and_takes_no_longer(chunks: int) -> None:
    for p, m in product(range(2, 6), range(1, 12)):
        full, found = (
            schedules.simulate(schedules.interleaved(p, each, chunks)) for each in (-(-m // p) * p, m)
        )
        most = [value(SCHEDULES["interleaved"].live, p=p, m=m, v=chunks, r=r) for r in range(p)]
        assert all(map(le, found.peak_activations, most))
        assert found.seconds <= full.seconds


def value(formula: str, **sizes: int) -> float:
    """The value of a record's formula."""
    return eval(formula, {"min": min, **sizes})


def test_micro_batches_may_differ_in_their_times() -> None:
    forward = [[1.0, 5.0], [1.0, 1.0]]
    found = schedules.simulate(schedules.gpipe(2, 2), {"forward": forward, "backward": 1, "message": 0.5})
    starts = [
        (event.instruction.kind, event.instruction.micro_batch, event.start) for event in found.timeline[1]
    ]
    assert starts == [("forward", 0, 1.5), ("forward", 1, 6.5), ("backward", 0, 7.5), ("backward", 1, 8.5)]
    assert found.seconds == 8.5 + 1 + 0.5 + 1
    halves = schedules.simulate(
        schedules.gpipe(2, 2), {"backward_input": [[1, 2], [3, 4]], "backward_weight": [[5, 6], [7, 8]]}
    )
    assert [e.end - e.start for e in halves.timeline[1] if e.instruction.kind == "backward"] == [10, 12]
    with pytest.raises(ValueError, match="each of which may be 2, one for each micro-batch"):
        schedules.simulate(schedules.gpipe(2, 2), {"forward": [[1.0, 5.0], [1.0]]})


def as_actions(schedule: Schedule) -> dict[int, list[torch_schedules._Action | None]]:
    """A schedule in torch's form: stage, kind and micro-batch, such as 3SEND_F0."""
    kinds = {
        "forward": torch_schedules.FORWARD,
        "backward": torch_schedules.FULL_BACKWARD,
        "backward_input": torch_schedules.BACKWARD_INPUT,
        "backward_weight": torch_schedules.BACKWARD_WEIGHT,
        "send_forward": torch_schedules.SEND_F,
        "recv_forward": torch_schedules.RECV_F,
        "send_backward": torch_schedules.SEND_B,
        "recv_backward": torch_schedules.RECV_B,
    }
    stages = placement_of(schedule).stages
    return {
        rank: [
            torch_schedules._Action(stages[rank][each.chunk], kinds[each.kind], each.micro_batch)
            for each in own
        ]
        for rank, own in enumerate(schedule)
    }


def test_torchs_validator_and_simulator_accept_every_schedule() -> None:
    for name, p, m, v in EVERY:
        schedule = schedules.by_name(name, p, m, v)
        schedules.check(schedule, m, v)
        actions, ranks = as_actions(schedule), SCHEDULES[name].placement(p, v).ranks
        stages = torch_schedules._validate_schedule(actions, p, p * v, m)
        assert stages == dict(enumerate(ranks))
        done = torch_schedules._simulate_comms_compute(actions, ranks.__getitem__, p * v)
        assert {rank: [each for each in own if each] for rank, own in done.items()} == actions
        # The same messages as torch itself puts in, in whatever order.
        compute = {rank: [each for each in own if each.is_compute_op] for rank, own in actions.items()}
        theirs = torch_schedules._add_send_recv(compute, ranks.__getitem__, p * v)
        assert {rank: {*own} for rank, own in theirs.items()} == {
            rank: {*own} for rank, own in actions.items()
        }


def without(schedule: Schedule, rank: int, wrong: Instruction) -> list[list[Instruction]]:
    changed = [list(own) for own in schedule]
    changed[rank].remove(wrong)
    return changed


def swapped(schedule: Schedule, rank: int, one: Instruction, other: Instruction) -> list[list[Instruction]]:
    exchange = {one: other, other: one}
    return [
        [exchange.get(each, each) if at == rank else each for each in own] for at, own in enumerate(schedule)
    ]


F = Instruction
MISTAKES = {
    "no forward": (
        lambda s: without(s, 1, F("forward", 1)),
        "rank 1, micro-batch 1, chunk 0: there is no forward pass",
    ),
    "no backward": (
        lambda s: without(s, 0, F("backward", 2)),
        r"rank 0, micro-batch 2.*there is no backward pass \(B2\)",
    ),
    "half a backward": (
        lambda s: [[replace(e, kind="backward_input") if e == F("backward", 2) else e for e in o] for o in s],
        r"backward pass is \['backward_input'\]",
    ),
    "twice": (lambda s: [[*s[0], F("forward", 1)], *s[1:]], "rank 0 has F1 2 times"),
    "no send": (lambda s: without(s, 0, F("send_forward", 2)), "send_forward is missing"),
    "to nobody": (lambda s: [*s[:2], [*s[2], F("send_forward", 0)]], "send_forward has no peer"),
    "backward first": (
        lambda s: swapped(s, 2, F("forward", 1), F("backward", 1)),
        "rank 2 has B1 before F1, which it needs",
    ),
    "sent too soon": (
        lambda s: swapped(s, 0, F("forward", 0), F("send_forward", 0)),
        "rank 0 has send F0 before F0",
    ),
    "needed too soon": (
        lambda s: swapped(s, 1, F("forward", 2), F("recv_forward", 2)),
        "rank 1 has F2 before recv F2",
    ),
    "crossed": (
        lambda s: swapped(s, 0, F("send_forward", 0), F("send_forward", 1)),
        "rank 0 has send F1 before F1",
    ),
    "a micro-batch too few": (
        lambda s: [[e for e in own if e.micro_batch != 3] for own in s],
        "the schedule has 3 micro-batches and should have 4",
    ),
    "nothing": (lambda s: [], "the schedule is empty"),
    "a circle": (
        # Rank 1 waits for a gradient before it gives rank 2 what that gradient is made of.
        lambda s: [
            s[0],
            [F("recv_forward", 0), F("forward", 0), F("recv_backward", 0), F("send_forward", 0)]
            + [e for e in s[1][2:] if e not in (F("send_forward", 0), F("recv_backward", 0))],
            s[2],
        ],
        "the schedule never ends: rank 0 waits at recv B0 for rank 1, rank 1 waits at recv B0 for rank 2, "
        "rank 2 waits at recv F0 for rank 1",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake: str) -> None:
    make, message = MISTAKES[mistake]
    good = schedules.one_f_one_b(3, 4)
    schedules.check(good, 4, 1)
    with pytest.raises(ValueError, match=message):
        schedules.check(make(good), 4)


def test_messages_cross_only_where_all_are_computed() -> None:
    schedule = swapped(schedules.gpipe(2, 2), 1, F("recv_forward", 0), F("recv_forward", 1))
    schedule[1].remove(F("recv_forward", 0))
    schedule[1].insert(1, F("recv_forward", 0))
    with pytest.raises(ValueError, match="micro-batch 0 of stage 0 and rank 1 receives micro-batch 1 of"):
        schedules.check(schedule)


def test_schedules_need_no_torch() -> None:
    code = (
        "import sys; import minidist.parallel.schedules as s; s.simulate(s.gpipe(2, 2)); "
        "print('torch' in sys.modules)"
    )
    assert output_of(code) == "False"


def test_a_schedule_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    axes = schedules.plot(schedules.zero_bubble(3, 4), path=tmp_path / "schedule.png")
    assert (tmp_path / "schedule.png").stat().st_size > 1000
    assert len(axes.patches) == 3 * 4 * 3
    (first,) = [text for text in axes.texts if text.get_position() == (0.5, 0)]
    assert first.get_text() == "0"
    assert "ranks wait for 14.3%" in axes.get_xlabel()
