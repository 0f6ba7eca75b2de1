"""Write the report as one self-contained HTML file, which can be mailed.

It opens with the card of one machine (`card.py`) and with findings, goes through the machine's chapters
(`chapters.py`), folds other machines away, and ends with how each number was measured. The folder `templates`
has the HTML; whatever they are given is escaped. The page is light or dark as the reader's system is
(`page.css`). A script lets readers sort tables, see how a number was measured and save figures (`page.js`);
without it, the page is still complete.

Each result has one note, however often it appears: the rounds and their spread, the peer that ran in turns
with it, the date, the commit, the command, and its index in the JSON file. On screen a number shows its note,
and on paper the note's number.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup, escape

from minidist.benchmarks.harness import columns, formats
from minidist.benchmarks.harness import describe_machine as machine
from minidist.benchmarks.harness.columns import Entry
from minidist.benchmarks.harness.results import Results, newest
from minidist.benchmarks.report import card, chapters, ladders
from minidist.benchmarks.report.decided_comparisons import UNDECIDED
from minidist.benchmarks.report.findings import findings
from minidist.benchmarks.report.pieces import (
    Facts,
    Figure,
    Figures,
    Findings,
    Folded,
    Part,
    Piece,
    Source,
    Words,
    identifier,
)
from minidist.benchmarks.report.tables import goals


def page(machines: Mapping[str, Results]) -> str:
    """Return the whole file: the first machine's results by slug, and the other machines' folded away."""
    (slug, found), *others = machines.items()
    parts = [_card(slug, found), _findings(slug, found), *chapters.parts(slug, found)]
    if ladders.first_cuda_ladder(machines) is None:
        parts.append(Part("no-gpu", "A GPU", [Words(ladders.CUDA_MISSING, quiet=False)]))
    parts.append(Part("software", "The software", [Facts(_software(found))]))
    if others:
        parts.append(_others(machines))
    return (
        _templates()
        .get_template("page.html")
        .render(
            parts=parts,
            notes=Notes(machines),
            chapter_titles=chapters.TITLES,
            keys=[column for column in columns.COLUMNS if column.key],
            machine=machine.title(found["machine_info"]),
            style=_file("page.css"),
            script=_file("page.js"),
        )
    )


def _card(slug: str, found: Results) -> Part:
    """The findings about this machine, and its ladder as one large chart."""
    info = found["machine_info"]
    pieces: list[Piece] = [Facts(card.facts(found), large=True)]
    if chart := ladders.cpu_bars(newest(found), info["cores"]):
        title = "From Python's loops to the last rung: a product of two matrices"
        pieces.append(Figures([Figure("ladder", title, chart)], wide=True))
    title = "Another machine" if info.get("another") else "This machine"
    return Part(identifier(slug), title, pieces, about=machine.title(info), strong=True)


def _findings(slug: str, found: Results) -> Part:
    """The findings, or how to measure some."""
    made = findings(slug, found)
    more = "Nothing that a finding rests on has been measured. Run `minidist bench`."
    return Part("findings", "What was found", [Findings(made)] if made else [Words(more)])


def _others(machines: Mapping[str, Results]) -> Part:
    """Each other machine's chapters, folded."""
    pieces: list[Piece] = []
    for slug, found in list(machines.items())[1:]:
        title, name = machine.title(found["machine_info"]), identifier(slug)
        own = [Part(name, title, [Facts(_software(found))], level=3), *chapters.parts(slug, found)]
        pieces.append(Folded(title, own))
    return Part("others", "Other machines", pieces)


def _software(found: Results) -> dict[str, str]:
    info = found["machine_info"]
    met, of = goals(found)
    latest = found["runs"][max(found["runs"])]["software"]
    blas, gpus = latest["blas"], info["gpus"] or []
    return {
        "Goals met": f"{met} of {of}" if of else "",
        "Driver": str(gpus[0]["driver"]) if gpus else "",
        "numba-cuda": (latest.get("numba-cuda") or "") if gpus else "",
        "BLAS": f"{blas['name']} {blas['version']}, {blas.get('architecture')} kernel" if blas else "",
        **{name: latest[name.lower()] or "" for name in ("Python", "NumPy", "torch", "Numba")},
        "System": latest["os"],
    }


@functools.cache
def _templates() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: _file(f"templates/{name}")),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    made.filters |= {"prose": prose, "identifier": identifier}
    return made


def prose(text: str) -> Markup:
    """Return plain text with `code` in it as HTML."""
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))


def _file(name: str) -> Markup:
    return Markup(resources.files(__package__).joinpath(name).read_text(encoding="utf-8"))


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
