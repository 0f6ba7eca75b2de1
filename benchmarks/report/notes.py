"""Notes at the end of the page that say how each number was measured.

Each result has one note, however often it appears: the rounds and their spread, the peer that ran in turns
with it, the date, the commit, the command, and its index in the JSON file. On screen a number shows its note
(`page.js`), and on paper the note's number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minidist.benchmarks.harness import columns, formats
from minidist.benchmarks.harness.columns import Entry
from minidist.benchmarks.harness.results import Results
from minidist.benchmarks.report.pieces import Source, identifier
from minidist.benchmarks.report.verdicts import UNDECIDED


@dataclass(frozen=True)
class Note:
    """How a result was measured, and where it is in its file."""

    label: str
    how: str
    command: str  # measures it again
    file: str
    index: int  # among the file's benchmarks
    fullname: str


class Notes:
    """The notes of one page, numbered as results appear on it."""

    def __init__(self, machines: Mapping[str, Results]) -> None:
        self._machines = machines
        self._indices = {
            (slug, entry["fullname"], entry["run"]): index
            for slug, found in machines.items()
            for index, entry in enumerate(found["benchmarks"])
        }
        self._numbers: dict[tuple[str, int], int] = {}
        self._anchored: set[tuple[str, int]] = set()
        self.listed: list[Note] = []

    def anchor(self, source: Source) -> str | None:
        """Return the id for a result's row, or None if an earlier row already has it."""
        result = self._result(source)
        if result in self._anchored:
            return None
        self._anchored.add(result)
        return self.target(source)

    def target(self, source: Source) -> str:
        """Return the id that a result's row has, or will have."""
        slug, index = self._result(source)
        return f"{identifier(slug)}-result-{index}"

    def number(self, source: Source) -> int:
        """Return the number of a result's note, which is written on first use."""
        result = self._result(source)
        if result not in self._numbers:
            self._numbers[result] = len(self._numbers) + 1
            self.listed.append(note(source, self._machines[result[0]], result[1]))
        return self._numbers[result]

    def __len__(self) -> int:
        """Return the number of results on the page."""
        return len(self.listed)

    def _result(self, source: Source) -> tuple[str, int]:
        slug, entry = source
        return slug, self._indices[slug, entry["fullname"], entry["run"]]


def note(source: Source, found: Results, index: int) -> Note:
    """Return the note of a result, which is at `index` in its machine's file."""
    slug, entry = source
    stats, extra, run = entry["stats"], entry["extra_info"], found["runs"][entry["run"]]
    parts = [_spread(stats)]
    if "peer" in extra:
        parts.append(_peer(entry))
    if "over_yardstick" in extra:
        middle = f"{extra['over_yardstick_q1']:.3g} to {extra['over_yardstick_q3']:.3g}"
        parts.append(
            f"Also in turns with {extra['yardstick']} in one process, median "
            f"{formats.seconds(extra['yardstick_median'])}; middle half of the rounds' ratios {middle}."
        )
    if "memory_source" in extra:
        parts.append(f"Memory: {extra['memory_source']}.")
    commit = run["commit"] or ""
    changed = " with changes" if commit.endswith("+") else ""
    at = f", commit {commit.rstrip('+')}{changed}" if commit else ""
    parts.append(f"{run['mode'].capitalize()} run of {entry['run'][:16].replace('T', ' ')} UTC{at}.")
    how = " ".join(parts)
    return Note(
        columns.label(entry), how, command(entry, run["mode"]), f"{slug}.json", index, entry["fullname"]
    )


def command(entry: Entry, mode: str) -> str:
    """Return the command that measures a result again, with the others of its function."""
    full = " --full" if mode == "full" else ""
    function = entry["name"].partition("[")[0]
    return f"minidist bench {entry['suite'].removeprefix('bench_')}{full} -k {function}"


def _spread(stats: dict[str, Any]) -> str:
    median, rounds = formats.seconds(stats["median"]), stats["rounds"]
    if rounds < 2:
        return f"{median} in a single round, which has no spread."
    text = f"Median {median} of {rounds} rounds"
    if {"q1", "q3"} <= stats.keys():
        text += f", their middle half {formats.seconds(stats['q1'])} to {formats.seconds(stats['q3'])}"
    if {"min", "max"} <= stats.keys():
        text += f", all {formats.seconds(stats['min'])} to {formats.seconds(stats['max'])}"
    return f"{text}."


def _peer(entry: Entry) -> str:
    extra = entry["extra_info"]
    pairs = f"{extra['pair_ratio_q1']:.3g} to {extra['pair_ratio_q3']:.3g}"
    verdict = f"; {UNDECIDED}" if columns.undecided(entry) else ""
    return (
        f"In turns with {extra['peer']}, median {formats.seconds(extra['peer_median'])}; middle half of the "
        f"pairs' ratios {pairs}{verdict}."
    )
