"""Findings are computed: a number is its result's, what is open is called open, what is missing left out."""

import copy
import re
from pathlib import Path

import pytest

from minidist.benchmarks.harness import formats, results
from minidist.benchmarks.report import chapters, findings
from minidist.benchmarks.report import decided_comparisons as verdicts
from minidist.benchmarks.report.pieces import Number
from tests.helpers import measured

EVERYTHING = measured.everything()
COMMITTED = [results.load(path) for path in Path("benchmarks/results").glob("*.json")]
NO_CLASSES = {"NumPy", "ZeRO", "PowerSGD", "KiB", "MiB"}


def found(*entries, **machine):
    return findings.findings("m", measured.machine(*entries, **machine), most=99)


def text(*entries, **machine):
    (finding,) = found(*entries, **machine)
    return finding.text


def faults(found):
    """Sentences of findings that are too long, or that name a class or a function."""
    sentences = [each for made in found for each in re.split(r"(?<=[.!?]) ", made.text)]
    assert all(each.endswith(".") for each in sentences)
    long = [each for each in sentences if len(each.split()) > findings.LONGEST]
    named = [each for each in sentences if {*re.findall(r"\w*[a-z][A-Z]\w*|\w+_\w+", each)} - NO_CLASSES]
    return long + named


@pytest.mark.parametrize("of", [EVERYTHING, *COMMITTED], ids=lambda of: of["machine_info"]["cpu"])
def test_sentences_are_short_and_name_no_class_and_no_function(of):
    made = findings.findings("m", of, most=99)
    assert len(made) >= 7
    assert findings.LONGEST == 20
    assert faults(made) == []
    assert all(each.rests_on for each in made)


@pytest.mark.parametrize("label", ["FullyShard", "fully_shard", "a name of very many words " * 3])
def test_a_planted_class_and_a_long_sentence_are_found(label):
    beside = measured.beside("torch fully_shard", 0.1, 0.5)
    assert len(faults(found(measured.entry("zero", "Z", "zero", 0.1, label=label, **beside)))) == 1


def test_as_many_findings_as_are_read():
    assert len(findings.findings("m", EVERYTHING)) <= findings.MOST == 8


def test_each_number_is_its_results():
    for each in findings.findings("m", EVERYTHING, most=99):
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
    assert made == ("Of 1 training steps beside another library's, 0 are faster, 0 slower and 1 undecided.")
    assert (of(found(*measured.strategies()), "strategies")) == (
        "Of 3 training steps beside another library's, 1 are faster, 1 slower and 1 undecided. ZeRO-1 "
        "(byte-small) takes 0.54 of torch's time. ZeRO-3 (byte-small) takes 1.21 of torch's time."
    )


def of(several, chapter):
    (only,) = [each.text for each in several if each.chapter == chapter]
    return only


def test_another_measurement_is_another_sentence():
    changed = copy.deepcopy(measured.strategies())
    changed[2]["extra_info"] |= measured.beside("torch fully_shard", 0.12, 0.8)
    whole = of(found(*changed), "strategies")
    assert "2 are faster, 0 slower" in whole
    assert "1.21" not in whole


def test_a_slow_link_is_no_step_of_the_table():
    """There our local SGD is compared with a DDP that sends at each step over an emulated wire."""
    slow = measured.entry(
        "slow_link", "2 + 2 ranks", "sgd", 0.1, strategy="local SGD", layout="dp=4", model="byte-small",
        **measured.beside("torch DDP", 0.1, 0.12),
    )  # fmt: skip
    assert of(found(slow, *measured.strategies()), "strategies").startswith("Of 3 training steps")
    assert found(slow) == []


def test_without_the_table_training_beside_libraries_counts():
    one = measured.entry(
        "zero", "ZeRO: a GPT", "zero", 0.1, label="stage 1", **measured.beside("torch FSDP", 0.1, 0.5)
    )
    own = measured.entry("pipeline", "P", "b", 0.1, **measured.beside("our own other form", 0.1, 0.5))
    assert text(one, own).startswith("Of 1 training steps")
    assert "ZeRO, stage 1 takes 0.50 of torch's time" in text(one, own)


def test_zero_is_beside_plain_data_parallelism_of_the_same_model_and_ranks():
    assert of(found(*measured.strategies()), "zero") == (
        "On 2 ranks ZeRO-3 holds 33.0 MB a rank, plain data parallelism 57.0 MB. A step of it sends 19.0 MB "
        "instead of 13.0 MB."
    )
    other = copy.deepcopy(measured.strategies())
    other[0]["extra_info"]["ranks"] = 4
    assert "plain data parallelism" not in " ".join(each.text for each in found(*other))


def test_scaling_says_that_a_rank_has_one_thread_and_other_tables_compare_with_all_cores():
    assert text(*measured.scaling()) == (
        "With one thread a rank, 2 ranks train 1.86 times (data parallel) and 1.76 times (ZeRO-2) as fast as "
        "one. The tables of strategies compare with one process on all cores, so they gain less."
    )
    assert text(*measured.scaling(), cores=1).startswith("With one thread a rank, 4 ranks on 1 core train")


def test_pipelines_wait_as_measured_beside_the_simulation():
    assert text(*measured.pipelines()) == (
        "GPipe's ranks wait for 23.1% of a step; the simulation says 20.0%. 1F1B's ranks wait for 22.4% of a "
        "step; the simulation says 20.0%."
    )


def test_a_collective_that_cannot_be_told_apart_says_so():
    entries = measured.collectives()
    assert "All-reduce in shared memory of 1 MiB on 2 ranks takes 0.20 of gloo's time" in text(*entries)
    assert "predictions are off by 10% in the median" in text(*entries)
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
        "On one core, matrix products climb from 0.0100 GFLOP/s at rung 1 to 104 GFLOP/s at rung 6. That is "
        "104% of NumPy's speed. The core's peak is used to 83.2%."
    )
    undecided = measured.ladder()
    undecided[-1]["extra_info"] |= measured.beside("numpy.matmul", 0.01, 0.99)
    assert "The last rung and NumPy show no difference beyond the spread." in text(*undecided)


def test_goals_name_the_farthest():
    goal = {"of": "median", "below": 0.01}
    missed = measured.entry("launch", "Starting", "slow", 0.025, goal=goal)
    met = measured.entry("launch", "Starting", "quick", 0.005, goal=goal)
    said = text(missed, met)
    assert said == (
        "Here the project meets 1 of the 2 goals that it set itself. Farthest: slow, at 2.50 times its limit."
    )
    told = found(missed, met)[-1]
    assert told.chapter == chapters.chapter_of(missed)  # where its link leads


@pytest.mark.parametrize("left_out", ["strategies", "pipelines", "scaling", "collectives", "ladder"])
def test_what_was_not_measured_has_no_sentence(left_out):
    gone = {each["fullname"] for each in getattr(measured, left_out)()}
    rest = [each for each in EVERYTHING["benchmarks"] if each["fullname"] not in gone]
    made = found(*rest)
    assert len(made) < len(findings.findings("m", EVERYTHING, most=99))
    assert not any(each["fullname"] in gone for finding in made for each in finding.rests_on)


def test_nothing_measured_is_nothing_found():
    assert found(measured.entry("x", "Other", "other", 0.1)) == []


def test_another_machines_findings_say_whose_they_are():
    foreign = measured.machine(*measured.ladder(), cpu="A")
    assert findings.findings("a", foreign)[0].machine == ""
    foreign["machine_info"]["another"] = True
    assert findings.findings("a", foreign)[0].machine.startswith("another machine: A,")
