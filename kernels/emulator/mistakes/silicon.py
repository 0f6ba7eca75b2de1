"""Twenty broken kernels on a GPU, a thousand times each: how often does silicon show what the emulator names?

    python -m minidist.kernels.emulator.mistakes.silicon             what the emulator says; no GPU needed
    python -m minidist.kernels.emulator.mistakes.silicon --compile   machine code for the GPU, on all cores
    python -m minidist.kernels.emulator.mistakes.silicon --gpu --out broken-kernels.json

Each is a rung with one of the mistakes in `planted.txt`. It multiplies the same matrices again and again, and
each product is compared, bit by bit, with that of the rung without the mistake: tiles, and so the order of
the sums, are the same. A mistake that costs time alone is timed beside the rung. Each runs in a process of
its own, because a kernel that writes where it must not, or never ends, takes its process's GPU with it; one
more process then tries it again. A result is the number of runs that went wrong: 0 of 1000 says that this
GPU, at this size, hides the mistake, not that there is none.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ...cache_folder import cache_folder
from ...cuda import load
from ...cuda.runtime import device, gpu_driver
from ...cuda.runtime.kernel import Kernel
from ...measure import gpu_timer, product_checks
from .mutants import COUNTED, USUAL, Mutant, built, caught, forget, planted, small_tiles

SHAPE = (4100, 4130, 1053)  # m, n, k: ragged, and more tiles than a GPU runs at once
RUNS, LIMIT, TRIES = 1000, 100.0, 2  # products; seconds of a process; processes, where each loses the GPU
PROGRAM = (sys.executable, "-m", "minidist.kernels.emulator.mistakes.silicon")
WIDTHS = (18, 46, 42)  # of the table's columns
CHOSEN = {
    "s3_shared_tile": (
        "no barrier after the copies",
        "no barrier after their use",
        "writes c past its last column",
        "threads without an element end early",
        "a warp reads a column",
    ),
    "s6_vector_loads": ("steps begin anywhere",),
    "s7_async_copy": (
        "no wait",
        "waits for one panel too few",
        "waits after the barrier",
        "copies to two slots of four in turns",
    ),
    "s9_tensor_core": ("no barrier in the loop", "copies are in no group"),
    "s10_hopper": (
        "no wgmma.fence",
        "fewer bytes are announced",
        "more bytes are announced",
        "a slot is free a step early",
        "a slot is free after half its readers",
        "consumers share a named barrier",
        "stores do not see what was written",
        "mbarriers are not shown",
    ),
}


class Tally(NamedTuple):
    """What became of a kernel's runs."""

    runs: int
    wrong: int  # runs of which the product, or the run itself, went wrong
    elements: float  # wrong elements of the first wrong product, as a share
    slower: float  # times the rung's own time; 0 where that was not measured
    error: str  # what ended the process, or ""

    def __str__(self) -> str:
        if self.slower:
            return f"{self.slower:.2f} times the rung's time"
        share = f", {self.elements:.2%} of the elements" if self.elements else ""
        return f"{self.wrong} of {self.runs} runs wrong{share}{self.error and f' ({self.error})'}"


def cases() -> list[tuple[str, Mutant]]:
    """Return the twenty, as rung and mistake."""
    named = {(rung, each.mistake): each for rung, mutants in planted().items() for each in mutants}
    return [(rung, named[rung, mistake]) for rung, mistakes in CHOSEN.items() for mistake in mistakes]


def tally(product: Callable[[], Any], expected: Any, runs: int, wait: Callable[[], object]) -> Tally:
    """Run a kernel so often, or until an error ends it; `wait` raises RuntimeError where it never ends."""
    wrong, elements = 0, 0.0
    for run in range(1, runs + 1):
        try:
            c = product()
            wait()
            # An element that nobody wrote is NaN, and so differs too.
            differs = (c != expected).sum().item() / max(expected.numel(), 1)
        except Exception as error:  # of the driver, of torch, of the emulator: each has a class of its own
            said = re.sub(r"\S*/", "", f"{type(error).__name__}: {error}")  # without folders
            return Tally(run, wrong + 1, elements, 0.0, said[:120])
        wrong += differs > 0
        elements = elements or differs
    return Tally(runs, wrong, elements, 0.0, "")


def run_one(number: int, runs: int, shape: tuple[int, int, int], folder: Path) -> Tally:
    """Run one of the twenty on torch's GPU, or in the emulator where there is none."""
    import torch

    rung, mutant = cases()[number]
    timer = gpu_timer.find() if device.backend() == "gpu" else None
    where, kind, (m, n, k) = "cuda" if timer else "cpu", getattr(torch, USUAL[rung][1]), shape
    a, b = torch.randn(m, k, device=where).to(kind), torch.randn(k, n, device=where).to(kind)
    c = torch.empty(m, n, dtype=kind, device=where)
    sound, broken = load(rung), built(rung, mutant.changes, folder / str(number)).RUNG
    expected = sound.matmul(a, b)

    def product(step: Any) -> Any:
        return step.matmul(a, b, out=c.fill_(float("nan")))

    found = tally(lambda: product(broken), expected, runs, timer.wait if timer else int)
    if mutant.caught in COUNTED and timer and not found.wrong:
        slow, usual = (timer.seconds(partial(step.matmul, a, b, out=c), 20) for step in (broken, sound))
        found = found._replace(slower=slow / usual)
    return found


