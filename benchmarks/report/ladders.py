"""The ladders of matrix products: each rung's speed, and in a table its share of the library's.

The CPU ladder is one machine's chart and the roofline of one core. The CUDA ladder is a table of all rungs in
each arithmetic; the row of a rung that was not measured says so.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minidist.benchmarks.harness import columns, formats, results
from minidist.benchmarks.harness.columns import Entry
from minidist.benchmarks.harness.results import Results
from minidist.benchmarks.report import bars, curves
from minidist.benchmarks.report.curves import Line, kind_color
from minidist.benchmarks.report.figures import Plot, color
from minidist.benchmarks.report.pieces import Bars, Cell, Heading, Row, Table
from minidist.benchmarks.report.tables import provenance
from minidist.kernels.cuda import RUNGS

NOTHING = "not measured"
DASH = "–"
RUNG = re.compile(r"s(\d+)_(\w+), (\d+)(?:, (\w+))?$")
"""A rung's label in the suites that measure square products: `s7_threads, 2048, float32`."""
ON_MATRIX_UNIT = re.compile(r"bf16, (\d+), (one|all) beside")
"""The last rung's label where it takes float32 for bf16, the only mode that is as fast as the unit."""
FIRST_ON_ALL_CORES, MATRIX_UNIT = 7, 8
CUDA_ABOUT = (
    "The columns by n give the rung's speed for n x n times n x n as a share of `torch.matmul`'s in the same "
    "arithmetic; at 100% both are equally fast. The rate, and its share of the GPU's peak (the vendor's "
    "product at its best), are for the largest n."
)
CUDA_MISSING = (
    "The CUDA ladder is not measured yet. To measure it, run `minidist bench cuda` on a machine with a GPU."
)


@dataclass(frozen=True)
class Climbed:
    """A square product of a rung of the CPU ladder, in single precision or on the matrix unit."""

    number: int
    name: str  # "6 register tile"
    size: int
    all_cores: bool
    entry: Entry

    @property
    def gflops(self) -> float:
        """Its 10^9 operations a second."""
        return float(self.entry["extra_info"]["gflops"])


def rung_of(entry: Entry) -> Climbed | None:
    """Return the rung whose product this is, or None for any other result."""
    label, extra = columns.label(entry), entry["extra_info"]
    if "gflops" not in extra or entry["suite"] not in ("bench_cpu_matmul", "bench_headline"):
        return None
    if (found := ON_MATRIX_UNIT.match(label)) and extra.get("arithmetic") == "bfloat16":
        name = f"{MATRIX_UNIT} matrix unit, bf16"
        return Climbed(MATRIX_UNIT, name, int(found[1]), found[2] == "all", entry)
    found = RUNG.match(label)
    if not found or "float64" in (found[4], entry["group"][-7:]):
        return None
    number, name = int(found[1]), f"{found[1]} {found[2].replace('_', ' ')}"
    return Climbed(number, name, int(found[3]), number >= FIRST_ON_ALL_CORES, entry)


def climbed(entries: Sequence[Entry]) -> list[Climbed]:
    """Return the rungs of the CPU ladder that were measured, each at its fastest, from the lowest up."""
    best: dict[int, Climbed] = {}
    for made in filter(None, map(rung_of, entries)):
        best[made.number] = max(made, best.get(made.number, made), key=lambda each: each.gflops)
    return [best[number] for number in sorted(best)]


def cpu_bars(entries: Sequence[Entry], cores: int) -> Bars | None:
    """Draw the CPU ladder from Python's loops to the last rung, with lines for NumPy; None for one rung."""
    rungs = climbed(entries)
    if len(rungs) < 2:
        return None
    rows, peers = [], {False: 0.0, True: 0.0}
    for rung in rungs:
        text = f"{formats.number(rung.gflops)} GFLOP/s, n = {rung.size:,}"
        many = f", {cores} cores" if rung.all_cores and cores > 1 else ""
        rows.append((f"{rung.name}{many}", rung.gflops, text, f"series-{2 if rung.all_cores else 0}"))
        extra = rung.entry["extra_info"]
        if extra.get("peer") == "numpy.matmul":
            peers[rung.all_cores] = max(peers[rung.all_cores], extra.get("peer_gflops", 0.0))
    words = {False: "NumPy on one core", True: f"NumPy on {cores} cores"}
    lines = {f"{words[which]}, {formats.number(rate)}": rate for which, rate in peers.items() if rate}
    caption = "Each rung at its fastest size, in float32; the matrix unit rounds to bf16. Logarithmic scale."
    return bars.lengths(rows, lines, "GFLOP/s of the CPU ladder", caption, log=True)


