"""The CUDA ladder in one table: each rung's speed as a share of torch.matmul's, in each arithmetic.

Only measured rungs have figures. The row of any other rung says "not measured", and so do all rows if no
results file comes from a machine with a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from minidist.benchmarks.harness import formats, results
from minidist.benchmarks.harness.columns import Entry
from minidist.benchmarks.harness.results import Results
from minidist.benchmarks.report import report
from minidist.kernels.cuda import RUNGS

NOTHING = "not measured"
DASH = "–"
TITLE = "The CUDA ladder against torch.matmul"
HOW = "To measure it, run `minidist bench cuda` on a machine with a GPU."


@dataclass(frozen=True)
class Row:
    """A rung in one arithmetic: float32, TF32, float16, ..."""

    rung: str
    dtype: str | None  # None if this rung was not measured
    entries: Mapping[int, Entry]  # by n, for n x n times n x n

    @property
    def name(self) -> str:
        """The row's name in a figure: `8 warp tile, float32`."""
        number, _, words = self.rung.removeprefix("s").partition("_")
        arithmetic = f", {formats.kind_name(self.dtype)}" if self.dtype else ""
        return f"{number} {words.replace('_', ' ')}{arithmetic}"

    def percent(self, size: int) -> float | None:
        """Return the share of torch.matmul's speed at a size, in percent."""
        return self._figure(size, "percent_of_peer")

    def largest(self, key: str) -> float | None:
        """Return a figure at the largest measured size."""
        return self._figure(max(self.entries), key) if self.entries else None

    def _figure(self, size: int, key: str) -> float | None:
        entry = self.entries.get(size)
        value: float | None = entry["extra_info"].get(key) if entry else None
        return value


@dataclass(frozen=True)
class Ladder:
    """All rungs, with one machine's results."""

    machine: str | None  # its slug; None if no results file has figures
    device: str  # the GPU's name
    provenance: str
    rows: tuple[Row, ...]

    @property
    def sizes(self) -> list[int]:
        """All sizes that were measured for at least one rung."""
        return sorted({size for row in self.rows for size in row.entries})

    @property
    def common_size(self) -> int:
        """The size that most rows have, the largest if there are several; 0 if there is none."""
        counts = Counter(size for row in self.rows for size in row.entries)
        return max(counts, key=lambda size: (counts[size], size), default=0)

    @property
    def title(self) -> str:
        """The table's title, with the GPU."""
        return f"{TITLE}, {self.device}" if self.machine else f"{TITLE}: {NOTHING}"

    @property
    def about(self) -> str:
        """Explain the figures, or how to measure them."""
        if self.machine is None:
            return f"None of the results files here comes from a GPU. {HOW}"
        return (
            "The columns by n give the rung's speed for n x n times n x n as a share of `torch.matmul`'s in "
            "the same arithmetic; at 100% both are equally fast. The rate, and its share of the GPU's peak "
            "(the vendor's product at its best), are for the largest n."
        )


def of(slug: str, found: Results) -> Ladder | None:
    """Return the ladder from a machine's results, or None if they have no rung."""
    measured: dict[tuple[str, str], dict[int, Entry]] = {}
    for entry in results.newest(found):
        extra = entry["extra_info"]
        if (
            entry["suite"] == "bench_cuda"
            and {"rung", "dtype", "size"} <= extra.keys()
            and "order" not in extra
        ):
            measured.setdefault((extra["rung"], extra["dtype"]), {})[extra["size"]] = entry
    if not measured:
        return None
    rows = []
    for rung in RUNGS:
        kinds = [dtype for name, dtype in measured if name == rung]
        rows += [Row(rung, kind, measured[rung, kind]) for kind in kinds] or [Row(rung, None, {})]
    entries = [entry for by_size in measured.values() for entry in by_size.values()]
    gpus = found["machine_info"]["gpus"] or [{"name": "a GPU"}]
    return Ladder(slug, gpus[0]["name"], report.provenance(found, entries), tuple(rows))


def pick(machines: Mapping[str, Results]) -> Ladder:
    """Return the ladder of the first machine that has one, or else a ladder without figures."""
    for slug, found in machines.items():
        ladder = of(slug, found)
        if ladder:
            return ladder
    return Ladder(None, "", "", tuple(Row(rung, None, {}) for rung in RUNGS))


def headings(ladder: Ladder) -> list[str]:
    """Return the headings of a row's cells."""
    if ladder.machine is None:
        return ["speed"]
    return ["arithmetic", *map(str, ladder.sizes), "GFLOP/s", "of the GPU's peak"]


def cells(ladder: Ladder, row: Row) -> list[str]:
    """Return the texts of a row's cells."""
    if ladder.machine is None:
        return [NOTHING]
    if row.dtype is None:
        return [NOTHING] + [DASH] * (len(headings(ladder)) - 1)
    shares = [*(row.percent(size) for size in ladder.sizes), row.largest("percent_of_gpu_peak")]
    texts = [DASH if share is None else f"{formats.number(share)}%" for share in shares]
    rate = row.largest("gflops")
    texts.insert(-1, DASH if rate is None else formats.number(rate))
    return [formats.kind_name(row.dtype), *texts]


def show(console: Console, ladder: Ladder) -> None:
    """Print the table, with as many of its first columns as fit into the terminal."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    texts = [cells(ladder, row) for row in ladder.rows]
    room = console.width - 2 - max(len(row.rung) for row in ladder.rows)
    shown = 0
    for index, heading in enumerate(headings(ladder)):
        words = "\n".join(heading.rsplit(" ", 1))
        width = max(*map(len, words.split("\n")), *(len(text[index]) for text in texts))
        room -= width + 3
        if room < 0:
            break
        table.add_column(words, justify="right" if index else "left", no_wrap=True)
        shown += 1
    for row, text in zip(ladder.rows, texts, strict=True):
        table.add_row(Text(row.rung), *map(Text, text[:shown]))
    console.print(Text(ladder.title, style="bold cyan"))
    console.print(table)
    console.print(Text(ladder.provenance or HOW.replace("`", "")))


def as_json(ladder: Ladder) -> dict[str, Any]:
    """Return the ladder for a program to read; if not measured, machine is null and sizes are empty."""
    keys = ("percent_of_peer", "percent_of_gpu_peak", "gflops", "peer_gflops")
    return {
        "machine": ladder.machine,
        "rows": [
            {
                "rung": row.rung,
                "dtype": row.dtype,
                "sizes": {
                    str(size): {key: entry["extra_info"].get(key) for key in keys}
                    for size, entry in sorted(row.entries.items())
                },
            }
            for row in ladder.rows
        ],
    }
