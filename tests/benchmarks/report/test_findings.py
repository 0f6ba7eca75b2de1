"""Findings are computed: a number is its result's, what is open is called open, what is missing left out."""

import re
import subprocess
from pathlib import Path

import pytest

from minidist.benchmarks.harness import results
from minidist.benchmarks.report import decided_comparisons, findings
from tests.helpers import measured
from tests.helpers.clocks import HANG

EVERYTHING = measured.everything()
# `make bench` writes what it measures to these files: tests judge only what was committed.
CHANGED = subprocess.run(
    ["git", "ls-files", "--modified", "--others", "benchmarks/results"],
    capture_output=True,
    text=True,
    timeout=HANG,
).stdout.split()
COMMITTED = [
    results.load(path) for path in Path("benchmarks/results").glob("*.json") if str(path) not in CHANGED
]
NO_CLASSES = {"NumPy", "ZeRO", "PowerSGD", "DualPipeV", "KiB", "MiB"}


def found(*entries, **machine):
    return findings.findings("m", measured.machine(*entries, **machine), most=99)


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


def changed(entries, at, **extra):
    """The entries, one of them with other figures."""
    entries[at]["extra_info"] |= extra
    return entries


def undecided(entries, peer, *which):
    for at in which:
        changed(entries, at, **measured.beside(peer, 0.01, 0.99))
    return entries


def one(suite, name, **extra):
    return measured.entry(suite, f"{suite.capitalize()}: a GPT", name, 0.1, **extra)


LIMIT = {"of": "median", "below": 0.2}
SLOW = one(
    "slow_link", "sgd", strategy="local SGD", layout="dp=4", model="byte-small",
    **measured.beside("torch DDP", 0.1, 0.12),
)  # fmt: skip
BEYOND = (
    f"there is {decided_comparisons.UNDECIDED} between minidist and gloo. "
    "Of 2 collectives, 0 are faster, 0 slower"
)
CASES = {
    "undecided alone": (
        [*measured.strategies()[:1], *measured.strategies()[3:]],
        ["Of 1 training steps beside another library's, 0 are faster, 0 slower and 1 undecided."],
    ),
    "another measurement": (
        changed(measured.strategies(), 2, ranks=4, **measured.beside("torch fully_shard", 0.12, 0.8)),
        [
            "Of 3 training steps beside another library's, 2 are faster, 0 slower and 1 undecided. ZeRO-1 "
            "(byte-small) takes 0.54 of torch's time.",
            "On 2 ranks ZeRO-1 holds 45.0 MB a rank, plain data parallelism 57.0 MB. A step of it sends "
            "13.0 MB instead of 13.0 MB.",
        ],
    ),
    "other ranks than data parallelism's": (changed(measured.strategies()[:2], 0, ranks=4)[1:], [
        "Of 1 training steps beside another library's, 1 are faster, 0 slower and 0 undecided. ZeRO-1 "
        "(byte-small) takes 0.54 of torch's time."
    ]),
    "a slow link is no step of the table": ([SLOW], []),
    "training beside libraries, and not beside our other forms": (
        [
            one("zero", "stage 1", **measured.beside("torch FSDP", 0.1, 0.5)),
            one("pipeline", "b", **measured.beside("our own other form", 0.1, 0.5)),
        ],
        [
            "Of 1 training steps beside another library's, 1 are faster, 0 slower and 0 undecided. Zero, "
            "stage 1 takes 0.50 of torch's time."
        ],
    ),
    "no collective told apart": (
        undecided(measured.collectives()[:2], "gloo", 0, 1),
        [f"For 1 MiB on 2 ranks {BEYOND} and 2 undecided."],
    ),
    "the most bytes on the fewest ranks": (
        changed(measured.collectives()[:2], 1, ranks=4),
        [
            "All-reduce in shared memory of 64 KiB on 2 ranks takes 0.20 of gloo's time. Of 2 collectives, 2 "
            "are faster, 0 slower and 0 undecided."
        ],
    ),
    "a recomputation that costs nothing": (
        [one("recompute", "r", **measured.beside("without", 0.1, 1.01))],
        ["Steps with and without recomputed activations show no difference beyond the spread."],
    ),
    "the farthest goal": (
        [
            one("launch", "quick", goal=LIMIT),
            one("launch", "near", goal={**LIMIT, "below": 0.09}),
            one("launch", "very_slow", goal={**LIMIT, "below": 0.04}),
        ],
        [
            "Here the project meets 1 of the 3 goals that it set itself. Farthest: very slow, at 2.50 times "
            "its limit."
        ],
    ),
    "nothing": ([one("x", "other")], []),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_open_or_missing_is_said_or_left_out(case):
    entries, expected = CASES[case]
    assert [each.text for each in found(*entries)] == expected


@pytest.mark.parametrize("left_out", ["strategies", "pipelines", "scaling", "collectives", "ladder"])
def test_what_was_not_measured_has_no_sentence(left_out):
    gone = {each["fullname"] for each in getattr(measured, left_out)()}
    made = found(*(each for each in EVERYTHING["benchmarks"] if each["fullname"] not in gone))
    assert len(made) < len(findings.findings("m", EVERYTHING, most=99))
    assert not any(each["fullname"] in gone for finding in made for each in finding.rests_on)


def test_another_machines_findings_say_whose_they_are():
    foreign = measured.machine(*measured.ladder(), cpu="A")
    assert findings.findings("a", foreign)[0].machine == ""
    foreign["machine_info"]["another"] = True
    assert findings.findings("a", foreign)[0].machine.startswith("another machine: A,")
