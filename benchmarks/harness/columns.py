"""The columns of the report's tables, in order, and the figures that fill them.

A benchmark puts figures into `benchmark.extra_info` under the names below. A table shows a column if any of
its rows has that figure. To show a new figure, add a line to `COLUMNS`.

    label                the row's name; without it, the test's name
    program              what was measured, if that is not minidist
    series, size         a point of a curve: the curve's name and the x of its point (see `report/plots.py`)
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
    comm_overlap         share of the communication's time in which a rank did something else, 0 to 1
    goal                 {"of": "ratio", "median" or "beyond_peer", "below": limit}: a goal of this project
    note                 a few words on what is measured
    peer, ...            a comparison with another program, see `turns.py`
    over_yardstick, ...  a second comparison, with the same program for all rows: see `strategy_rounds.py`
    strategy, layout, model, ranks   a row of the table of strategies: its `md.Layout`, and what it trains
    memory               {"parameters", "gradients", "optimizer", "activations", "buffers"}: bytes of the
                         fullest rank; peer_memory is the peer's total, counted the same way; memory_source
                         says how they were counted
    scaling, efficiency  "strong" or "weak", with series and size (ranks); the share of ideal speed-up
    timeline, bubble     of a pipeline, "simulated" and "measured": `pipeline_steps.py`
    fit                  alpha, beta and the other figures of `comm.cost.fit`: `collective_timing.py`
    cost, par, unit      the cost of an exercise's solution, and the cost to aim for

The CUDA ladder has a table of its own (`report/ladder.py`), with these figures: rung, dtype ("tf32" is
float32 with factors rounded to TF32), order ("nt": b is transposed), peer_gflops, peak_gflops, peak_gb_per_s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Entry = dict[str, Any]


def seconds(value: float) -> str:
    """Format a duration with three significant digits: `3.14 ms`."""
    for limit, unit in ((1e-6, "ns"), (1e-3, "µs"), (1.0, "ms")):
        if value < limit:
            return f"{_three(value * 1000 / limit)} {unit}"
    return f"{_three(value)} s"


def size(value: float) -> str:
    """Format bytes with three significant digits: `26.5 KB` (decimal units, as networks count)."""
    for limit, unit in ((1e3, "B"), (1e6, "KB"), (1e9, "MB")):
        if value < limit:
            return f"{_three(value * 1000 / limit) if limit > 1e3 else f'{value:.0f}'} {unit}"
    return f"{_three(value / 1e9)} GB"


def binary_size(value: int) -> str:
    """Format a power of two of bytes: `64 KiB`."""
    for limit, unit in ((2**10, "B"), (2**20, "KiB"), (2**30, "MiB")):
        if value < limit:
            return f"{value * 2**10 // limit} {unit}"
    return f"{value >> 30} GiB"


def number(value: float) -> str:
    """Format a count or a rate with three significant digits and separated thousands: `12,300`."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else _three(value)


def times(ratio: float) -> str:
    """Format a ratio with two decimals, or from 100 on with three digits: `0.92`, `24.89`, `10,300`."""
    return number(ratio) if ratio >= 100 else f"{ratio:.2f}"


def kind_name(dtype: str) -> str:
    """Name the arithmetic of a product: `TF32` (not a dtype that memory holds), or else the dtype."""
    return "TF32" if dtype == "tf32" else dtype


def difference(value: float) -> str:
    """Format a difference of durations with its sign: `+3.14 µs`."""
    return f"{'-' if value < 0 else '+'}{seconds(abs(value))}"


def _three(value: float) -> str:
    """Format with three significant digits and no exponent: `0.0123`, `1.20`, `123`."""
    rough = float(f"{value:.3g}")
    if rough == 0:
        return "0"
    return f"{rough:.{max(0, 2 - math.floor(math.log10(abs(rough))))}f}"


@dataclass(frozen=True)
class Column:
    """One column of a table: its heading, and a function from an entry to its text, or None."""

    heading: str
    cell: Callable[[Entry], str | None]
    right: bool = True  # aligned to the right, as figures are


