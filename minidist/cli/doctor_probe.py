"""Look up facts for `minidist doctor` in another process: the foreign code that is loaded may fail or hang.

It prints a JSON object for each item, once that is looked up, so that no failure or delay hides the others.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

PROBE_TIMEOUT = 60.0  # seconds; importing torch from a cold disk may take most of a minute
LIBRARIES = ("nvvm", "nvrtc", "nvJitLink")
ITEMS = ("torch", "numba_cuda", *LIBRARIES, "ladder", "bf16")


def probe(program: str | None = None, timeout: float = PROBE_TIMEOUT) -> dict[str, Any]:
    """Run this file, or `program`, in a new process and return what it finds.

    An item has an "error" if the process fails before it, and is "slow" too if the process takes too long.
    """
    asked = ["-m", "minidist.cli.doctor_probe"] if program is None else ["-c", program]
    lacking: dict[str, Any]
    try:
        done = subprocess.run(
            [sys.executable, *asked], capture_output=True, timeout=timeout, stdin=subprocess.DEVNULL
        )
        output, lines = done.stdout, done.stderr.decode(errors="replace").strip().splitlines()
        lacking = {"error": lines[-1] if lines else f"a fresh Python ended with exit code {done.returncode}"}
    except subprocess.TimeoutExpired as late:
        output = late.stdout or b""
        lacking = {"error": f"this machine was too slow to look within {timeout:.0f} s", "slow": True}
    found: dict[str, Any] = dict.fromkeys(ITEMS, lacking)
    for line in output.splitlines():
        with contextlib.suppress(ValueError, TypeError):  # what a library has printed
            found.update(json.loads(line))
    return found


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
    """Return where one of CUDA's compiler libraries was found; for NVVM, which of several and why."""
    if name == "nvvm":
        from minidist.kernels.cuda.runtime import nvvm

        chosen = nvvm.load()
        if chosen is not None:
            return f"{chosen.version} in {chosen.path.parent}, {chosen.reason}"
    loaded = importlib.import_module("cuda.pathfinder").load_nvidia_dynamic_lib(name)
    return "torch's packages" if loaded.was_already_loaded_from_elsewhere else str(loaded.found_via)


def ladder() -> dict[str, Any]:
    """Where the CUDA ladder runs, and the versions that must be compatible."""
    from minidist.kernels.cuda.runtime import device

    device.require_toolkit()
    found: dict[str, Any] = {"backend": device.backend(), "toolkit": device.toolkit_major()}
    if found["backend"] == "gpu":
        from minidist.kernels.cuda.runtime import gpu_driver

        properties = gpu_driver.get().here()
        found |= {"gpu": properties.name, "driver": properties.driver}
    device.require_compiler()
    return found


def bf16() -> dict[str, Any]:
    """Return how a product in bfloat16 on the CPU ends, in a process of its own."""
    from minidist.parallel.training import bf16_on_cpu

    found = bf16_on_cpu.outcome()
    if found is None:
        return {"error": f"no answer within {bf16_on_cpu.LIMIT:.0f} s", "slow": True}
    return found._asdict()


if __name__ == "__main__":
    items: dict[str, Callable[[], object]] = {
        "torch": torch,
        "numba_cuda": numba_cuda,
        **{name: functools.partial(library, name) for name in LIBRARIES},
        "ladder": ladder,
        "bf16": bf16,
    }
    for name, find in items.items():
        print(json.dumps({name: attempt(find)}), flush=True)
