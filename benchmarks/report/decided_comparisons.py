"""Pick results that belong together, and count comparisons: faster, slower, undecided.

A comparison is decided if the middle half of the pairs' ratios lies on one side of 1 (`columns.undecided`).
Only strategies compared with other programs count, not for example a bubble compared with its simulation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from minidist.benchmarks.harness import columns, formats
from minidist.benchmarks.harness.columns import Entry
from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.schedule_kinds import SCHEDULES

UNDECIDED = "no difference beyond the spread"
# Suites that train, and the libraries that people would use instead; other peers are forms of our own.
TRAINING = ("bench_training", "bench_zero", "bench_tensor_parallel", "bench_pipeline")
LIBRARIES = ("torch", "plain torch", "accelerate", "deepspeed")
TITLES = {name: kind.title for name, kind in SCHEDULES.items()}
"""Schedules' names as in the papers."""
# The figures of a cost model's fit in seconds per byte; the others are seconds per call.
A_BYTE = ("beta", "busy_beta", "gamma", "put", "take", "combine")


@dataclass(frozen=True)
class Tally:
    """Comparisons by their verdict."""

    faster: tuple[Entry, ...]
    slower: tuple[Entry, ...]
    undecided: tuple[Entry, ...]

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All comparisons."""
        return self.faster + self.slower + self.undecided

    @property
    def best(self) -> Entry | None:
        """The decided comparison with the largest gain."""
        return min(self.faster, key=ratio, default=None)

    @property
    def worst(self) -> Entry | None:
        """The decided comparison with the largest loss."""
        return max(self.slower, key=ratio, default=None)


def ratio(entry: Entry) -> float:
    """Return our time over the peer's."""
    return float(entry["extra_info"]["ratio"])


def tally(entries: Iterable[Entry]) -> Tally:
    """Sort the entries that have a comparison by verdict."""
    found = columns.grouped(entries, columns.verdict)
    return Tally(*(tuple(found.get(each, ())) for each in ("faster", "slower", "undecided")))


def strategies(entries: Iterable[Entry]) -> list[Entry]:
    """Return the table of strategies, or if that was not measured, training compared with libraries."""
    entries = list(entries)
    table = [entry for entry in entries if entry["suite"] == "bench_strategies"]
    return table or [entry for entry in entries if entry["suite"] in TRAINING and _library(entry)]


def _library(entry: Entry) -> bool:
    peer = str(entry["extra_info"].get("peer", "")).lower()
    return peer.startswith(LIBRARIES)


def library(entry: Entry) -> str:
    """Return the peer's library or program, without what it calls of it: `torch`, `Accelerate`, `gloo`."""
    peer = str(entry["extra_info"]["peer"])
    return peer.removeprefix("plain ").partition(" ")[0].partition(".")[0].rstrip(",")


def name(entry: Entry) -> str:
    """Return a strategy's full name, for use outside its table: `ZeRO, stage 2`."""
    extra = entry["extra_info"]
    if "strategy" in extra:
        label = columns.label(entry)  # includes the number of ranks if that is more than two
        return f"{label} ({extra['model']})" if "model" in extra else label
    subject = entry["group"].partition(":")[0].partition(" in every form")[0]
    label = columns.label(entry)
    return label if subject.lower() in label.lower() else f"{subject}, {label}"


def told(entry: Entry) -> str:
    """Describe a comparison: `0.83 (0.81–0.85) times the time of torch DDP`, or that it is undecided."""
    extra = entry["extra_info"]
    middle = f"({extra['pair_ratio_q1']:.2f}–{extra['pair_ratio_q3']:.2f})"
    if columns.undecided(entry):
        return f"{UNDECIDED} {middle}"
    return f"{formats.times(extra['ratio'])} {middle} times the time of {extra['peer']}"


def is_collective(entry: Entry) -> bool:
    """Whether a result compares a collective with a peer's."""
    own = entry["suite"] == "bench_collectives"
    return bool(own and {"ratio", "bytes", "ranks"} <= entry["extra_info"].keys())


def schedule_name(entry: Entry) -> str:
    """Return a schedule's name as in the papers."""
    schedule = str(entry["extra_info"]["schedule"])
    return TITLES.get(schedule, schedule)


def zero_stages(entries: Iterable[Entry]) -> dict[tuple[str, int], dict[int, Entry]]:
    """Return, by model and ranks, the plainest result with counted memory of each ZeRO stage.

    Stage 0 is plain data parallelism.
    """
    found: dict[tuple[str, int], dict[int, Entry]] = {}
    for entry in sorted(entries, key=lambda entry: _frills(entry["extra_info"])):
        extra = entry["extra_info"]
        if {"strategy", "memory", "layout", "model", "ranks"} <= extra.keys():
            stage = _zero_stage(extra["layout"])
            if stage is not None:
                found.setdefault((extra["model"], extra["ranks"]), {}).setdefault(stage, entry)
    return found


def _frills(extra: dict[str, Any]) -> tuple[bool, int]:
    """Return a sort key that puts overlap, data parallelism's default, and then plain forms first."""
    strategy = str(extra.get("strategy", ""))
    return strategy != "data parallel, overlap", strategy.count(",")


def _zero_stage(layout: str) -> int | None:
    """Return the ZeRO stage of a layout with only data parallelism, in full precision; None for any other."""
    try:
        parsed = Layout.parse(layout)
    except ValueError:
        return None
    alone = Layout(dp=parsed.dp, zero=parsed.zero) == parsed and parsed.dp > 1
    return parsed.zero if alone else None


def fit_in_words(fitted: dict[str, Any]) -> str:
    """Format the parameters of a fit: `alpha 35.1 µs, beta 0.24 ns per byte (4.20 GB/s)`."""
    words = []
    for name, number in fitted.items():
        if isinstance(number, (int, float)):
            word = f"{name} {formats.seconds(number)}{' per byte' if name in A_BYTE else ''}"
            rate = f" ({formats.number(1e-9 / number)} GB/s)" if name == "beta" and number > 0 else ""
            words.append(word + rate)
    return ", ".join(words)
