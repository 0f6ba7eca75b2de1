"""Show what this machine has for parallel training, what each missing part costs, and how to install it.

`minidist doctor` prints the table. Nothing here needs a GPU or a network, and nothing can hang: foreign code
(torch, CUDA's libraries) is loaded in another process with a time limit.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from minidist.benchmarks.harness import machine
from minidist.cli.doctor_parts import (
    MachinePart,
    bf16,
    gloo,
    gpu,
    ladder,
    library,
    looked,
    nccl,
    numba_cuda,
    torch,
)
from minidist.cli.doctor_probe import LIBRARIES, probe
from minidist.comm.launching.cores import available_cores

SHARED_MEMORY = 2**30  # bytes of /dev/shm that ranks of one host need for large exchanges


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


def cores() -> MachinePart:
    """Cores that this process may use."""
    usable, all_of_them = available_cores(), os.cpu_count() or 1
    found = f"{usable} of {all_of_them}, {machine.cpu_model()}"
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
        return MachinePart(
            "compiler cache", False, off, "rungs 3 to 8 and the CUDA ladder refuse to run", remedy
        )
    package = Path(kernels.__file__).parent / "cpu" / "support" / "__pycache__"
    named = os.environ.get("NUMBA_CACHE_DIR")
    # As Numba finds it: without HOME and a name in passwd, "~" stays, for a folder of that name.
    user = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "numba")
    choices = [Path(named)] if named else [package, user]
    for folder in choices:
        if _writable(folder):
            return MachinePart("compiler cache", True, str(folder))
    cost, remedy = "every process compiles each rung again: a second", "export NUMBA_CACHE_DIR=/tmp/numba"
    return MachinePart("compiler cache", False, f"{choices[0]} can't be written", cost, remedy)


def _writable(folder: Path) -> bool:
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


def show(console: Console, parts: list[MachinePart]) -> None:
    """Print the table, then what is missing."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "part", "found"):
        table.add_column(heading)
    for part in parts:
        mark, style = ("ok", "green") if part.ok else ("missing", "red" if part.required else "yellow")
        mark = mark if part.looked else "?"
        table.add_row(Text(mark, style), Text(part.name), Text(part.found))
    console.print(table)
    missing = [part for part in parts if not part.ok]
    if not missing:
        console.print("Nothing is missing.", style="green")
    for part in missing:
        wrong = f" is missing. It costs: {part.cost}." if part.looked else f": {part.found}."
        console.print(Text.assemble((part.name, "bold"), wrong))
        console.print(Text.assemble("  remedy: ", (part.remedy, "cyan")))
