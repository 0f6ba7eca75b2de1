"""Judge a file of kernels: run what it launches in the emulator on random numbers, check, and count.

The file itself runs in another process (`recorder.py`), which sends PTX and launches. This one makes the
numbers, runs the PTX, and compares the result with one computed in float64, so a solution has no way to the
answer but a kernel that computes it.

What a kernel costs is counted, at fixed sizes, so it is the same on any machine. The numbers there come from
a checksum of the launches and of all that their PTX does. Someone can still search for a kernel whose numbers
happen to suit it; so the same launches first run on fresh numbers, where they must be right as well, and must
not cost more than by chance. The cost there is no score: a histogram's conflicts are others in each run.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..cuda.runtime import compiler
from ..emulator.execution.run_grid import COUNTING, run_kernel
from ..emulator.instructions.linked_functions import function_of
from ..emulator.machine.counts import Counts, by_warp
from ..emulator.ptx.dtypes import Array, Mask
from ..emulator.ptx.fault import Fault
from ..emulator.ptx.program import PtxInstruction
from ..rung import require_numba
from . import gpu_time
from .gpu_time import ARCHITECTURE
from .problems import PROBLEMS, Case, Problem

STEPS = 1_000_000  # of the emulator in one case; naive attention takes 400,000
LOADING = 10  # seconds for what the file does before its functions are called
CALLING = 30  # seconds for a call of one, which may compile kernels
SECONDS = 150  # for its process; it may use 120 of the processor
SCRATCH = 64 << 20  # bytes
LINE = 128  # bytes of global memory that L1 passes at a time
PLACES, BLOCKS, SHARED = 2048, 32, 228 << 10  # of a multiprocessor: registers of a warp's lane, blocks, bytes
DEARER = 1.05  # at most, on fresh numbers than on those that are scored; honest kernels differ by 0.2 %


@dataclass(frozen=True)
class Costs:
    """What a solution costs at the scored sizes."""

    instructions: int  # of warps; one in float64 counts twice
    registers: int  # of a thread, at most; 4 bytes of spills or stack count as one, and so do `_places`
    sectors: int  # of 32 bytes, from and to global memory
    conflicts: int  # passes through L1 and shared memory beyond the least; atomics that wait for their turn
    barriers: int  # of warps
    matrix: int  # 2048 operations of tensor cores
    steps: int  # of the emulator, which runs up to 8192 threads side by side: few threads take many
    launches: int

    @property
    def total(self) -> int:
        """The sum, in slots in which a multiprocessor issues an instruction; an H100 has four a cycle.

        The L2 cache brings a sector in about a cycle. L1 and shared memory pass one line of 128 bytes a
        cycle. Tensor cores do 2048 operations in a slot. A warp holds its registers as long as it runs, so
        these count with the instructions: 255, with which few warps fit, make them half as dear again.
        """
        slots = 4 * (self.sectors + self.conflicts + self.steps) + 8 * self.barriers + self.matrix
        return self.instructions * (512 + self.registers) // 512 + slots + 1000 * self.launches


@dataclass(frozen=True)
class Verdict:
    """The verdict on a solution: its score, 100 for par, or what is wrong with it."""

    problem: str
    score: float  # a whole number from 10 on, with one decimal below
    wrong: str = ""
    costs: Costs | None = None
    seconds: float | None = None  # on a GPU, if there is one that runs the kernels


class Meter(Counts):
    """Counts that also stop a kernel that runs too long, and count float64 and accesses that take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = self.turns = self.in_float64 = 0  # turns: of atomics and of lines

    def step(self, shape: Any, instructions: Sequence[PtxInstruction], mask: Mask, counted: str) -> None:
        """Count instructions as `Counts` does. Raises Fault after too many."""
        before = self.classes[counted]
        super().step(shape, instructions, mask, counted)
        double = sum("f64" in each.opcode for each in instructions)
        self.in_float64 += (self.classes[counted] - before) * double // len(instructions)
        self.steps += len(instructions)
        if self.steps > STEPS:
            where = str(instructions[0].location or "")
            says = f"{self.steps:,} steps of the emulator so far, and the judge allows {STEPS:,} a case"
            raise Fault("too slow", f"{says}: use more threads, or look for a loop that does not end", where)

    def access(self, access: Any, shared: bool) -> None:
        """Count requests as `Counts` does, a warp's atomics on one address, and lines it need not touch."""
        super().access(access, shared)
        addresses, lanes = access.addresses, access.lanes
        if shared:
            return
        if access.batch.first.opcode[0] in ("atom", "red"):
            places = np.stack([np.broadcast_to(lanes // 32, addresses.shape).ravel(), addresses.ravel()])
            self.turns += addresses.size - np.unique(places, axis=1).shape[1]
            return
        for row in addresses:
            spread, there = by_warp(access.machine.shape, row, lanes)
            lines = np.sort(np.where(there, spread // LINE, -1))
            touched = (np.diff(lines, prepend=-1) != 0).sum(1)
            self.turns += int(np.maximum(touched - -(-there.sum(1) * access.width // LINE), 0).sum())


def judge(path: Path, names: Collection[str] = PROBLEMS) -> list[Verdict]:
    """Return a verdict on each function of the file that is named after one of these problems.

    Raises ValueError if there is none, or if the file cannot be read or run at all.
    """
    require_numba()
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): name a Python file") from None
    problems = [
        one
        for name, one in PROBLEMS.items()
        if name in names
        and re.search(rf"^\s*(def {name}\b|{name} *=|.*import.*\b{name}\b)", source, re.MULTILINE)
    ]
    none = f"{path} defines no function named after a problem: {', '.join(names)}"
    if not problems:
        raise ValueError(none)
    draw = np.random.default_rng()
    sizes = {one.name: [*one.some_sizes(draw), one.scored] for one in problems}
    cases = {one.name: [one.make(draw, *these) for these in sizes[one.name]] for one in problems}
    told = _recorded(path, source, cases)
    problems = [one for one in problems if one.name in told]  # others are methods, or locals
    if not problems:
        raise ValueError(none)
    return [_verdict(one, sizes[one.name], cases[one.name], *told[one.name]) for one in problems]


def _recorded(path: Path, source: str, cases: dict[str, list[Case]]) -> dict[str, tuple[Any, list[str]]]:
    """Return what the file launches in each case, and the programs, as processes of its own tell it.

    A function that ends its process has a sentence instead; a new process then runs those that are left.
    """
    found: dict[str, tuple[Any, list[str]]] = {}
    left = dict(cases)
    while left:
        lines, died = _told(path, source, left)
        begun = ""
        for line in lines:
            if "begins" in line:
                begun = line["begins"]
            elif "problem" in line:
                begun, found[line["problem"]] = "", (line["record"], line["programs"])
            elif "error" in line:
                raise ValueError(line["error"])
        if begun not in left:
            if died:
                raise ValueError(died)
            break
        found[begun] = died, []
        left = {name: own for name, own in left.items() if name not in found}
    return found


def _told(path: Path, source: str, cases: dict[str, list[Case]]) -> tuple[list[Any], str]:
    """Run the file in a process; return what it said, and why it ended early, if it did."""
    shapes = {
        name: [
            [[key, x.dtype.str, x.shape] for key, x in (*case.inputs.items(), ("out", case.out))]
            for case in own
        ]
        for name, own in cases.items()
    }
    # The folder of the reader's file stays out of the path: it may be called types.py.
    root = str(Path(__file__).parents[3])
    program = f"import sys; sys.path[0] = {root!r}; import {__package__}.recorder as it; it.main()"
    environment = {**os.environ, "MINIDIST_CUDA_BACKEND": "emulator", "OMP_NUM_THREADS": "1"}
    environment |= {"OPENBLAS_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder).resolve() / path.name
        copy.write_text(source, encoding="utf-8")
        request = json.dumps({"path": str(copy), "problems": shapes, "seconds": LOADING, "calling": CALLING})
        try:
            done = subprocess.run(
                [sys.executable, "-c", program],
                input=request,
                capture_output=True,
                text=True,
                cwd=folder,
                env=environment,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired as late:
            said = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
            died = f"{path} had not ended after {SECONDS} s: does a loop go on for ever?"
        else:
            said, code = done.stdout, done.returncode
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            died = f"{path} ended its process (exit code {code}): {last}"
            if -code in (signal.SIGXCPU, signal.SIGKILL):
                died = f"{path} took too long or too much memory, and was ended: does a loop go on for ever?"
    said = said.replace(json.dumps(str(copy))[1:-1], json.dumps(str(path))[1:-1])
    try:
        lines = [json.loads(line) for line in said.splitlines(keepends=True) if line.endswith("\n")]
    except ValueError:  # the file has written there, too
        raise ValueError(died) from None
    return lines, "" if lines and "ended" in lines[-1] else died


def _verdict(
    problem: Problem, sizes: list[Any], cases: list[Case], told: Any, programs: list[str]
) -> Verdict:
    """Return the verdict on what was recorded for one problem."""
    if isinstance(told, str):
        return Verdict(problem.name, 0, told)
    if len(told) != len(cases):
        return Verdict(problem.name, 0, "the file's process does not say what it launches in each case")
    launches = told[-1]["launches"]
    hashed = [_code(ptx) for ptx in programs]
    seed = hashlib.sha256(json.dumps([(hashed[number], *how) for number, *how in launches]).encode()).digest()
    scored = problem.make(np.random.default_rng([*seed]), *problem.scored)
    # The last case runs what the checksum has seen, and nothing else: names and comments hold no answer.
    runs = [
        *zip(sizes, cases, told, [programs] * len(told), strict=True),
        (sizes[-1], scored, told[-1], hashed),
    ]
    fresh = meter = Meter()
    for these, case, recorded, texts in runs:
        fresh, meter = meter, Meter()
        wrong = _wrong(case, recorded, texts, meter)
        if wrong:
            says = ", ".join(f"{name} = {n}" for name, n in zip(problem.sizes, these, strict=True))
            return Verdict(problem.name, 0, f"with {says}, {wrong}")
    costs, usual = _costs(meter, launches, hashed), _costs(fresh, launches, hashed).total
    if usual > DEARER * costs.total:
        wrong = f"it costs {usual:,} on fresh numbers, and {costs.total:,} on those that are scored"
        return Verdict(problem.name, 0, f"{wrong}: let it do the same work for all")
    took = gpu_time.seconds(launches, programs, _memory(scored, told[-1]))
    return Verdict(problem.name, _score(problem.par, costs.total), "", costs, took)


def _score(par: int, cost: int) -> float:
    """Return 100 for par, 1 at least; below 10 with a decimal, since a whole point is a tenth of the cost."""
    points = 100 * par / cost
    return max(1, round(points) if points >= 10 else round(points, 1))


def _code(ptx: str) -> str:
    """Return PTX without comments, files and lines, the same on each machine; symbols are numbered.

    The linker's functions keep their names, which say what they compute.
    """
    bare = re.sub(r"^\s*(//|\.file\b|\.loc\b).*(\n|\Z)", "", ptx, flags=re.MULTILINE)
    names: dict[str, str] = {}

    def numbered(found: re.Match[str]) -> str:
        name = found[0]
        return name if function_of(name) else names.setdefault(name, f"symbol_{len(names)}")

    return re.sub(r"\b(_ZN|_cudapy_)\w+", numbered, bare)


def _wrong(case: Case, recorded: Any, programs: list[str], meter: Meter) -> str:
    """Run the recorded launches on a case; return what is wrong, or "" for nothing."""
    if not recorded["launches"]:
        return "it launches no kernel, and nothing else can write to out"
    before = COUNTING.set(meter)
    try:
        if (scratch := sum(map(abs, recorded["scratch"]))) > SCRATCH:
            return f"it makes arrays of {scratch:,} bytes: {SCRATCH:,} is the most"
        arrays = _memory(case, recorded)
        for number, grid, block, shared, cluster, args, names in recorded["launches"]:
            arguments = [_argument(x, arrays) for x in args]
            run_kernel(programs[number], grid, block, arguments, shared, cluster, names)
    except Fault as fault:
        return str(fault)
    except Exception as error:  # PTX may be anything
        return f"the emulator cannot run it: {error or type(error).__name__}"
    finally:
        COUNTING.reset(before)
    out = arrays[len(case.inputs)]
    bad = ~(abs(out - case.expected) <= case.allowed)
    if not bad.any():
        return ""
    first = np.unravel_index(int(np.argmax(bad)), out.shape)
    got, right = out[first], case.expected[first]
    many = f"{np.count_nonzero(bad)} of {out.size} elements are wrong"
    nobody = ", as if nobody had written it" if np.isnan(got) else ""
    return f"out[{', '.join(map(str, first))}] is {got:g}{nobody}, and {right:g} is right: {many}"


def _memory(case: Case, recorded: Any) -> list[Array]:
    """Return the arrays that launches use: inputs, the result, and what the file has made."""
    for given in case.inputs.values():
        given.flags.writeable = False
    scratch = [np.full(n, 0xFF, np.uint8) for n in recorded["scratch"]]  # NaN, whatever Python put there
    return [*case.inputs.values(), case.out.copy(), *scratch]


def _argument(x: Any, arrays: list[Array]) -> Any:
    """Return a recorded argument. Raises ValueError or TypeError for a part that is not in its array."""
    if "items" in x:
        return tuple(_argument(item, arrays) for item in x["items"])
    if "number" in x:
        return np.dtype(x["dtype"]).type(x["number"]) if x["dtype"] else x["number"]
    memory = arrays[x["array"]].reshape(-1).view(np.uint8)
    return np.ndarray(x["shape"], x["dtype"], memory, x["offset"], x["strides"])


def _costs(meter: Meter, launches: Any, programs: list[str]) -> Costs:
    """Return the costs of launches that were metered; registers as the assembler reports them."""
    reports = [compiler.report_of_ptx(programs[number], ARCHITECTURE) for number, *_ in launches]
    spilled = [each.spill_stores + each.spill_loads + each.stack for each in reports]
    registers = [each.registers + -(-bytes_ // 4) for each, bytes_ in zip(reports, spilled, strict=True)]
    registers += [
        _places(block, how[0] + each.shared)
        for (_, _, block, *how), each in zip(launches, reports, strict=True)
    ]
    total = meter.total
    return Costs(
        instructions=total.instructions + meter.in_float64,
        registers=max(registers, default=0),
        sectors=total.load_sectors + total.store_sectors,
        conflicts=total.shared_passes - total.shared_least + meter.turns,
        barriers=meter.classes["barrier"],
        matrix=meter.matrix_flops // 2048,
        steps=meter.steps,
        launches=len(launches),
    )


def _places(block: Sequence[int], shared: int) -> int:
    """Return the registers of a thread that leave room for as few warps as blocks of this size do.

    A multiprocessor has room for 64 warps, but for 32 blocks: with one warp a block, half of it stays empty.
    """
    fit = max(1, min(BLOCKS, SHARED // (shared + 1024)))  # the system takes 1024 bytes
    return PLACES // (fit * -(-math.prod(block) // 32))
