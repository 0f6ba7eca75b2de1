"""The report as one HTML file: no script, no font, no picture and no style from elsewhere, so it can be
mailed.

Light and dark follow the reader's system; on a phone tables scroll sideways under their first column.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape
from typing import Any

from minidist.benchmarks import columns, ladder, ladder_plots, machine, report
from minidist.benchmarks.ladder import Ladder
from minidist.benchmarks.plots import Plot, plot
from minidist.benchmarks.report import Section
from minidist.benchmarks.results import Results

STYLE = """
:root { color-scheme: light dark;
  --ground: #fdfdfc; --card: #ffffff; --ink: #1d2125; --muted: #5b636c; --grid: #e6e8ea; --line: #d9dcdf;
  --accent: #0b6e99; --peer: #7a828b; --good: #217a4b; --bad: #b4560e;
  --series-0: #0b6e99; --series-1: #c2550a; --series-2: #237a4c; --series-3: #8346b4;
  --series-4: #b02a53; --series-5: #77690a; --series-6: #3f51b5; --series-7: #00786e; }
@media (prefers-color-scheme: dark) { :root {
  --ground: #15181b; --card: #1c2024; --ink: #e7e9eb; --muted: #a3abb3; --grid: #2c3237; --line: #343a40;
  --accent: #63bde6; --peer: #9aa3ac; --good: #6ccb97; --bad: #f0a35e;
  --series-0: #63bde6; --series-1: #f0a35e; --series-2: #6ccb97; --series-3: #c79cea;
  --series-4: #f38aa8; --series-5: #d3c454; --series-6: #9daaf2; --series-7: #5fd0c5; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .25rem; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .5rem; padding-top: 1.25rem; border-top: 2px solid var(--accent); }
h3 { font-size: 1.05rem; margin: 1.75rem 0 .25rem; }
p { margin: .25rem 0 .75rem; max-width: 46rem; }
.quiet, figcaption, caption { color: var(--muted); font-size: .875rem; }
nav a { color: var(--accent); margin-right: 1rem; white-space: nowrap; }
dl { display: flex; flex-wrap: wrap; gap: .5rem 2rem; margin: .75rem 0; }
dt { color: var(--muted); font-size: .8rem; } dd { margin: 0; font-weight: 600; }
figure { margin: 1rem 0; max-width: 33rem; }
figure svg { display: block; width: 100%; height: auto; overflow: visible; }
figure svg text { font-family: system-ui, sans-serif !important; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; background: var(--card); }
table { border-collapse: collapse; width: 100%; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .7rem; text-align: left; white-space: nowrap; border-top: 1px solid var(--grid); }
thead :is(th, td) { border-top: 0; color: var(--muted); font-weight: 500; }
th[scope=row] { position: sticky; left: 0; background: var(--card); font-weight: 600; }
.right { text-align: right; } .good { color: var(--good); } .bad { color: var(--bad); }
@media (max-width: 34rem) { th[scope=row] { white-space: normal; min-width: 8.5rem; } }
@media print { .scroll { overflow: visible; } }
"""


def page(machines: Mapping[str, Results]) -> str:
    """The whole file, from the results of one or more machines by slug, in that order."""
    title = "minidist, measured"
    links = "".join(
        f'<a href="#{escape(slug)}">{escape(machine.title(found["machine_info"]))}</a>'
        for slug, found in machines.items()
    )
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{title}</title>\n<link rel="icon" href="data:,">\n<style>{STYLE}</style>\n</head>\n'
    )
    intro = (
        "Programs that are compared ran in turn, A B A B, so that their ratio holds where the machine "
        "drifts. It is our time over the other's: below 1 minidist is faster; in brackets stands the middle "
        "half of the ratios of single pairs. Times are medians, and the spread is half the width of their "
        "middle half."
    )
    body = "".join(_machine(slug, found) for slug, found in machines.items())
    if not any(ladder.of(slug, found) for slug, found in machines.items()):
        body += _ladder(ladder.pick({}), "cuda-ladder")
    navigation = f"<nav>{links}</nav>" if len(machines) > 1 else ""
    return (
        f"{head}<body><main>\n<h1>{title}</h1>\n<p>{intro}</p>\n{navigation}\n{body}</main></body>\n</html>\n"
    )


def _machine(slug: str, found: Results) -> str:
    info = found["machine_info"]
    met, of = report.goals(found)
    latest = found["runs"][max(found["runs"])]["software"]
    blas = latest["blas"]
    gpus = info["gpus"] or []
    facts = {
        "Goals met": f"{met} of {of}" if of else "",
        "GPU": _gpus(gpus) if gpus else "",
        "Driver": str(gpus[0]["driver"]) if gpus else "",
        "numba-cuda": (latest.get("numba-cuda") or "") if gpus else "",
        "Cores": str(info["cores"]),
        "Caches": ", ".join(f"{name} {size}" for name, size in info["caches"].items()),
        "BLAS": f"{blas['name']} {blas['version']}" if blas else "",
        **{name: latest[name.lower()] or "" for name in ("Python", "NumPy", "torch", "Numba")},
        "System": latest["os"],
    }
    listed = "".join(
        f"<div><dt>{name}</dt><dd>{escape(text)}</dd></div>" for name, text in facts.items() if text
    )
    shown = "".join(
        _section(section, found, f"{slug}-{number}") for number, section in enumerate(report.sections(found))
    )
    climbed = ladder.of(slug, found)
    if climbed:
        shown = _ladder(climbed, f"{slug}-ladder") + shown
    return f'<h2 id="{escape(slug)}">{escape(machine.title(info))}</h2>\n<dl>{listed}</dl>\n{shown}'


def _gpus(gpus: list[dict[str, Any]]) -> str:
    first = gpus[0]
    many = f"{len(gpus)} x " if len(gpus) > 1 else ""
    memory = f", {first['memory_bytes'] / 2**30:.0f} GiB" if first["memory_bytes"] else ""
    return f"{many}{first['name']}{memory}, compute capability {first['compute_capability']}"


def _ladder(climbed: Ladder, name: str) -> str:
    """The CUDA ladder at a glance, or that it was not measured."""
    figures = ""
    if climbed.machine:
        drawn = [
            ladder_plots.bars(climbed, f"{name}-bars"),
            ladder_plots.roofline(climbed, f"{name}-roofline"),
        ]
        figures = "".join(_figure(each) for each in drawn if each)
    headings = "".join(
        f'<th scope="col"{_class("right" if index else "")}>{escape(heading)}</th>'
        for index, heading in enumerate(ladder.headings(climbed))
    )
    rows = "".join(
        f'<tr><th scope="row">{escape(row.rung)}</th>'
        + "".join(
            f"<td{_class('right' if index else '')}>{escape(text)}</td>"
            for index, text in enumerate(ladder.cells(climbed, row))
        )
        + "</tr>"
        for row in climbed.rows
    )
    return (
        f'<section>\n<h3 id="{name}">{escape(climbed.title)}</h3>\n'
        f'<p class="quiet">{_prose(climbed.about)}</p>\n{figures}'
        f"{_scrolling(name, headings, rows)}"
        + (f'<p class="quiet">{escape(climbed.provenance)}</p>\n' if climbed.provenance else "")
        + "</section>\n"
    )


def _section(section: Section, found: Results, name: str) -> str:
    drawn = plot(section, name)
    figure = _figure(drawn) if drawn else ""
    heading = f'<h3 id="{name}">{escape(section.title)}</h3>\n<p class="quiet">{_prose(section.about)}</p>\n'
    return f"<section>\n{heading}{figure}{_table(section, found, name)}</section>\n"


def _figure(drawn: Plot) -> str:
    svg = drawn.svg.replace("<svg", f'<svg role="img" aria-label="{escape(drawn.alt)}"', 1)
    return f"<figure>{svg}<figcaption>{escape(drawn.caption)}</figcaption></figure>\n"


def _table(section: Section, found: Results, name: str) -> str:
    shown = section.columns()
    headings = "".join(
        f'<th scope="col"{_class("right" if column.right else "")}>{escape(column.heading)}</th>'
        for column in shown
    )
    rows = []
    for entry in section.entries:
        judged = columns.goal(entry)
        cells = []
        for column in shown:
            kind = "right" if column.right else ""
            if column is columns.GOAL and judged:
                kind = "good" if judged[2] else "bad"
            cells.append(f"<td{_class(kind)}>{escape(column.cell(entry) or '')}</td>")
        rows.append(f'<tr><th scope="row">{escape(columns.label(entry))}</th>{"".join(cells)}</tr>')
    return (
        _scrolling(name, headings, "".join(rows))
        + f'<p class="quiet">{escape(report.provenance(found, section.entries))}</p>\n'
    )


def _scrolling(name: str, headings: str, rows: str) -> str:
    """A table in a region that scrolls: it has to be reachable with the keyboard, and to say what it is."""
    return (
        f'<div class="scroll" role="region" aria-labelledby="{name}" tabindex="0"><table>\n'
        f"<thead><tr><td></td>{headings}</tr></thead>\n<tbody>{rows}</tbody></table></div>\n"
    )


def _prose(text: str) -> str:
    """Plain text with `code` in it, as HTML."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""
