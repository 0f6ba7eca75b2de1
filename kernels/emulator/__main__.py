"""Count in the emulator what the rungs of the CUDA ladder do; no GPU needed.

python -m minidist.kernels.emulator                    # all rungs side by side, 128 x 128 x 128
python -m minidist.kernels.emulator s6 256             # one rung, line by line
python -m minidist.kernels.emulator s9 256 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from .. import rung
from ..cuda import CUDA_LADDER
from ..measure import harness
from .ptx.fault import EmulatorError
from .report import Profile, profiled

WIDTHS = {"rung": 20, "instructions": 13, "FLOP each": 10, "sectors/load": 13, "moved/least": 12}
WIDTHS |= {"shared passes": 14, "conflicts": 10, "s": 6}


def main(arguments: list[str] | None = None) -> int:
    """Print the table of all rungs, or the profile of one; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m minidist.kernels.emulator", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("rung", nargs="?", help="s1 to s10, or a full name (default: all)")
    parser.add_argument("n", nargs="?", type=int, default=128, help="multiply n x n by n x n (128)")
    parser.add_argument("--dtype", help="float32 where the rung takes it")
    options = parser.parse_args(arguments)
    if not 1 <= options.n <= 1024:
        parser.error(f"n is {options.n}: pass 1 to 1024, as the emulator takes minutes for more")
    try:
        if options.rung is not None:
            print(measured(rung(options.rung, CUDA_LADDER), options.n, options.dtype)[0])
            return 0
        print(_row(tuple(WIDTHS)))
        for step in CUDA_LADDER:
            print(_row(_cells(step, options.n, options.dtype)))
    except (ValueError, TypeError, EmulatorError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def measured(step: Any, n: int, dtype: str | None) -> tuple[Profile, float]:
    """Return the profile of a rung's n x n x n product, and the seconds of a run without counting."""
    kind = dtype or ("float32" if "float32" in step.dtypes else step.dtypes[0])
    a, b = harness.inputs(n, n, n, harness.numpy_dtype(kind), seed=n)
    step.matmul(a, b)  # compiles
    start = time.perf_counter()
    c = step.matmul(a, b)
    seconds = time.perf_counter() - start
    with profiled(f"{step.name}, {n} x {n} x {n}, {kind}") as counts:
        step.matmul(a, b, out=c)
    return counts, seconds


def _cells(step: Any, n: int, dtype: str | None) -> tuple[str, ...]:
    if dtype is not None and dtype not in step.dtypes:
        return (step.name, f"takes {' or '.join(step.dtypes)}", *[""] * 6)
    counts, seconds = measured(step, n, dtype)
    total = counts.total
    size = 2 if "float32" not in step.dtypes else 4
    moved = 32 * (total.load_sectors + total.store_sectors) + counts.counts.copied_bytes
    return (
        step.name,
        str(total.instructions),
        f"{2 * n**3 / max(total.instructions, 1):.0f}",
        f"{counts.sectors_per_load:.2f}" if total.loads else "-",
        f"{moved / (3 * n * n * size):.1f}",
        str(total.shared_passes),
        str(counts.shared_conflicts),
        f"{seconds:.2f}",
    )


def _row(cells: tuple[str, ...]) -> str:
    rung, *rest = zip(cells, WIDTHS.values(), strict=True)
    return (f"{rung[0]:<{rung[1]}}" + "".join(f"{cell:>{width}}" for cell, width in rest)).rstrip()


if __name__ == "__main__":
    sys.exit(main())
