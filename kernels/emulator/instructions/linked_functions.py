"""Calls of functions that a linker would add to the PTX: on float16 and bfloat16, print, and array.reshape.

Numba's float16 operators are C++ functions of cuda_fp16.h. Their names are mangled (Itanium C++ ABI,
"Mangling"): `_ZplRK6__halfS1__nbst` is `operator+(const __half&, const __half&)`. All parameters are
addresses: of the result, then of the operands. The emulator computes in float32 (fma in float64) and rounds
once, to nearest even, as PTX does.

print becomes a call of CUDA's vprintf, which prints here in lane order.

`array.reshape` calls `int numba_attempt_nocopy_reshape(nd, dims, strides, newnd, newdims, newstrides,
itemsize, is_f_order)`, with pointers to arrays of int64. It writes the new strides and returns 1, or returns
0 if the reshape needs a copy.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ..accesses.access import Access
from ..accesses.loads_and_stores import fetch, put
from ..arithmetic.compare_and_select import ORDER
from ..arithmetic.floats import ARITHMETIC, narrow, widen
from ..base.addresses import LOCAL_WINDOW, lanes_of
from ..base.instruction_batch import Batch
from ..base.instruction_registry import Run, unit
from ..machine.machine_state import Machine
from ..ptx.dtypes import Array, Mask
from ..ptx.fault import EmulatorError
from ..ptx.program import Symbol


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
    **{f"__h{name}": ARITHMETIC[name][1] for name in ("add", "sub", "mul", "div", "neg", "abs")},
    "__hmax": np.fmax,
    "__hmin": np.fmin,
    "__hisnan": np.isnan,
    "__hisinf": np.isinf,
    "__hfma": lambda a, b, c: a.astype(np.float64) * b + c,
    "hexp10": lambda a: np.float32(10) ** a,
    "hrsqrt": lambda a: 1 / np.sqrt(a),
    "hrcp": np.reciprocal,
    "htanh_approx": np.tanh,
}
SAME_NAME = "cos sin tanh exp exp2 log log2 log10 sqrt ceil floor trunc rint"  # as NumPy's, behind an h
FUNCTIONS |= {f"h{name}": getattr(np, name) for name in SAME_NAME.split()}
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


@unit("call", order="fence", results=0, counted="branch")
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
        values = [_operand(machine, batch, offset, lanes, found.operand) for offset in operands]
        data = _bytes(np.asarray(found.function(*values)), found.result)
        to = Access(machine, batch, _pointer(machine, result, lanes), data.shape[-1], lanes, "writes")
        put(to, "generic", data)
        machine.local[lanes, status : status + 4] = 0  # no exception

    return run


def _pointer(machine: Machine, at: int, lanes: Array) -> Array:
    """Return the addresses that lanes passed in the parameter at offset `at` of their local memory."""
    words = np.ascontiguousarray(machine.local[lanes, at : at + 8]).view(np.int64)
    return words.reshape(1, -1)


def _operand(machine: Machine, batch: Batch, at: int, lanes: Array, kind: str) -> Array:
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


LONGEST = 4096  # bytes of a string


@unit("call.vprintf", order="fence", results=0, counted="branch")
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


@unit("call.numba_attempt_nocopy_reshape", order="fence", results=0, counted="branch")
def reshape(batch: Batch) -> Run:
    """Find the strides for a new shape, once for all lanes with the same arguments."""
    at = [operand.offset for operand in batch.first.operands if isinstance(operand, Symbol)]
    status = at[0]

    def run(machine: Machine, mask: Mask) -> None:
        lanes = lanes_of(machine, mask)
        nd, dims, strides, newnd, newdims, newstrides, itemsize = (
            _pointer(machine, offset, lanes)[0] for offset in at[1:8]
        )
        in_f_order = machine.local[lanes, at[8]] != 0

        def items(pointer: Array, count: int) -> Array:
            """Return the arrays behind a pointer, (lanes, count)."""
            places = [(pointer + 8 * i)[None] for i in range(count)]
            reads = [Access(machine, batch, place, 8, lanes, "reads") for place in places]
            columns = [fetch(read, "generic").view(np.int64)[0, :, 0] for read in reads]
            return np.stack(columns, axis=1) if columns else empty

        empty = np.empty((lanes.size, 0), np.int64)
        old, new = int(nd[0]), int(newnd[0])  # of the arrays' types
        wanted = items(newdims, new)
        asked = np.column_stack([items(dims, old), items(strides, old), wanted, itemsize, in_f_order])
        cases, case_of = np.unique(asked, axis=0, return_inverse=True)
        answers = [
            _strides(case[:old], case[old : 2 * old], case[2 * old : -2], *case[-2:]) for case in cases
        ]
        case_of = case_of.reshape(-1)
        found = np.array([answer is not None for answer in answers])[case_of]
        for i in range(new):
            stride = np.array([0 if one is None else one[i] for one in answers], np.int64)[case_of]
            if found.any():
                data = stride[found][None, :, None].view(np.uint8)
                places = (newstrides + 8 * i)[None, found]
                put(Access(machine, batch, places, 8, lanes[found], "writes"), "generic", data)
        machine.local[lanes, status : status + 4] = found.astype(np.int32)[:, None].view(np.uint8)

    return run


def _strides(
    shape: Array, strides: Array, wanted: Array, itemsize: int, in_f_order: bool
) -> tuple[int, ...] | None:
    """Return the strides of a reshaped array, None if it needs a copy."""
    if int(np.prod(shape)) != int(np.prod(wanted)):
        return None
    # Nothing reads the array: only the layout of its items matters.
    item = np.empty(1, f"V{itemsize}")
    array = as_strided(item, tuple(shape.tolist()), tuple(strides.tolist()), writeable=False)
    # Fortran order is the same with the axes reversed.
    step = -1 if in_f_order else 1
    array = array.transpose() if in_f_order else array
    try:
        array.shape = tuple(wanted.tolist())[::step]
    except AttributeError:  # "incompatible shape for in-place modification"
        return None
    return array.strides[::step]
