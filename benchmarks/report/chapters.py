"""The report's chapters, and the assignment of results to chapters.

A result's chapter follows from the keys in its extra_info, or else from its suite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minidist.benchmarks.harness.columns import Entry
from minidist.benchmarks.report.report import Section


@dataclass(frozen=True)
class Chapter:
    """A part of the report: its name in links, its title, and an introduction."""

    name: str
    title: str
    about: str
    suites: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()  # a result with all these keys in extra_info belongs here


CHAPTERS = (
    Chapter(
        "strategies",
        "Strategies",
        "The cost of a training step: its time, the bytes that a rank sends, the bytes that the fullest rank "
        "holds, and the time of the same step with the library that people would use instead.",
        ("bench_strategies", "bench_training", "bench_tensor_parallel",
         "bench_parameter_server", "bench_slow_link", "bench_devices"),
        ("strategy",),
    ),
    Chapter(
        "plain",
        "The training ladder: every strategy on a page",
        "Each rung adds one idea to the rung before it. The ratio of times is the rung's time over that of "
        "the engine's form of the idea, which works for any model: above 1 the engine is faster.",
        ("bench_plain",),
        ("idea", "lines"),
    ),
    Chapter(
        "zero",
        "ZeRO: which rank holds what",
        "Each stage shards one more part of the memory over the ranks: first the optimizer state, then the "
        "gradients, then the parameters.",
        ("bench_zero", "bench_fully_shard", "bench_recompute"),
    ),
    Chapter(
        "pipelines",
        "Pipelines",
        "Each row is a rank, and each box a pass of a micro-batch; in the gaps the rank waits. The upper "
        "chart is the simulated schedule, the lower one was measured, and both have the same time scale.",
        ("bench_pipeline",),
        ("timeline",),
    ),
    Chapter(
        "scaling",
        "Scaling",
        "Strong scaling divides one batch over more ranks; ideally N ranks are N times as fast. Weak scaling "
        "gives every rank the same number of rows; ideally the step takes no longer.",
        ("bench_scaling",),
        ("scaling",),
    ),
    Chapter(
        "collectives",
        "Collectives",
        "Operations in which all ranks take part. Dots are measured. Lines are predictions of the cost "
        "model, whose two or three parameters were fitted to other sizes beforehand.",
        ("bench_collectives", "bench_nccl"),
    ),
    Chapter(
        "ladders",
        "Matrix products: the ladders",
        "Each rung adds one idea to the rung before it. It is compared with the vendor's library and with "
        "the machine's peak.",
        ("bench_cpu_matmul", "bench_cuda"),
    ),
    Chapter(
        "lessons",
        "Lessons: solutions against par",
        "Each exercise has a measure of cost. Its solution's cost is compared with par, the cost to aim for.",
        ("bench_lessons",),
        ("cost", "par"),
    ),
    Chapter("rest", "Everything else", "", ()),
)  # fmt: skip
BY_SUITE = {suite: chapter.name for chapter in CHAPTERS for suite in chapter.suites}


def chapter_of(entry: Entry) -> str:
    """Return the name of a result's chapter."""
    for chapter in reversed(CHAPTERS):  # so that a strategy with a timeline counts as a pipeline
        if chapter.keys and set(chapter.keys) <= entry["extra_info"].keys():
            return chapter.name
    return BY_SUITE.get(entry["suite"], "rest")


def by_chapter(sections: Sequence[Section]) -> dict[str, list[Section]]:
    """Sort sections by chapter; a section with results of several chapters is split."""
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
