"""Findings are computed: a number is its result's, what is open is called open, what is missing left out."""

import copy

import pytest

from minidist.benchmarks.harness import formats, results
from minidist.benchmarks.report import chapters, findings, verdicts
from minidist.benchmarks.report.pieces import Number
from tests.helpers import measured

EVERYTHING = measured.everything()


def found(*entries, **machine):
    return findings.findings({"m": measured.machine(*entries, **machine)}, most=99)


def text(*entries, **machine):
    (finding,) = found(*entries, **machine)
    return finding.text


def test_five_sentences_open_the_report():
    five = findings.findings({"m": EVERYTHING})
    assert len(five) == findings.MOST == 5
    assert len({each.chapter for each in five}) == 5
    for each in five:
        assert each.text.endswith(".")
        assert any(isinstance(word, Number) for word in each.words)
        assert each.rests_on


def test_each_number_is_its_results():
    for each in findings.findings({"m": EVERYTHING}, most=99):
        for word in each.words:
            if isinstance(word, Number):
                assert any(word.entry is entry for entry in each.rests_on)
                assert word.text in written(word.entry), word.text


def written(entry):
    """Every way in which a finding may write a figure of a result."""
    extra, stats = entry["extra_info"], entry["stats"]
    numbers = [value for value in extra.values() if isinstance(value, (int, float))]
    yield formats.seconds(stats["median"])
    if "memory" in extra:
        yield formats.size(sum(extra["memory"].values()))
    if "efficiency" in extra:
        yield f"{extra['efficiency'] * extra['size']:.2f} times"
    if "bubble" in extra:
        yield f"{100 * extra['bubble']['measured']:.1f}%"
    for value in numbers:
        yield from (formats.times(value), f"{formats.number(value)}%", f"{formats.number(value)} GFLOP/s")
        yield formats.size(value)


def test_strategies_are_counted_and_the_ends_named():
    made = text(*measured.strategies()[:1], *measured.strategies()[3:])
    assert made.startswith("1 training steps ran in turns")
    assert f"1 showed {verdicts.UNDECIDED}" in made
    assert "0.98" not in made  # which means nothing
    whole = found(*measured.strategies())[0].text
    assert "1 took less time, 1 took more, and 1 showed" in whole
    assert "ZeRO-1 (byte-small) with 0.54 times the time of torch ZeroRedundancyOptimizer" in whole
    assert "ZeRO-3 (byte-small) with 1.21 times the time of torch fully_shard" in whole


def test_another_measurement_is_another_sentence():
    changed = copy.deepcopy(measured.strategies())
    changed[2]["extra_info"] |= measured.beside("torch fully_shard", 0.12, 0.8)
    whole = found(*changed)[0].text
    assert "2 took less time, 0 took more" in whole
    assert "the extreme is ZeRO-1" in whole
    assert "1.21" not in whole


def test_a_slow_link_is_no_step_of_the_table():
    """There our local SGD is compared with a DDP that sends at each step over an emulated wire."""
    slow = measured.entry(
        "slow_link", "2 + 2 ranks", "sgd", 0.1, strategy="local SGD", layout="dp=4", model="byte-small",
        **measured.beside("torch DDP", 0.1, 0.12),
    )  # fmt: skip
    assert found(slow, *measured.strategies())[0].text.startswith("3 training steps ran in turns")
    assert found(slow) == []


def test_without_the_table_training_beside_libraries_counts():
    one = measured.entry(
        "zero", "ZeRO: a GPT", "zero", 0.1, label="stage 1", **measured.beside("torch FSDP", 0.1, 0.5)
    )
    own = measured.entry("pipeline", "P", "b", 0.1, **measured.beside("our own other form", 0.1, 0.5))
    assert text(one, own).startswith("1 training steps ran in turns")
    assert "ZeRO, stage 1 with 0.50 times the time of torch FSDP" in text(one, own)


