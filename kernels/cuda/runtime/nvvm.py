"""Choose the NVVM that compiles kernels: the newest one that is no newer than nvJitLink.

nvJitLink links what NVVM has compiled, and refuses the code of a newer NVVM. The two may come from different
places: torch brings nvJitLink alone, and a toolkit on the machine has NVVM. So every copy is looked up, among
the wheels on Python's path and in toolkits. The chosen one is loaded before `cuda.pathfinder` searches, which
takes a library that is loaded already.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIBRARY = "libnvvm.so.4"
IN_WHEELS = ("nvidia/cu13/lib", "nvidia/cuda_nvcc/nvvm/lib64")  # for CUDA 13 and 12
IN_TOOLKITS = ("nvvm/lib64", "lib64", "lib")
TOOLKITS = Path("/usr/local")  # where the toolkit's installer puts cuda and cuda-13.0
VERSION = re.compile(rb"Cuda compilation tools, release \d+\.\d+, V([\d.]+)")
LIBDEVICE = "nvvm/libdevice/libdevice.10.bc"


@dataclass(frozen=True)
class Chosen:
    """The NVVM that was taken, and the reason."""

    path: Path
    version: str
    reason: str


def copies() -> list[Path]:
    """Return every NVVM on this machine: of wheels on Python's path, of toolkits, on the loader's path."""
    named = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX")]
    roots = [Path(name) for name in named if name] + sorted(TOOLKITS.glob("cuda*"))
    folders = [Path(entry, inside) for entry in sys.path for inside in IN_WHEELS]
    folders += [root / inside for root in roots for inside in IN_TOOLKITS]
    folders += map(Path, filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")))
    files = (folder / LIBRARY for folder in folders)
    return list(dict.fromkeys(file.resolve() for file in files if file.is_file()))


def version(path: Path) -> str:
    """Return the version that this NVVM was released in, such as "13.0.88", or "0" if it does not say."""
    content = path.read_bytes()
    match = VERSION.match(content, max(0, content.find(b"Cuda compilation tools, release ")))
    return match[1].decode() if match else "0"


def numbers(version: str) -> tuple[int, ...]:
    """Return (13, 0, 88) for "13.0.88"."""
    return tuple(int(part) for part in version.split(".") if part)


def choose(found: dict[Path, str], linker: tuple[int, int]) -> Chosen | None:
    """Choose among copies of NVVM with their versions; None if there is none.

    Raises ImportError, with the remedy, if each is newer than nvJitLink's version `linker`.
    """
    if not found:
        return None
    than = f"nvJitLink {linker[0]}.{linker[1]}"
    fit = [path for path in found if numbers(found[path])[:2] <= linker]
    if not fit:
        path = min(found, key=lambda path: numbers(found[path]))
        raise ImportError(
            f"NVVM {found[path]} in {path.parent} is newer than {than}, which can't link its code: "
            f"pip install 'nvidia-nvvm=={linker[0]}.{linker[1]}.*'"
        )
    path = max(fit, key=lambda path: numbers(found[path]))
    others = ", ".join(f"{found[other]} in {other.parent}" for other in found if other != path)
    beside = f"; not {others}" if others else ""
    return Chosen(path, found[path], f"the newest that is no newer than {than}{beside}")


@functools.cache
def load() -> Chosen | None:
    """Load the chosen NVVM into this process; None if there is none, or no nvJitLink."""
    try:
        linker: Any = importlib.import_module("cuda.bindings.nvjitlink").version()
    except Exception:  # each missing library has a class of its own; `device.require_compiler` names it
        return None
    chosen = choose({path: version(path) for path in copies()}, tuple(linker))
    if chosen is not None:
        ctypes.CDLL(str(chosen.path), ctypes.RTLD_GLOBAL)
        for root in chosen.path.parents[1:3]:  # Numba looks for its library of functions there last
            if (root / LIBDEVICE).is_file():
                os.environ.setdefault("CUDA_HOME", str(root))
    return chosen
