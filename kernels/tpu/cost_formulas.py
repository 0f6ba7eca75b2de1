"""The cost of a product on a machine, as formulas: cycles, and how often each operand is read from memory.

A chip has room for far more multipliers than memory can feed. They help only if each number that was read is
used many times. In a systolic array it is: it passes from one processing element (PE) to the next (Kung, Why
Systolic Architectures?, IEEE Computer 15(1), 1982). This file gives the same counts for a scalar processor, a
vector unit and an array. Memory means everything outside the multipliers and their registers, also caches and
on-chip buffers.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace

DATAFLOWS = ("weight_stationary", "output_stationary")


@dataclass(frozen=True)
class ProductCounts:
    """The cost of c (m, n) = a (m, k) times b (k, n): cycles, and elements read and written."""

    machine: str  # what counted, as a table shows it
    m: int
    n: int
    k: int
    multipliers: int  # multiply-adds that the machine could do in one cycle
    cycles: int
    a_reads: int
    b_reads: int
    c_reads: int  # partial sums brought back, to be added to
    c_writes: int  # partial sums and results

    @property
    def multiply_adds(self) -> int:
        """The useful multiply-adds: one for each row of a, column of b and element of the sum."""
        return self.m * self.n * self.k

    @property
    def utilisation(self) -> float:
        """Useful multiply-adds over multipliers times cycles, 0 to 1; 0 if nothing ran."""
        return self.multiply_adds / (self.multipliers * self.cycles) if self.cycles else 0.0

    @property
    def accesses(self) -> int:
        """Elements read from memory or written to it."""
        return self.a_reads + self.b_reads + self.c_reads + self.c_writes

    @property
    def multiply_adds_per_access(self) -> float:
        """The multiply-adds for each element read from memory or written to it."""
        return self.multiply_adds / self.accesses if self.accesses else 0.0

    def bytes_moved(self, operand_bytes: int, sum_bytes: int) -> int:
        """Return the bytes moved, for these sizes of operands and sums: (1, 4) for a TPU's int8 and int32."""
        return (self.a_reads + self.b_reads) * operand_bytes + (self.c_reads + self.c_writes) * sum_bytes


def scalar(m: int, n: int, k: int) -> ProductCounts:
    """Return the counts of a processor that does one multiply-add in a cycle.

    Three loops take m n k cycles, and each cycle reads one element of a and one of b. A sum stays in a
    register until it is finished, so c is written once.
    """
    return replace(vector(m, n, k, 1), machine="scalar")


