"""Run the reader's file in a process of its own, which learns the shapes of the arrays and no number in them.

The functions named after problems get empty arrays. Their launches are not run but recorded: PTX, grid,
block, and which part of which array each argument is. Only that goes back, so nothing that Python does here
can reach a number, the expected result, the checker or the counts. It goes back line by line: the name of a
problem before its function runs, and its record afterwards. So a function that ends this process costs no
other its verdict.

From the moment the file runs, this process may read what Python and the compiler need, and nothing more: the
first attempt to open another file, a socket or a process ends it, with a sentence. That stops accidents and
tricks; it is no sandbox for a stranger's program.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import resource
import signal
import sys
import time
import types
from collections.abc import Callable
from typing import Any, NoReturn, TextIO

import numpy as np

from ..cache_folder import cache_folder
from ..cuda.runtime import kernel_cache
from ..emulator import launch_and_profile as report
from ..emulator.execution import run_grid as run

SECONDS, BYTES = 120, 4 << 30  # of the processor, and of memory beyond what the compiler has taken
LAUNCHES = 100  # of one call
# What the reader has tried, by how an event of the interpreter's audit hooks begins (PEP 578); "": harmless.
TRIED = {
    **dict.fromkeys(("os.listdir", "os.scandir", "os.putenv", "os.unsetenv"), ""),
    **dict.fromkeys(("subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn"), "starts a process"),
    **dict.fromkeys(("os.", "shutil.", "ctypes.", "mmap."), "goes past Python to the system"),
    "socket.": "opens a socket",
}
End = Callable[[dict[str, Any]], NoReturn]


class Recorded:
    """The launches of one call, and the arrays that they use."""

    def __init__(self, arrays: list[Any], programs: dict[str, int]) -> None:
        self.owners, self.given = list(arrays), len(arrays)
        self.programs = programs  # PTX texts, by their number
        self.launches: list[Any] = []
        for module in (report, run):
            vars(module)["run_kernel"] = self.add

    def add(self, ptx: str, grid: Any, block: Any, args: Any, *how: int, names: Any = ()) -> None:
        """Note a launch, in the place of `run_kernel`; `how` is its shared memory and its cluster."""
        if len(self.launches) == LAUNCHES:
            raise ValueError(f"more than {LAUNCHES} launches: let a kernel do more at a time")
        number = self.programs.setdefault(ptx, len(self.programs))
        sizes = [run.sizes(*each) for each in (("grid", grid), ("block", block))]
        self.launches.append([number, *sizes, *map(int, how), [*map(self.code, args)], [*names]])

    def code(self, x: Any) -> dict[str, Any]:
        """Return an argument as JSON: a number with its type, or a part of an array."""
        if isinstance(x, tuple):
            return {"items": [*map(self.code, x)]}
        if not isinstance(x, np.ndarray):
            value = x.item() if isinstance(x, np.generic) else x
            if not isinstance(value, int | float):
                raise TypeError(f"an argument is a {type(x).__name__}: kernels get arrays and numbers here")
            return {"number": value, "dtype": x.dtype.str if isinstance(x, np.generic) else ""}
        owner: Any = x
        while getattr(owner, "base", None) is not None:
            owner = owner.base
        if not isinstance(owner, np.ndarray) or x.dtype.kind not in "biuf":
            raise TypeError(f"an array of {x.dtype} in a {type(owner).__name__}: make it with numpy.empty")
        if not any(owner is known for known in self.owners):
            self.owners.append(owner)
        which = next(i for i, known in enumerate(self.owners) if known is owner)
        offset = x.ctypes.data - owner.ctypes.data
        return {
            "array": which,
            "offset": offset,
            "dtype": x.dtype.str,
            "shape": x.shape,
            "strides": x.strides,
        }


def main() -> None:
    """Answer the request on stdin on stdout, both in JSON."""
    request = json.load(sys.stdin)
    answer = os.fdopen(os.dup(1), "w")
    warm_up()
    serve(request, answer)


def serve(request: Any, answer: TextIO) -> NoReturn:
    """Run the file, write what it launches, and end this process."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):  # what the file prints is nobody's answer
        os.dup2(nowhere, stream)

    def say(told: dict[str, Any]) -> None:
        answer.write(f"{json.dumps(told)}\n")
        answer.flush()

    def end(told: dict[str, Any]) -> NoReturn:
        say(told)
        os._exit(0)

    def late(_: int, frame: types.FrameType | None) -> None:
        says = f"the file had not ended after {request['seconds']:g} s: does a loop go on for ever?"
        end({"error": _line(frame, path) + says})

    def endless(*_: Any) -> NoReturn:
        raise TimeoutError(f"it had not ended after {request['calling']:g} s: does a loop go on for ever?")

    path = request["path"]
    sys.dont_write_bytecode = True
    _limit(path, end)
    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, request["seconds"])
    file = sys.modules["answer"] = types.ModuleType("answer")
    try:
        with open(path, "rb") as source:
            exec(compile(source.read(), path, "exec"), file.__dict__)
    except BaseException as error:
        end({"error": _said(error, path)})
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, endless)
    for name, cases in request["problems"].items():
        if hasattr(file, name):
            say({"begins": name})
            programs = dict[str, int]()
            record = _record(file, name, cases, programs, path, request["calling"])
            say({"problem": name, "record": record, "programs": [*programs]})
    end({"ended": True})


