"""Count comparisons: how many are faster, how many slower, and how many undecided.

A comparison is decided if the middle half of the pairs' ratios lies on one side of 1 (`columns.undecided`).
Only strategies compared with other programs count, not for example a bubble compared with its simulation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from minidist.benchmarks.harness import columns, formats
from minidist.benchmarks.harness.columns import Entry

UNDECIDED = "no difference beyond the spread"
# Suites that train, and the libraries that people would use instead; other peers are forms of our own.
TRAINING = ("bench_training", "bench_zero", "bench_fully_shard", "bench_tensor_parallel", "bench_pipeline")
LIBRARIES = ("torch", "plain torch", "accelerate", "deepspeed")


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
    found: dict[str, list[Entry]] = {"faster": [], "slower": [], "undecided": []}
    for entry in entries:
        verdict = columns.verdict(entry)
        if verdict:
            found[verdict].append(entry)
    return Tally(*(tuple(found[each]) for each in ("faster", "slower", "undecided")))


def strategies(entries: Iterable[Entry]) -> list[Entry]:
    """Return the table of strategies, or if that was not measured, training compared with libraries."""
    entries = list(entries)
    table = [entry for entry in entries if entry["suite"] == "bench_strategies"]
    return table or [entry for entry in entries if entry["suite"] in TRAINING and _library(entry)]


def _library(entry: Entry) -> bool:
    peer = str(entry["extra_info"].get("peer", "")).lower()
    return peer.startswith(LIBRARIES)


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
