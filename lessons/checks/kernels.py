"""CUDA kernels of readers: run in the emulator, counted; their faults told as the reader knows the lines.

counts = run(answer, "10 elements", 3, 4, x, y)      # a Profile; WrongAnswer where the kernel is at fault
print(in_words(fault))                               # for a cell that shows a fault on purpose
seconds = gpu_seconds(kernel, 3, 4, x, y)            # None where there is no GPU
"""

from __future__ import annotations

import importlib
import inspect
import re
import statistics
import types
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import cuda

from checks.support.answers import Answer, TimeLimit, as_python, line_of_cell
from checks.support.unanswered import functions_of
from checks.support.verdicts import NeedsMore, Score, wrong
from minidist.kernels.cuda.emulator import EmulatorError, Fault, Profile, profile
from minidist.kernels.cuda.runtime.compiler import compile_ptx
from minidist.kernels.cuda.runtime.device import backend, require_toolkit
from minidist.kernels.emulator.launch_and_profile import ARCHITECTURE

Size = int | Sequence[int]

try:  # at import, and so in a lesson's first cell
    require_toolkit()
except ImportError as missing:
    raise NeedsMore(
        f"This lesson compiles kernels, which takes no GPU: {missing}. Then restart the notebook's kernel. "
        "(numba-cuda is built for Linux and Windows: on a Mac use a Linux container.)"
    ) from None


def run(answer: Answer, says: str, grid: Size, block: Size, *args: Any) -> Profile:
    """Run a reader's kernel in the emulator on the arguments' own memory; return what it did.

    Args:
        answer: a function with @cuda.jit.
        says: names the input in messages: "10 elements in 3 blocks of 4 threads".
        grid, block: as the emulator's `launch`.
        args: NumPy arrays and numbers.

    Raises:
        WrongAnswer: it does not compile, has a fault that the emulator finds, or goes on for too long.
    """
    kernel = answer.function
    if not hasattr(kernel, "py_func"):
        wrong(
            f"{answer.name} is a plain Python function, which no GPU can run: write @cuda.jit above its def."
        )
    if as_python(kernel) is not kernel:
        wrong(f"{answer.name} has @njit above its def, which compiles it for the CPU: write @cuda.jit.")

    def in_emulator() -> Profile:
        try:
            return profile(kernel, grid, block, *args)
        except Fault as fault:
            wrong(
                f"With {says}, the kernel has a fault. A GPU might not say so: it may give wrong results, or "
                "right ones on some days.",
                *_indented(in_words(fault)),
            )
        except TimeLimit:
            wrong(f"With {says}, the kernel had not ended after 20 s. Is there a loop that goes on too long?")
        except EmulatorError as error:
            wrong(f"With {says}, the emulator can't run it: {error}")
        except Exception as error:  # Numba has many kinds
            if isinstance(error, TypeError) and " takes " in str(error):
                wrong(f"{error}.")
            wrong(*not_compiled(error, kernel))

    counts: Profile = Answer(answer.name, in_emulator)()
    return counts


def in_words(fault: Fault) -> str:
    """A fault of the emulator with its lines as the reader knows them."""

    def place(found: re.Match[str]) -> str:
        return f" {found[1]} {line_of_cell(found[2], int(found[3]))}"

    message = re.sub(r" (at|to) ((?:/|<)\S*?):(\d+)", place, fault.message)
    text = f"{fault.kind[0].upper()}{fault.kind[1:]}: {message}"
    file, _, line = fault.where.rpartition(":")
    return f"{text}\n  at {line_of_cell(file, int(line))}" if line.isdigit() else text


