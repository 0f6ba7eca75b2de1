"""Look up facts for `minidist doctor` in another process: the foreign code that is loaded may fail or hang.

It prints one JSON object. Each item is looked up separately, so that no failure hides another.
"""

from __future__ import annotations

import functools
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

PROBE_TIMEOUT = 60.0  # seconds; importing torch from a cold disk may take most of a minute
LIBRARIES = ("nvvm", "nvrtc", "nvJitLink")
ITEMS = ("torch", "numba_cuda", *LIBRARIES, "ladder")


def probe(program: str | None = None, timeout: float = PROBE_TIMEOUT) -> dict[str, Any]:
    """Run this file, or `program`, in a new process and return what it finds.

    If the process fails or takes too long, every item has its error.
    """
    asked = ["-m", "minidist.cli.doctor_probe"] if program is None else ["-c", program]
    command, none = [sys.executable, *asked], subprocess.DEVNULL
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, stdin=none)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    except subprocess.TimeoutExpired:
        error = f"no answer in {timeout:.0f} s"
    except (IndexError, ValueError):
        lines = done.stderr.strip().splitlines()
        error = lines[-1] if lines else f"a fresh Python ended with exit code {done.returncode}"
    return {item: {"error": error} for item in ITEMS}


def attempt(find: Callable[[], object]) -> object:
    """Return the result of `find`, or {"error": ...} if it fails."""
    try:
        return find()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}


def torch() -> dict[str, Any]:
    """torch's build, and which of its parts work here."""
    import torch
    import torch.distributed as dist

    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def numba_cuda() -> str:
    """The version of the compiler of the CUDA rungs."""
    version: str = importlib.import_module("numba_cuda").__version__
    return version


def library(name: str) -> str:
    """Where one of CUDA's compiler libraries was found; for NVVM, which of several and why."""
    if name == "nvvm":
        from minidist.kernels.cuda.runtime import nvvm

        chosen = nvvm.load()
        if chosen is not None:
            return f"{chosen.version} in {chosen.path.parent}, {chosen.reason}"
    return str(importlib.import_module("cuda.pathfinder").load_nvidia_dynamic_lib(name).found_via)


def ladder() -> dict[str, Any]:
    """Where the CUDA ladder runs, and the versions that must be compatible."""
    from minidist.kernels.cuda.runtime import device

    device.require_toolkit()
    found: dict[str, Any] = {"backend": device.backend(), "toolkit": device.toolkit_major()}
    if found["backend"] == "gpu":
        from minidist.kernels.cuda.runtime import gpu_driver

        driver = gpu_driver.get()
        properties = driver.properties(driver.current())
        found |= {"gpu": properties.name, "driver": properties.driver}
    if found["backend"] != "simulator":
        device.require_compiler()
    return found


if __name__ == "__main__":
    items: dict[str, Callable[[], object]] = {
        "torch": torch,
        "numba_cuda": numba_cuda,
        **{name: functools.partial(library, name) for name in LIBRARIES},
        "ladder": ladder,
    }
    print(json.dumps({name: attempt(find) for name, find in items.items()}))
