"""One machine's part of the page: its hardware, then its chapters with figures and tables."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from minidist.benchmarks.harness import machine, results
from minidist.benchmarks.harness.columns import Entry
from minidist.benchmarks.report import (
    chapters,
    collective_plots,
    cpu_plots,
    gantt,
    ladder,
    ladder_plots,
    lesson_plots,
    memory_bars,
    page_tables,
    ratio_plot,
    report,
    scaling_plots,
    verdicts,
)
from minidist.benchmarks.report.chapters import Chapter
from minidist.benchmarks.report.findings_training import schedule_name, zero_stages
from minidist.benchmarks.report.page_html import figure, figures, folded, identifier, prose
from minidist.benchmarks.report.page_tables import Shown
from minidist.benchmarks.report.plots import Plot, plot
from minidist.benchmarks.report.report import Section

MOST_RATIOS = 30  # a figure with more comparisons is folded
MOST_BARS = 16  # a group with more results gets no bars
DRAWN = {"scaling", "timeline", "par"}  # results with these keys are in their chapter's own figures


class Machine:
    """One machine's part of the page. `contents` maps the ids of its chapters to their titles."""

    def __init__(self, shown: Shown) -> None:
        self._shown = shown
        self._slug = identifier(shown.slug)
        self._entries = results.newest(shown.found)
        self.contents: dict[str, str] = {}

    def html(self) -> str:
        """Return the machine's HTML. Call it once, since it numbers the notes as they appear."""
        found = self._shown.found
        several = chapters.by_chapter(report.sections(found))
        parts = []
        for chapter in chapters.CHAPTERS:
            made = self._chapter(chapter, several.get(chapter.name, []))
            if made:
                self.contents[f"{self._slug}-{chapter.name}"] = chapter.title
                parts.append(made)
        title = escape(machine.title(found["machine_info"]))
        return f'<section id="{self._slug}">\n<h2>{title}</h2>\n{_facts(found)}</section>\n{"".join(parts)}'

    def _chapter(self, chapter: Chapter, sections: Sequence[Section]) -> str:
        name = f"{self._slug}-{chapter.name}"
        lead = getattr(self, f"_lead_{chapter.name}", lambda _: "")(name)
        in_lead = {entry["fullname"] for entry in (*self._strategies(), *self._rungs())}  # in its table
        told: set[str] = set()  # each suite's description is shown once
        parts = []
        for number, section in enumerate(sections):
            rows = [entry for entry in section.entries if entry["fullname"] not in in_lead]
            if rows:
                about = "" if section.about in told else section.about
                told.add(section.about)
                parts.append(self._section(Section(section.title, about, tuple(rows)), f"{name}-{number}"))
        if not lead and not parts:
            return ""
        about = f'<p class="quiet">{prose(chapter.about)}</p>\n' if chapter.about else ""
        heading = f"<h3>{escape(chapter.title)}</h3>\n{about}"
        return f'<section id="{name}">\n{heading}{lead}{"".join(parts)}</section>\n'

    def _strategies(self) -> list[Entry]:
        return [
            entry
            for entry in self._entries
            if "strategy" in entry["extra_info"] and not {"scaling", "timeline"} & entry["extra_info"].keys()
        ]

    def _rungs(self) -> list[Entry]:
        return [entry for entry in self._entries if {"idea", "lines"} <= entry["extra_info"].keys()]

    def _section(self, section: Section, name: str) -> str:
        about = f'<p class="quiet">{prose(section.about)}</p>\n' if section.about else ""
        small, large = len(section.entries) < 2, len(section.entries) > MOST_BARS
        extras = [entry["extra_info"].keys() for entry in section.entries]
        curved = any("predicted" in extra or {"series", "size", "gflops"} <= extra for extra in extras)
        # The chapter's own figures already show these results.
        led = any(DRAWN & extra for extra in extras)
        drawn = plot(section, name) if curved or not (small or large or led) else None
        shown = figures([figure(drawn, name)]) if drawn else ""
        made = page_tables.of_section(section, self._shown, name)
        return f'<h4 id="{name}">{escape(section.title)}</h4>\n{about}{shown}{self._fits(section)}{made}'

    def _fits(self, section: Section) -> str:
        """Return the figures of the cost model's fit, a line for each algorithm."""
        fitted = {
            str(entry["extra_info"]["series"]): entry["extra_info"]["fit"]
            for entry in section.entries
            if {"fit", "series"} <= entry["extra_info"].keys()
        }
        if not fitted:
            return ""
        lines = "".join(
            f"<li>{escape(name)}: {escape(collective_plots.fit_in_words(each))}</li>"
            for name, each in fitted.items()
        )
        return folded("The fitted parameters of the lines", f'<ul class="quiet">{lines}</ul>\n')

    def _lead_strategies(self, name: str) -> str:
        groups: dict[str, list[Entry]] = {}
        for entry in self._strategies():
            groups.setdefault(entry["group"], []).append(entry)
        if not groups:
            return self._ratios(verdicts.strategies(self._entries), f"{name}-ratios")
        parts = []
        fullest_first = sorted(groups.items(), key=lambda group: -len(group[1]))
        for number, (title, rows) in enumerate(fullest_first):
            place = f"{name}-table-{number}"
            made = page_tables.of_strategies(rows, self._shown, place)
            parts.append(
                f'<h4 id="{place}">{escape(title)}</h4>\n{made}{self._ratios(rows, f"{place}-ratios")}'
            )
        return "".join(parts)

    def _ratios(self, entries: Sequence[Entry], name: str) -> str:
        drawn = ratio_plot.ratios(entries, name)
        shown = figures([figure(drawn, name, "Our time over the peer's")] if drawn else [])
        many = len(verdicts.tally(entries).entries)
        return folded(f"All {many} comparisons at a glance", shown) if many > MOST_RATIOS else shown

    def _lead_collectives(self, name: str) -> str:
        shown = []
        for ranks, drawn in collective_plots.curves(self._entries, f"{name}-gloo").items():
            shown.append(figure(drawn, f"{name}-gloo-{ranks}", f"Our time over the peer's, {ranks} ranks"))
        return figures(shown)

    def _lead_zero(self, name: str) -> str:
        shown = []
        for number, ((model, ranks), stages) in enumerate(zero_stages(self._entries).items()):
            rows = [entry for _, entry in sorted(stages.items())]
            drawn = memory_bars.measured(rows, f"{name}-bars-{number}") if len(rows) > 1 else None
            if drawn:
                shown.append(figure(drawn, f"{name}-bars-{number}", f"Memory of {model} on {ranks} ranks"))
        return figures(shown)

    def _lead_plain(self, name: str) -> str:
        rows = self._rungs()
        drawn = memory_bars.measured(rows, f"{name}-bars")
        if not drawn:
            return ""
        title = f'<h4 id="{name}-table">{escape(rows[0]["group"])}</h4>\n'
        made = page_tables.of_rungs(rows, self._shown, f"{name}-table")
        return title + made + figures([figure(drawn, f"{name}-bars", "What the fullest rank holds")])

    def _lead_pipelines(self, name: str) -> str:
        drawn = [entry for entry in self._entries if entry["extra_info"].get("timeline")]
        shown = []
        for number, entry in enumerate(drawn):
            place = f"{name}-gantt-{number}"
            shown.append(figure(gantt.chart(entry, place), place, schedule_name(entry)))
        return figures(shown)

    def _lead_scaling(self, name: str) -> str:
        cores = self._shown.found["machine_info"]["cores"]
        shown = []
        for kind in ("strong", "weak"):
            drawn = scaling_plots.curves(self._entries, kind, f"{name}-{kind}", cores)
            if drawn:
                shown.append(figure(drawn, f"{name}-{kind}", f"{kind.capitalize()} scaling"))
        return figures(shown)

    def _lead_ladders(self, name: str) -> str:
        device = str(self._shown.found["machine_info"]["cpu"])
        drawn: dict[str, Plot | None] = {
            "The CPU ladder": cpu_plots.bars(self._entries, f"{name}-cpu"),
            "Roofline of one core": cpu_plots.roofline(self._entries, device, f"{name}-cpu-roofline"),
        }
        shown = [
            figure(each, f"{name}-cpu-{number}", heading)
            for number, (heading, each) in enumerate(drawn.items())
            if each
        ]
        climbed = ladder.of(self._shown.slug, self._shown.found)
        return figures(shown) + (cuda_ladder(climbed, f"{self._slug}-ladder", self._shown) if climbed else "")

    def _lead_lessons(self, name: str) -> str:
        rows = [entry for entry in self._entries if {"cost", "par"} <= entry["extra_info"].keys()]
        if not rows:
            return ""
        drawn = lesson_plots.bars(rows, f"{name}-par")
        shown = figures([figure(drawn, f"{name}-par", "Solutions against par")] if drawn else [])
        return f"<p>{escape(lesson_plots.sentence(rows))}</p>\n{shown}"


