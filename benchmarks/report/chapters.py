"""The chapters of a machine's results, as data: their order, their words, their results, what they open with.

To add a chapter, add a line to `CHAPTERS`; the page, its contents and the findings' links follow. A result's
chapter follows from the keys in its extra_info, or else from its suite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from minidist.benchmarks.harness import columns, results
from minidist.benchmarks.harness.columns import Entry
from minidist.benchmarks.harness.results import Results
from minidist.benchmarks.report import bars, curves, ladders, tables
from minidist.benchmarks.report import decided_comparisons as verdicts
from minidist.benchmarks.report.figures import Plot
from minidist.benchmarks.report.pieces import Bars, Bullets, Folded, Part, Piece, Words, figures, identifier
from minidist.benchmarks.report.tables import Section, sections

MOST_RATIOS = 24  # a figure with more comparisons is folded
MOST_BARS = 16  # a group with more results gets no bars
DRAWN = {"scaling", "timeline", "par"}  # results with these keys are in their chapter's own figures


@dataclass(frozen=True)
class Shown:
    """One machine's results, and the name of the chapter that shows them."""

    slug: str
    found: Results
    name: str = ""

    @property
    def entries(self) -> list[Entry]:
        """The newest results, of all chapters."""
        return results.newest(self.found)

    @property
    def strategies(self) -> list[Entry]:
        """The rows of the tables of strategies."""
        other = {"scaling", "timeline"}
        return [
            e for e in self.entries if "strategy" in e["extra_info"] and not other & e["extra_info"].keys()
        ]

    @property
    def rungs(self) -> list[Entry]:
        """The rows of the training ladder."""
        return [entry for entry in self.entries if {"idea", "lines"} <= entry["extra_info"].keys()]


def strategies(shown: Shown) -> list[Piece]:
    """The tables of strategies, the fullest first, with all their comparisons at a glance."""
    groups = columns.grouped(shown.strategies, lambda entry: entry["group"])
    if not groups:
        return _ratios(verdicts.strategies(shown.entries), f"{shown.name}-ratios")
    pieces: list[Piece] = []
    fullest_first = sorted(groups.items(), key=lambda group: -len(group[1]))
    for number, (title, rows) in enumerate(fullest_first):
        place = f"{shown.name}-table-{number}"
        pieces.append(Words(title=title, name=place))
        pieces.append(tables.of_training(rows, shown.slug, shown.found, place, "strategy"))
        pieces += _ratios(rows, f"{place}-ratios")
    return pieces


def _ratios(entries: Sequence[Entry], name: str) -> list[Piece]:
    shown = figures([(name, "Our time over the peer's", bars.ratios(entries))])
    many = len(verdicts.tally(entries).entries)
    return [Folded(f"All {many} comparisons at a glance", shown)] if many > MOST_RATIOS else shown


def plain(shown: Shown) -> list[Piece]:
    """The training ladder, and what its rungs hold."""
    rows, place = shown.rungs, f"{shown.name}-table"
    if not rows:
        return []
    table = tables.of_training(rows, shown.slug, shown.found, place, "rung")
    held = (f"{shown.name}-bars", "What the fullest rank holds", bars.measured_memory(rows))
    return [Words(title=rows[0]["group"], name=place), table, *figures([held])]


def zero(shown: Shown) -> list[Piece]:
    """The memory of each ZeRO stage."""
    made = []
    for number, ((model, ranks), stages) in enumerate(verdicts.zero_stages(shown.entries).items()):
        rows = [entry for _, entry in sorted(stages.items())]
        chart = bars.measured_memory(rows, _one_bucket(stages)) if len(rows) > 1 else None
        made.append((f"{shown.name}-bars-{number}", f"Memory of {model} on {ranks} ranks", chart))
    return figures(made)


def _one_bucket(stages: dict[int, Entry]) -> str:
    """Say why a stage counts more bytes than the one before it, if one does."""
    total = {stage: sum(entry["extra_info"]["memory"].values()) for stage, entry in stages.items()}
    above = [stage for stage in total if total[stage] > total.get(stage - 1, total[stage])]
    if not above:
        return ""
    names = " and ".join(f"ZeRO-{stage}" for stage in above)
    return (
        f" {names} counts more than the stage before: until they are sent, gradients wait in a bucket of up "
        "to 25 MB beside the rank's own share, and a model this small fits into one. Larger models gain."
    )


