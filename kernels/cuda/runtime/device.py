"""Where the CUDA ladder runs: on a GPU, or in the emulator of its instructions.

The same source serves both. With a usable GPU, kernels run on it. Without one, NumPy executes their PTX
(`emulator/`), so tests and lessons need no hardware. MINIDIST_CUDA_BACKEND overrides this choice.

Missing or mismatched software is reported in one sentence with its remedy, before a CUDA error code could
appear. Source for versions: NVIDIA, CUDA Compatibility (a driver of the toolkit's major version runs what it
built).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
from typing import Any, Literal

from ...rung import require_numba
from . import nvvm

Backend = Literal["gpu", "emulator"]
BACKENDS = ("gpu", "emulator")
VARIABLE = "MINIDIST_CUDA_BACKEND"
INSTALL = "pip install 'minidist[cuda]'"
# The oldest driver for Linux of a toolkit's major version (CUDA Toolkit Release Notes, table 3).
DRIVERS = {12: 525, 13: 580}


def backend() -> Backend:
    """Return "gpu" or "emulator": where kernels run now.

    $MINIDIST_CUDA_BACKEND decides if it is set. Otherwise it is "gpu" if there is one and its driver fits,
    else "emulator". Raises ValueError for another value of the variable, and RuntimeError if "gpu" is asked
    for and there is none, if the driver is too old, and under NUMBA_ENABLE_CUDASIM=1.
    """
    named = os.environ.get(VARIABLE)
    if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0"):
        raise RuntimeError(
            "NUMBA_ENABLE_CUDASIM is set, with which Numba compiles no kernels. Its simulator runs them as "
            "cuda.jit(kernel.function)[grid, block](...): for the ladder, unset it"
        )
    if not named:
        return "gpu" if has_gpu() else "emulator"
    if named not in BACKENDS:
        raise ValueError(f"{VARIABLE} is {named!r}: set it to {' or '.join(BACKENDS)}, or unset it")
    if named == "gpu" and not has_gpu():
        raise RuntimeError(f"{VARIABLE} is 'gpu', and no NVIDIA GPU was found: unset it for the emulator")
    return named  # type: ignore[return-value]


@functools.cache
def has_gpu() -> bool:
    """Return whether this process may use a GPU; RuntimeError if its driver is older than the toolkit."""
    try:
        driver: Any = importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return False
    try:
        (error,) = driver.cuInit(0)
        if int(error):
            return False
        error, count = driver.cuDeviceGetCount()
        if int(error) or count < 1:
            return False
        error, version = driver.cuDriverGetVersion()
    except (RuntimeError, OSError):  # no driver library on this machine
        return False
    check_driver(version, toolkit_major())
    return True


def toolkit_major() -> int:
    """Return the major version of the installed CUDA toolkit wheels."""
    version: str = importlib.import_module("cuda.bindings").__version__
    return int(version.partition(".")[0])


def check_driver(version: int, toolkit: int) -> None:
    """Raise RuntimeError if a driver for CUDA `version` (12080 is 12.8) is older than `toolkit` (13)."""
    if version // 1000 >= toolkit:
        return
    raise RuntimeError(
        f"the driver of this GPU is for CUDA {version // 1000}.{version % 1000 // 10}, and the installed "
        f"toolkit is CUDA {toolkit}: update the driver to {DRIVERS.get(toolkit, 'a newer one')} or newer, "
        f"pip install 'numba-cuda[cu{version // 1000}]', or set {VARIABLE}=emulator"
    )


def require_toolkit() -> None:
    """Raise ImportError, with the command that helps, if the compiler packages are missing or broken.

    RuntimeError if NUMBA_DISABLE_JIT keeps them from compiling.
    """
    require_numba()
    if importlib.util.find_spec("numba_cuda") is None:
        raise ImportError(f"the CUDA ladder needs numba-cuda, which is not installed: {INSTALL}")


@functools.cache
def require_compiler() -> None:
    """Raise ImportError if NVVM, NVRTC or nvJitLink are missing or do not fit; these need no GPU."""
    require_toolkit()
    nvvm.load()
    pathfinder: Any = importlib.import_module("cuda.pathfinder")
    for name in ("nvvm", "nvrtc", "nvJitLink"):
        try:
            pathfinder.load_nvidia_dynamic_lib(name)
        except pathfinder.DynamicLibNotFoundError as error:
            raise ImportError(f"kernels are compiled with {name}, which was not found: {INSTALL}") from error


def capability(architecture: str) -> tuple[int, int, str]:
    """Return (9, 0, "a") for "sm_90a", (7, 5, "") for "sm_75"; raise ValueError for anything else."""
    match = re.fullmatch(r"sm_(\d+)(\d)([af]?)", architecture)
    if not match:
        raise ValueError(f"architecture is {architecture!r}: pass one as in 'sm_80', 'sm_90a' or 'sm_100'")
    return int(match[1]), int(match[2]), match[3]


@functools.cache  # asked for at every product
def architecture_on(needed: str, device: tuple[int, int], kernel: str, gpu: str) -> str:
    """Return the architecture to compile `kernel` for on a GPU of compute capability `device`.

    `needed` is the oldest on which the kernel runs. "sm_90a" has instructions that only Hopper knows: such a
    kernel runs on 9.0 and nothing newer. Raises RuntimeError if this GPU, called `gpu`, can't run it.
    """
    major, minor, features = capability(needed)
    has = f"{gpu} has compute capability {device[0]}.{device[1]}"
    if features:
        if device != (major, minor):
            raise RuntimeError(
                f"{kernel} uses instructions that only compute capability {major}.{minor} has, and {has}: "
                f"take an earlier rung, or set {VARIABLE}=emulator"
            )
        return needed
    if device < (major, minor):
        raise RuntimeError(
            f"{kernel} needs compute capability {major}.{minor}, and {has}: "
            f"take an earlier rung, or set {VARIABLE}=emulator"
        )
    return f"sm_{device[0]}{device[1]}"
