"""print in a kernel: Numba compiles it to a call of CUDA's vprintf, which prints here in lane order."""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np

from ..base.addresses import LOCAL_WINDOW, lanes_of
from ..base.batch import Batch
from ..base.instruction_registry import Run, unit
from ..machine.machine import Machine
from ..ptx.dtypes import Mask
from ..ptx.operands import Symbol

LONGEST = 4096  # bytes of a string


@unit("call.vprintf", order="fence", results=0)
def vprintf(batch: Batch) -> Run:
    """vprintf(format, arguments): generic addresses of a string, and of a struct as in C."""
    offsets = [operand.offset for operand in batch.first.operands if isinstance(operand, Symbol)]
    returned, text_at, arguments_at = offsets

    def run(machine: Machine, mask: Mask) -> None:
        for lane in lanes_of(machine, mask).tolist():
            text = _string(machine, _number(machine, lane, text_at, "i8"))
            arguments = _number(machine, lane, arguments_at, "i8") - LOCAL_WINDOW
            sys.stdout.write(_formatted(machine, lane, text, arguments))
            machine.local[lane, returned : returned + 4] = 0

    return run


def _number(machine: Machine, lane: int, at: int, kind: str) -> Any:
    dtype = np.dtype(kind)
    return machine.local[lane, at : at + dtype.itemsize].view(dtype)[0].item()


def _string(machine: Machine, address: int) -> str:
    found = [buffer for buffer in machine.memory.buffers if buffer.start <= address < buffer.end]
    if not found:
        machine.fault("out of bounds", f"prints a string at {machine.memory.near(address)}")
    start = address - found[0].start
    return bytes(found[0].bytes[start : start + LONGEST]).split(b"\0")[0].decode(errors="replace")


def _formatted(machine: Machine, lane: int, text: str, at: int) -> str:
    """Format the arguments, from offset `at` of the lane's local memory on, into %lld and the like."""

    def value(match: re.Match[str]) -> str:
        nonlocal at
        letter, length = match[3], match[2]
        if letter == "%":
            return "%"
        wide = letter in "feEgGaAsp" or length in ("l", "ll")
        kind = "f8" if letter in "feEgGaA" else f"{'u' if letter in 'uxXop' else 'i'}{8 if wide else 4}"
        at = -(-at // np.dtype(kind).itemsize) * np.dtype(kind).itemsize
        number = _number(machine, lane, at, kind)
        at += np.dtype(kind).itemsize
        if letter == "s":
            return _string(machine, number)
        conversion = f"%{match[1]}{letter.replace('p', 'x').replace('i', 'd')}"
        return str(conversion % number)

    return re.sub(r"%([-+ #0-9.]*)(l{0,2}|h{0,2}|z)([diuxXocsfeEgGaAp%])", value, text)
