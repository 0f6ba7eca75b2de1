"""Time a rung of the CUDA ladder with other values of its constants, beside torch.matmul.

    python -m minidist.benchmarks.harness.cuda_tune s10_hopper GROUP=16 CLUSTER=1 "COLUMNS=(256,)"

A constant is one that the rung's file sets in a line of its own. A ragged product and the timed one are
checked against float64. On a machine without a GPU the emulator runs the ragged product alone, so the command
can be tried anywhere.
"""

from __future__ import annotations

import re
import secrets
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from minidist.benchmarks.harness.cuda import cuda_check, cuda_timing
from minidist.benchmarks.harness.cuda_smoke import smoke
from minidist.kernels import cuda
from minidist.kernels.measure import product_checks

RAGGED = (300, 330, 280)  # m, n, k: past the largest tile each way
SIZE = 8192
BUDGET = 2.0  # seconds of timing


def set_constants(name: str, settings: Sequence[str]) -> None:
    """Run a rung's file again with other constants, each given as "NAME=VALUE"; without, with its own.

    Values that the file computes from a constant change with it. Raises ValueError for one it does not set.
    """
    file = Path(cuda.__file__).with_name(f"{name}.py")
    text = file.read_text()
    for setting in settings:
        constant, _, value = setting.partition("=")
        text, found = re.subn(rf"(?m)^{re.escape(constant)} = [^#\n]+", f"{constant} = {value}  ", text)
        if not found:
            raise ValueError(f"{setting}: {name} sets no {constant}; give NAME=VALUE of a line of {file}")
    cuda.load(name)  # also where this file is run by itself
    exec(compile(text, str(file), "exec"), vars(sys.modules[f"{cuda.__name__}.{name}"]))


def tune(name: str) -> Iterator[str]:
    """Check a rung with the constants that it has now, then time it; yield a line for each.

    Raises AssertionError for a wrong product, and RuntimeError for one that does not end in half a minute.
    """
    for dtype in cuda.load(name).dtypes:
        if dtype in ("float16", "float64"):  # float16's code is bfloat16's; float64 is not tuned
            continue
        yield from smoke(name, dtypes=(dtype,), shapes=(RAGGED,), orders=("nn",))
        if cuda_timing.unavailable() is None:
            yield timed(name, dtype)


def timed(name: str, dtype: str) -> str:
    """Check a rung's product of SIZE, time it in turns with torch's, and return a line about it."""
    rung, gpu = cuda.load(name), cuda_timing.gpu()
    kind = cuda_check.kind_of(rung, dtype)
    operands = cuda_timing.Operands(gpu, (SIZE,) * 3, dtype, seed=secrets.randbits(63))
    seconds, _ = cuda_timing.beside_torch(gpu, rung, kind, operands, BUDGET)
    own, other = map(statistics.median, seconds)
    rate = product_checks.flops(SIZE, SIZE, SIZE) / own
    return f"{rate / 1e12:.1f} TFLOP/s, {other / own:.3f} of torch.matmul's: {name} in {kind}, {SIZE}"


if __name__ == "__main__":
    set_constants(sys.argv[1], sys.argv[2:])
    for line in tune(sys.argv[1]):
        print(f"{line}, with {' '.join(sys.argv[2:]) or 'its own constants'}", flush=True)
