"""Notes at the end of the page that say how each number was measured.

Each result has one note, however often it appears: the rounds and their spread, the peer that ran in turns
with it, the date, the commit, the command, and its index in the JSON file. On screen a number shows its note
(`page.js`), and on paper the note's number.
"""

from __future__ import annotations

from html import escape
from typing import Any

from minidist.benchmarks.harness import columns, formats
from minidist.benchmarks.harness.columns import Column, Entry
from minidist.benchmarks.harness.results import Results
from minidist.benchmarks.report.page_html import identifier
from minidist.benchmarks.report.verdicts import UNDECIDED

# The key of each column's figures in a result.
KEYS = {
    "time": "stats.median",
    "GFLOP/s": "extra_info.gflops",
    "of the peer's speed": "extra_info.percent_of_peer",
    "of the FMA peak": "extra_info.percent_of_peak",
    "of the GPU's peak": "extra_info.percent_of_gpu_peak",
    "ratio of times": "extra_info.ratio (pair_ratio_q1–pair_ratio_q3)",
    "time minus peer's": "extra_info.beyond_peer",
    "goal": "extra_info.goal",
    "peer": "extra_info.peer",
    "peer's time": "extra_info.peer_median",
    "predicted": "extra_info.predicted",
    "GB/s": "extra_info.bus_gb_per_s",
    "rows/s": "extra_info.rows_per_s",
    "sent per step": "extra_info.bytes_per_step",
    "communication hidden": "extra_info.comm_overlap",
    "spread": "stats.iqr / stats.median / 2",
    "rounds": "stats.rounds",
    "over one process": "extra_info.over_yardstick",
    "efficiency": "extra_info.efficiency",
    "cost": "extra_info.cost and par",
    "memory of the fullest rank": "sum of extra_info.memory",
    "parameters, gradients, state": "extra_info.held",
    "peer's memory": "extra_info.peer_memory",
    "the one idea": "extra_info.idea",
    "lines": "extra_info.lines",
    "note": "extra_info.note",
}
_BY_CELL = {column.cell: KEYS.get(column.heading, "") for column in columns.COLUMNS}


def key(column: Column) -> str:
    """Return the key of a column's figures in a result, even if the column was renamed."""
    return _BY_CELL.get(column.cell, "")


class Notes:
    """The notes of one page, numbered as results appear on it."""

    def __init__(self, machines: dict[str, Results]) -> None:
        self._machines = machines
        self._indices = {
            (slug, entry["fullname"], entry["run"]): index
            for slug, found in machines.items()
            for index, entry in enumerate(found["benchmarks"])
        }
        self._numbers: dict[tuple[str, int], int] = {}
        self._anchored: set[tuple[str, int]] = set()
        self._texts: list[str] = []

    def anchor(self, slug: str, entry: Entry) -> str:
        """Return the id for a result's row, or "" if an earlier row already has it."""
        result = slug, self._index(slug, entry)
        if result in self._anchored:
            return ""
        self._anchored.add(result)
        return self.target(slug, entry)

    def target(self, slug: str, entry: Entry) -> str:
        """Return the id that a result's row has, or will have."""
        return f"{identifier(slug)}-result-{self._index(slug, entry)}"

    def name(self, slug: str, entry: Entry) -> str:
        """Return the id of a result's note, which is written on first use."""
        result = slug, self._index(slug, entry)
        if result not in self._numbers:
            self._numbers[result] = len(self._numbers) + 1
            self._texts.append(how(entry, self._machines[slug], slug, result[1]))
        return f"note-{self._numbers[result]}"

    def mark(self, slug: str, entry: Entry) -> str:
        """Return the link to a result's note, which shows the note's number."""
        name = self.name(slug, entry)
        label = f"How this was measured: note {name.removeprefix('note-')}"
        return f'<a class="note" href="#{name}" aria-label="{label}">{name.removeprefix("note-")}</a>'

    def html(self) -> str:
        """Return all notes, in order."""
        items = "".join(f'<li id="note-{number}">{text}</li>\n' for number, text in enumerate(self._texts, 1))
        return f'<ol class="notes">\n{items}</ol>\n'

    def __len__(self) -> int:
        """Return the number of results on the page."""
        return len(self._texts)

    def _index(self, slug: str, entry: Entry) -> int:
        return self._indices[slug, entry["fullname"], entry["run"]]


def how(entry: Entry, found: Results, slug: str, index: int) -> str:
    """Return as HTML how a result was measured, and where it is in its file."""
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
    told = " ".join(map(escape, parts))
    return (
        f"<b>{escape(columns.label(entry))}</b>: {told} "
        f"Measure again: <code>{escape(command(entry, run['mode']))}</code>. "
        f"In <code>{escape(slug)}.json</code>, <code>benchmarks[{index}]</code>: "
        f"<code>{escape(entry['fullname'])}</code>."
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
