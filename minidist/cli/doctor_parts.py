"""What `minidist doctor` says of the items that `doctor_probe.py` looks up: a row of the table for each."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from typing import Any

from minidist.benchmarks.harness import machine
from minidist.parallel.training import bf16_on_cpu


@dataclass(frozen=True)
class MachinePart:
    """A part of the machine: what was found, or what its absence costs and how to install it."""

    name: str
    ok: bool
    found: str
    cost: str = ""  # what does not work, or is slower, without it
    remedy: str = ""  # a command, or a sentence if there is none
    required: bool = False  # nothing trains without it
    looked: bool = True  # False if this machine was too slow to look: it is then neither there nor missing


def looked(found: Any, part: MachinePart) -> MachinePart:
    """The row of an item; it says neither "there" nor "missing" if this machine was too slow to look."""
    if not (isinstance(found, dict) and found.get("slow")):
        return part
    remedy = "minidist doctor once more: the files are then in memory"
    return replace(part, ok=False, found=found["error"], cost="", remedy=remedy, required=False, looked=False)


def torch(found: dict[str, Any]) -> MachinePart:
    """torch itself, without which nothing trains."""
    if "error" in found:
        cost, remedy = "everything except the ladder", "pip install torch"
        return MachinePart("torch", False, found["error"], cost, remedy, required=True)
    build = f"CUDA {found['cuda']}" if found["cuda"] else "CPU only"
    text = f"{found['version']}, {build}, {found['threads']} threads"
    return MachinePart("torch", True, text, required=True)


def gloo(found: dict[str, Any]) -> MachinePart:
    """The transport between ranks on CPUs."""
    if found.get("gloo"):
        return MachinePart("gloo", True, "in torch", required=True)
    remedy = "pip install --force-reinstall torch"
    return MachinePart("gloo", False, "not in this torch", "ranks on CPUs can't talk", remedy, required=True)


def bf16(found: dict[str, Any]) -> MachinePart:
    """Whether torch survives products in bfloat16 on this CPU; see `parallel/training/bf16_on_cpu.py`."""
    if "died" not in found:
        cost, remedy = "it is not known whether precision='bf16' works", "see why torch is missing"
        return MachinePart("bfloat16", False, found["error"], cost, remedy)
    named = next((f"{name}={os.environ[name]}" for name in bf16_on_cpu.NAMES if os.environ.get(name)), None)
    if not found["died"]:
        return MachinePart("bfloat16", True, "torch multiplies in it" + (f"; {named}" if named else ""))
    cure = f"{bf16_on_cpu.VARIABLE}={bf16_on_cpu.CURE}"
    text = f"torch's products on this CPU die ({found['died']})"
    if not found["cured"]:
        cost, remedy = "precision='bf16' is refused on the CPU", f"none known, not even {cure}: use float32"
        return MachinePart("bfloat16", False, text, cost, remedy)
    if named == cure:
        return MachinePart("bfloat16", True, f"{text}, but not with {cure}, which is set")
    cost = "programs in bfloat16 die, unless minidist starts early enough to set a variable for them"
    return MachinePart("bfloat16", False, text + (f"; {named}" if named else ""), cost, f"export {cure}")


def gpu(gpus: list[dict[str, Any]] | None, found: dict[str, Any]) -> MachinePart:
    """NVIDIA GPUs, their driver, and whether this torch can use them."""
    if gpus is None:
        found_none, remedy = "none", "nothing to install: all of minidist works without one"
        if shutil.which("nvidia-smi"):
            found_none, remedy = "nvidia-smi finds none", "run nvidia-smi, which says what is wrong"
        return MachinePart("GPU", False, found_none, "products and training run on the CPU", remedy)
    text = f"{len(gpus)} x {gpus[0]['name']}, driver {gpus[0]['driver']}"
    if found.get("devices"):
        return MachinePart("GPU", True, text)
    why = "a CPU-only build" if found.get("cuda") is None else f"built for CUDA {found['cuda']}"
    cost = "torch trains on the CPU although there is a GPU"
    remedy = "pip install --force-reinstall torch, without constraints.txt; or a newer driver"
    return MachinePart("GPU", False, f"{text}; torch, {why}, can't use it", cost, remedy)


def nccl(gpus: list[dict[str, Any]] | None, found: dict[str, Any]) -> MachinePart:
    """The transport between ranks on GPUs."""
    if found.get("nccl"):
        return MachinePart("NCCL", True, "in torch")
    if gpus is None:
        return MachinePart("NCCL", True, "not in this torch; not needed without a GPU")
    remedy = "pip install --force-reinstall torch, without constraints.txt"
    return MachinePart("NCCL", False, "not in this torch", "ranks on GPUs can't talk", remedy)


def numba_cuda(found: Any) -> MachinePart:
    """The compiler of the CUDA rungs."""
    if isinstance(found, str):
        return MachinePart("numba-cuda", True, found)
    cost = "kernels for a GPU can't be written in Python"
    return MachinePart("numba-cuda", False, found["error"], cost, "pip install 'minidist[cuda]'")


def library(name: str, found: Any) -> MachinePart:
    """One of CUDA's compiler libraries, which come as wheels and do not need a GPU."""
    title = name if name == "nvJitLink" else name.upper()
    if isinstance(found, str):
        if name == "nvvm" and ", " in found:  # with its version
            return MachinePart(title, True, found)
        version = machine.version(f"nvidia-{name.lower()}") or machine.version(f"nvidia-cuda-{name.lower()}")
        return MachinePart(title, True, f"{version}, from {found}" if version else f"from {found}")
    cost = "kernels for a GPU can't be compiled, not even to read their code"
    return MachinePart(title, False, "not found", cost, "pip install 'minidist[cuda]'")


def ladder(found: dict[str, Any]) -> MachinePart:
    """Where the CUDA ladder runs, and whether the driver supports the toolkit that compiles it."""
    if "error" in found:
        cost = "the rungs of the CUDA ladder can't run, not even in the emulator"
        # The ladder's own errors end with the remedy.
        error = found["error"].partition(": ")[2] or found["error"]
        return MachinePart("CUDA ladder", False, error, cost, error.rpartition(": ")[2])
    where, toolkit = found["backend"], found["toolkit"]
    if where == "gpu":
        text = f"on {found['gpu']}; driver for CUDA {found['driver']}, toolkit {toolkit}"
    elif where == "emulator":
        text = f"in the emulator, toolkit {toolkit}"
    else:
        text = "in Numba's simulator"
    return MachinePart("CUDA ladder", True, text)
