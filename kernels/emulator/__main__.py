"""Count in the emulator what the rungs of a CUDA ladder do; no GPU needed.

python -m minidist.kernels.emulator                    # all rungs side by side, 128 x 128 x 128
python -m minidist.kernels.emulator --attention        # those of attention: 128 positions, one head of 64
python -m minidist.kernels.emulator s6 256             # one rung, line by line
python -m minidist.kernels.emulator s9 256 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import rung
from ..attention_rung import AttentionRung
from ..cuda import CUDA_LADDER
from ..cuda.attention import CUDA_ATTENTION_LADDER
from ..measure import attention_reference as attention
from ..measure import product_checks
from ..rung import Step
from .launch_and_profile import Profile, profiled
from .ptx.fault import EmulatorError

WIDTHS = {"rung": 20, "instructions": 13, "FLOP each": 10, "sectors/load": 13, "moved/least": 12}
WIDTHS |= {"shared passes": 14, "conflicts": 10, "s": 6}


def main(arguments: list[str] | None = None) -> int:
    """Print the table of all rungs, or the profile of one; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m minidist.kernels.emulator", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("rung", nargs="?", help="s1 to s10, or a full name (default: all)")
    parser.add_argument("n", nargs="?", type=int, default=128, help="sizes, or positions (128)")
    parser.add_argument("--attention", action="store_true", help="the ladder of attention, with backward")
    parser.add_argument("--dtype", help="float32 where the rung takes it")
    options = parser.parse_args(arguments)
    if not 1 <= options.n <= 1024:
        parser.error(f"n is {options.n}: pass 1 to 1024, as the emulator takes minutes for more")
    ladder: Sequence[Step] = CUDA_ATTENTION_LADDER if options.attention else CUDA_LADDER
    try:
        if options.rung is not None:
            print(measured(rung(options.rung, ladder), options.n, options.dtype)[0])
            return 0
        print(_row(tuple(WIDTHS)))
        for step in ladder:
            print(_row(_cells(step, options.n, options.dtype)))
    except (ValueError, TypeError, EmulatorError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def measured(step: Any, n: int, dtype: str | None) -> tuple[Profile, float]:
    """Return the profile of a rung's n x n x n product or n positions, and the seconds without counting."""
    kind = dtype or _usual(step)
    a, b = product_checks.inputs(n, n, n, product_checks.numpy_dtype(kind), seed=n)

    def call() -> None:
        if isinstance(step, AttentionRung):
            attention.run(step, _size(n), False, kind)
        else:
            step.matmul(a, b, out=np.empty_like(a))

    call()  # compiles
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    what = f"{n} positions of 64" if isinstance(step, AttentionRung) else f"{n} x {n} x {n}"
    with profiled(f"{step.name}, {what}, {kind}") as counts:
        call()
    return counts, seconds


def _usual(step: Step) -> str:
    return "float32" if "float32" in step.dtypes else step.dtypes[0]


def _size(n: int) -> attention.Size:
    return (1,), n, n, 64


def _cells(step: Any, n: int, dtype: str | None) -> tuple[str, ...]:
    if dtype is not None and dtype not in step.dtypes:
        return (step.name, f"takes {' or '.join(step.dtypes)}", *[""] * 6)
    counts, seconds = measured(step, n, dtype)
    total, kind = counts.total, dtype or _usual(step)
    if isinstance(step, AttentionRung):
        backward = step.gradients is not None
        work = attention.flops(_size(n), False, False) + backward * attention.flops(_size(n), False, True)
        least = attention.least_bytes(step, _size(n), False, kind)
    else:
        work, least = product_checks.flops(n, n, n), product_checks.least_bytes(n, n, n, kind)
    return (
        step.name,
        str(total.instructions),
        f"{work / max(total.instructions, 1):.0f}",
        f"{counts.sectors_per_load:.2f}" if total.loads else "-",
        f"{counts.moved / least:.1f}",
        str(total.shared_passes),
        str(counts.shared_conflicts),
        f"{seconds:.2f}",
    )


def _row(cells: tuple[str, ...]) -> str:
    rung, *rest = zip(cells, WIDTHS.values(), strict=True)
    return (f"{rung[0]:<{rung[1]}}" + "".join(f"{cell:>{width}}" for cell, width in rest)).rstrip()


if __name__ == "__main__":
    sys.exit(main())
