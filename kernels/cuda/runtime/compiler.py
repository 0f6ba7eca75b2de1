"""Compile a kernel to PTX or to machine code, for any architecture, without a GPU or a driver.

Numba types and lowers the function. NVVM turns that into PTX, or into LTO-IR from which nvJitLink makes a
cubin for one architecture. All of these are wheels. The emulator executes PTX. A GPU loads the cubin, which
is already machine code: a driver older than the toolkit could not assemble its PTX. Link-time optimisation is
also the only path on which `setmaxnreg` has an effect (elsewhere it is ignored, warning C7504). Results are
kept on disk (`kernel_cache.py`). With a cubin comes the assembler's report: registers, spills, stack, shared
memory.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

from ..runtime import kernel_cache, nvvm
from .device import capability, require_compiler


@dataclass(frozen=True)
class Report:
    """The resources that a kernel needs on one architecture."""

    architecture: str
    registers: int  # per thread
    spill_stores: int  # bytes per thread that did not fit registers and are stored to local memory
    spill_loads: int  # bytes per thread that are loaded back
    stack: int  # bytes per thread: local arrays that did not become registers
    shared: int  # bytes per block that the source declares; dynamic shared memory comes on top
    warnings: tuple[str, ...] = ()  # of the assembler
    entry: str = ""  # the kernel's name in the machine code


def parse(log: str, architecture: str) -> Report:
    """Return the report from the log of the assembler's `-v`; raise ValueError if the log has no kernel."""

    def number(pattern: str) -> int:
        match = re.search(pattern, log)
        if not match:
            raise ValueError(f"the assembler's log has no {pattern!r}: {log!r}")
        return int(match[1])

    # Not from the machine code's section: from 9.0 on that includes the system's 1024 bytes.
    shared = re.search(r"(\d+) bytes smem", log)
    entry = re.search(r"Compiling entry function '([^']+)'", log)
    return Report(
        architecture=architecture,
        registers=number(r"Used (\d+) registers"),
        spill_stores=number(r"(\d+) bytes spill stores"),
        spill_loads=number(r"(\d+) bytes spill loads"),
        stack=number(r"(\d+) bytes stack frame"),
        shared=int(shared[1]) if shared else 0,
        warnings=tuple(re.findall(r"^.*\bwarning\s*:\s*(.+?)\s*$", log, re.MULTILINE | re.IGNORECASE)),
        entry=entry[1] if entry else "",
    )


PACKAGES = (
    *("numba-cuda", "llvmlite", "cuda-core", "nvidia-nvvm", "nvidia-cuda-nvrtc", "nvidia-nvjitlink"),
    *("nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvrtc-cu12", "nvidia-nvjitlink-cu12"),  # CUDA 12's names
)


def compile_ptx(
    function: Callable[..., None],
    types: tuple[Any, ...],
    architecture: str,
    threads: int,
    blocks: int = 1,
    fastmath: bool = False,
    debug: bool = False,
) -> str:
    """Return the PTX of a kernel whose arguments have these Numba types, for "sm_80", "sm_90a", ...

    The launch bounds are `threads` a block and at least `blocks` blocks on a multiprocessor; from them the
    assembler derives how many registers a thread may have. Each instruction names its line of Python. With
    `debug` the code is not optimised and stores exceptions, as with cuda.jit(debug=True). Raises ImportError
    if the compiler is not installed, ValueError for an unknown architecture, and Numba's own errors.
    """
    given = (function, types, architecture, (threads, blocks), fastmath, debug, "ptx")
    return _kept(given, lambda: _compile(*given).encode()).decode()


def compile_cubin(
    function: Callable[..., None],
    types: tuple[Any, ...],
    architecture: str,
    threads: int,
    blocks: int = 1,
) -> tuple[bytes, Report]:
    """Return a kernel's machine code and its report; arguments as for `compile_ptx`, errors as of `link`."""
    given = (function, types, architecture, (threads, blocks), False, False, "ltoir")

    def compile_and_link() -> bytes:
        cubin, log = link(_compile(*given), architecture, function.__name__)
        return b"%d\n%b%b" % (len(cubin), cubin, log.encode())

    size, _, rest = _kept(given, compile_and_link).partition(b"\n")
    return rest[: int(size)], parse(rest[int(size) :].decode(), architecture)


