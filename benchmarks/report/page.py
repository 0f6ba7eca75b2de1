"""Write the report as one self-contained HTML file, which can be mailed.

It opens with what was found and what to use, goes through each machine's chapters (`chapters.py`), and ends
with how each number was measured (`notes.py`). `OPENING` and `chapters.CHAPTERS` are the order. The folder
`templates` has the HTML; whatever they are given is escaped. The page is light or dark as the reader's system
is (`page.css`). A script lets readers sort tables, see how a number was measured and save figures
(`page.js`); without it, the page is still complete.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup, escape

from minidist.benchmarks.harness import columns, machine
from minidist.benchmarks.harness.results import Results
from minidist.benchmarks.report import chapters, ladders, what_to_use
from minidist.benchmarks.report.answer import Question
from minidist.benchmarks.report.findings import MOST, findings
from minidist.benchmarks.report.notes import Notes
from minidist.benchmarks.report.pieces import Facts, Findings, Part, Piece, Words, identifier
from minidist.benchmarks.report.sections import goals


def what_was_found(machines: Mapping[str, Results]) -> Part:
    """The findings, and how to measure those that lack results."""
    found = findings(machines)
    pieces: list[Piece] = [Findings(found)]
    if len(found) < MOST:
        missing = f"{len(found)} of {MOST} findings: the others lack results. "
        pieces.append(Words(f"{missing}Run `minidist bench --full` to measure them."))
    return Part("findings", "What was found", pieces)


def what_should_i_use(machines: Mapping[str, Results]) -> Part:
    """The answer, which rests on no measurement."""
    return Part("answer", "What should I use?", what_to_use.pieces(Question()))


def cpu_ladders(machines: Mapping[str, Results]) -> Part | None:
    """The CPU ladder on each machine, if one measured it."""
    rows = ladders.cpu_rows(machines)
    if not rows:
        return None
    pieces = [Words(ladders.CPU_ABOUT, quiet=False), ladders.cpu_table(rows)]
    return Part("machines", ladders.CPU_TITLE, pieces, link="The CPU ladder on each machine")


OPENING: tuple[Callable[[Mapping[str, Results]], Part | None], ...] = (
    what_was_found,
    what_should_i_use,
    cpu_ladders,
)
"""What comes before the machines' chapters, in order."""


def page(machines: Mapping[str, Results]) -> str:
    """Return the whole file, for the results of one or more machines by slug, in that order."""
    parts = [part for make in OPENING if (part := make(machines))]
    for slug, found in machines.items():
        title = machine.title(found["machine_info"])
        parts.append(Part(identifier(slug), title, [Facts(_facts(found))], strong=True))
        parts += chapters.parts(slug, found)
    missing = ladders.first_cuda_ladder(machines)
    if missing.machine is None:
        pieces = chapters.cuda_ladder(missing, "cuda-ladder")
        parts.append(Part("no-gpu", "A GPU", pieces, link="A GPU: not measured"))
    return (
        _templates()
        .get_template("page.html")
        .render(
            parts=parts,
            notes=Notes(machines),
            chapter_titles=chapters.TITLES,
            keys=[column for column in columns.COLUMNS if column.key],
            machines=f"{len(machines)} machines" if len(machines) > 1 else "one machine",
            style=_file("page.css"),
            script=_file("page.js"),
        )
    )


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


def _facts(found: Results) -> dict[str, str]:
    info = found["machine_info"]
    met, of = goals(found)
    latest = found["runs"][max(found["runs"])]["software"]
    blas = latest["blas"]
    gpus = info["gpus"] or []
    return {
        "Goals met": f"{met} of {of}" if of else "",
        "GPU": _gpus(gpus) if gpus else "",
        "Driver": str(gpus[0]["driver"]) if gpus else "",
        "numba-cuda": (latest.get("numba-cuda") or "") if gpus else "",
        "Cores": str(info["cores"]),
        "Caches": ", ".join(f"{name} {size}" for name, size in info["caches"].items()),
        "BLAS": f"{blas['name']} {blas['version']}, {blas.get('architecture')} kernel" if blas else "",
        **{name: latest[name.lower()] or "" for name in ("Python", "NumPy", "torch", "Numba")},
        "System": latest["os"],
    }


def _gpus(gpus: list[dict[str, Any]]) -> str:
    first = gpus[0]
    many = f"{len(gpus)} x " if len(gpus) > 1 else ""
    memory = f", {first['memory_bytes'] / 2**30:.0f} GiB" if first["memory_bytes"] else ""
    return f"{many}{first['name']}{memory}, compute capability {first['compute_capability']}"
