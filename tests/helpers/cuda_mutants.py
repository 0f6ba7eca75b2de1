"""Mutants: a rung's source with one mistake in it, built beside the rung and put to the checks of the rung.

A check that cannot fail says nothing. So each mistake names the check that has to find it: the kind of the
emulator's Fault, "wrong numbers", "bank conflicts", "uncoalesced", or what the assembler reports.
"""

import importlib.util
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from minidist.kernels import cuda
from minidist.kernels.emulator import Fault, profiled
from minidist.kernels.measure import harness
from tests.helpers.machine_code import launched, shortcomings
from tests.helpers.patches import changed, mistakes_in

FOLDER = Path(cuda.__file__).parent
_numbers = itertools.count()


@dataclass(frozen=True)
class Mutant:
    """A mistake, the check that finds it, and where it shows."""

    mistake: str
    caught: str
    changes: tuple[str, ...]  # of the rung's file, or after "@tiling/panels" of another one of kernels/cuda
    sizes: tuple[int, ...] = ()  # m, n, k, where the rung's usual ones don't show it


def swap(old, new):
    """A change."""
    return (f"~{old} => {new}",)


def planted():
    """Those of `cuda_mistakes.txt`, by rung."""
    found = {}
    for each in mistakes_in(Path(__file__).with_name("cuda_mistakes.txt"))[0]:
        caught, *sizes = each.says
        mutant = Mutant(each.name, caught, (*each.changes,), tuple(map(int, " ".join(sizes).split())))
        found.setdefault(each.part, []).append(mutant)
    return found


def built(rung, changes, folder):
    """The module of a rung with these changes, and of the files of kernels/cuda that they are for.

    The copies are modules of the same package, so that their imports work. Raises AssertionError where a
    change does not fit.
    """
    parts = {rung: []}
    for line in changes:
        parts.setdefault(line[1:], []) if line[0] == "@" else parts[[*parts][-1]].append(line)
    texts = {file: (FOLDER / f"{file}.py").read_text() for file in parts}
    for file, lines in parts.items():
        try:
            texts[file] = changed(texts[file], lines)
        except ValueError as error:
            raise AssertionError(f"{file}.py {error}") from None
    number = next(_numbers)
    names = {file: str(Path(file).with_name(f"mutant_{number}_{Path(file).name}")) for file in texts}
    modules = {}
    for file in reversed(texts):  # the rung, which imports the others, comes last
        text = texts[file]
        for other, name in names.items():
            text = text.replace(f"from .{dotted(other)} import", f"from .{dotted(name)} import")
        path = folder / f"{names[file]}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(f"{cuda.__name__}.{dotted(names[file])}", path)
        modules[file] = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(modules[file])
    return modules[rung]


def dotted(file):
    """The name of a file's module in the package: "tiling/panels" is tiling.panels."""
    return file.replace("/", ".")


def forget(module):
    """Take the modules that were built with this one out of Python's table of modules."""
    own = module.__name__.rpartition(".")[2].partition("_s")[0] + "_"
    for name in [name for name in sys.modules if name.rpartition(".")[2].startswith(own)]:
        del sys.modules[name]


def caught_by(step, sizes, dtype):
    """The check that a product of these sizes does not pass, and what it says; "" where it passes."""
    try:
        with np.errstate(invalid="ignore"):
            harness.check(step, *sizes, dtype, np.random.default_rng())
    except Fault as fault:
        return fault.kind if _has_a_place(fault) else "a fault without a place", str(fault)
    except AssertionError as error:
        return "wrong numbers", str(error)
    return "", ""


def _has_a_place(fault):
    """Whether it names a line of the source."""
    file, _, line = fault.where.rpartition(":")
    return Path(file).is_file() and int(line) > 0


def caught_by_counting(step, sizes, dtype, sectors):
    """As `caught_by`: banks must not conflict, and a load take `sectors` of 32 bytes at most."""
    a, b = harness.inputs(*sizes, dtype, seed=0)
    with profiled() as counts:
        step.matmul(a, b)
    if counts.shared_conflicts:
        return "bank conflicts", str(counts)
    if counts.sectors_per_load > sectors:
        return "uncoalesced", str(counts)
    return "", ""


def caught_by_assembling(step, dtype, registers, wanted):
    """As `caught_by`: what the assembler says of the kernel for 64 x 64 x 64."""
    kernel, types, _ = launched(step, dtype, 64)
    found = shortcomings(kernel.compile(types, kernel.architecture), registers, wanted)
    return (found[0], str(found)) if found else ("", "")
