"""Show what this machine has for parallel training, what each missing part costs, and how to install it.

`minidist doctor` prints the table, and `minidist doctor --gpu` one block, to read before a first run on a GPU
and to send back with the results. Nothing here needs a GPU or a network, and nothing can hang: foreign code
(torch, CUDA's libraries) is loaded in another process with a time limit (`doctor_probe.py`).
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from minidist.benchmarks.harness import describe_machine as machine
from minidist.cli.doctor_probe import LIBRARIES, probe
from minidist.comm.launching.cores import available_cores
from minidist.parallel.training import bf16_on_cpu

SHARED_MEMORY = 2**30  # bytes of /dev/shm that ranks of one host need for large exchanges
FOR_CUDA = ("torch", "GPU", "numba-cuda", "NVVM", "NVRTC", "nvJitLink", "CUDA ladder", "pytest-benchmark")
"""The parts without which `minidist bench cuda` does not run."""
REINSTALL = "pip install --force-reinstall torch, without constraints.txt"


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


def examine() -> list[MachinePart]:
    """Examine every part, in the order of the table."""
    found = probe()
    gpus = machine.gpus()
    return [
        cores(),
        memory(),
        blas(),
        looked(found["torch"], torch(found["torch"])),
        looked(found["torch"], gloo(found["torch"])),
        looked(found["bf16"], bf16(found["bf16"])),
        shared_memory(),
        compiler_cache(),
        matrix_unit(),
        looked(gpus and found["torch"], gpu(gpus, found["torch"])),
        looked(gpus and found["torch"], nccl(gpus, found["torch"])),
        looked(found["numba_cuda"], numba_cuda(found["numba_cuda"])),
        *(looked(found[name], library(name, found[name])) for name in LIBRARIES),
        looked(found["ladder"], ladder(found["ladder"])),
        extra("scikit-learn", "bench", "the handwritten digits: minidist train takes --data bytes only"),
        extra("pytest-benchmark", "bench", "minidist bench"),
        extra("matplotlib", "bench", "the plots: minidist report prints its table only"),
        extra("jupyterlab", "lessons", "the lessons as notebooks"),
    ]


def looked(found: Any, part: MachinePart) -> MachinePart:
    """The row of an item; it says neither "there" nor "missing" if this machine was too slow to look."""
    if not (isinstance(found, dict) and found.get("slow")):
        return part
    remedy = "minidist doctor once more: the files are then in memory"
    return replace(part, ok=False, found=found["error"], cost="", remedy=remedy, required=False, looked=False)


# What this process looks at itself.


def cores() -> MachinePart:
    """Cores that this process may use."""
    usable, all_of_them = available_cores(), os.cpu_count() or 1
    found = f"{usable} of {all_of_them}, {machine.cpu_name()}"
    if usable > 1:
        return MachinePart("cores", True, found)
    remedy = "give this process more cores; taskset, the container or the job scheduler limits them"
    return MachinePart("cores", False, found, "ranks take turns, so more ranks are never faster", remedy)


def memory() -> MachinePart:
    """Main memory."""
    size = machine.memory_bytes()
    return MachinePart("memory", True, f"{size / 2**30:.1f} GiB" if size else "unknown")


def blas() -> MachinePart:
    """numpy's BLAS, the yardstick of the matmul ladder."""
    found = machine.blas()
    if found is None:
        cost, remedy = "its threads and speed are unknown", "pip install --force-reinstall numpy"
        return MachinePart("BLAS", False, "none recognised in numpy", cost, remedy)
    text = f"{found['name']} {found['version']}, {found['architecture']}, {found['threads']} threads"
    return MachinePart("BLAS", True, text)


def shared_memory(folder: str = "/dev/shm") -> MachinePart:
    """Memory that the ranks of one host share."""
    try:
        size = os.statvfs(folder)
    except (OSError, AttributeError):
        cost = "nothing for gloo; libraries that share tensors between processes use files instead"
        return MachinePart("shared memory", True, f"no {folder}", cost)
    total = size.f_frsize * size.f_blocks
    text = f"{total / 2**30:.1f} GiB in {folder}"
    if total >= SHARED_MEMORY:
        return MachinePart("shared memory", True, text)
    remedy = "docker run --shm-size=2g, or mount -o remount,size=2g /dev/shm"
    return MachinePart("shared memory", False, text, "NCCL and data loaders run out of it and fail", remedy)


