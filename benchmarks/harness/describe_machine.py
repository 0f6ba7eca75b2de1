"""Describe this machine and its software, without its name, user or paths.

A result without its machine says nothing, so each results file opens with `describe()` and is named by
`slug()`. Both only read files and environment variables, except that finding the GPU starts one other process
with a time limit.

A name is no identity, since CPUs of different generations may all be called "AMD EPYC". So `same` compares
machines by what the CPU says of its family, model and stepping, and by caches, cores, memory and GPUs.
Results from before "cpu_id" was kept are of an unknown machine, and so another's.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from minidist.comm.launching.cores import available_cores, memory_limit
from minidist.kernels.measure.peaks_file import cpu_name as cpu_name
from minidist.kernels.tried_once import cpu_fields

PACKAGES = ("minidist", "numpy", "torch", "numba", "numba-cuda", "cuda-bindings")
GPU_QUERY = ("name", "driver_version", "memory.total", "compute_cap")
GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg")  # Linux, and Linux inside Windows
CORETYPE = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
"""Variables that have OpenBLAS use another CPU's kernel. With Haswell's, NumPy is half as fast on a Zen 5."""
CPU_FIELDS = (
    ("cpu family", "model", "stepping"),  # x86
    ("CPU implementer", "CPU part", "CPU variant", "CPU revision"),  # ARM
)
# It runs in a fresh Python, so that a driver that fails or hangs does so there.
ASK_DRIVER = """
from minidist.kernels.cuda.runtime import gpu_driver as gpu
driver = gpu.get()
for number in range(driver.count):
    found = driver.properties(number)
    capability = ".".join(map(str, found.capability))
    print(f"{found.name}, CUDA {found.driver}, {found.memory >> 20}, {capability}")
"""


def describe() -> dict[str, Any]:
    """Return the machine's hardware as a JSON-ready dictionary; sizes are in bytes."""
    return {
        "cpu": cpu_name(),
        "cpu_id": cpu_id(),
        "cores": available_cores(),
        "cores_of_machine": os.cpu_count() or 1,
        "architecture": platform.machine(),
        "memory_bytes": memory_bytes(),
        "caches": caches(),
        "gpus": gpus(),
    }


def software() -> dict[str, Any]:
    """Return the versions of the software that a figure depends on, and the BLAS behind NumPy."""
    return {
        "os": operating_system(),
        "python": platform.python_version(),
        "blas": blas(),
        **{name: version(name) for name in PACKAGES},
        **{
            name: version(f"nvidia-{name}") or version(f"nvidia-{name}-cu12")
            for name in ("nvvm", "nvjitlink")
        },
    }


def slug(machine: dict[str, Any], whole: bool = False) -> str:
    """Name a machine by its GPUs, `2x-nvidia-h200`, or else its CPU and usable cores, `amd-epyc-8-cores`.

    With `whole` the name has both.
    """
    words = []
    found = machine["gpus"] or []
    if found:
        words += [f"{len(found)}x"] if len(found) > 1 else []
        words.append(_plain(found[0]["name"]))
    if whole or not found:
        words.append(
            f"{_plain(machine['cpu'])} {machine['cores']} core{'s' if machine['cores'] != 1 else ''}"
        )
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


def title(machine: dict[str, Any]) -> str:
    """Describe a machine in one line: `AMD EPYC (25-17-1), 2 cores, 24 GiB, no GPU`.

    The numbers are the CPU's family, model and stepping. Results of another machine than this one say so.
    """
    found = machine["gpus"] or []
    gpu = f"{len(found)} x {found[0]['name']}" if len(found) > 1 else found[0]["name"] if found else "no GPU"
    memory = f", {machine['memory_bytes'] / 2**30:.0f} GiB" if machine["memory_bytes"] else ""
    another = "another machine: " if machine.get("another") else ""
    cpu = f"{another}{machine['cpu']}{' ({})'.format(machine['cpu_id']) if machine.get('cpu_id') else ''}"
    return f"{cpu}, {machine['cores']} core{'s' if machine['cores'] != 1 else ''}{memory}, {gpu}"


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two of `describe`'s descriptions are of one machine, or of two that are equal."""
    return _identity(one) == _identity(other)


def digest(machine: dict[str, Any]) -> str:
    """Return six letters and digits that tell machines of the same name apart."""
    text = json.dumps(_identity(machine), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=3).hexdigest()