def test_zero_is_beside_plain_data_parallelism_of_the_same_model_and_ranks():
    sentence = found(*measured.strategies())[1].text
    assert sentence == (
        "ZeRO-3 trains byte-small on 2 ranks in 33.0 MB per rank, where plain data parallelism takes 57.0 MB "
        "(58%), and sends 19.0 MB per step instead of 13.0 MB."
    )
    other = copy.deepcopy(measured.strategies())
    other[0]["extra_info"]["ranks"] = 4
    assert "plain data parallelism" not in " ".join(each.text for each in found(*other))


def test_scaling_is_on_as_many_ranks_as_there_are_cores_or_says_that_they_share():
    assert text(*measured.scaling()) == (
        "On 2 ranks one batch trains 1.86 times as fast as on one with data parallel (93% of the ideal) and "
        "1.76 times as fast as on one with ZeRO-2 (88% of the ideal)."
    )
    assert text(*measured.scaling(), cores=1).startswith("On 4 ranks, which share 1 core, one batch")


def test_pipelines_wait_as_measured_beside_the_simulation():
    assert text(*measured.pipelines()) == (
        "A pipeline's ranks wait for 23.1% of a step under GPipe (simulated: 20.0%) and 22.4% of a step "
        "under 1F1B (simulated: 20.0%)."
    )


def test_a_collective_that_cannot_be_told_apart_says_so():
    entries = measured.collectives()
    assert "All-reduce in shared memory of 1 MiB on 2 ranks takes 0.20 of gloo's time" in text(*entries)
    assert "the cost model's median error over 3 times is 10%" in text(*entries)
    for each in entries[:4]:
        each["extra_info"] |= measured.beside("gloo", 1e-3, 1.01)
    assert f"there is {verdicts.UNDECIDED} between minidist and gloo" in text(*entries)
    small, large = measured.collectives()[:2]
    small["extra_info"]["ranks"], large["extra_info"]["ranks"] = (
        2,
        4,
    )  # most bytes, not fewest ranks
    assert "of 64 KiB on 2 ranks takes 0.20 of gloo's time" in text(small, large)


def test_the_ladder_goes_from_the_first_rung_to_the_last():
    assert text(*measured.ladder()) == (
        "On one core the ladder of matrix products climbs from 0.0100 GFLOP/s (rung 1, python loops) to 104 "
        "GFLOP/s (rung 6, tile, n = 2,048), which is 104% of numpy.matmul's speed and 83.2% of the core's "
        "peak."
    )
    undecided = measured.ladder()
    undecided[-1]["extra_info"] |= measured.beside("numpy.matmul", 0.01, 0.99)
    assert f"with {verdicts.UNDECIDED} against numpy.matmul and" in text(*undecided)


def test_goals_name_the_farthest():
    goal = {"of": "median", "below": 0.01}
    missed = measured.entry("launch", "Starting", "slow", 0.025, goal=goal)
    met = measured.entry("launch", "Starting", "quick", 0.005, goal=goal)
    said = text(missed, met)
    assert said.startswith("This project meets 1 of the 2 goals that it set itself; ")
    assert said.endswith("; slow misses by most, at 2.50 times its limit.")
    told = found(missed, met)[-1]
    assert told.chapter == chapters.chapter_of(missed)  # where its link leads


@pytest.mark.parametrize("left_out", ["strategies", "pipelines", "scaling", "collectives", "ladder"])
def test_what_was_not_measured_has_no_sentence(left_out):
    gone = {each["fullname"] for each in getattr(measured, left_out)()}
    rest = [each for each in EVERYTHING["benchmarks"] if each["fullname"] not in gone]
    made = found(*rest)
    assert len(made) < len(findings.findings({"m": EVERYTHING}, most=99))
    assert not any(each["fullname"] in gone for finding in made for each in finding.rests_on)


def test_nothing_measured_is_nothing_found():
    assert found(measured.entry("x", "Other", "other", 0.1)) == []


def test_several_machines_are_named_and_the_first_that_has_it_speaks():
    two = {"a": measured.machine(*measured.ladder(), cpu="A"), "b": EVERYTHING}
    made = findings.findings(two)
    assert {each.slug for each in made} == {"a", "b"}
    (ladder,) = [each for each in made if each.chapter == "ladders"]
    assert ladder.machine.startswith("A,")
    assert results.newest(two["a"])
