"""bfloat16 on a CPU: try whether torch survives a product, and avoid what would kill it.

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
import importlib.metadata
import os
import signal
import time
import warnings
from typing import TYPE_CHECKING, NamedTuple

from minidist.kernels.tried_once import child, fault, remembered

if TYPE_CHECKING:
    from torch import nn

VARIABLE, CURE = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"
NAMES = (VARIABLE, "DNNL_MAX_CPU_ISA")  # oneDNN reads the second where the first is not set
PROGRAM = f"import sys; sys.path[:] = {{!r}}; from {__name__} import products; products()"
LIMIT = 60.0  # seconds of a child, most of which import torch
REFUSED = "could not create a primitive"


class Outcome(NamedTuple):
    """How the products in a child process ended."""

    died: str  # what killed it, such as "SIGILL"; "" if it survived
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
    builds: tuple[str, ...] = ()
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        builds = (importlib.metadata.version("torch"),)
    found = remembered("bf16-products", builds, _try)
    return None if found is None else Outcome(*found)


def avoid() -> Outcome | None:
    """Where products kill the process, set the variable, for this process and its children; the user's stays.

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
    """What killed a child with these products; "" if it survived, None if it failed in another way."""
    inherited = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = child(PROGRAM, {**inherited, "CUDA_VISIBLE_DEVICES": "", **variable}, LIMIT)
    if done is None or fault(done.returncode):
        return fault(done.returncode) if done else None
    if REFUSED in done.stderr.decode(errors="replace"):
        return REFUSED
    return None if done.returncode else ""


@functools.cache
def _survives() -> bool:
    """Whether a fork of this process survives the products, with what oneDNN has read here."""
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
