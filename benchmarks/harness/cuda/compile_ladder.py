"""Compile every variant of the CUDA ladder's kernels on all cores, before a GPU is asked for anything.

A kernel is compiled at its first launch, for its dtypes, the order of its operands and its tile, while the
GPU idles. The machine code is kept in the user's cache folder, and is of no use to another machine, because
Python's version and the paths of the sources are part of its key.

Rungs choose tiles by the sizes. So each rung is called with matrices of the benchmark's sizes, and its
launches are noted instead of made.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, NamedTuple
from unittest import mock

from minidist.benchmarks.harness import describe_machine as machine
from minidist.benchmarks.harness.cuda import cuda_timing
from minidist.comm.launching.cores import available_cores
from minidist.kernels.attention_rung import AttentionRung
from minidist.kernels.cuda import RUNGS, attention, load
from minidist.kernels.cuda.runtime import device
from minidist.kernels.cuda.runtime.kernel import Kernel
from minidist.kernels.measure.attention_reference import run

RAGGED = ((129, 257, 72), (300, 130, 65))  # m, n, k: some rows are not 16 bytes apart
HOPPER = (9, 0)  # the GPU to compile for where there is none


class Variant(NamedTuple):
    """The arguments of a call of a rung."""

    rung: str
    dtype: str
    order: str  # of a and b, in BLAS's letters; of attention "causal" or "whole"


def this_gpu() -> tuple[int, int]:
    """Return the compute capability of this machine's first GPU, or of a Hopper, without using the GPU."""
    for gpu in machine.gpus() or []:
        major, _, minor = str(gpu["compute_capability"]).partition(".")
        if major.isdecimal() and minor.isdecimal():
            return int(major), int(minor)
    return HOPPER


def variants(capability: tuple[int, int]) -> tuple[list[Variant], list[str]]:
    """Return what to compile for a GPU, the slowest to compile first, and why some rungs are left out."""
    found, left_out = [], []
    for rung in (*map(load, reversed(RUNGS)), *map(attention.load, reversed(attention.RUNGS))):
        try:
            device.architecture_on(rung.architecture, capability, f"rung {rung.name}", "the GPU")
        except RuntimeError as error:
            left_out.append(str(error))
            continue
        orders = ("whole", "causal") if isinstance(rung, AttentionRung) else ("nn", "nt", "tn")
        found += [Variant(rung.name, dtype, order) for dtype in rung.dtypes for order in orders]
    return found, left_out


@contextmanager
def noted() -> Iterator[list[tuple[Kernel, tuple[Any, ...]]]]:
    """Note kernels with the types of their arguments, instead of launching them."""
    found: list[tuple[Kernel, tuple[Any, ...]]] = []

    def note(self: Kernel, grid: tuple[int, ...], *args: Any, **more: Any) -> None:
        found.append((self, self.types(args)))

    with mock.patch.object(Kernel, "launch", note):
        yield found


def compile_variant(variant: Variant, capability: tuple[int, int]) -> str:
    """Compile the kernels that one variant launches at any size; return a line about them.

    Run it where `device.backend()` is the emulator. Raises the compiler's errors.
    """
    import torch

    started, kind = time.perf_counter(), getattr(torch, variant.dtype)

    def matrix(rows: int, columns: int, order: str) -> Any:  # its values are never read
        shape = (columns, rows) if order == "t" else (rows, columns)
        return torch.empty(shape, dtype=kind).T if order == "t" else torch.empty(shape, dtype=kind)

    sizes = [*((size,) * 3 for size in (cuda_timing.TINY, *cuda_timing.SIZES)), *RAGGED]
    with noted() as launches:
        if variant.rung in attention.RUNGS:
            sizes = []
            run(attention.load(variant.rung), ((1,), 1, 1, 64), variant.order == "causal", variant.dtype)
        for m, n, k in sizes:
            load(variant.rung).matmul(matrix(m, k, variant.order[0]), matrix(k, n, variant.order[1]))
    reports = []
    for kernel, types in dict.fromkeys(launches):
        architecture = device.architecture_on(kernel.architecture, capability, kernel.name, "the GPU")
        reports.append(kernel.compile(types, architecture).report)
    registers, spilled = max(r.registers for r in reports), max(r.spill_stores for r in reports)
    return (
        f"{' '.join(variant):<32}{len(reports)} kernels for {reports[0].architecture}, at most {registers} "
        f"registers and {spilled} bytes spilled, {time.perf_counter() - started:.1f} s"
    )


def compile_all(capability: tuple[int, int]) -> Iterator[tuple[bool, str]]:
    """Compile all variants, each in one of as many processes as there are cores; yield (good, line)."""
    found, left_out = variants(capability)
    yield from ((True, f"left out: {reason}") for reason in left_out)
    spawn = get_context("spawn")
    with ProcessPoolExecutor(available_cores(), mp_context=spawn, initializer=_without_gpu) as pool:
        running = {variant: pool.submit(compile_variant, variant, capability) for variant in found}
        for variant, future in running.items():
            try:
                yield True, future.result()
            except Exception as error:  # of any kind: one kernel that fails must not hide the others
                yield False, f"{' '.join(variant)}: {type(error).__name__}: {error}"


def _without_gpu() -> None:
    os.environ[device.VARIABLE] = "emulator"