def _kept(given: tuple[Any, ...], make: Callable[[], bytes]) -> bytes:
    """Return what is kept on disk for these arguments of `_compile`, or make it and keep it."""
    require_compiler()
    function, types, *options = given
    key = kernel_cache.key(function, *map(str, types), *options, _versions())
    kept = kernel_cache.load(key)
    if kept is None:
        kept = make()
        kernel_cache.save(key, kept)
    return kept


@functools.lru_cache(maxsize=128)
def report_of_ptx(ptx: str, architecture: str) -> Report:
    """Return the assembler's report on PTX. Raises as `link` does."""
    return parse(link(ptx.encode(), architecture, "the kernel", "ptx")[1], architecture)


def link(
    code: bytes, architecture: str, name: str, kind: Literal["ltoir", "ptx"] = "ltoir"
) -> tuple[bytes, str]:
    """Return the cubin that nvJitLink makes of code, and its log; raise RuntimeError if it fails."""
    core: Any = importlib.import_module("cuda.core")
    options = core.LinkerOptions(
        name=name, arch=architecture, link_time_optimization=kind == "ltoir", ptxas_options=["-v"]
    )
    linker = None
    try:
        linker = core.Linker(getattr(core.ObjectCode, f"from_{kind}")(code, name=name), options=options)
        cubin: bytes = linker.link("cubin").code
        log: str = linker.get_info_log()
    except Exception as error:  # each kind of failure has its own class, which changes with releases
        said = str((linker.get_error_log() if linker is not None else "") or error)
        if "OUTDATED_LIBRARY" in said or "newer version of nvJitLink" in said:
            raise RuntimeError(
                f"nvJitLink is older than NVVM, which compiled {name}: install nvidia-nvjitlink and "
                "nvidia-nvvm of the same version"
            ) from error
        raise RuntimeError(f"nvJitLink can't assemble {name} for {architecture}: {said}") from error
    return cubin, log


def _compile(
    function: Callable[..., None],
    types: tuple[Any, ...],
    architecture: str,
    bounds: tuple[int, int],
    fastmath: bool,
    debug: bool,
    output: str,
) -> Any:
    from numba import cuda

    major, minor, features = capability(architecture)
    cc = (major, minor, features) if features else (major, minor)
    with _assumed_device((major, minor)):
        code, _ = cuda.compile(
            function,
            types,
            device=False,
            abi="numba",
            cc=cc,
            output=output,
            launch_bounds=bounds,
            fastmath=fastmath,
            **({"debug": True, "opt": False} if debug else {"lineinfo": True}),
        )
    return code


@contextlib.contextmanager
def _assumed_device(cc: tuple[int, int]) -> Iterator[None]:
    """Let Numba think that the current device has compute capability `cc`.

    Numba compiles a function that a kernel calls (also its own, such as `array.view`) for the current device.
    That needs a driver, and the current device may not be the target. `cuda.compile` has no option for it
    (numba-cuda 0.30), so its look-up is replaced, under the lock that every compilation takes.
    """
    dispatcher: Any = importlib.import_module("numba.cuda.dispatcher")
    lock: Any = importlib.import_module("numba.cuda.core.compiler_lock").global_compiler_lock
    with lock:
        asked = dispatcher.get_current_device
        dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=cc)
        try:
            yield
        finally:
            dispatcher.get_current_device = asked


@functools.cache
def _versions() -> tuple[str, ...]:
    """Return the versions and settings that the code depends on; they are part of its key on disk."""
    chosen = nvvm.load()  # of a toolkit, maybe
    found = [f"NVVM {chosen.version}"] if chosen else []
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{package} {importlib.metadata.version(package)}")
    return (*found, *sorted(f"{name}={os.environ[name]}" for name in os.environ if name.startswith("NUMBA_")))
