"""How fast this machine can be, and how near a kernel comes to that.

    python -m minidist.kernels.measure.roofline --place s4 512 --place numpy 512 --plot roofline.png

`measure` takes this machine's peaks once, in about five seconds, and keeps them. `attainable` returns the
rate that an arithmetic intensity allows. `place` times a rung, or any other product, and returns the share of
that rate that it reaches. `plot` draws both.

Source: Williams, Waterman, Patterson, Roofline: An Insightful Visual Performance Model for Multicore
Architectures, Communications of the ACM 52(4), 2009.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import warnings
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from ..cpu.support.caches import available_cpus
from ..cpu.support.vector_unit import vector_unit
from ..rung import Rung
from . import cpu_peaks, gpu_peaks, gpu_timer, peaks_file
from .peaks import Peaks, Roof, dtype_name
from .points import Multiplication, Point, intensity, median_gpu_seconds, median_seconds, product_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Peaks", "Point", "Roof", "attainable", "intensity", "measure", "place", "plot", "point"]

Cores = Literal["one", "all", "gpu"]
_measured: dict[Path, Peaks] = {}  # for machines whose cache folder can't be written


def measure(fresh: bool = False) -> Peaks:
    """Return this machine's peaks: the kept ones, or else measure them now and keep them.

    `fresh` measures again: when a busy machine (`.busy`) has become idle, or when something changed that the
    file's name (`peaks_file.path()`) does not show. If no file can be written, this process keeps them.
    """
    file = peaks_file.path()
    if not fresh:
        kept = _measured.get(file) or peaks_file.load(file)
        if kept:
            return kept
    one, all_cores = cpu_peaks.roofs()
    gpu, problem = None, ""
    try:
        gpu = gpu_peaks.roof()
    except RuntimeError as error:
        problem = str(error).partition("\n")[0]
        warnings.warn(f"the GPU's peaks could not be measured, and are left out: {problem}", stacklevel=2)
    cpu, unit, cores = peaks_file.cpu_name(), vector_unit().name, len(available_cpus())
    _measured[file] = Peaks(cpu, unit, cores, datetime.date.today().isoformat(), one, all_cores, gpu)
    if not problem:
        peaks_file.save(_measured[file], file)
    return _measured[file]


def attainable(
    intensity: ArrayLike,
    dtype: DTypeLike | str = "float32",
    cores: Cores = "one",
    peaks: Peaks | None = None,
) -> Any:
    """Return the FLOP/s that `intensity` in FLOP/byte allows: min(peak, intensity * bandwidth).

    A number gives a float, an array an array of its shape. `peaks` are those of `measure()` unless given.
    Raises ValueError for a negative intensity, and for a dtype or cores that were not measured.
    """
    return (peaks or measure()).roof(cores).attainable(intensity, dtype)


def place(
    product: Multiplication,
    m: int,
    n: int,
    k: int,
    dtype: DTypeLike = "float32",
    cores: Cores | None = None,
    peaks: Peaks | None = None,
    seconds: float = 0.2,
) -> Point:
    """Time `product` with (m, k) and (k, n), and return its point on the roofline.

    `product` is a rung, a NumPy function such as numpy.matmul, or any function of two arrays; its result is
    not checked here (`product_checks.check` does that). `cores` names the roof: "one" core; "all" for a
    product that uses threads (BLAS gets as many); "gpu" for a product that takes tensors in the memory of
    torch's GPU. A rung knows its own; others count as "one". The time is the median of calls for `seconds`,
    at least three; on a GPU it is the GPU's own time, without Python's. A rung that multiplies float32 as
    TF32 or bfloat16 is placed below that roof.

    Raises ValueError for a size below 1, and for a dtype or cores that were not measured.
    """
    if cores is None:
        cores = "one"
        if isinstance(product, Rung):
            cores = "gpu" if product.device == "cuda" else product.cores
    peaks = peaks or measure()
    name, threads = product_name(product), peaks.cores if cores == "all" else 1
    stored = dtype_name(dtype)
    kind = stored
    if stored == "float32" and isinstance(product, Rung):
        on_matrix_unit = product.device == "cpu" and "bfloat16" in product.dtypes
        kind = "tf32" if product.tf32 else "bfloat16" if on_matrix_unit else stored
    if kind == "bfloat16" and kind not in peaks.roof(cores).flops:
        kind = stored  # peaks of a machine without a matrix unit
    point(name, 1.0, m, n, k, kind, cores, peaks, stored)  # raises what is wrong before anything is timed
    timer = gpu_timer.find() if cores == "gpu" else None
    if timer:
        took = median_gpu_seconds(product, m, n, k, stored, timer, seconds)
    else:
        took = median_seconds(product, m, n, k, dtype, threads, seconds)
    return point(name, took, m, n, k, kind, cores, peaks, stored)


def point(
    name: str,
    seconds: float,
    m: int,
    n: int,
    k: int,
    dtype: DTypeLike = "float32",
    cores: Cores = "one",
    peaks: Peaks | None = None,
    stored: str = "",
) -> Point:
    """Return the point of a product that took `seconds`, timed elsewhere; raises ValueError like `place`.

    `stored` is the dtype of the matrices in memory, if they are multiplied in another.
    """
    kind = dtype_name(dtype)
    roof = (peaks or measure()).roof(cores)
    return Point(name, m, n, k, kind, seconds, roof, stored if stored != kind else "")


def plot(
    points: Point | Sequence[Point] = (),
    path: str | PathLike[str] | None = None,
    dtype: DTypeLike | str = "float32",
    peaks: Peaks | None = None,
    axes: Axes | None = None,
) -> Axes:
    """Draw the roofs of one core, all cores and the GPU if any, with points from `place`; return the axes.

    The roofs are those of the points' dtypes, or of `dtype` if there are no points; beside float32, which can
    be made of bf16 numbers, also that of the CPU's matrix unit if it has one. With `path` the figure is
    saved there, in the format of its suffix (.png, .svg, .pdf), and not shown; without, a notebook shows it.
    With `axes` it is drawn there.
    """
    from .roofline_plot import draw

    several = [points] if isinstance(points, Point) else list(points)
    return draw(peaks or measure(), several, dtype_name(dtype), path, axes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the peaks and the points asked for, and draw them; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m minidist.kernels.measure.roofline",
        description="This machine's peaks, and what share of them a product reaches.",
        epilog="example: python -m minidist.kernels.measure.roofline --place s4 512 --plot roofline.png",
    )
    parser.add_argument("--fresh", action="store_true", help="measure again, though figures are kept")
    parser.add_argument(
        "--place",
        nargs=2,
        action="append",
        default=[],
        metavar=("RUNG", "N"),
        help="time N x N matrices with a rung of either ladder, or with numpy on one core, in float32 where "
        "the rung takes it; may be repeated",
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the roofline: .png, .svg or .pdf")
    options = parser.parse_args(arguments)
    try:
        _show(options)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _show(options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    from .. import rung

    asked = [(np.matmul if name == "numpy" else rung(name), _whole(n)) for name, n in options.place]
    with Console(stderr=True).status("measuring, a few seconds"):
        peaks = measure(options.fresh)
        points = [place(product, n, n, n, _dtype(product), peaks=peaks) for product, n in asked]
    table = Table(title=f"{peaks.machine}, {peaks.vector_unit}, measured {peaks.date}")
    table.add_column("")
    for roof in peaks.roofs:
        table.add_column(roof.name, justify="right")
    for kind in dict.fromkeys(kind for roof in peaks.roofs for kind in roof.flops):
        measured = [roof if kind in roof.flops else None for roof in peaks.roofs]
        table.add_row(f"{kind}, GFLOP/s", *(f"{x.flops[kind] / 1e9:.1f}" if x else "" for x in measured))
        table.add_row("  ridge, FLOP/byte", *(f"{x.ridge(kind):.1f}" if x else "" for x in measured))
    table.add_row("memory, GB/s", *(f"{roof.bandwidth / 1e9:.1f}" for roof in peaks.roofs))
    Console().print(table)
    for placed in points:
        print(placed)
    if peaks.busy:
        print("Other programs ran meanwhile, so the peaks are too low: --fresh measures again.")
    if options.plot:
        plot(points, options.plot, peaks=peaks)


def _dtype(product: Multiplication) -> str:
    if isinstance(product, Rung) and "float32" not in product.dtypes:
        return product.dtypes[-1]
    return "float32"


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"N is {text!r}: pass a whole number, as in --place s4 512")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
