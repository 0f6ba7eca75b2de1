"""Two runs set beside each other: what got slower beyond the spread, and comparisons that decide nothing."""

import copy
import json

import pytest

from minidist.benchmarks.harness import columns, results
from minidist.benchmarks.harness.compare_runs import compare, judge
from minidist.benchmarks.report import printed
from tests.benchmarks.harness.test_results import MACHINE
from tests.helpers import measured


def entry(name="a", median=1.0, iqr=0.02, rounds=9, **extra):
    found = measured.entry("x", "Things", name, median, **extra)
    found["stats"] |= {"iqr": iqr, "rounds": rounds}
    return found


def ratio(value, half=0.02, peer="torch DDP"):
    return measured.beside(peer, value, value, half)


def file_of(*entries, run="2025-01-01", mode="quick", info=MACHINE):
    return {
        **measured.machine(*({**each, "run": run} for each in entries)),
        "machine_info": info,
        "runs": {run: {"mode": mode, "software": {}, "commit": None}},
    }


@pytest.mark.parametrize(
    ("value", "half", "rounds", "undecided", "verdict"),
    [
        (1.02, 0.05, 9, True, "undecided"),  # planted: the middle half contains 1
        (0.98, 0.05, 9, True, "undecided"),
        (1.10, 0.05, 9, False, "slower"),
        (0.90, 0.05, 9, False, "faster"),
        (0.90, 0.0, 1, True, "undecided"),  # a single pair has no spread
        # Of two equal programs four of five pairs fall on one side in every third run.
        (0.97, 0.02, 5, True, "undecided"),
        (0.97, 0.02, 50, False, "faster"),
    ],
)
def test_a_spread_that_exceeds_the_difference_says_so(value, half, rounds, undecided, verdict):
    found = entry(rounds=rounds, **ratio(value, half))
    assert columns.undecided(found) is undecided
    assert columns.verdict(found) == verdict
    assert ("undecided" in columns.RATIO.cell(found)) is undecided
    rows = printed.machine_as_json(file_of(found))["sections"][0]["rows"]
    assert (rows[0]["undecided"], rows[0]["verdict"]) == (undecided, verdict)


def test_the_yardstick_has_a_verdict_of_its_own():
    over = {"over_yardstick": 1.01, "over_yardstick_q1": 0.9, "over_yardstick_q3": 1.1}
    assert columns.undecided(entry(**ratio(2.0), **over), "over_yardstick")
    assert not columns.undecided(entry(**ratio(2.0), **over))


@pytest.mark.parametrize(
    ("old", "new", "verdict", "of"),
    [
        # By the ratio to a peer, whatever the times do: this machine has become half as fast.
        (entry(median=1.0, **ratio(0.9)), entry(median=2.0, **ratio(0.9)), "same", "ratio to torch DDP"),
        (entry(**ratio(0.9)), entry(**ratio(1.1)), "slower", "ratio to torch DDP"),
        (entry(**ratio(1.1)), entry(**ratio(0.9)), "faster", "ratio to torch DDP"),
        # Beyond the floor, and within the spread of both.
        (entry(**ratio(0.9, 0.1)), entry(**ratio(1.1, 0.1)), "same", "ratio to torch DDP"),
        # Beyond the spread, and within the floor.
        (entry(**ratio(1.0, 0.001)), entry(**ratio(1.04, 0.001)), "same", "ratio to torch DDP"),
        # Another peer is no yardstick: by the time.
        (entry(**ratio(0.9)), entry(**ratio(2.0, peer="gloo")), "same", "time"),
        (entry(median=1.0), entry(median=1.2), "slower", "time"),
        (entry(median=1.2), entry(median=1.0), "faster", "time"),
        (entry(median=1.0, iqr=0.2), entry(median=1.2), "same", "time"),
        (entry(median=1.0, rounds=1), entry(median=9.0), "undecided", "time"),
        # What is counted has no spread; its time does not matter.
        (entry(median=1.0, cost=8.0, par=8.0), entry(median=3.0, cost=8.0, par=8.0), "same", "cost"),
        (entry(cost=8.0, par=8.0), entry(rounds=1, cost=9.0, par=8.0), "slower", "cost"),
    ],
)
def test_verdicts(old, new, verdict, of):
    found = judge(old, new)
    assert (found.verdict, found.of) == (verdict, of)