def compile_one(number: int, shape: tuple[int, int, int], folder: Path, capability: tuple[int, int]) -> str:
    """Compile one of the twenty, and the rung without the mistake, and return a line about it."""
    rung, mutant = cases()[number]
    launches: list[tuple[Kernel, tuple[Any, ...]]] = []

    def note(self: Kernel, grid: tuple[int, ...], *args: Any, **more: Any) -> None:
        launches.append((self, self.types(args)))

    Kernel.launch = note  # type: ignore[method-assign]
    for step in (load(rung), built(rung, mutant.changes, folder / str(number)).RUNG):
        step.matmul(*product_checks.inputs(*shape, USUAL[rung][1], seed=0))
    for kernel, types in launches:
        architecture = device.architecture_on(kernel.architecture, capability, rung, "the GPU")
        spills = kernel.compile(types, architecture).report.spill_stores
    return f"compiled: {rung}, {mutant.mistake}: {len(launches)} kernels, {spills} bytes spilled"


def emulated() -> Iterator[tuple[str, str, str]]:
    """Yield rung, mistake, and what the emulator calls it, with small tiles and two multiprocessors."""
    gpu_driver.multiprocessors = lambda: 2  # so that blocks of rung 10 take several tiles
    with tempfile.TemporaryDirectory() as folder:
        for rung, mutant in cases():
            module = built(rung, mutant.changes, Path(folder))
            small_tiles(rung, module)
            yield rung, mutant.mistake, caught(rung, module, mutant)[0]
            forget(module)


def in_processes(number: int, words: list[str]) -> Tally:
    """Run one of the twenty in a process of its own, and again where the process loses the GPU."""
    found: list[Tally] = []
    while len(found) < TRIES:
        try:
            command = [*PROGRAM, "--one", str(number), *words]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT)
            found.append(Tally(*json.loads(done.stdout.splitlines()[-1])))
        except subprocess.TimeoutExpired:
            found.append(Tally(1, 1, 0.0, 0.0, f"no end after {LIMIT:.0f} s"))
        except (ValueError, IndexError):
            found.append(Tally(1, 1, 0.0, 0.0, f"exit code {done.returncode}"))
        if not found[-1].error:
            break
    last = found[-1]
    return last._replace(runs=sum(each.runs for each in found), wrong=sum(each.wrong for each in found))


def main(arguments: list[str] | None = None) -> None:
    """Print the table; with --gpu, write it to a file too, after each kernel."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--gpu", action="store_true", help="run each on the GPU")
    parser.add_argument("--compile", action="store_true", help="compile each")
    parser.add_argument("--capability", type=int, nargs=2, default=(9, 0), help="of the GPU to compile for")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--shape", type=int, nargs=3, default=SHAPE, metavar=("M", "N", "K"))
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    options = parser.parse_args(arguments)
    folder, shape = cache_folder() / "broken-kernels", tuple(options.shape)
    words = ["--shape", *map(str, shape), "--runs", str(options.runs)]
    if options.one is not None and options.compile:
        print(compile_one(options.one, shape, folder, tuple(options.capability)), flush=True)
    elif options.one is not None:
        print(json.dumps(run_one(options.one, options.runs, shape, folder)))
    elif options.compile:
        own = {**os.environ, device.VARIABLE: "emulator"}
        start = [*PROGRAM, *words, "--compile", "--capability", *map(str, options.capability)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda i: subprocess.run([*start, "--one", str(i)], env=own), range(len(cases()))))
    elif options.gpu and device.backend() != "gpu":
        parser.error("there is no GPU here: leave --gpu out for what the emulator says")
    elif options.gpu:
        _print("rung", "mistake", "the emulator says", f"on this GPU, {' x '.join(map(str, shape))}")
        rows = []
        for i, (rung, mutant) in enumerate(cases()):
            found = in_processes(i, words)
            _print(rung, mutant.mistake, mutant.caught, str(found))
            rows.append({"rung": rung, "mistake": mutant.mistake, "says": mutant.caught, **found._asdict()})
            if options.out:
                options.out.write_text(json.dumps({"shape": shape, "kernels": rows}, indent=1))
    else:
        for row in emulated():
            _print(*row)


def _print(*cells: str) -> None:
    padded = [f"{cell:<{width}}" for cell, width in zip(cells, WIDTHS, strict=False)]
    print("".join([*padded, *cells[len(WIDTHS) :]]).rstrip(), flush=True)


if __name__ == "__main__":
    main()