def vector(m: int, n: int, k: int, lanes: int = 16) -> ProductCounts:
    """Return the counts of a vector unit that does `lanes` multiply-adds in a cycle.

    The lanes hold neighbouring elements of a row of c in a register until they are finished. For each p, one
    element of a goes to all lanes, and each lane reads its own element of b: m k ceil(n / lanes) cycles and
    reads of a, m n k reads of b. So a wider vector saves only reads of a.
    """
    m, n, k = sizes(m, n, k)
    instructions = m * k * -(-n // at_least("lanes", lanes, 1))
    name, products, writes = f"vector, {lanes} lanes", m * n * k, m * n if k else 0
    return ProductCounts(name, m, n, k, lanes, instructions, instructions, products, 0, writes)


def systolic(
    m: int, n: int, k: int, rows: int, cols: int, dataflow: str, double_buffered: bool = True
) -> ProductCounts:
    """Return the counts of a systolic array of rows x cols PEs; `cycles` explains the cycles.

    c has N = ceil(n / cols) blocks of columns.

    - weight_stationary: each weight is read once, k n. All of a streams by for each block of columns: N m k.
      Each of the K = ceil(k / rows) tiles of such a block gives m n partial sums, and all but the first are
      added to earlier ones: K m n writes, (K - 1) m n reads. (A TPU has accumulators on the chip for these.)
    - output_stationary: for each of the M N tiles of c, M = ceil(m / rows), its rows of a and columns of b
      stream by: N m k and M k n reads. Sums leave once: m n writes.
    """
    spent = cycles(m, n, k, rows, cols, dataflow, double_buffered)  # checks all arguments
    stationary = dataflow_name(dataflow)
    a_reads = b_reads = c_reads = c_writes = 0
    if spent > 0:
        a_reads = -(-n // cols) * m * k
        if stationary == "weight_stationary":
            tiles_of_k = -(-k // rows)
            b_reads, c_reads, c_writes = k * n, (tiles_of_k - 1) * m * n, tiles_of_k * m * n
        else:
            b_reads, c_writes = -(-m // rows) * k * n, m * n
    machine = f"{rows} x {cols} {stationary}" + ("" if double_buffered else ", single-buffered")
    return ProductCounts(machine, m, n, k, rows * cols, spent, a_reads, b_reads, c_reads, c_writes)


def cycles(m: int, n: int, k: int, rows: int, cols: int, dataflow: str, double_buffered: bool = True) -> int:
    """Return the cycles of (m, k) times (k, n) on R = rows by C = cols PEs, by a closed formula.

    The dimension along the rows of the array, h, is k (weight-stationary) or m (output-stationary); the other
    one, s, streams. There are N = ceil(n / C) blocks of columns, each of H = ceil(h / R) tiles, all of height
    R but the last, which has r = h - (H - 1) R.

    *One tile* of height t: loading its weights takes t cycles, then s rows of a stream in, one per cycle.
    Output-stationary is the mirror image: s columns of a stream in, then t rows of c drain. Either way the
    controller issues commands for t + s cycles, and the last needs R - 1 more cycles to walk down the edge of
    the array and C - 1 to cross it: t + s + R + C - 2 cycles. For a full tile that is 2 R + C + s - 2, as in
    SCALE-Sim (Samajdar et al., SCALE-Sim: Systolic CNN Accelerator Simulator, 2018) for both dataflows.

    *Single-buffered*, the tiles' commands follow one another, and only the last command's path is added:

        N h + N H s + R + C - 2

    *Double-buffered*, a tile's stream and the next tile's load (or the drain of the tile before) overlap, and
    the longer of the two counts: max(s, t). Only the first load (the last drain), of height f, has nothing to
    overlap with: its tile takes s + f, which is min(s, f) more. f is min(R, h) for weights, r for results:

        N (H - 1) max(s, R) + N max(s, r) + min(s, f) + R + C - 2

    With full tiles and s >= R this is N H s + 2 R + C - 2: the array idles only at the start and the end. A
    product without a multiply-add takes 0 cycles.
    """
    m, n, k = sizes(m, n, k)
    rows, cols = at_least("rows", rows, 1), at_least("cols", cols, 1)
    weights_stay = dataflow_name(dataflow) == "weight_stationary"
    if m * n * k == 0:
        return 0
    height, stream = (k, m) if weights_stay else (m, k)
    column_blocks, blocks = -(-n // cols), -(-height // rows)
    last = height - (blocks - 1) * rows
    crossing = rows + cols - 2
    if not double_buffered:
        return column_blocks * height + column_blocks * blocks * stream + crossing
    alone = min(rows, height) if weights_stay else last
    per_block = (blocks - 1) * max(stream, rows) + max(stream, last)
    return column_blocks * per_block + min(stream, alone) + crossing


@dataclass(frozen=True, repr=False)
class CountedAndPredicted:
    """The counts of one product on several machines; printed, it is a table."""

    rows: tuple[ProductCounts, ...]

    def __str__(self) -> str:
        first = self.rows[0]
        table = [
            ("machine", "cycles", "utilisation", "reads of a", "of b", "of c", "writes of c", "work/access"),
            *(
                (
                    row.machine,
                    f"{row.cycles:,}",
                    f"{row.utilisation:.1%}",
                    times(row.a_reads, row.m * row.k),
                    times(row.b_reads, row.k * row.n),
                    times(row.c_reads, row.m * row.n),
                    times(row.c_writes, row.m * row.n),
                    f"{row.multiply_adds_per_access:.1f}",
                )
                for row in self.rows
            ),
        ]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
            for line in table
        ]
        shapes = f"({first.m}, {first.k}) times ({first.k}, {first.n})"
        title = f"{shapes}: {first.multiply_adds:,} multiply-adds; in brackets: times each element"
        return "\n".join([title, *lines])

    __repr__ = __str__  # a notebook's cell shows the table


def times(accesses: int, elements: int) -> str:
    """Return "1,024 (4x)" for 1024 accesses to 256 elements."""
    return f"{accesses:,} ({accesses / elements:.4g}x)" if elements else "0"


def sizes(m: int, n: int, k: int) -> tuple[int, int, int]:
    """Return m, n and k as ints; raise TypeError or ValueError if one is not a size."""
    return at_least("m", m, 0), at_least("n", n, 0), at_least("k", k, 0)


def dataflow_name(dataflow: str) -> str:
    """Return "weight_stationary" or "output_stationary", which may have a hyphen; else raise ValueError."""
    name = str(dataflow).replace("-", "_")
    if name not in DATAFLOWS:
        raise ValueError(f"dataflow is {dataflow!r}: pass {' or '.join(map(repr, DATAFLOWS))}")
    return name


def at_least(name: str, value: int, least: int) -> int:
    """Return `value` as an int; raise TypeError if it is not one, ValueError if it is too small."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}: pass a whole number, {least} or more") from None
    if number < least:
        raise ValueError(f"{name} is {number}: pass {least} or more")
    return number