def test_a_row_without_a_peer_goes_by_the_yardstick():
    def over(value):
        return {
            "yardstick": "plain torch",
            "over_yardstick": value,
            "over_yardstick_q1": value - 0.01,
            "over_yardstick_q3": value + 0.01,
        }

    found = judge(entry(median=1.0, **over(0.8)), entry(median=1.0, **over(1.0)), same_machine=False)
    assert (found.verdict, found.of) == ("slower", "ratio to plain torch")


def test_a_planted_slowdown_is_the_one_that_is_told():
    names = ["a", "b", "c"]
    old = file_of(*(entry(name, **ratio(0.9)) for name in names), entry("gone"))
    new = file_of(*(entry(name, **ratio(0.9)) for name in names), entry("extra"), run="2025-01-02")
    measured = [each["fullname"] for each in new["benchmarks"]]
    quiet = compare(old, new, measured, True)
    assert not quiet.slower
    assert quiet.lines()[-1].startswith("3 same, 1 new, 1 gone (3 by the ratio to a program")
    assert not compare(old, new, measured, False).having("gone")  # where some were selected

    planted = copy.deepcopy(new)
    planted["benchmarks"][1]["extra_info"] |= ratio(1.5)
    found = compare(old, planted, measured, True)
    assert found.slower
    assert found.lines()[0] == "b (Things): slower, ratio to torch DDP 0.90 -> 1.50"
    told = json.loads(json.dumps(found.as_json()))["changes"]
    assert [change["label"] for change in told if change["verdict"] == "slower"] == ["b"]


def test_another_machines_times_say_nothing():
    other = {**MACHINE, "cpu": "Other CPU"}
    old = file_of(entry("a", median=1.0), entry("b", **ratio(0.9)), info=other)
    new = file_of(entry("a", median=9.0), entry("b", **ratio(1.5)), run="2025-01-02")
    found = compare(old, new, [each["fullname"] for each in new["benchmarks"]], False)
    assert [(change.label, change.verdict) for change in found.changes] == [("b", "slower")]
    assert "from another machine, Other CPU, 2 cores" in found.lines()[-1]


def test_a_quick_run_is_set_beside_the_quick_one():
    old = results.merge(
        file_of(entry(median=1.0), run="2025-01-01"),
        file_of(entry(median=3.0), run="2025-01-02", mode="full"),
    )
    new = results.merge(old, file_of(entry(median=1.0), run="2025-01-03"))
    found = compare(old, new, [entry()["fullname"]], False)
    assert (found.changes[0].old, found.changes[0].verdict) == (1.0, "same")


def test_a_count_is_what_the_file_keeps_of_it(tmp_path):
    """Of 23/28 it keeps six digits, and the same count in a run just measured is no change."""
    results.save(file_of(entry(cost=23 / 28, par=23 / 28)), tmp_path / "old.json")
    new = file_of(entry(cost=23 / 28, par=23 / 28), run="2025-01-02")
    found = compare(results.load(tmp_path / "old.json"), new, [entry()["fullname"]], True)
    assert [change.verdict for change in found.changes] == ["same"]


def test_a_count_is_set_beside_the_one_of_the_same_name():
    """What stands in the row is the count furthest from par, which need not be the same in both runs."""

    def counted(forward, backward):
        scores = [{"what": "sent forward", "cost": forward}, {"what": "sent backward", "cost": backward}]
        return entry(cost=max(forward, backward), par=1.0, scores=scores)

    found = judge(counted(0.0, 4096.0), counted(64.0, 4096.0))
    assert (found.verdict, found.old, found.new) == ("slower", 0.0, 64.0)
    assert judge(counted(8.0, 9.0), counted(8.0, 9.0)).verdict == "same"
    assert judge(counted(8.0, 9.0), counted(4.0, 9.0)).verdict == "faster"
    assert judge(counted(8.0, 9.0), counted(4.0, 9.5)).verdict == "slower"