def _extra(key: str, text: Callable[[Any], str]) -> Callable[[Entry], str | None]:
    def cell(entry: Entry) -> str | None:
        value = entry["extra_info"].get(key)
        return None if value is None else text(value)

    return cell


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


def undecided(entry: Entry) -> bool:
    """Return whether a comparison leaves open which program is faster.

    It does if 1 lies within the interquartile range of the pairs' ratios, widened for few pairs (`FEW`), or
    if there is a single pair. An entry without a comparison gives False.
    """
    return _within(entry, "ratio", "pair_ratio_q1", "pair_ratio_q3")


def undecided_over_yardstick(entry: Entry) -> bool:
    """Return the same as `undecided`, for the comparison with the yardstick."""
    return _within(entry, "over_yardstick", "over_yardstick_q1", "over_yardstick_q3")


def _within(entry: Entry, ratio: str, q1: str, q3: str) -> bool:
    extra = entry["extra_info"]
    if ratio not in extra:
        return False
    rounds = entry["stats"]["rounds"]
    more = FEW / rounds * (extra[q3] - extra[q1]) / 2
    return bool(rounds < 2 or extra[q1] - more <= 1 <= extra[q3] + more)


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


def _memory(entry: Entry) -> str | None:
    whole = memory_of(entry)
    return None if whole is None else size(whole)


def _yardstick(entry: Entry) -> str | None:
    extra = entry["extra_info"]
    if "over_yardstick" not in extra:
        return None
    told = " undecided" if undecided_over_yardstick(entry) else ""
    return f"{times(extra['over_yardstick'])}{told}"


def _cost(entry: Entry) -> str | None:
    extra = entry["extra_info"]
    if "cost" not in extra:
        return None
    unit = f" {extra['unit']}" if extra.get("unit") else ""
    return f"{count(extra['cost'])}{unit}, par {count(extra['par'])}"


def count(value: float) -> str:
    """Format a count with all its digits and separated thousands; a fraction with four digits."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4g}"


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


PEER = Column("peer", _extra("peer", str), right=False)
PEER_TIME = Column("peer's time", _extra("peer_median", seconds))
SHARE = Column("of the peer's speed", _extra("percent_of_peer", lambda value: f"{number(value)}%"))
RATIO = Column("ratio of times", _ratio)
BEYOND = Column("time minus peer's", _extra("beyond_peer", difference))
GOAL = Column("goal", _goal, right=False)
COLUMNS = (
    Column("cost", _cost),
    Column("time", lambda entry: seconds(entry["stats"]["median"])),
    Column("spread", _spread),
    Column("rounds", lambda entry: str(entry["stats"]["rounds"])),
    Column("GFLOP/s", _extra("gflops", number)),
    SHARE,
    Column("of the FMA peak", _extra("percent_of_peak", lambda value: f"{number(value)}%")),
    Column("of the GPU's peak", _extra("percent_of_gpu_peak", lambda value: f"{number(value)}%")),
    Column("over one process", _yardstick),
    Column("efficiency", _extra("efficiency", lambda share: f"{100 * share:.0f}%")),
    RATIO,
    BEYOND,
    GOAL,
    Column("sent per step", _extra("bytes_per_step", size)),
    Column("memory of the fullest rank", _memory),
    PEER,
    PEER_TIME,
    Column("peer's memory", _extra("peer_memory", size)),
    Column("predicted", _extra("predicted", seconds)),
    Column("GB/s", _extra("bus_gb_per_s", number)),
    Column("rows/s", _extra("rows_per_s", number)),
    Column("communication hidden", _extra("comm_overlap", lambda share: f"{number(100 * share)}%")),
    Column("note", _extra("note", str), right=False),
)


def shown(entries: Sequence[Entry]) -> list[Column]:
    """Return the columns that at least one of these entries fills."""
    return [column for column in COLUMNS if any(column.cell(entry) is not None for entry in entries)]
