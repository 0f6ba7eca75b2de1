"""Comparisons counted: how many are faster, how many slower, and how many cannot be told apart.

A comparison is decided where the middle half of the ratios of single pairs lies on one side of 1
(`columns.undecided`). What is no strategy's comparison with another program, such as a bubble beside its
simulation, is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from minidist.benchmarks.harness import columns
from minidist.benchmarks.harness.columns import Entry

UNDECIDED = "no difference that can be told from the spread"
# Suites that train, and peers that people would take instead; other peers are our own other forms.
TRAINING = ("bench_training", "bench_zero", "bench_fully_shard", "bench_tensor_parallel", "bench_pipeline")
LIBRARIES = ("torch", "plain torch", "accelerate", "deepspeed")


@dataclass(frozen=True)
class Tally:
    """Comparisons by what they came to."""

    faster: tuple[Entry, ...]
    slower: tuple[Entry, ...]
    undecided: tuple[Entry, ...]

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All of them."""
        return self.faster + self.slower + self.undecided

    @property
    def best(self) -> Entry | None:
        """The decided one with the largest gain."""
        return min(self.faster, key=ratio, default=None)

    @property
    def worst(self) -> Entry | None:
        """The decided one with the largest loss."""
        return max(self.slower, key=ratio, default=None)


def ratio(entry: Entry) -> float:
    """Our time over the peer's."""
    return float(entry["extra_info"]["ratio"])


def tally(entries: Iterable[Entry]) -> Tally:
    """Count those that are compared."""
    found: dict[str, list[Entry]] = {"faster": [], "slower": [], "undecided": []}
    for entry in entries:
        came_to = columns.verdict(entry)
        if came_to:
            found[came_to].append(entry)
    return Tally(*(tuple(found[each]) for each in ("faster", "slower", "undecided")))


def strategies(entries: Iterable[Entry]) -> list[Entry]:
    """Results of the table of strategies; where that was not measured, training beside other libraries."""
    entries = list(entries)
    table = [entry for entry in entries if entry["suite"] == "bench_strategies"]
    return table or [entry for entry in entries if entry["suite"] in TRAINING and _library(entry)]


def _library(entry: Entry) -> bool:
    peer = str(entry["extra_info"].get("peer", "")).lower()
    return peer.startswith(LIBRARIES)


def name(entry: Entry) -> str:
    """What a strategy is called where its table is not around it: `ZeRO, stage 2`."""
    extra = entry["extra_info"]
    if "strategy" in extra:
        label = columns.label(entry)  # with its ranks, where these are not two
        return f"{label} ({extra['model']})" if "model" in extra else label
    subject = entry["group"].partition(":")[0].partition(" in every form")[0]
    label = columns.label(entry)
    return label if subject.lower() in label.lower() else f"{subject}, {label}"


def told(entry: Entry) -> str:
    """A comparison in words: `0.83 (0.81–0.85) of the time of torch DDP`, or that it is open."""
    extra = entry["extra_info"]
    middle = f"({extra['pair_ratio_q1']:.2f}–{extra['pair_ratio_q3']:.2f})"
    if columns.undecided(entry):
        return f"{UNDECIDED} {middle}"
    return f"{columns.times(extra['ratio'])} {middle} of the time of {extra['peer']}"
