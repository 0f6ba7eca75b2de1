"""The pieces of HTML that make up the report's page; each function escapes its arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from minidist.benchmarks.report.plots import Plot

UNITS = {
    "ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0,
    "B": 1.0, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
    "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30,
}  # fmt: skip
VALUE = re.compile(r"[±<]?\s?([-−+]?\d[\d,]*\.?\d*)\s?([a-zA-Zµ]*)")


@dataclass(frozen=True)
class Cell:
    """One cell of a table: its text, style and note."""

    text: str
    kind: str = ""  # a CSS class: right, good, bad, undecided, wide
    note: str = ""  # the id of its note, if that differs from its row's


@dataclass(frozen=True)
class Row:
    """One row of a table. `mark` is the link to the note on how its numbers were measured."""

    head: str
    cells: Sequence[Cell]
    anchor: str = ""  # the row's id
    note: str = ""  # the note's id
    mark: str = ""
    kind: str = ""


@dataclass(frozen=True)
class Heading:
    """A heading of a table: its text, its figures' key in the JSON, and their alignment."""

    text: str
    key: str = ""
    right: bool = True


def value(text: str) -> float | None:
    """Return the number that a cell's text begins with, in its base unit, or None; cells sort by it.

    >>> value("26.5 KB"), value("1.02 (0.98–1.10)"), value("12,300"), value("+3.00 µs")
    (26500.0, 1.02, 12300.0, 3e-06)
    """
    found = VALUE.match(text)
    if not found:
        return None
    number = float(found[1].replace(",", "").replace("−", "-"))
    return number * UNITS.get(found[2], 1.0)


def table(labelled_by: str, headings: Sequence[Heading], rows: Sequence[Row], first: str = "") -> str:
    """Return a sortable table in a scrolling region, which has a name and can be reached by keyboard."""
    heads = "".join(
        f'<th scope="col"{classes("right" if heading.right else "")}'
        f"{attribute('data-key', heading.key)}{attribute('title', heading.key)}>"
        f'<button type="button">{escape(heading.text)}</button></th>'
        for heading in (Heading(first or "name", right=False), *headings)
    )
    if not first:
        heads = heads.replace(">name<", '><span class="unseen">name</span><', 1)
    return (
        f'<div class="scroll" role="region" aria-labelledby="{labelled_by}" tabindex="0">'
        f'<table class="sortable">\n<thead><tr>{heads}</tr></thead>\n'
        f"<tbody>{''.join(map(_row, rows))}</tbody></table></div>\n"
    )


def _row(row: Row) -> str:
    attributes = attribute("id", row.anchor) + attribute("data-note", row.note) + classes(row.kind)
    cells = "".join(map(_cell, row.cells))
    head = f'<th scope="row" data-text="{escape(row.head)}">{escape(row.head)}{row.mark}</th>'
    return f"<tr{attributes}>{head}{cells}</tr>\n"


def _cell(cell: Cell) -> str:
    number = value(cell.text)
    sorts = "" if number is None else f' data-value="{number:g}"'
    return f"<td{classes(cell.kind)}{sorts}{attribute('data-note', cell.note)}>{prose(cell.text)}</td>"


def figure(drawn: Plot, name: str, heading: str = "") -> str:
    """Return a figure with its description, its caption, and the button that saves it."""
    svg = drawn.svg.replace("<svg", f'<svg role="img" aria-label="{escape(drawn.alt)}"', 1)
    above = f"<h5>{escape(heading)}</h5>" if heading else ""
    return (
        f'<figure id="{name}-figure">{above}{svg}<figcaption><span>{escape(drawn.caption)}</span>'
        f'<button type="button" class="save" aria-label="Save this figure as SVG">Save</button>'
        "</figcaption></figure>\n"
    )


def figures(drawn: Sequence[str]) -> str:
    """Return figures next to each other, as far as there is room."""
    return f'<div class="figures">\n{"".join(drawn)}</div>\n' if drawn else ""


def folded(summary: str, content: str) -> str:
    """Return content that is folded away under a summary."""
    return f"<details><summary>{escape(summary)}</summary>\n{content}</details>\n"


def prose(text: str) -> str:
    """Return plain text with `code` in it as HTML."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))


def classes(name: str) -> str:
    """Return the attribute class, or nothing if the name is empty."""
    return attribute("class", name)


def attribute(name: str, text: str) -> str:
    """Return an attribute, or nothing if the text is empty."""
    return f' {name}="{escape(text)}"' if text else ""


def identifier(text: str) -> str:
    """Turn a text into an id, which can also be part of a link."""
    return re.sub(r"[^\w-]+", "-", text)
