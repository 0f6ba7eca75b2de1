"""Bar charts, as data that the page's template turns into HTML: comparisons, memory, goals, timelines.

`curves.py` draws what has two axes. The words of a bar stand above it and are as large as the page's own, so
they can be read on a phone too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from minidist.benchmarks.harness import columns, formats
from minidist.benchmarks.harness.columns import Entry
from minidist.benchmarks.report import decided_comparisons as verdicts
from minidist.benchmarks.report.pieces import Bar, Bars, Box

SHADES = {"faster": "good", "slower": "bad", "undecided": "muted"}
PARTS = {
    "parameters": "series-0",
    "gradients": "series-1",
    "optimizer": "series-2",
    "activations": "series-3",
    "buffers": "series-5",
    "transient": "muted",
}
LEAST = 0.13  # share of the track; a shorter part of the memory has no room for its number
MOST_RATIO = 3.0  # where a chart of ratios ends
PASSES = {
    "forward": ("series-0", "forward"),
    "backward": ("series-1", "backward"),
    "backward_input": ("series-1", "backward"),
    "backward_weight": ("series-2", "backward, weights"),
}
Rows = Sequence[tuple[str, float | None, str, str]]
"""Names, their values or None, their texts and their colours."""


def lengths(rows: Rows, lines: Mapping[str, float], what: str, caption: str, log: bool = False) -> Bars:
    """Draw a bar for each value, from 0 or on a logarithmic scale, and lines across all of them."""
    known = [value for _, value, _, _ in rows if value]
    most = 1.02 * max([*known, *lines.values()], default=1.0)
    least = min(known, default=1.0) / 3

    def place(value: float) -> float:
        if not log:
            return max(0.0, value / most)
        return math.log(value / least) / math.log(most / least)

    bars = [
        Bar(name, text, [Box(0, place(value), shade)] if value else []) for name, value, text, shade in rows
    ]
    told = "; ".join(f"{row.name} {row.text}" for row in bars)
    alt = f"Bars of {what}{' on a logarithmic scale' if log else ''}: {told}."
    return Bars(bars, alt, caption, {name: place(value) for name, value in lines.items()})


def shares(rows: Rows, of: str, caption: str, what: str = "share of") -> Bars:
    """Draw percentages as bars, with a line at 100."""
    return lengths(rows, {of: 100.0}, f"the {what} {of}, with a line at 100 percent", caption)


def ratios(entries: Sequence[Entry]) -> Bars | None:
    """Draw all comparisons: a dot for our time over the peer's, and a bar for the middle half of the pairs.

    Returns None without comparisons.
    """
    paired = sorted((entry for entry in entries if columns.verdict(entry)), key=verdicts.ratio)
    if not paired:
        return None
    alone = len({entry["group"] for entry in paired}) == 1
    name = columns.label if alone else verdicts.name
    most = min(MOST_RATIO, 1.05 * max(1.1, *(each["extra_info"]["pair_ratio_q3"] for each in paired)))
    rows = []
    for entry in paired:
        extra, shade = entry["extra_info"], SHADES[columns.verdict(entry) or ""]
        low, at, high = (min(extra[key], most) / most for key in ("pair_ratio_q1", "ratio", "pair_ratio_q3"))
        boxes = [Box(low, high - low, shade, style="range"), Box(at, 0, shade, style="dot")]
        rows.append(Bar(f"{name(entry)} – {extra['peer']}", columns.RATIO.cell(entry) or "", boxes))
    caption = (
        "Our time over the peer's, the median of pairs that ran in turns; left of the line we are faster. A "
        "bar is the middle half of the pairs' ratios; it is grey if the comparison is undecided."
    )
    told = "; ".join(f"{name(entry)} {verdicts.told(entry)}" for entry in paired)
    alt = f"Ratios of times with a line at 1: {told}."
    return Bars(rows, alt, caption, {"equally fast": 1 / most})


def memory(rows: Sequence[tuple[str, Mapping[str, int]]], caption: str, limit: int | None = None) -> Bars:
    """Draw a stacked bar for each name, with its bytes by part; `limit` is the memory that is available."""
    most = max([*(sum(parts.values()) for _, parts in rows), limit or 0, 1])
    scale = next((scale for scale in (1e9, 1e6, 1e3) if most >= scale), 1)  # the whole's text says which
    bars, told = [], []
    for name, parts in rows:
        whole, left, boxes = sum(parts.values()), 0.0, []
        for part, shade in PARTS.items():
            share = parts.get(part, 0) / most
            if share:
                boxes.append(
                    Box(left, share, shade, formats.number(parts[part] / scale) if share > LEAST else "")
                )
                left += share
        over = ", too much" if limit is not None and whole > limit else ""
        bars.append(Bar(name, formats.size(whole) + over, boxes))
        several = ", ".join(f"{part} {formats.size(parts[part])}" for part in PARTS if parts.get(part))
        told.append(f"{name} {formats.size(whole)} ({several})")
    legend = {shade: part for part, shade in PARTS.items() if any(parts.get(part) for _, parts in rows)}
    lines = {f"the limit, {formats.size(limit)}": limit / most} if limit else {}
    return Bars(bars, f"Stacked bars of memory: {'; '.join(told)}.", caption, lines, legend, "stacked")


def measured_memory(entries: Sequence[Entry], more: str = "") -> Bars | None:
    """Draw the counted memory of results, or return None without results."""
    rows = [(columns.label(entry), entry["extra_info"]["memory"]) for entry in entries]
    caption = f"Counted bytes on the fullest rank after a step; shorter is better.{more}"
    return memory(rows, caption) if rows else None


def goals(entries: Sequence[Entry]) -> Bars:
    """Draw measurements as shares of their limits, with a line at the limit."""
    rows = []
    for entry in entries:
        judged = columns.goal(entry)
        assert judged is not None
        value, limit, kept = judged
        text = f"at {value / limit:.2f} times its limit"
        rows.append((columns.label(entry), value / limit, text, "good" if kept else "bad"))
    caption = "Goals: a bar that ends left of the line has met its goal."
    return lengths(rows, {"the limit": 1.0}, "goals, with a limit at 1", caption)


def pairs(entries: Sequence[Entry]) -> Bars:
    """Draw our time and the peer's, row by row."""
    rows = []
    for entry in entries:
        extra, label = entry["extra_info"], columns.label(entry)
        ours, peer = entry["stats"]["median"], extra["peer_median"]
        rows.append((f"{label}, {extra.get('program', 'minidist')}", ours, formats.seconds(ours), "series-0"))
        rows.append((f"{label}, {extra['peer']}", peer, formats.seconds(peer), "peer"))
    return lengths(rows, {}, "times", "Median times, measured in turns; shorter is better.")