def _identity(machine: dict[str, Any]) -> dict[str, Any]:
    memory = machine["memory_bytes"]
    return {
        **{key: machine.get(key) for key in ("cpu", "cpu_id", "cores", "caches")},
        "memory": memory and round(memory / 2**30),  # a kernel keeps some MB more or fewer for itself
        "gpus": [(gpu["name"], gpu.get("memory_bytes")) for gpu in machine["gpus"] or []],
    }


def cpu_id(cpuinfo: str = "/proc/cpuinfo") -> str:
    """Return the CPU's family, model and stepping, as `25-17-1`, or ARM's numbers; "" if unknown."""
    fields = cpu_fields(cpuinfo)
    for each in CPU_FIELDS:
        if fields.keys() >= set(each):
            return "-".join(fields[key] for key in each)
    return ""


def _plain(name: str) -> str:
    """Remove trademark signs and the clock rate from a marketing name."""
    name = re.sub(r"\((R|TM|C)\)|@.*|\b(CPU|Processor|with .*)\b", " ", name, flags=re.IGNORECASE)
    return re.sub(r"\b\d+-Core\b", " ", name, flags=re.IGNORECASE)


def version(distribution: str) -> str | None:
    """Return a distribution's version without importing it, or None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def memory_bytes() -> int | None:
    """Return the bytes of main memory, or the container's limit if that is lower."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
    return min(total, memory_limit() or total)


def caches(folder: str = "/sys/devices/system/cpu/cpu0/cache") -> dict[str, str]:
    """Return the first core's caches, as {"L1d": "32 KiB", "L2": "1 MiB"}; empty if unknown."""
    found = {}
    for index in sorted(Path(folder).glob("index[0-9]*")):
        try:
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
            kilobytes = int(size.removesuffix("K"))
        except (OSError, ValueError):
            continue
        text = f"{kilobytes // 1024} MiB" if kilobytes % 1024 == 0 else f"{kilobytes} KiB"
        found["L" + level + {"Data": "d", "Instruction": "i"}.get(kind, "")] = text
    return found


def operating_system() -> str:
    """Return kernel and release, as `Linux 6.1`; the full build string may name the host."""
    release = re.match(r"\d+(\.\d+)?", platform.release())
    return f"{platform.system()} {release.group() if release else ''}".strip()


def blas() -> dict[str, Any] | None:
    """Return name, version, chosen architecture and threads of NumPy's BLAS, or None for an unknown one.

    "chosen_by" is OPENBLAS_CORETYPE where that variable chose the architecture, which may then be slower than
    the CPU's own.
    """
    import numpy as np
    import threadpoolctl

    np.matmul(np.ones((2, 2)), np.ones((2, 2)))  # some builds load their BLAS at the first product
    found = [pool for pool in threadpoolctl.threadpool_info() if pool.get("user_api") == "blas"]
    if not found:
        return None
    # SciPy's wheel brings a BLAS of its own, but np.matmul runs on NumPy's.
    own = next((pool for pool in found if "numpy" in pool.get("filepath", "")), found[0])
    return {
        "name": own.get("internal_api"),
        "version": own.get("version"),
        "architecture": own.get("architecture"),
        "threads": own.get("num_threads"),
        **({"chosen_by": CORETYPE[0]} if os.environ.get(CORETYPE[0]) else {}),
    }


def gpus() -> list[dict[str, Any]] | None:
    """Return NVIDIA GPUs as {name, driver, memory_bytes, compute_capability}, or None if there are none.

    CUDA_VISIBLE_DEVICES does not matter: all of the machine's GPUs are listed. A container may have a GPU but
    no nvidia-smi. Then the driver itself is asked, which gives its CUDA version instead of its own.
    """
    text = None
    if shutil.which("nvidia-smi"):
        text = output(["nvidia-smi", f"--query-gpu={','.join(GPU_QUERY)}", "--format=csv,noheader,nounits"])
    elif any(map(os.path.exists, GPU_DEVICES)):
        text = output([sys.executable, "-c", ASK_DRIVER], timeout=60.0)
    found = []
    for line in (text or "").splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == len(GPU_QUERY):
            name, driver, memory, capability = fields
            size = int(memory) * 2**20 if memory.isdigit() else None
            found.append(
                {"name": name, "driver": driver, "memory_bytes": size, "compute_capability": capability}
            )
    return found or None


def output(command: list[str], timeout: float = 10.0) -> str | None:
    """Return a command's output, or None if it is missing, fails or takes longer than `timeout` seconds."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
