"""Compile a user's kernel to PTX for the emulator, with the compiler of the CUDA ladder."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from ...cuda.runtime import compiler
from ...cuda.runtime.device import capability, require_compiler
from ..ptx.fault import EmulatorError

_COMPILED: WeakKeyDictionary[Any, dict[Any, str]] = WeakKeyDictionary()


def compiled_ptx(
    function: Callable[..., Any],
    types: tuple[Any, ...],
    architecture: str,
    threads: int,
    fastmath: bool,
    debug: bool,
) -> str:
    """Return the PTX of a kernel. As in Numba, values of its closure are fixed by the first launch."""
    kept = _COMPILED.setdefault(function, {})
    key = (types, architecture, threads, fastmath, debug)
    if key not in kept:
        compile_it = _debug_ptx if debug else compiler.compile_ptx
        try:
            kept[key] = compile_it(function, types, architecture, threads, fastmath=fastmath)
        except AttributeError as error:
            if "insert_unresolved_ref" not in str(error):
                raise
            raise EmulatorError(
                f"{function.__name__} calls a function that calls itself, which Numba compiles for no GPU: "
                "write it as a loop"
            ) from error
    return kept[key]


def _debug_ptx(
    function: Callable[..., Any], types: tuple[Any, ...], architecture: str, threads: int, fastmath: bool
) -> str:
    """Return unoptimised PTX that stores exceptions, as Numba compiles kernels with debug=True."""
    require_compiler()
    cuda = importlib.import_module("numba.cuda")
    major, minor, features = capability(architecture)
    with compiler._assumed_device((major, minor)):
        ptx, _ = cuda.compile(
            function,
            types,
            device=False,
            abi="numba",
            cc=(major, minor, features) if features else (major, minor),
            output="ptx",
            launch_bounds=(threads, 1),
            fastmath=fastmath,
            debug=True,
            opt=False,
        )
    return str(ptx)
