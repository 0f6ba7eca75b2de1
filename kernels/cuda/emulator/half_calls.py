"""Calls of CUDA's functions on __half and __nv_bfloat16, which Numba leaves to a linker.

float16 operators of Numba are C++ functions of cuda_fp16.h, linked in after PTX is made. Their names say what
they are (Itanium C++ ABI, "Mangling"): `_ZplRK6__halfS1__nbst` is `operator+(const __half&, const __half&)`.
All parameters are addresses: of the result, then of the operands. They compute in float32 (fma in float64)
and round once, to nearest even, as PTX does.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .access import fetch, put
from .batch import Batch
from .fault import EmulatorError
from .half import narrow, widen
from .operands import Symbol
from .places import lanes_of
from .units import Array, Mask, Run, unit

if TYPE_CHECKING:
    from .machine import Machine

OPERATORS: dict[str, Callable[..., Any]] = {
    "pl": np.add,
    "mi": np.subtract,
    "ml": np.multiply,
    "dv": np.divide,
    "ng": np.negative,
    "ps": np.positive,
    "eq": np.equal,
    "ne": np.not_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"__h{name}": OPERATORS[name] for name in ("eq", "ne", "gt", "ge", "lt", "le")},
    "__hadd": np.add,
    "__hsub": np.subtract,
    "__hmul": np.multiply,
    "__hdiv": np.divide,
    "__hneg": np.negative,
    "__habs": np.abs,
    "__hmax": np.fmax,
    "__hmin": np.fmin,
    "__hisnan": np.isnan,
    "__hisinf": np.isinf,
    "__hfma": lambda a, b, c: a.astype(np.float64) * b + c,
    "hcos": np.cos,
    "hsin": np.sin,
    "htanh": np.tanh,
    "hexp": np.exp,
    "hexp2": np.exp2,
    "hexp10": lambda a: np.float32(10) ** a,
    "hlog": np.log,
    "hlog2": np.log2,
    "hlog10": np.log10,
    "hsqrt": np.sqrt,
    "hrsqrt": lambda a: 1 / np.sqrt(a),
    "hrcp": np.reciprocal,
    "hceil": np.ceil,
    "hfloor": np.floor,
    "htrunc": np.trunc,
    "hrint": np.rint,
}
NAME = re.compile(r"_Z(?:L(\d+))?(\w+?)(?:RK)?(6__half|13__nv_bfloat16)(?:S\d?_)*_nbst")


def function_of(name: str) -> tuple[Callable[..., Any], bool] | None:
    """Return what a mangled name computes, and whether on bfloat16; None for one that is not known."""
    match = NAME.fullmatch(name)
    if match is None:
        return None
    known = FUNCTIONS if match[1] else OPERATORS
    return (known[match[2]], match[3] != "6__half") if match[2] in known else None


@unit("call", order="fence", results=0)
def call(batch: Batch) -> Run:
    """A call that no function of the PTX answers: (status), name, (result, operands...), all addresses."""
    found = function_of(batch.first.opcode[1])
    if found is None:
        raise EmulatorError(
            f"{batch.first.location or 'unknown line'}: the emulator does not know the function "
            f"{batch.first.opcode[1]}, which a linker would bring"
        )
    function, brain = found
    status, result, *operands = [
        operand.offset for operand in batch.first.operands if isinstance(operand, Symbol)
    ]

    def run(machine: Machine, mask: Mask) -> None:
        lanes = lanes_of(machine, mask)
        values = [_number(machine, batch, at, lanes, brain) for at in operands]
        answer = np.asarray(function(*values))
        if answer.dtype == np.bool_:
            data = answer.astype(np.uint8)[..., None]
        else:
            rounded = narrow(answer.astype(np.float32)) if brain else answer.astype(np.float16)
            data = np.ascontiguousarray(rounded)[..., None].view(np.uint8)
        put(machine, batch, "generic", _pointer(machine, result, lanes), data, lanes)
        machine.local[lanes, status : status + 4] = 0  # no exception

    return run


def _pointer(machine: Machine, at: int, lanes: Array) -> Array:
    """Return the addresses that the lanes passed in the parameter at `at` of their local memory."""
    words = np.ascontiguousarray(machine.local[lanes, at : at + 8]).view(np.int64)
    return words.reshape(1, -1)


def _number(machine: Machine, batch: Batch, at: int, lanes: Array, brain: bool) -> Array:
    bits = fetch(machine, batch, "generic", _pointer(machine, at, lanes), 2, lanes).view(np.uint16)[..., 0]
    return widen(bits) if brain else bits.view(np.float16).astype(np.float32)