def warm_up() -> None:
    """Compile a kernel, so that everything that the compiler loads is there before the limits are."""
    from ..cuda import warp  # noqa: F401

    def nothing(x, y):  # type: ignore[no-untyped-def]
        x[0] = y[0]

    vars(kernel_cache)["save"] = lambda *_: False
    Recorded([], {})
    report.launch(nothing, 1, 32, np.zeros(1, np.float16), np.zeros(1, np.float32))


def _limit(path: str, end: End) -> None:
    """From here on, end this process when it opens anything or takes too much."""
    with open("/proc/self/statm") as statm:
        taken = int(statm.read().split()[0]) * resource.getpagesize()
    limits = {"CPU": SECONDS, "AS": taken + BYTES, "FSIZE": 0, "CORE": 0}
    for name, most in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
    roots = [
        sys.prefix,
        sys.base_prefix,
        *filter(None, sys.path),
        str(cache_folder() / "kernels"),
        os.getcwd(),
    ]
    readable = tuple(os.path.join(os.path.realpath(root), "") for root in roots)
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
    real, current, tried = os.path.realpath, sys._getframe, tuple(TRIED.items())

    def watch(event: str, given: tuple[Any, ...]) -> None:
        if event == "open":
            name, _, flags = given
            if isinstance(name, int) or (
                not flags & writing and real(os.fsdecode(name)).startswith(readable)
            ):
                return
            what = f"opens the file {os.fsdecode(name)}"
        else:
            what = next((words for begins, words in tried if event.startswith(begins)), "")
        if what:
            says = f"the file {what}, and was stopped: a solution only launches kernels"
            end({"error": _line(current(1), path) + says})

    sys.addaudithook(watch)


def _limit_processor(seconds: float) -> None:
    """Have the system end this process after so much more of the processor: no handler runs while C does."""
    used, (_, most) = time.process_time(), resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (min(most, math.ceil(used + seconds) + 1), most))


def _line(frame: types.FrameType | None, path: str) -> str:
    """Return where in the reader's file a frame is, or was called from."""
    while frame is not None and frame.f_code.co_filename != path:
        frame = frame.f_back
    return f"{path}:{frame.f_lineno}: " if frame is not None else ""


def _record(
    file: Any, name: str, cases: list[Any], programs: dict[str, int], path: str, seconds: float
) -> Any:
    """Return what the function launches in each case, or a sentence that says what is wrong.

    SIGALRM ends a call after so many seconds, so one that does not end costs no other problem its verdict.
    """
    function = getattr(file, name, None)
    names = ", ".join(array[0] for array in cases[0])
    if not inspect.isfunction(function):
        return (
            f"{name} is a {type(function).__name__}: write a function {name}({names}) that launches kernels"
        )
    try:
        inspect.signature(function).bind(*cases[0])
    except TypeError:
        return f"{name}{inspect.signature(function)} has other arguments than the problem: {name}({names})"
    found = []
    for case in cases:
        arrays = [np.zeros(shape, dtype) for _, dtype, shape in case]
        recorded = Recorded(arrays, programs)
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            _limit_processor(seconds)
            function(*arrays)
        except BaseException as error:
            return _said(error, path)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        scratch = [owner.nbytes for owner in recorded.owners[recorded.given :]]
        found.append({"launches": recorded.launches, "scratch": scratch})
    return found


def _said(error: BaseException, path: str) -> str:
    """Return an error in a sentence, with the line of the reader's file where it is known."""
    lines, trace = [], error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == path:
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    text = re.sub(r"\x1b\[\d*m", "", str(error))
    name = re.escape(os.path.basename(path))  # Numba names the line of a kernel
    within = re.findall(rf'{name}"?(?:, line |:| \()(\d+)', text)
    if isinstance(error, SyntaxError):
        within, text = [str(error.lineno)], error.msg
    line = within[-1] if within else lines[-1] if lines else ""
    text = re.split(r"\n(?: *\n)* *(?:There are|During:|File)", re.sub(r"^Failed in .*\n", "", text))[0]
    if "NRT required" in text:
        text = "a kernel can't make new arrays, as x + y of whole arrays does: a thread takes single elements"
    if "CUDA driver" in text:
        text = "kernel[grid, block](...) needs a GPU: launch with minidist.kernels.emulator.launch here"
    where = f"{path}:{line}: " if line else ""
    return f"{where}{type(error).__name__}: {' '.join(text.split())}"
