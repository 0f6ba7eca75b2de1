"""Keep compiled kernels in the user's cache folder, under a checksum of everything they depend on.

A kernel's code depends on its function and everything that it refers to: the constants of its closure, the
functions and intrinsics that it calls, and theirs. If one of these values has no checksum, or the function
has no file (a notebook's cell), each process compiles the kernel again.

A file begins with a checksum of its content; a truncated or damaged file counts as missing.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ...cache_folder import cache_folder, write_whole

MOST = 1000  # files; beyond that the older half is deleted
HERE = str(__package__).rpartition(".")[0]  # kernels.cuda: all its sources are in every checksum
KNOWN_MODULES = ("numba", "llvmlite", "numpy", "math", "operator", "builtins")
CONSTANTS = (int, float, complex, str, bytes, bool, type(None), type(Ellipsis), np.generic, np.dtype)


class Unknown(Exception):
    """A value without a checksum that would distinguish it from others."""


def key(function: Callable[..., None], *more: object) -> str | None:
    """Return a name for the code of `function` and all it depends on; None if there is no checksum."""
    code = getattr(function, "__code__", None)
    if code is None or not os.path.isfile(code.co_filename):
        return None
    checksum = hashlib.sha256(_sources())
    try:
        _add(checksum, (function, sys.version, *more), {})
    except Unknown:
        return None
    return checksum.hexdigest()


def load(name: str | None) -> bytes | None:
    """Return what was saved under this name, or None if there is nothing or it is damaged."""
    if name is None:
        return None
    try:
        kept = _path(name).read_bytes()
    except OSError:
        return None
    checksum, content = kept[:32], kept[32:]
    return content if hashlib.sha256(content).digest() == checksum else None


def save(name: str | None, content: bytes) -> bool:
    """Write the file, whole or not at all, and return whether that succeeded."""
    if name is None:
        return False
    file = _path(name)
    if not write_whole(file, hashlib.sha256(content).digest() + content):
        return False
    with contextlib.suppress(OSError):  # another process deletes the same files
        _forget(file.parent)
    return True


def _path(name: str) -> Path:
    return cache_folder() / "kernels" / name


def _forget(where: Path) -> None:
    """Delete old files: each change of a source leaves some behind that nobody asks for again."""
    files = list(where.iterdir())
    if len(files) <= MOST:
        return
    for file in sorted(files, key=lambda file: file.stat().st_mtime)[: len(files) // 2]:
        file.unlink(missing_ok=True)


@functools.cache
def _sources() -> bytes:
    """Return a checksum of every file of `kernels/cuda`: kernels reach some functions through the module."""
    checksum = hashlib.sha256()
    for file in sorted(Path(__file__).parent.parent.rglob("*.py")):
        checksum.update(file.read_bytes())
    return checksum.digest()


def _add(checksum: Any, value: object, seen: dict[int, int]) -> None:
    """Add the value to the checksum; raise Unknown if that is not possible."""
    if id(value) in seen:  # a function that calls itself, or two that share a third
        checksum.update(b"again %d" % seen[id(value)])
        return
    if isinstance(value, CONSTANTS):
        checksum.update(f"{type(value).__name__} {value!r};".encode())
    elif isinstance(value, (tuple, list, frozenset)):
        checksum.update(f"{type(value).__name__} {len(value)};".encode())
        for part in sorted(value, key=repr) if isinstance(value, frozenset) else value:
            _add(checksum, part, seen)
    elif isinstance(value, np.ndarray):  # a constant array
        _add(checksum, (value.dtype.str, value.shape, value.tobytes()), seen)
    elif isinstance(value, types.ModuleType):
        if value.__name__.partition(".")[0] not in KNOWN_MODULES and not value.__name__.startswith(HERE):
            raise Unknown(repr(value))
        checksum.update(f"module {value.__name__};".encode())
    elif isinstance(value, types.CodeType):
        # Line info is part of the result.
        lines = (value.co_filename, value.co_firstlineno, value.co_linetable)
        names = (value.co_names, value.co_varnames, value.co_freevars, value.co_argcount)
        _add(checksum, (value.co_code, value.co_consts, names, lines), seen)
    elif isinstance(value, types.FunctionType):
        seen[id(value)] = len(seen)
        if _belongs_to_numba(value):
            checksum.update(f"{value.__module__}.{value.__qualname__};".encode())
        else:
            _add(checksum, (value.__code__, value.__defaults__), seen)
            for name, used in _variables(value):
                checksum.update(f"{name} is ".encode())
                _add(checksum, used, seen)
    elif hasattr(value, "py_func"):  # a function that is compiled already: cuda.jit
        _add(checksum, value.py_func, seen)
    elif hasattr(value, "_defn"):  # an intrinsic, whose closure may hold constants
        _add(checksum, value._defn, seen)
    elif isinstance(value, type):
        checksum.update(f"type {value.__module__}.{value.__qualname__};".encode())
    elif (isinstance(value, types.BuiltinFunctionType) or _belongs_to_numba(value)) and " at 0x" not in repr(
        value
    ):
        checksum.update(f"{type(value).__name__} {value!r};".encode())
    else:
        raise Unknown(repr(value))


def _variables(function: types.FunctionType) -> list[tuple[str, Any]]:
    """Return the names and values that `function`, and functions inside it, take from outside."""
    code, globals_found = [function.__code__], {}
    for part in code:
        for name in part.co_names:  # attribute names too, which does no harm
            if name in function.__globals__:
                globals_found[name] = function.__globals__[name]
        code.extend(constant for constant in part.co_consts if isinstance(constant, types.CodeType))
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    try:
        return [*sorted(globals_found.items()), *((name, cell.cell_contents) for name, cell in cells)]
    except ValueError as error:  # a cell that is not filled yet
        raise Unknown(function.__qualname__) from error


def _belongs_to_numba(value: object) -> bool:
    module = getattr(value, "__module__", None) or type(value).__module__
    return str(module).partition(".")[0] in ("numba", "llvmlite")
