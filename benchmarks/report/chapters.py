"""The report's chapters, and which results stand in which.

What a result is for decides: its figures in extra_info, and where those say nothing its suite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minidist.benchmarks.harness.columns import Entry
from minidist.benchmarks.report.report import Section


@dataclass(frozen=True)
class Chapter:
    """A part of the report: its name in links, its title, and what a reader should know before."""

    name: str
    title: str
    about: str
    suites: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()  # of extra_info: a result that has them all belongs here


CHAPTERS = (
    Chapter(
        "strategies",
        "Strategies",
        "What a training step costs: its time, the bytes that a rank sends, the bytes that the fullest rank "
        "holds, and the same step by the library that people would take instead.",
        ("bench_strategies", "bench_training", "bench_tensor_parallel",
         "bench_parameter_server", "bench_slow_link", "bench_devices"),
        ("strategy",),
    ),
    Chapter(
        "zero",
        "ZeRO: who holds what",
        "Each stage shares one more part of the memory over the ranks: the optimizer's state, then the "
        "gradients, then the parameters.",
        ("bench_zero", "bench_fully_shard", "bench_recompute"),
    ),
    Chapter(
        "pipelines",
        "Pipelines",
        "A row for each rank, a box for each pass of a micro-batch, and nothing where a rank waits: what the "
        "schedule promises above, what the ranks did below, on one scale of time.",
        ("bench_pipeline",),
        ("timeline",),
    ),
    Chapter(
        "scaling",
        "Scaling",
        "Strong scaling cuts one batch over more ranks, and is ideal where N ranks are N times as fast; weak "
        "scaling gives each rank as much as before, and is ideal where the step takes no longer.",
        ("bench_scaling",),
        ("scaling",),
    ),
    Chapter(
        "collectives",
        "Collectives",
        "Operations in which all ranks take part. Dots are measured; lines are what the model of cost says, "
        "whose two or three numbers were fitted to other sizes before.",
        ("bench_collectives", "bench_nccl"),
    ),
    Chapter(
        "ladders",
        "Matrix products: the ladders",
        "Each rung is one idea more than the one before it, beside the vendor's library and below what the "
        "machine can do at all.",
        ("bench_cpu_matmul", "bench_cuda"),
    ),
    Chapter(
        "lessons",
        "Lessons: solutions against par",
        "What the exercises' solutions cost by the measure that each names, beside what a good one may cost.",
        ("bench_lessons",),
        ("cost", "par"),
    ),
    Chapter("rest", "Everything else", "", ()),
)  # fmt: skip
BY_SUITE = {suite: chapter.name for chapter in CHAPTERS for suite in chapter.suites}


def chapter_of(entry: Entry) -> str:
    """The name of the chapter in which a result stands."""
    for chapter in reversed(CHAPTERS):  # a pipeline's timeline says more than that it is a strategy
        if chapter.keys and set(chapter.keys) <= entry["extra_info"].keys():
            return chapter.name
    return BY_SUITE.get(entry["suite"], "rest")


def by_chapter(sections: Sequence[Section]) -> dict[str, list[Section]]:
    """Sections by chapter, in the chapters' order; of one whose results differ there are several."""
    found: dict[str, list[Section]] = {chapter.name: [] for chapter in CHAPTERS}
    for section in sections:
        parts: dict[str, list[Entry]] = {}
        for entry in section.entries:
            parts.setdefault(chapter_of(entry), []).append(entry)
        for name, entries in parts.items():
            found[name].append(Section(section.title, section.about, tuple(entries)))
    for chapter in CHAPTERS:
        order = {suite: index for index, suite in enumerate(chapter.suites)}
        found[chapter.name].sort(key=lambda section: order.get(section.entries[0]["suite"], len(order)))
    return {name: several for name, several in found.items() if several}