def cpu_roofline(entries: Sequence[Entry], device: str) -> Plot | None:
    """Draw the rungs of one core below its roofline, or return None if no peak was measured."""
    several: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        extra = entry["extra_info"]
        if entry["suite"] == "bench_cpu_matmul" and {"series", "size", "percent_of_peak"} <= extra.keys():
            several.setdefault(extra["series"], []).append(extra)
    lines = []
    for index, (name, figures) in enumerate(sorted(several.items())):
        arithmetic = figures[0].get("arithmetic", "float32")  # of the matrix unit: bfloat16
        figures.sort(key=lambda extra: int(extra["size"]))
        lines.append(Line(name, arithmetic, figures, color(index), "float32"))
    if not lines:
        return None
    peaks = {
        kind: peak([each for line in lines if line.dtype == kind for each in line.figures])
        for kind in dict.fromkeys(line.dtype for line in lines)
    }
    memory = bandwidth([each for line in lines for each in line.figures])
    slope = "its slope is the rate at which a core reads memory, and " if memory else ""
    return curves.roofline(
        f"one core of {device}",
        lines,
        peaks,
        memory or None,
        f"The roofline of one core: {slope}its peak is the rate of fused multiply-adds, or of the matrix "
        "unit's products in bf16. A point for each n.",
    )


def peak(measured: Sequence[Mapping[str, Any]]) -> float:
    """Return the machine's peak in GFLOP/s that rates and their shares of it imply."""
    return float(statistics.median(100 * each["gflops"] / each["percent_of_peak"] for each in measured))


def bandwidth(measured: Sequence[Mapping[str, Any]]) -> float:
    """Return the median of the memory's GB/s, or 0 if it was not measured."""
    known = [float(each["peak_gb_per_s"]) for each in measured if "peak_gb_per_s" in each]
    return statistics.median(known or [0.0])


@dataclass(frozen=True)
class CudaRow:
    """A rung of the CUDA ladder in one arithmetic: float32, TF32, float16, ..."""

    rung: str
    dtype: str | None  # None if this rung was not measured
    entries: Mapping[int, Entry]  # by n, for n x n times n x n

    @property
    def name(self) -> str:
        """The row's name in a figure: `8 warp tile, float32`."""
        number, _, words = self.rung.removeprefix("s").partition("_")
        arithmetic = f", {formats.kind_name(self.dtype)}" if self.dtype else ""
        return f"{number} {words.replace('_', ' ')}{arithmetic}"

    @property
    def figures(self) -> list[dict[str, Any]]:
        """The figures of each size, from the smallest up."""
        return [entry["extra_info"] for _, entry in sorted(self.entries.items())]

    def percent(self, size: int) -> float | None:
        """Return the share of torch.matmul's speed at a size, in percent."""
        entry = self.entries.get(size)
        value: float | None = entry["extra_info"].get("percent_of_peer") if entry else None
        return value

    def largest(self, key: str) -> float | None:
        """Return a figure at the largest measured size."""
        return self.figures[-1].get(key) if self.entries else None


