"""The CPU ladder's share of NumPy's speed on every machine, one under the other, each as its own.

A share of one machine says nothing about another: their CPUs differ, and so do the kernels that NumPy's BLAS
chooses for them. So each row names its machine, when it measured, and that kernel. No figure of a row comes
from another machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from minidist.benchmarks.harness import columns, formats, identity, machine, results
from minidist.benchmarks.harness.columns import Entry
from minidist.benchmarks.harness.results import Results
from minidist.benchmarks.report import report

ONE, ALL = "s6_register_tile", "s7_threads"
TITLE = "The CPU ladder's share of NumPy's speed, float32"
ABOUT = "Above 100% the ladder is faster. A ~ marks what the spread leaves undecided. Sizes are m x n x k."
SIZES = (64, 128, 256, 512, 1024, 2048)
PRODUCTS = {
    **{str(n): (f"test_rung[{ONE}-{n}]", f"test_all_cores[float32-{n}]") for n in SIZES},
    **{
        name: tuple(f"test_tall_and_flat[{shape}-{step}]" for step in (ONE, ALL))
        for name, shape in {"2048 x 1 x 2048": "2048x1x2048", "64 x 4096 x 64": "64x4096x64"}.items()
    },
}
"""Each column's heading, with the names of the benchmarks of rung 6 and of rung 7."""


@dataclass(frozen=True)
class Shares:
    """A row: one rung on one machine."""

    slug: str  # the machine's
    machine: str  # its title, which says so if it is another than this one
    measured: str  # the CPU's family, model and stepping, when it was measured, and BLAS's kernel
    rung: str
    entries: dict[str, Entry]  # by the heading of the product

    def cells(self) -> list[str]:
        """Return the share for each product, as `97%`; "" where it was not measured."""
        return [share(self.entries.get(product)) for product in PRODUCTS]


def share(entry: Entry | None) -> str:
    """Format a share of the peer's speed: `97%`, or `~97%` if it is undecided which is faster."""
    if entry is None or "percent_of_peer" not in entry["extra_info"]:
        return ""
    return f"{'~' * columns.undecided(entry)}{formats.number(entry['extra_info']['percent_of_peer'])}%"


def rows(machines: Mapping[str, Results]) -> list[Shares]:
    """Return the rows of all machines that measured the ladder, in their order."""
    found = []
    for slug, of in machines.items():
        info = of["machine_info"]
        entries = {e["name"]: e for e in results.newest(of) if e["suite"] == "bench_cpu_matmul"}
        own = [
            {product: entries[names[index]] for product, names in PRODUCTS.items() if names[index] in entries}
            for index in range(2)
        ]
        when = report.provenance(of, [entry for each in own for entry in each.values()])
        measured = f"{identity.told(info)}; {when}"
        for rung, each in zip(("rung 6, one core", f"rung 7, {info['cores']} cores"), own, strict=True):
            if each:
                found.append(Shares(slug, machine.title(info), measured, rung, each))
    return found


def show(console: Console, machines: Mapping[str, Results]) -> None:
    """Print each machine's rows, with as many of the first columns as fit into the terminal."""
    found = rows(machines)
    if found:
        console.print(Text(TITLE, style="bold cyan"))
        console.print(Text(ABOUT))
    for (title, measured), own in itertools.groupby(found, key=lambda row: (row.machine, row.measured)):
        console.print(Text(f"\n{title}", style="bold"))
        console.print(_table(list(own), console.width))
        console.print(Text(measured))


def _table(own: Sequence[Shares], width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    room = width - 2 - max(len(row.rung) for row in own)
    shown = 0
    for index, product in enumerate(PRODUCTS):
        heading = product.replace(" x ", "\nx ")
        room -= 2 + max(*map(len, heading.split("\n")), *(len(row.cells()[index]) for row in own))
        if room < 0:
            break
        table.add_column(heading, justify="right", no_wrap=True)
        shown += 1
    for row in own:
        table.add_row(row.rung, *row.cells()[:shown])
    return table


def as_json(machines: Mapping[str, Results]) -> list[dict[str, Any]]:
    """Return the rows for a program to read: shares in percent."""
    return [
        {
            "machine": row.slug,
            "title": row.machine,
            "measured": row.measured,
            "rung": row.rung,
            "percent_of_numpy": {
                product: entry["extra_info"].get("percent_of_peer") for product, entry in row.entries.items()
            },
        }
        for row in rows(machines)
    ]
