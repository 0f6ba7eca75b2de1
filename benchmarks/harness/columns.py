"""The columns of the report's tables, in order, and the figures that fill them.

A benchmark puts figures into `benchmark.extra_info` under the names below. A table shows a column if any of
its rows has that figure. To show a new figure, add a line to `COLUMNS`.

    label                the row's name; without it, the test's name
    program              what was measured, if that is not minidist
    series, size         a point of a curve: the curve's name and the x of its point (see `report/curves.py`)
    gflops               10^9 floating-point operations a second
    percent_of_peak      our rate as a share of the FMA peak of the cores used (`roofline.measure`)
    peak_gb_per_s        10^9 bytes a second that those cores, or the GPU, can read from memory
    percent_of_gpu_peak  our rate as a share of the GPU's measured peak in that arithmetic (`gpu_peaks`)
    percent_of_peer      our rate as a share of the peer's, in percent
    beyond_peer          our median minus the peer's, in seconds; below 0 we are faster
    predicted            seconds that a cost model predicted before the measurement
    bus_gb_per_s         10^9 bytes a second that a rank sends, by the algorithm's formula
    rows_per_s           rows (examples, sequences) of a global batch per second
    bytes_per_step       bytes that a rank sends to the others in a step
    hidden               share of the time with a message under way in which a rank did not wait, 0 to 1
    goal                 {"of": "ratio", "median" or "beyond_peer", "below": limit}: a goal of this project
    note                 a few words on what is measured
    peer, ...            a comparison with another program, see `turns.py`
    over_yardstick, ...  a second comparison, with the same program for all rows: see `training/rounds.py`
    strategy, layout, model, ranks   a row of the table of strategies: its `md.Layout`, and what it trains
    memory               {"parameters", "gradients", "optimizer", "activations", "buffers"}: bytes of the
                         fullest rank; peer_memory is the peer's total, counted the same way; memory_source
                         says how they were counted
    scaling, efficiency  "strong" or "weak", with series and size (ranks); the share of ideal speed-up
    timeline, bubble     of a pipeline, "simulated" and "measured": `training/pipelines.py`
    fit                  alpha, beta and the other figures of `comm.cost.fit`: `collective_timing.py`
    cost, par, unit      the cost of an exercise's solution, and the cost to aim for
    idea, lines, held    of a rung of the training ladder: its idea in a few words, the lines of its file, and
                         the bytes of parameters, gradients and optimizer state on the rank with most of them

The CUDA ladder has a table of its own (`report/ladders.py`), with these figures: rung, dtype ("tf32" is
float32 with factors rounded to TF32), order ("nt": b is transposed), peer_gflops, peak_gflops, peak_gb_per_s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from minidist.benchmarks.harness.formats import count, difference, number, seconds, size, times

Entry = dict[str, Any]
Key = TypeVar("Key")


@dataclass(frozen=True)
class Column:
    """One column of a table: its heading, and a function from an entry to its text, or None."""

    heading: str
    cell: Callable[[Entry], str | None]
    key: str  # where a result has the figures
    right: bool = True  # aligned to the right, as figures are


def extra(heading: str, key: str, text: Callable[[Any], str] = str, right: bool = True) -> Column:
    """Make the column of a figure in extra_info."""

    def cell(entry: Entry) -> str | None:
        value = entry["extra_info"].get(key)
        return None if value is None else text(value)

    return Column(heading, cell, f"extra_info.{key}", right)


def _percent(value: float) -> str:
    return f"{number(value)}%"


def grouped(entries: Iterable[Entry], key: Callable[[Entry], Key]) -> dict[Key, list[Entry]]:
    """Return the entries by their key, both in the order in which they come."""
    found: dict[Key, list[Entry]] = {}
    for entry in entries:
        found.setdefault(key(entry), []).append(entry)
    return found


def label(entry: Entry) -> str:
    """Return a row's name."""
    return str(entry["extra_info"].get("label") or entry["name"].removeprefix("test_").replace("_", " "))


def _spread(entry: Entry) -> str:
    """Format half the interquartile range as a share of the median."""
    stats = entry["stats"]
    if stats["rounds"] < 2 or not stats["median"]:
        return "one round"
    return f"±{50 * stats['iqr'] / stats['median']:.0f}%"


def _ratio(entry: Entry) -> str | None:
    extra = entry["extra_info"]
    if "ratio" not in extra:
        return None
    if extra["ratio"] >= 100:  # this far apart, the quartiles say nothing more
        return times(extra["ratio"])
    middle = f"{times(extra['ratio'])} ({extra['pair_ratio_q1']:.2f}–{extra['pair_ratio_q3']:.2f})"
    return f"{middle} undecided" if undecided(entry) else middle


FEW = 5
"""With this many rounds the interquartile range is doubled; with fewer rounds it is widened even more.

Few rounds give only a rough estimate of the spread. With this rule, two runs of five rounds of the same
program, with rounds that scatter by 5%, count as different in 3 of 1000 cases.
"""


BESIDE = {
    "ratio": ("peer", "pair_ratio_q1", "pair_ratio_q3"),
    "over_yardstick": ("yardstick", "over_yardstick_q1", "over_yardstick_q3"),
}
"""By each kind of comparison's ratio, the keys of the other program's name and of the pairs' quartiles."""


def undecided(entry: Entry, ratio: str = "ratio") -> bool:
    """Return whether a comparison, by default with the peer, leaves open which program is faster.

    It does if 1 lies within the interquartile range of the pairs' ratios, widened for few pairs (`FEW`), or
    if there is a single pair. Returns False without a comparison.
    """
    extra, rounds = entry["extra_info"], entry["stats"]["rounds"]
    if ratio not in extra:
        return False
    _, q1, q3 = BESIDE[ratio]
    low, high = widened(extra[q1], extra[q3], rounds)
    return bool(rounds < 2 or low <= 1 <= high)


