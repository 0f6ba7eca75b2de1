"""The ladders of matrix products in one table each: every rung's speed as a share of the library's.

Only measured rungs have figures. CPU: the last three rungs on every machine, one under the other, each as its
own. A share of one machine says nothing about another: their CPUs differ, and so do the kernels that NumPy's
BLAS chooses for them. So each row names its machine, when it measured, and that kernel.

CUDA: all rungs in each arithmetic, on the first machine with a GPU. The row of a rung that was not measured
says so, and so do all rows if no results file comes from a machine with a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minidist.benchmarks.harness import columns, formats, identity, machine, results
from minidist.benchmarks.harness.columns import Entry
from minidist.benchmarks.harness.results import Results
from minidist.benchmarks.report.pieces import Cell, Heading, Row, Table
from minidist.benchmarks.report.sections import provenance
from minidist.kernels.cuda import RUNGS

ONE, ALL = "s6_register_tile", "s7_threads"
UNIT = "test_matrix_unit[{}-bf16-numpy-all]"  # in rung 8's row; a quick run measures one size
CPU_TITLE = "The CPU ladder's share of NumPy's speed, float32"
CPU_ABOUT = (
    "Above 100% the ladder is faster. Rung 8 rounds float32 to bf16 for the CPU's matrix unit. A ~ marks "
    "what the spread leaves undecided. Sizes are m x n x k."
)
SIZES = (64, 128, 256, 512, 1024, 2048)
PRODUCTS = {
    **{
        str(n): (
            f"test_rung[{ONE}-{n}]",
            f"test_all_cores[float32-{n}]",
            *([UNIT.format(n)] if n == 1024 else []),
        )
        for n in SIZES
    },
    **{
        name: tuple(f"test_tall_and_flat[{shape}-{step}]" for step in (ONE, ALL))
        for name, shape in {"2048 x 1 x 2048": "2048x1x2048", "64 x 4096 x 64": "64x4096x64"}.items()
    },
}
"""Each column's heading, with the names of the benchmarks of rungs 6 and 7, and of rung 8 for some."""
NOTHING = "not measured"
DASH = "–"
CUDA_TITLE = "The CUDA ladder against torch.matmul"
CUDA_HOW = "To measure it, run `minidist bench cuda` on a machine with a GPU."


@dataclass(frozen=True)
class Shares:
    """A row of the CPU ladder's table: one rung on one machine."""

    slug: str  # the machine's
    machine: str  # its title, which says so if it is another than this one
    measured: str  # the CPU's family, model and stepping, when it was measured, and BLAS's kernel
    rung: str
    entries: dict[str, Entry]  # by the heading of the product

    def cells(self) -> list[str]:
        """Return the share for each product, as `97%`; "" where it was not measured."""
        return [_share(self.entries.get(product)) for product in PRODUCTS]


def _share(entry: Entry | None) -> str:
    """Format a share of the peer's speed: `97%`, or `~97%` if it is undecided which is faster."""
    if entry is None or "percent_of_peer" not in entry["extra_info"]:
        return ""
    return f"{'~' * columns.undecided(entry)}{formats.number(entry['extra_info']['percent_of_peer'])}%"


def cpu_rows(machines: Mapping[str, Results]) -> list[Shares]:
    """Return the rows of all machines that measured the CPU ladder, in their order."""
    found = []
    for slug, of in machines.items():
        info = of["machine_info"]
        entries = {e["name"]: e for e in results.newest(of) if e["suite"] == "bench_cpu_matmul"}
        own = [
            {
                product: entries[names[index]]
                for product, names in PRODUCTS.items()
                if index < len(names) and names[index] in entries
            }
            for index in range(3)
        ]
        when = provenance(of, [entry for each in own for entry in each.values()])
        measured = f"{identity.told(info)}; {when}"
        cores = f"{info['cores']} cores"
        for entry in own[2].values():  # one at most
            percent = entry["extra_info"]["percent_of_peer"]
            measured += f"; the matrix unit of this CPU: {percent / 100:.1f} times NumPy's float32"
        titles = "rung 6, one core", f"rung 7, {cores}", f"rung 8 in bf16, {cores}"
        for rung, each in zip(titles, own, strict=True):
            if each:
                found.append(Shares(slug, machine.title(info), measured, rung, each))
    return found


def cpu_table(rows: list[Shares]) -> Table:
    """Return the table of the CPU ladder, and below it which machine measured when."""

    def cell(row: Shares, product: str, text: str) -> Cell:
        return Cell(text, "right", (row.slug, row.entries[product]) if text else None)

    made = [
        Row(
            f"{row.machine}: {row.rung}",
            [cell(row, *each) for each in zip(PRODUCTS, row.cells(), strict=True)],
        )
        for row in rows
    ]
    told = tuple(dict.fromkeys(f"{row.machine}: {row.measured}." for row in rows))
    return Table([Heading(product) for product in PRODUCTS], made, told, "machine and rung", "machines")


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

    machine: str | None  # its slug; None if no results file has figures
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
        return f"{CUDA_TITLE}, {self.device}" if self.machine else f"{CUDA_TITLE}: {NOTHING}"

    @property
    def about(self) -> str:
        """Explain the figures, or how to measure them."""
        if self.machine is None:
            return f"None of the results files here comes from a GPU. {CUDA_HOW}"
        return (
            "The columns by n give the rung's speed for n x n times n x n as a share of `torch.matmul`'s in "
            "the same arithmetic; at 100% both are equally fast. The rate, and its share of the GPU's peak "
            "(the vendor's product at its best), are for the largest n."
        )

    def table(self, label: str = "") -> Table:
        """Return the table; `label` is the id of its heading."""
        headings = ["arithmetic", *map(str, self.sizes), "GFLOP/s", "of the GPU's peak"]
        if self.machine is None:
            headings = ["speed"]
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
        source = {size: (str(self.machine), entry) for size, entry in row.entries.items()}
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


def first_cuda_ladder(machines: Mapping[str, Results]) -> CudaLadder:
    """Return the ladder of the first machine that has one, or else a ladder without figures."""
    made = (cuda_ladder(slug, found) for slug, found in machines.items())
    none = CudaLadder(None, "", "", tuple(CudaRow(rung, None, {}) for rung in RUNGS))
    return next((ladder for ladder in made if ladder), none)
