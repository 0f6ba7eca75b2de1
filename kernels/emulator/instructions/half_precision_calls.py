"""Calls of CUDA's functions on __half and __nv_bfloat16, which Numba leaves to a linker.

Numba's float16 operators are C++ functions of cuda_fp16.h that are linked to the PTX. Their names are mangled
(Itanium C++ ABI, "Mangling"): `_ZplRK6__halfS1__nbst` is `operator+(const __half&, const __half&)`. All
parameters are addresses: of the result, then of the operands. The emulator computes in float32 (fma in
float64) and rounds once, to nearest even, as PTX does.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arithmetic.compare import ORDER
from ..arithmetic.half_precision import narrow, widen
from ..base.addresses import lanes_of
from ..base.batch import Batch
from ..base.instruction_registry import Run, unit
from ..machine.machine import Machine
from ..memory.access import Access
from ..memory.loads_and_stores import fetch, put
from ..ptx.dtypes import Array, Mask
from ..ptx.fault import EmulatorError
from ..ptx.operands import Symbol


def _unordered(compare: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: compare(a, b) | np.isnan(a) | np.isnan(b)


def _saturated(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *operands: np.clip(np.nan_to_num(function(*operands), nan=0.0), 0, 1)


OPERATORS: dict[str, Callable[..., Any]] = {
    "pl": np.add,
    "mi": np.subtract,
    "ml": np.multiply,
    "dv": np.divide,
    "ng": np.negative,
    "ps": np.positive,
    **ORDER,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"__h{name}": compare for name, compare in ORDER.items()},
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
    "htanh_approx": np.tanh,
}
# Suffixes: u also holds if an operand is NaN; _sat clamps to [0, 1], NaN to 0; _relu clamps at 0.
FUNCTIONS |= {f"__h{name}u": _unordered(compare) for name, compare in ORDER.items()}
FUNCTIONS |= {f"__h{name}_rn": FUNCTIONS[f"__h{name}"] for name in ("add", "sub", "mul")}
FUNCTIONS |= {f"__h{name}_sat": _saturated(FUNCTIONS[f"__h{name}"]) for name in ("add", "sub", "mul", "fma")}
FUNCTIONS |= {"__hmax_nan": np.maximum, "__hmin_nan": np.minimum}
FUNCTIONS |= {"__hfma_relu": lambda a, b, c: np.maximum(FUNCTIONS["__hfma"](a, b, c), 0)}
HALVES = {"6__half": "f16", "13__nv_bfloat16": "bf16"}
# Letters of the mangling for C++'s types.
LETTERS = {"f": "f4", "d": "f8", "s": "i2", "t": "u2", "i": "i4", "j": "u4", "l": "i8", "m": "u8"}
LETTERS |= {"x": "i8", "y": "u8", "a": "i1", "h": "u1", "c": "i1", "b": "?"}
_TYPE = "6__half|13__nv_bfloat16"
NAME = re.compile(rf"_Z(?:L(\d+))?(\w+?)(?:RK)?({_TYPE})(?:S\d?_)*_nbst")
CONSTRUCTOR = re.compile(rf"_ZN({_TYPE})C1E(\w|{_TYPE})_nbst")
CONVERSION = re.compile(rf"\w*_ZNK({_TYPE})cv(\w)Ev_\w+")


@dataclass(frozen=True, slots=True)
class HalfCall:
    """The operation behind a mangled name. Kinds are "f16", "bf16", or NumPy's name of a dtype."""

    function: Callable[..., Any]
    operand: str
    result: str
    result_at: int = 0  # the index of the result's parameter; the operands follow it


def function_of(name: str) -> HalfCall | None:
    """Return what a mangled name computes, or None."""
    if match := NAME.fullmatch(name):
        known, kind = FUNCTIONS if match[1] else OPERATORS, HALVES[match[3]]
        return HalfCall(known[match[2]], kind, kind) if match[2] in known else None
    if match := CONSTRUCTOR.fullmatch(name):
        kind = HALVES.get(match[2], LETTERS.get(match[2], ""))
        return HalfCall(np.positive, kind, HALVES[match[1]], result_at=1) if kind else None
    if (match := CONVERSION.fullmatch(name)) and match[2] in LETTERS:
        return HalfCall(np.positive, HALVES[match[1]], LETTERS[match[2]])
    return None


@unit("call", order="fence", results=0)
def call(batch: Batch) -> Run:
    """call (status), name, (result, operands...) of a function that the PTX does not define."""
    found = function_of(batch.first.opcode[1])
    if found is None:
        raise EmulatorError(
            f"{batch.first.location or 'unknown line'}: the emulator does not know the function "
            f"{batch.first.opcode[1]}, which a linker would add"
        )
    status, *at = [operand.offset for operand in batch.first.operands if isinstance(operand, Symbol)]
    result, operands = at[found.result_at], at[found.result_at + 1 :]

    def run(machine: Machine, mask: Mask) -> None:
        lanes = lanes_of(machine, mask)
        values = [_number(machine, batch, offset, lanes, found.operand) for offset in operands]
        data = _bytes(np.asarray(found.function(*values)), found.result)
        to = Access(machine, batch, _pointer(machine, result, lanes), data.shape[-1], lanes, "writes")
        put(to, "generic", data)
        machine.local[lanes, status : status + 4] = 0  # no exception

    return run


def _pointer(machine: Machine, at: int, lanes: Array) -> Array:
    """Return the addresses that lanes passed in the parameter at offset `at` of their local memory."""
    words = np.ascontiguousarray(machine.local[lanes, at : at + 8]).view(np.int64)
    return words.reshape(1, -1)


def _number(machine: Machine, batch: Batch, at: int, lanes: Array, kind: str) -> Array:
    """Return the operands that the parameter at offset `at` points to, halves as float32."""
    dtype = np.dtype("u2" if kind in HALVES.values() else kind)
    source = Access(machine, batch, _pointer(machine, at, lanes), dtype.itemsize, lanes, "reads")
    bits: Array = fetch(source, "generic").view(dtype)[..., 0]
    if kind == "bf16":
        return widen(bits)
    return bits.view(np.float16).astype(np.float32) if kind == "f16" else bits


def _bytes(answer: Array, kind: str) -> Array:
    """Return the bytes of results. Conversion to an integer drops the fraction."""
    if answer.dtype == np.bool_:
        return answer.astype(np.uint8)[..., None]
    if kind == "bf16":
        answer = narrow(answer.astype(np.float32))
    else:
        answer = answer.astype("f2" if kind == "f16" else kind)
    return np.ascontiguousarray(answer)[..., None].view(np.uint8)