def widened(q1: float, q3: float, rounds: int) -> tuple[float, float]:
    """Return the ends of the interquartile range of the pairs' ratios, widened for few rounds (`FEW`)."""
    more = FEW / rounds * (q3 - q1) / 2
    return q1 - more, q3 + more


def verdict(entry: Entry) -> str | None:
    """Return a comparison's result: "faster", "slower" or "undecided", or None without a comparison."""
    if "ratio" not in entry["extra_info"]:
        return None
    if undecided(entry):
        return "undecided"
    return "faster" if entry["extra_info"]["pair_ratio_q3"] < 1 else "slower"


def memory_of(entry: Entry) -> int | None:
    """Return all bytes of the fullest rank, or None if they were not counted."""
    parts = entry["extra_info"].get("memory")
    return None if parts is None else sum(parts.values())


def _yardstick(entry: Entry) -> str | None:
    ratio = entry["extra_info"].get("over_yardstick")
    if ratio is None:
        return None
    return f"{times(ratio)} undecided" if undecided(entry, "over_yardstick") else times(ratio)


def _cost(entry: Entry) -> str | None:
    extra = entry["extra_info"]
    if "cost" not in extra:
        return None
    unit = f" {extra['unit']}" if extra.get("unit") else ""
    return f"{count(extra['cost'])}{unit}, par {count(extra['par'])}"


def goal(entry: Entry) -> tuple[float, float, bool] | None:
    """Return the measured figure, its limit and whether it was met, or None without a goal."""
    wanted = entry["extra_info"].get("goal")
    if not wanted:
        return None
    value = entry["stats"]["median"] if wanted["of"] == "median" else entry["extra_info"].get(wanted["of"])
    return None if value is None else (value, wanted["below"], value < wanted["below"])


def _goal(entry: Entry) -> str | None:
    found = goal(entry)
    if found is None:
        return None
    _, limit, kept = found
    in_seconds = entry["extra_info"]["goal"]["of"] in ("median", "beyond_peer")
    text = seconds(limit) if in_seconds else f"{limit:g}"
    return f"{'met' if kept else 'missed'}, < {text}"


TIME = Column("time", lambda entry: seconds(entry["stats"]["median"]), "stats.median")
PEER = extra("peer", "peer", right=False)
PEER_TIME = extra("peer's time", "peer_median", seconds)
SHARE = extra("of the peer's speed", "percent_of_peer", _percent)
RATIO = Column("ratio of times", _ratio, "extra_info.ratio (pair_ratio_q1–pair_ratio_q3)")
BEYOND = extra("time minus peer's", "beyond_peer", difference)
HIDDEN = extra("communication hidden", "hidden", lambda share: f"{100 * share:.0f}%")
YARDSTICK = Column("over one process", _yardstick, "extra_info.over_yardstick")
EXPLAINED = {
    RATIO.key: "A ratio is the median over pairs of turns; it may differ from the quotient of the medians.",
    YARDSTICK.key: "Over one process: in turns with one process that has all cores.",
    HIDDEN.key: "Communication hidden: of the time with a message under way, the share in which a rank did "
    "not wait for one. CPU ranks copy and add messages themselves, and a small model's gradients are one "
    "message, sent when the backward pass has ended. So 0% is normal there.",
}
"""What is told below a table with these columns, by the column's key."""
GOAL = Column("goal", _goal, "extra_info.goal", right=False)
COLUMNS = (
    Column("cost", _cost, "extra_info.cost and par"),
    extra("lines", "lines", count),
    TIME,
    Column("spread", _spread, "stats.iqr / stats.median / 2"),
    Column("rounds", lambda entry: str(entry["stats"]["rounds"]), "stats.rounds"),
    extra("GFLOP/s", "gflops", number),
    SHARE,
    extra("of the FMA peak", "percent_of_peak", _percent),
    extra("of the GPU's peak", "percent_of_gpu_peak", _percent),
    YARDSTICK,
    extra("efficiency", "efficiency", lambda share: f"{100 * share:.0f}%"),
    RATIO,
    BEYOND,
    GOAL,
    extra("sent per step", "bytes_per_step", size),
    Column(
        "memory of the fullest rank",
        lambda entry: None if (found := memory_of(entry)) is None else size(found),
        "sum of extra_info.memory",
    ),
    extra("parameters, gradients, state", "held", size),
    PEER,
    PEER_TIME,
    extra("peer's memory", "peer_memory", size),
    extra("predicted", "predicted", seconds),
    extra("GB/s", "bus_gb_per_s", number),
    extra("rows/s", "rows_per_s", number),
    HIDDEN,
    extra("the one idea", "idea", right=False),
    extra("note", "note", right=False),
)
RUN = Column("run", lambda entry: f"{entry['mode']}, {entry['run'].partition('T')[0]}", "", right=False)
"""For a table with results of several runs, quick and full ones beside each other."""


def shown(entries: Sequence[Entry]) -> list[Column]:
    """Return the columns that at least one of these entries fills."""
    found = [column for column in COLUMNS if any(column.cell(entry) is not None for entry in entries)]
    return [*found, RUN] if len({entry.get("run") for entry in entries}) > 1 else found


def beside_peers(entries: Sequence[Entry]) -> list[str]:
    """Return the lines of a table of comparisons: each benchmark's ratio to its peer, aligned."""
    several = (RATIO, PEER, TIME, PEER_TIME)
    rows = [["Name (time in turns)", *(column.heading.capitalize() for column in several)]]
    rows += [[entry["name"], *(column.cell(entry) or "" for column in several)] for entry in entries]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
