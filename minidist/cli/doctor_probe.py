"""What `minidist doctor` looks up in another process, since it loads foreign code that may fail or hang.

It prints one JSON object. Each item is looked up separately, so that no failure hides another.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable
from typing import Any


def attempt(find: Callable[[], object]) -> object:
    """What `find` returns, or {"error": ...} if it fails."""
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
    """Where one of CUDA's compiler libraries was found."""
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
        **{name: functools.partial(library, name) for name in ("nvvm", "nvrtc", "nvJitLink")},
        "ladder": ladder,
    }
    print(json.dumps({name: attempt(find) for name, find in items.items()}))