def compiler_cache() -> MachinePart:
    """The folder in which numba keeps machine code from one process to the next."""
    from minidist import kernels
    from minidist.kernels.rung import require_numba

    try:
        require_numba()
    except RuntimeError as error:
        off, _, remedy = str(error).rpartition(": ")
        cost = "rungs 3 to 8 and the CUDA ladder refuse to run"
        return MachinePart("compiler cache", False, off, cost, remedy)
    package = Path(kernels.__file__).parent / "cpu" / "support" / "__pycache__"
    named = os.environ.get("NUMBA_CACHE_DIR")
    # As Numba finds it: without HOME and a name in passwd, "~" stays, for a folder of that name.
    user = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "numba")
    choices = [Path(named)] if named else [package, user]
    for folder in choices:
        if writable(folder):
            return MachinePart("compiler cache", True, str(folder))
    cost, remedy = "every process compiles each rung again: a second", "export NUMBA_CACHE_DIR=/tmp/numba"
    return MachinePart("compiler cache", False, f"{choices[0]} can't be written", cost, remedy)


def matrix_unit() -> MachinePart:
    """The CPU's instructions for products of bf16 numbers, found by trying, which rung 8 multiplies with."""
    from minidist.kernels.cpu.support import bf16_instructions as bf16

    try:
        found, none = bf16.matrix_unit(), bf16.NONE
    except RuntimeError as error:
        found, none = "", str(error)
    if found:
        what = {bf16.AMX: "tiles", bf16.AVX512_BF16: "pairs"}[found]
        return MachinePart("matrix unit", True, f"{found}: {what} of bf16 numbers in one instruction")
    remedy = "nothing to install: rung s7_threads multiplies in float32"
    return MachinePart("matrix unit", False, none, "rung s8_matrix_unit refuses to run", remedy)


def writable(folder: Path) -> bool:
    """Whether a file can be made in a folder, or in its nearest existing parent."""
    while not folder.exists() and folder.parent != folder:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def extra(distribution: str, group: str, cost: str) -> MachinePart:
    """A package that one of minidist's extras installs."""
    version = machine.version(distribution)
    if version:
        return MachinePart(distribution, True, version)
    return MachinePart(distribution, False, "not installed", cost, f"pip install 'minidist[{group}]'")


# What to say of the items that `doctor_probe.py` has looked up.


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
    named = next((f"{name}={os.environ[name]}" for name in bf16_on_cpu.NAMES if os.environ.get(name)), "")
    also = f"; {named}" if named else ""
    if not found["died"]:
        return MachinePart("bfloat16", True, f"torch multiplies in it{also}")
    cure = f"{bf16_on_cpu.VARIABLE}={bf16_on_cpu.CURE}"
    text = f"torch's products on this CPU die ({found['died']})"
    if not found["cured"]:
        cost, remedy = "precision='bf16' is refused on the CPU", f"none known, not even {cure}: use float32"
        return MachinePart("bfloat16", False, text, cost, remedy)
    if named == cure:
        return MachinePart("bfloat16", True, f"{text}, but not with {cure}, which is set")
    cost = "programs in bfloat16 die, unless minidist starts early enough to set a variable for them"
    return MachinePart("bfloat16", False, text + also, cost, f"export {cure}")


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
    cost, remedy = "torch trains on the CPU although there is a GPU", f"{REINSTALL}; or a newer driver"
    return MachinePart("GPU", False, f"{text}; torch, {why}, can't use it", cost, remedy)


