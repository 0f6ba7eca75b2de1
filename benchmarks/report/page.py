"""Write the report as one self-contained HTML file, which can be mailed.

It opens with what was found and what to use (`page_findings.py`), goes through each machine's chapters
(`page_chapters.py`), and ends with how each number was measured (`page_notes.py`). The page is light or dark
as the reader's system is (`page.css`). A script lets readers sort tables, see how a number was measured and
save figures (`page.js`); without it, the page is still complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib import resources

from minidist.benchmarks.harness import machine
from minidist.benchmarks.harness.results import Results
from minidist.benchmarks.report import ladder, page_findings, page_tables, side_by_side
from minidist.benchmarks.report.answer import Question
from minidist.benchmarks.report.findings import findings
from minidist.benchmarks.report.page_chapters import Machine, cuda_ladder
from minidist.benchmarks.report.page_html import classes, identifier
from minidist.benchmarks.report.page_notes import KEYS, Notes
from minidist.benchmarks.report.page_tables import Shown

TITLE = "minidist, measured"
ABOUT = (
    "minidist multiplies matrices and trains models on many ranks, by hand, in code small enough to read. "
    "This page compares its speed and memory with those of the libraries that people would use instead."
)
# The page loads nothing from the network, and with this policy a browser would refuse to.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
READING = (
    "Compared programs ran in turns, A B A B, so that their ratio holds even if the machine drifts. The "
    "ratio is our time over the peer's: below 1 minidist is faster. The brackets hold the middle half of the "
    "pairs' ratios, from the first quartile to the third. If that range, widened for few pairs, contains 1, "
    "the result is undecided. Times are medians, and the spread is half the width of their middle half. "
    "Press a number, or the small number next to a name, to see how it was measured."
)


def page(machines: Mapping[str, Results]) -> str:
    """Return the whole file, for the results of one or more machines by slug, in that order."""
    notes = Notes(dict(machines))
    first = page_findings.findings(findings(machines), notes) + page_findings.what_to_use(Question())
    contents = {"findings": "What was found", "answer": "What should I use?"}
    if shares := side_by_side.rows(machines):
        first += (
            f'<section id="machines">\n<h2>{side_by_side.TITLE}</h2>\n<p>{side_by_side.ABOUT}</p>\n'
            f"{page_tables.of_shares(shares, notes, 'machines')}</section>\n"
        )
        contents["machines"] = "The CPU ladder on each machine"
    body, named = "", set()
    for slug, found in machines.items():
        each = Machine(Shown(slug, found, notes))
        body += each.html()
        contents[identifier(slug)] = machine.title(found["machine_info"])
        named.add(identifier(slug))
        contents |= each.contents
    if not any(ladder.of(slug, found) for slug, found in machines.items()):
        missing = cuda_ladder(ladder.pick({}), "cuda-ladder", None)
        body += f'<section id="no-gpu">\n<h2>A GPU</h2>\n{missing}</section>\n'
        contents["no-gpu"] = "A GPU: not measured"
    contents["notes"] = "How it was measured"
    links = "".join(
        f'<li{classes("machine" if name in named else "")}><a href="#{name}">{escape(title)}</a></li>'
        for name, title in contents.items()
    )
    several = f"{len(machines)} machines" if len(machines) > 1 else "one machine"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{TITLE}</title>\n<link rel="icon" href="data:,">\n'
        f"<style>\n{_file('page.css')}</style>\n</head>\n"
        '<body>\n<a class="skip" href="#findings">To the findings</a>\n<div class="page">\n'
        f"<header><h1>{TITLE}</h1><p>{ABOUT}</p>"
        f'<p class="quiet">{len(notes)} results of {several}.</p></header>\n'
        f'<nav aria-label="Contents"><ol>{links}</ol></nav>\n'
        f"<main>\n{first}{body}{_notes(notes)}</main>\n</div>\n"
        f"<script>\n{_file('page.js')}</script>\n</body>\n</html>\n"
    )


def _notes(notes: Notes) -> str:
    keys = "; ".join(f"{heading}: <code>{escape(key)}</code>" for heading, key in KEYS.items())
    return (
        f'<section id="notes">\n<h2>How it was measured</h2>\n<p>{READING}</p>\n'
        f'<p class="quiet">The key of each column in a result of the JSON file: {keys}.</p>\n'
        f"<details><summary>All {len(notes)} notes</summary>\n{notes.html()}</details>\n</section>\n"
    )


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