@dataclass(frozen=True)
class CudaLadder:
    """All rungs of the CUDA ladder, with one machine's results."""

    machine: str  # its slug
    device: str  # the GPU's name
    provenance: str
    rows: tuple[CudaRow, ...]

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
        return f"The CUDA ladder against torch.matmul, {self.device}"

    def table(self, label: str = "") -> Table:
        """Return the table; `label` is the id of its heading."""
        headings = ["arithmetic", *map(str, self.sizes), "GFLOP/s", "of the GPU's peak"]
        return Table(
            [Heading(text, right=index > 0) for index, text in enumerate(headings)],
            [self._row(row, len(headings)) for row in self.rows],
            (self.provenance,) if self.provenance else (),
            label=label,
        )

    def _row(self, row: CudaRow, width: int) -> Row:
        if row.dtype is None:
            blank = [DASH] * (width - 1)
            return Row(row.rung, [Cell(NOTHING), *(Cell(text, "right") for text in blank)])
        source = {size: (self.machine, entry) for size, entry in row.entries.items()}
        last, rate = source[max(source)], row.largest("gflops")
        cells = [
            *(Cell(_percent(row.percent(size)), "right", source.get(size)) for size in self.sizes),
            Cell(DASH if rate is None else formats.number(rate), "right", last),
            Cell(_percent(row.largest("percent_of_gpu_peak")), "right", last),
        ]
        return Row(row.rung, [Cell(formats.kind_name(row.dtype)), *cells], last, own=False)


def _percent(share: float | None) -> str:
    return DASH if share is None else f"{formats.number(share)}%"


def cuda_ladder(slug: str, found: Results) -> CudaLadder | None:
    """Return the CUDA ladder from a machine's results, or None if they have no rung."""
    measured: dict[tuple[str, str], dict[int, Entry]] = {}
    for entry in results.newest(found):
        extra = entry["extra_info"]
        own = entry["suite"] == "bench_cuda" and "order" not in extra
        if own and {"rung", "dtype", "size"} <= extra.keys():
            measured.setdefault((extra["rung"], extra["dtype"]), {})[extra["size"]] = entry
    if not measured:
        return None
    rows = []
    for rung in RUNGS:
        kinds = [dtype for name, dtype in measured if name == rung]
        rows += [CudaRow(rung, kind, measured[rung, kind]) for kind in kinds] or [CudaRow(rung, None, {})]
    entries = [entry for by_size in measured.values() for entry in by_size.values()]
    gpus = found["machine_info"]["gpus"] or [{"name": "a GPU"}]
    return CudaLadder(slug, gpus[0]["name"], provenance(found, entries), tuple(rows))


def first_cuda_ladder(machines: Mapping[str, Results]) -> CudaLadder | None:
    """Return the ladder of the first machine that has one."""
    made = (cuda_ladder(slug, found) for slug, found in machines.items())
    return next((ladder for ladder in made if ladder), None)


def cuda_bars(ladder: CudaLadder) -> Bars:
    """Draw a bar for each rung and arithmetic of the CUDA ladder, at the size that most of them have."""
    common, rows = ladder.common_size, []
    for row in ladder.rows:
        size = max((size for size in row.entries if size <= common), default=max(row.entries, default=0))
        percent = row.percent(size)
        text = NOTHING if percent is None else f"{formats.number(percent)}%"
        shade = "muted" if row.dtype is None else f"series-{curves.KINDS.index(row.dtype)}"
        rows.append((row.name, percent, text if size in (0, common) else f"{text}, n = {size}", shade))
    caption = f"Share of torch.matmul's speed in the same arithmetic, at n = {common}."
    return bars.shares(rows, "torch.matmul's speed", caption)


def cuda_roofline(ladder: CudaLadder) -> Plot | None:
    """Draw the CUDA ladder's rungs on the GPU's roofline, or return None if no peak was measured."""
    rows = [row for row in ladder.rows if row.largest("peak_gflops")]
    if not rows:
        return None
    return curves.roofline(
        ladder.device,
        [Line(row.name, str(row.dtype), row.figures, kind_color(row.dtype)) for row in rows],
        {str(row.dtype): row.largest("peak_gflops") or 0.0 for row in rows},
        max(row.largest("peak_gb_per_s") or 0.0 for row in rows),
        "The roofline: its slope is the rate of a copy within the GPU's memory, and each peak is the rate of "
        "the vendor's own product at its best. A point for each n.",
    )
