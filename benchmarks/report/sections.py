"""Sort one machine's newest results into sections by group: what the terminal, the page and the JSON show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from minidist.benchmarks.harness import columns, results
from minidist.benchmarks.harness.columns import Column, Entry
from minidist.benchmarks.harness.results import Results


@dataclass(frozen=True)
class Section:
    """One table of the report: the benchmarks of one group."""

    title: str
    about: str  # its suite's description
    entries: tuple[Entry, ...]  # from results.newest

    @property
    def peer(self) -> str | None:
        """The peer of all comparisons here; None if there is no peer or more than one."""
        peers = {entry["extra_info"]["peer"] for entry in self.entries if "peer" in entry["extra_info"]}
        return peers.pop() if len(peers) == 1 else None

    def columns(self) -> list[Column]:
        """Return the columns with any figures; if all rows have the same peer, headings name it."""
        shown = columns.shown(self.entries)
        if self.peer is None:
            return shown
        renamed = {
            columns.PEER_TIME: self.peer,
            columns.SHARE: f"of {self.peer}",
            columns.RATIO: f"time over {self.peer}",
            columns.BEYOND: f"time minus {self.peer}'s",
        }
        return [replace(c, heading=renamed.get(c, c.heading)) for c in shown if c != columns.PEER]


def sections(found: Results) -> list[Section]:
    """Sort one machine's newest results by group, in the order of the suites."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in results.newest(found):
        groups.setdefault((entry["suite"], entry["group"]), []).append(entry)
    return [
        Section(group, found["suites"].get(suite, ""), tuple(entries))
        for (suite, group), entries in groups.items()
    ]


def goals(found: Results) -> tuple[int, int]:
    """Return how many of the goals measured on this machine were met, and their number."""
    judged = [judgement for entry in results.newest(found) if (judgement := columns.goal(entry))]
    return sum(kept for _, _, kept in judged), len(judged)


def provenance(found: Results, entries: Sequence[Entry]) -> str:
    """Say when and how these figures were measured: `quick run of 2025-01-31, commit 1a2b3c4`."""
    described = []
    for name in sorted({entry["run"] for entry in entries}):
        run = found["runs"][name]
        commit = f", commit {run['commit']}" if run["commit"] else ""
        beside = any(e["run"] == name and e["extra_info"].get("peer") == "numpy.matmul" for e in entries)
        blas = f", {_blas_kernel(run)}" if beside and run["software"].get("blas") else ""
        described.append(f"{run['mode']} run of {name.partition('T')[0]}{commit}{blas}")
    return "; ".join(dict.fromkeys(described))


def _blas_kernel(run: dict[str, Any]) -> str:
    """Name the kernel of NumPy's BLAS in a run: `NumPy on openblas's SkylakeX kernel`."""
    blas = run["software"]["blas"]
    chosen = f", which {blas['chosen_by']} chose" if "chosen_by" in blas else ""
    return f"NumPy on {blas['name']}'s {blas['architecture']} kernel{chosen}"