def pipelines(shown: Shown) -> list[Piece]:
    """A step of each schedule, simulated and measured."""
    entries = [entry for entry in shown.entries if entry["extra_info"].get("timeline")]
    return figures(
        (f"{shown.name}-gantt-{number}", verdicts.schedule_name(entry), bars.timeline(entry))
        for number, entry in enumerate(entries)
    )


def scaling(shown: Shown) -> list[Piece]:
    """Speed over the number of ranks."""
    cores = shown.found["machine_info"]["cores"]
    return figures(
        (f"{shown.name}-{kind}", f"{kind.capitalize()} scaling", curves.scaling(shown.entries, kind, cores))
        for kind in ("strong", "weak")
    )


def collectives(shown: Shown) -> list[Piece]:
    """All comparisons with another library."""
    return _ratios([*filter(verdicts.is_collective, shown.entries)], f"{shown.name}-ratios")


def matrix_products(shown: Shown) -> list[Piece]:
    """Roofline of the CPU ladder, whose bars are on the card; figures and the table of the CUDA ladder."""
    below = ladders.cpu_roofline(shown.entries, str(shown.found["machine_info"]["cpu"]))
    pieces = figures([(f"{shown.name}-cpu", "Roofline of one core", below)])
    climbed = ladders.cuda_ladder(shown.slug, shown.found)
    return pieces + (cuda_ladder(climbed, f"{identifier(shown.slug)}-ladder") if climbed else [])


def cuda_ladder(climbed: ladders.CudaLadder, name: str) -> list[Piece]:
    """The CUDA ladder's figures and table."""
    made: list[tuple[str, str, Bars | Plot | None]] = [
        (f"{name}-bars", "The CUDA ladder", ladders.cuda_bars(climbed)),
        (f"{name}-roofline", f"Roofline of {climbed.device}", ladders.cuda_roofline(climbed)),
    ]
    return [Words(ladders.CUDA_ABOUT, climbed.title, name), *figures(made), climbed.table(name)]


def lessons(shown: Shown) -> list[Piece]:
    """How many solutions cost no more than par, and which do not."""
    rows = [entry for entry in shown.entries if {"cost", "par"} <= entry["extra_info"].keys()]
    if not rows:
        return []
    met = sum(entry["extra_info"]["cost"] <= entry["extra_info"]["par"] for entry in rows)
    sentence = Words(f"{met} of {len(rows)} solutions cost no more than par.", quiet=False)
    return [sentence, *figures([(f"{shown.name}-par", "Solutions against par", bars.lessons(rows))])]


@dataclass(frozen=True)
class Chapter:
    """A part of the report: its name in links, its title, and an introduction."""

    name: str
    title: str
    about: str
    suites: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()  # a result with all these keys in extra_info belongs here
    opening: Callable[[Shown], list[Piece]] = lambda shown: []  # what comes before its sections


CHAPTERS = (
    Chapter(
        "strategies", "Strategies",
        "The cost of a training step: its time, the bytes that a rank sends, the bytes that the fullest rank "
        "holds, and the time of the same step with the library that people would use instead.",
        ("bench_strategies", "bench_training", "bench_tensor_parallel",
         "bench_parameter_server", "bench_slow_link", "bench_devices"),
        ("strategy",), strategies,
    ),
    Chapter(
        "plain", "The training ladder: every strategy on a page",
        "Each rung adds one idea to the rung before it. The ratio of times is the rung's time over that of "
        "the engine's form of the idea, which works for any model: above 1 the engine is faster.",
        ("bench_plain",), ("idea", "lines"), plain,
    ),
    Chapter(
        "zero", "ZeRO: which rank holds what",
        "Each stage shards one more part of the memory over the ranks: first the optimizer state, then the "
        "gradients, then the parameters. Buckets that are under way come on top.",
        ("bench_zero", "bench_recompute"), opening=zero,
    ),
    Chapter(
        "pipelines", "Pipelines",
        "Each row is a rank, and each box a pass of a micro-batch; in the gaps the rank waits. The upper "
        "rows are the simulated schedule, the lower ones were measured, and all have the same time scale.",
        ("bench_pipeline",), ("timeline",), pipelines,
    ),
    Chapter(
        "scaling", "Scaling",
        "Strong scaling divides one batch over more ranks; ideally N ranks are N times as fast. Weak scaling "
        "gives every rank the same number of rows; ideally the step takes no longer. Every rank has one "
        "thread here, also the single one. The tables of strategies compare with one process on all cores, "
        "so their gains are smaller.",
        ("bench_scaling",), ("scaling",), scaling,
    ),
    Chapter(
        "collectives", "Collectives",
        "Operations in which all ranks take part. Dots are measured. Lines are predictions of the cost "
        "model, whose two or three parameters were fitted to other sizes beforehand.",
        ("bench_collectives", "bench_nccl"), opening=collectives,
    ),
    Chapter(
        "ladders", "Matrix products: the ladders",
        "Each rung adds one idea to the rung before it. It is compared with the vendor's library and with "
        "the machine's peak.",
        ("bench_cpu_matmul", "bench_cuda", "bench_attention"), opening=matrix_products,
    ),
    Chapter(
        "lessons", "Lessons: solutions against par",
        "Each exercise has a measure of cost. Its solution's cost is compared with par, the cost to aim for.",
        ("bench_lessons",), ("cost", "par"), lessons,
    ),
    Chapter("rest", "Everything else", ""),
)  # fmt: skip
TITLES = {chapter.name: chapter.title for chapter in CHAPTERS}
BY_SUITE = {suite: chapter.name for chapter in CHAPTERS for suite in chapter.suites}