def not_compiled(error: Exception, kernel: Any) -> list[str]:
    """Why Numba can't compile a kernel, in two lines of the many that it has."""
    text = re.sub(r"^Failed in .*\n", "", str(error)).strip()
    if "void return type" in text:
        return ["A kernel returns nothing: it writes its results into arrays. Leave out what follows return."]
    if literal := re.search(r"(\w+): (\w+) has to be known when compiling", text):
        return [
            f"{literal[1]} has to know `{literal[2]}` when it is compiled: give it a number, or the name of "
            "a constant, and nothing that is computed there."
        ]
    if "NRT required" in text or "_ol_array_allocate" in text:
        return [
            "A kernel can't make new arrays, as `x + y` of whole arrays does: a thread takes single elements."
        ]
    if "exception_match" in text:
        return ["A kernel can't catch exceptions: leave out try and except."]
    if "shared.array" in text or "local.array" in text:
        return [
            "An array in shared or local memory has to know its shape when it is compiled: give it numbers, "
            "or names of constants, and nothing that is computed there."
        ]
    if "'Optional' object" in text:
        return [
            "A name stands for an array in one place, and for something else in another. A function that "
            "stands for an instruction returns nothing: it changes the array that it is given."
        ]
    if called := re.search(r"Function\(<intrinsic (\w+)>\)", text):
        return [f"Numba can't compile your call of {called[1]}: are its arguments those that it takes?"]
    if text.startswith("zip() argument"):
        return ["A function that stands for an instruction is called with too few arguments, or too many."]
    (function,) = functions_of(kernel)
    file, first = function.__code__.co_filename, function.__code__.co_firstlineno
    within = range(first, first + len(inspect.getsourcelines(function)[0]))
    if operation := re.search(r"No implementation of function Function\(<built-in function (\w+)>\)", text):
        lines = [
            f"Numba can't compile `{operation[1]}` for a GPU as it is used there: a kernel computes with "
            "numbers, and with single elements of arrays."
        ]
    else:
        lines = [f"Numba can't compile it for a GPU: {text.splitlines()[0].strip()}"]
    numbers = re.findall(r"\bline (\d+)", text) + re.findall(r"\.py:(\d+)\)", text)
    lines += [f"  at {line_of_cell(file, line)}" for line in map(int, numbers) if line in within][:1]
    return lines


def _indented(text: str) -> list[str]:
    return [f"  {line}" for line in text.splitlines()]


def in_float64(kernel: Any, *args: Any) -> tuple[Score, ...]:
    """A score where a kernel computes in float64 with these arguments, and else none."""
    typeof = importlib.import_module(
        "numba.cuda.typing.typeof"
    ).typeof  # what numba-cuda has, and Numba has not
    types = tuple(typeof(each) for each in args)
    ptx = compile_ptx(kernel.py_func, types, ARCHITECTURE, 256)
    count = len(re.findall(r"\b(?:add|fma|mul)\.\S*f64", ptx))
    idea = (
        "begin the sum as float32(0): a plain 0.0 or 1.0 is a float64, with which many GPUs are many times "
        "slower"
    )
    return (Score("Instructions in float64", count, 0, idea),) if count else ()


def with_constants(kernel: Any, **constants: int) -> Any:
    """The same kernel with other values for constants that its text names: with_constants(tiled, TILE=8).

    Numba compiles a constant into the kernel, so each value makes a kernel of its own.
    """
    function = kernel.py_func
    known = {**function.__globals__, **constants}
    return cuda.jit(
        types.FunctionType(function.__code__, known, function.__name__, None, function.__closure__)
    )


def gpu_seconds(kernel: Any, grid: Size, block: Size, *args: Any, rounds: int = 5) -> float | None:
    """Median of the seconds that a launch takes on the GPU, by its own clock; None where there is none.

    Arrays of random numbers, as large as `args`, take their place (zeros switch fewer transistors). Launch
    what takes a millisecond or more: the time of something shorter is that of Python.
    """
    try:
        if backend() != "gpu":
            return None
    except RuntimeError:  # a driver that is too old: `minidist doctor` has the remedy
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Numba's, of grids that fill no GPU
        random = np.random.default_rng(0).random
        there = [
            cuda.to_device(random(x.shape).astype(x.dtype)) if isinstance(x, np.ndarray) else x for x in args
        ]
        ready = kernel[grid, block]
        ready(*there)  # compiles
        times = []
        for _ in range(rounds):
            start, end = cuda.event(), cuda.event()
            start.record()
            ready(*there)
            end.record()
            end.synchronize()
            times.append(cuda.event_elapsed_time(start, end) / 1e3)  # from milliseconds
    return statistics.median(times)