def nccl(gpus: list[dict[str, Any]] | None, found: dict[str, Any]) -> MachinePart:
    """The transport between ranks on GPUs."""
    if found.get("nccl"):
        return MachinePart("NCCL", True, "in torch")
    if gpus is None:
        return MachinePart("NCCL", True, "not in this torch; not needed without a GPU")
    return MachinePart("NCCL", False, "not in this torch", "ranks on GPUs can't talk", REINSTALL)


def numba_cuda(found: Any) -> MachinePart:
    """The compiler of the CUDA rungs."""
    if isinstance(found, str):
        return MachinePart("numba-cuda", True, found)
    cost = "kernels for a GPU can't be written in Python"
    return MachinePart("numba-cuda", False, found["error"], cost, "pip install 'minidist[cuda]'")


def library(name: str, found: Any) -> MachinePart:
    """One of CUDA's compiler libraries, which come as wheels and do not need a GPU."""
    title = name if name == "nvJitLink" else name.upper()
    if not isinstance(found, str):
        cost = "kernels for a GPU can't be compiled, not even to read their code"
        return MachinePart(title, False, "not found", cost, "pip install 'minidist[cuda]'")
    if name == "nvvm" and ", " in found:  # with its version
        return MachinePart(title, True, found)
    version = machine.version(f"nvidia-{name.lower()}") or machine.version(f"nvidia-cuda-{name.lower()}")
    return MachinePart(title, True, f"{version}, from {found}" if version else f"from {found}")


def ladder(found: dict[str, Any]) -> MachinePart:
    """Where the CUDA ladder runs, and whether the driver supports the toolkit that compiles it."""
    if "error" in found:
        cost = "the rungs of the CUDA ladder can't run, not even in the emulator"
        # The ladder's own errors end with the remedy.
        error = found["error"].partition(": ")[2] or found["error"]
        return MachinePart("CUDA ladder", False, error, cost, error.rpartition(": ")[2])
    toolkit = found["toolkit"]
    where = {
        "gpu": f"on {found.get('gpu')}; driver for CUDA {found.get('driver')}, toolkit {toolkit}",
        "emulator": f"in the emulator, toolkit {toolkit}",
    }
    return MachinePart("CUDA ladder", True, where[found["backend"]])


# What is printed.


def show(console: Console, parts: list[MachinePart]) -> None:
    """Print the table, then what is missing."""
    table = Table("", "part", "found", box=box.SIMPLE_HEAD, pad_edge=False)
    for part in parts:
        mark, style = ("ok", "green") if part.ok else ("missing", "red" if part.required else "yellow")
        table.add_row(Text(mark if part.looked else "?", style), Text(part.name), Text(part.found))
    console.print(table)
    missing = [part for part in parts if not part.ok]
    if not missing:
        console.print("Nothing is missing.", style="green")
    for part in missing:
        wrong = f" is missing. It costs: {part.cost}." if part.looked else f": {part.found}."
        console.print(Text.assemble((part.name, "bold"), wrong))
        console.print(Text.assemble("  remedy: ", (part.remedy, "cyan")))


def needed_for_cuda(parts: list[MachinePart]) -> list[MachinePart]:
    """Choose the parts without which `minidist bench cuda` does not run."""
    return [part for part in parts if part.name in FOR_CUDA]


def show_cuda(console: Console, parts: list[MachinePart]) -> None:
    """Print whether the ladder will run with these parts, then each part, with a remedy if it is missing."""
    runs = all(part.ok for part in parts)
    headline = "The CUDA ladder will run here." if runs else "The CUDA ladder will not run on a GPU here."
    if not runs and all(part.ok or not part.looked for part in parts):
        headline = "It is not known whether the CUDA ladder will run here."
    console.print(headline, style="green" if runs else "yellow")
    versions = [f"{name} {machine.version(name) or 'missing'}" for name in ("numpy", "numba", "typer")]
    lines = [("Python", ", ".join([platform.python_version(), *versions]))]
    lines += [
        (part.name, part.found if part.ok else f"{part.found}; remedy: {part.remedy}") for part in parts
    ]
    for name, text in lines:
        console.print(f"  {name:<17} {text}", highlight=False, markup=False, soft_wrap=True)