def chapter_of(entry: Entry) -> str:
    """Return the name of a result's chapter."""
    for chapter in reversed(CHAPTERS):  # so that a strategy with a timeline counts as a pipeline
        if chapter.keys and set(chapter.keys) <= entry["extra_info"].keys():
            return chapter.name
    return BY_SUITE.get(entry["suite"], "rest")


def by_chapter(several: Sequence[Section]) -> dict[str, list[Section]]:
    """Sort sections by chapter; a section with results of several chapters is split."""
    found: dict[str, list[Section]] = {chapter.name: [] for chapter in CHAPTERS}
    for section in several:
        for name, entries in columns.grouped(section.entries, chapter_of).items():
            found[name].append(replace(section, entries=tuple(entries)))
    for chapter in CHAPTERS:
        order = {suite: index for index, suite in enumerate(chapter.suites)}
        found[chapter.name].sort(key=lambda section: order.get(section.entries[0]["suite"], len(order)))
    return {name: several for name, several in found.items() if several}


def parts(slug: str, found: Results) -> list[Part]:
    """Return one machine's chapters for the page; those without results are left out."""
    several, made = by_chapter(sections(found)), []
    for chapter in CHAPTERS:
        shown = Shown(slug, found, f"{identifier(slug)}-{chapter.name}")
        pieces = chapter.opening(shown) + _sections(several.get(chapter.name, []), shown)
        if pieces:
            made.append(Part(shown.name, chapter.title, pieces, level=3, about=chapter.about))
    return made


def _sections(several: Sequence[Section], shown: Shown) -> list[Piece]:
    """The chapter's sections, without what its opening has in tables; each suite is described once."""
    opened = {entry["fullname"] for entry in (*shown.strategies, *shown.rungs)}
    told: set[str] = set()
    pieces: list[Piece] = []
    for number, section in enumerate(several):
        rows = tuple(entry for entry in section.entries if entry["fullname"] not in opened)
        if rows:
            about = "" if section.about in told else section.about
            told.add(section.about)
            pieces += _section(Section(section.title, about, rows), shown, f"{shown.name}-{number}")
    return pieces


def _section(section: Section, shown: Shown, name: str) -> list[Piece]:
    small, large = len(section.entries) < 2, len(section.entries) > MOST_BARS
    extras = [entry["extra_info"].keys() for entry in section.entries]
    curved = any("predicted" in extra or {"series", "size", "gflops"} <= extra for extra in extras)
    # The chapter's own figures already show these results.
    opened = any(DRAWN & extra for extra in extras)
    drawn = curves.of_section(section) if curved else None
    plot = drawn or (None if small or large or opened else bars.of_section(section.entries))
    table = tables.of_section(section, shown.slug, shown.found, name)
    return [Words(section.about, section.title, name), *figures([(name, "", plot)]), *_fits(section), table]


def _fits(section: Section) -> list[Piece]:
    """The figures of the cost model's fit, a line for each algorithm."""
    fitted = {
        str(entry["extra_info"]["series"]): entry["extra_info"]["fit"]
        for entry in section.entries
        if {"fit", "series"} <= entry["extra_info"].keys()
    }
    lines = [f"{name}: {verdicts.fit_in_words(each)}" for name, each in fitted.items()]
    return [Folded("The fitted parameters of the lines", [Bullets(lines)])] if lines else []