def of_section(entries: Sequence[Entry]) -> Bars | None:
    """Draw a section's goals, or else its pairs of times."""
    paired = [entry for entry in entries if "peer" in entry["extra_info"]]
    if judged := [entry for entry in entries if columns.goal(entry)]:
        return goals(judged)
    return pairs(paired) if paired else None


def lessons(entries: Sequence[Entry]) -> Bars | None:
    """Draw a bar for each exercise's solution that is not at par, or return None if all are.

    Most solutions meet par exactly, since par was set by them, and their bars would say nothing.
    """
    rows = []
    for entry in entries:
        cost, par = entry["extra_info"]["cost"], entry["extra_info"]["par"]
        if par and cost != par:
            percent, name = 100 * cost / par, columns.label(entry).partition(":")[0]
            rows.append((name, percent, f"{formats.number(percent)}%", "good" if cost <= par else "bad"))
    caption = "Solutions that are not at par: their cost as a share of par; left of the line is better."
    return shares(rows, "par", caption, "cost as a share of") if rows else None


def timeline(entry: Entry) -> Bars:
    """Draw a pipeline's step: a row for each rank, simulated above and measured below, on one time scale."""
    extra = entry["extra_info"]
    drawn = extra["timeline"]
    shown = {which: drawn[which] for which in ("simulated", "measured") if which in drawn}
    end = max(box[4] for ranks in shown.values() for rank in ranks for box in rank)
    rows, told, kinds = [], [], set()
    for which, ranks in shown.items():
        waits = extra.get("bubble", {}).get(which)
        words = which if waits is None else f"{which}: ranks wait for {100 * waits:.1f}% of the step"
        last = max(box[4] for rank in ranks for box in rank)
        told.append(f"{words}, and the last pass ends after {formats.seconds(last)}")
        for number, boxes in enumerate(ranks):
            rows.append(Bar(f"rank {number}", "" if number else words, [_pass(box, end) for box in boxes]))
            kinds |= {box[0] for box in boxes}
    legend = {shade: name for kind, (shade, name) in PASSES.items() if kind in kinds}
    alt = f"A Gantt chart of {len(ranks)} ranks under {verdicts.schedule_name(entry)}, {'; '.join(told)}."
    caption = f"Each box is a pass, with its micro-batch's number; the whole width is {formats.seconds(end)}."
    return Bars(rows, alt, caption, {}, legend, "timeline")


def _pass(box: Sequence[Any], end: float) -> Box:
    kind, micro_batch, chunk, start, stop = box
    shade, _ = PASSES.get(kind, ("muted", kind))
    text = str(micro_batch) if stop - start > 0.03 * end else ""
    return Box(start / end, (stop - start) / end, shade, text, "later" if chunk else "")
