"""bfloat16 on a CPU: find out by trying whether torch survives a product, and avoid what would end it.

Some virtual machines show a CPU's AMX units and hide leaf 0x1d of CPUID, which gives the size of their tiles.
oneDNN, which multiplies bfloat16 for torch, takes the size from there. The first product then kills the
process (SIGILL), or cannot be made. With ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 oneDNN leaves AMX alone. It
reads the variable once in a process, at the first product, also in float32.

The CPU's flags do not tell this, so a child process tries: two seconds, once for a CPU and a build of torch.
It also tries where no AMX is listed, since the next fault need not be one of AMX. The user's cache folder
keeps the answer.

Source: the issues 5689 and 5801 of uxlfoundation/oneDNN.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from minidist.kernels.cache_folder import cache_folder

if TYPE_CHECKING:
    from torch import nn

VARIABLE, CURE = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"
NAMES = (VARIABLE, "DNNL_MAX_CPU_ISA")  # oneDNN reads the second where the first is not set
PROGRAM = f"import sys; sys.path[:] = {{!r}}; from {__name__} import products; products()"
LIMIT = 60.0  # seconds of a child, most of which import torch
# Others, such as SIGKILL when memory runs out, come from outside and say nothing about the CPU.
FAULTS = (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT)
REFUSED = "could not create a primitive"
CPU_FIELDS = ("model name", "cpu family", "model", "stepping", "microcode", "flags", "CPU part", "Features")


class Outcome(NamedTuple):
    """What became of the products in a child process."""

    died: str  # "" if it survived; else of what, such as "SIGILL"
    cured: bool  # whether it survives with the variable


_avoided = False  # whether this process, and not its user, has set the variable


def products(backward: bool = True) -> None:
    """Multiply in bfloat16 as models do, in sizes for which oneDNN takes different kernels."""
    import torch

    bf16 = torch.bfloat16
    for m, k, n in ((1, 1, 1), (3, 5, 7), (64, 64, 64), (64, 256, 512)):
        x, w = torch.ones(m, k, dtype=bf16), torch.ones(n, k, dtype=bf16)
        torch.mm(x, w.T)
        torch.bmm(x[None], w.T[None])
        if backward:
            layer = torch.nn.Linear(k, n, dtype=bf16)
            layer(x.requires_grad_()).sum().backward()
    q = torch.ones(1, 2, 64, 16, dtype=bf16)
    torch.nn.functional.scaled_dot_product_attention(q, q, q)


@functools.cache
def outcome() -> Outcome | None:
    """Return the outcome on this machine, remembered or tried now; None if it could not be tried."""
    file = cache_folder() / f"bf16-{_identity()}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Outcome(**json.loads(file.read_text()))
    try:
        import fcntl

        file.parent.mkdir(parents=True, exist_ok=True)
        opened = file.open("a+")
    except (ImportError, OSError):
        return _try()
    with opened:
        with contextlib.suppress(OSError):
            fcntl.flock(opened, fcntl.LOCK_EX)  # ranks ask at the same time, and the first tries for all
        opened.seek(0)
        with contextlib.suppress(ValueError, TypeError):
            return Outcome(**json.loads(opened.read()))
        found = _try()
        if found is not None:
            opened.truncate(0)
            opened.write(json.dumps(found._asdict()))
        return found


def avoid() -> Outcome | None:
    """Where products end torch, set the variable for this process and those it starts, unless the user has.

    Call it before the first product. Returns the outcome if it is a fault, else None.
    """
    global _avoided
    if _avoided or not any(os.environ.get(name) for name in NAMES):
        found = outcome()
        if found is not None and found.died:
            if found.cured:
                os.environ[VARIABLE], _avoided = CURE, True
            return found
    return None


def require_products(model: nn.Module) -> None:
    """ValueError if the model lies on a CPU on which bfloat16 products would end this process."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    from minidist import comm

    device = next((p.device for p in model.parameters() if not p.is_meta), None) or comm.device()
    if device.type != "cpu" or _get_current_dispatch_mode() is not None:  # a dry run multiplies nothing
        return
    found = avoid()
    if found is None or (found.cured and _survives()):
        return
    why = f"precision='bf16' on this CPU would end the process: torch's bfloat16 products die ({found.died})"
    if not found.cured:
        raise ValueError(f"{why}, also with {VARIABLE}={CURE}; give precision='fp32', or another torch")
    raise ValueError(
        f"{why}. {VARIABLE}={CURE} avoids that, but torch has computed in this process and no longer "
        "reads the variable; set it before you start the program, or give precision='fp32'"
    )


def _try() -> Outcome | None:
    died = _child({})
    if not died:
        return None if died is None else Outcome("", True)
    cured = _child({VARIABLE: CURE})
    return None if cured is None else Outcome(died, not cured)


def _child(variable: dict[str, str]) -> str | None:
    """Of what a child with these products died; "" if it survived, None if it failed in another way."""
    inherited = {name: value for name, value in os.environ.items() if name not in NAMES}
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM.format([entry for entry in sys.path if isinstance(entry, str)])],
            env={**inherited, "CUDA_VISIBLE_DEVICES": "", **variable},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LIMIT,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if -done.returncode in FAULTS:
        return signal.Signals(-done.returncode).name
    if REFUSED in done.stderr.decode(errors="replace"):
        return REFUSED
    return None if done.returncode else ""


@functools.cache
def _survives() -> bool:
    """Whether a fork of this process survives: it has what oneDNN has read here, and may die of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of a fork beside threads; this one uses none of theirs
        child = os.fork()
    if not child:
        try:
            import torch

            faulthandler.disable()
            torch.set_num_threads(1)
            products(backward=False)  # autograd refuses to run in a fork
            os._exit(0)
        finally:
            os._exit(1)
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _identity() -> str:
    """Letters and digits for the CPU, its microcode and torch's build."""
    told = [platform.machine(), platform.processor()]
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open(errors="replace") as lines:
        for line in lines:
            key, separator, value = line.partition(":")
            if not separator:
                break  # the first CPU speaks for all
            told += [value.strip()] if key.strip() in CPU_FIELDS else []
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        told.append(importlib.metadata.version("torch"))
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]