def cuda_ladder(climbed: ladder.Ladder, name: str, shown: Shown | None) -> str:
    """Return the CUDA ladder's figures and table, or say that it was not measured."""
    drawn = []
    if climbed.machine:
        bars, roofline = f"{name}-bars", f"{name}-roofline"
        drawn.append(figure(ladder_plots.bars(climbed, bars), bars, "The CUDA ladder"))
        below = ladder_plots.roofline(climbed, roofline)
        if below:
            drawn.append(figure(below, roofline, f"Roofline of {climbed.device}"))
    return (
        f'<h4 id="{name}">{escape(climbed.title)}</h4>\n<p class="quiet">{prose(climbed.about)}</p>\n'
        f"{figures(drawn)}{page_tables.of_ladder(climbed, name, shown)}"
    )


def _facts(found: results.Results) -> str:
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
        "BLAS": f"{blas['name']} {blas['version']}, {blas.get('architecture')} kernel" if blas else "",
        **{name: latest[name.lower()] or "" for name in ("Python", "NumPy", "torch", "Numba")},
        "System": latest["os"],
    }
    listed = "".join(
        f"<div><dt>{name}</dt><dd>{escape(text)}</dd></div>" for name, text in facts.items() if text
    )
    return f"<dl>{listed}</dl>\n"


def _gpus(gpus: list[dict[str, Any]]) -> str:
    first = gpus[0]
    many = f"{len(gpus)} x " if len(gpus) > 1 else ""
    memory = f", {first['memory_bytes'] / 2**30:.0f} GiB" if first["memory_bytes"] else ""
    return f"{many}{first['name']}{memory}, compute capability {first['compute_capability']}"
