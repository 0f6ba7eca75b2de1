"""Compare and select: setp, set, selp, slct, testp.

Source: PTX ISA manual, "Comparison and Selection Instructions" and "Comparisons of Floating-Point Operands":
an ordered comparison with a NaN is false, an unordered one (`ltu`, `neu`, ...) is true.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..base.operation import BITS, INTEGERS, Builder, Function, Operation, pairwise, unpack
from ..ptx.dtypes import DTYPES, Array
from .half_precision import widen
from .rounding import flush

FLOATS = ("f16", "bf16", "f32", "f64", "f16x2", "bf16x2")


def _not(function: Function) -> Function:
    return lambda a, b: ~function(a, b)


def _differs(a: Array, b: Array) -> Array:
    """Return whether a < b or a > b."""
    return np.less(a, b) | np.greater(a, b)


def _is_nan(a: Array, b: Array) -> Array:
    return np.isnan(a) | np.isnan(b)


ORDER: dict[str, Function] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
UNSIGNED: dict[str, Function] = {"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}
UNORDERED: dict[str, Function] = {
    "equ": _not(_differs),
    "neu": np.not_equal,
    "ltu": _not(np.greater_equal),
    "leu": _not(np.greater),
    "gtu": _not(np.less_equal),
    "geu": _not(np.less),
    "num": _not(_is_nan),
    "nan": _is_nan,
}
BOOLEAN: dict[str, Function] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _comparison(name: str, kind: str) -> Function | None:
    """Return the comparison of operands of `kind`."""
    if kind in FLOATS:
        if name == "ne":
            return _differs
        return ORDER.get(name) or UNORDERED.get(name)
    if kind in BITS[1:]:
        return ORDER[name] if name in ("eq", "ne") else None
    if kind not in INTEGERS:
        return None
    return ORDER.get(name) or (UNSIGNED.get(name) if kind[0] == "u" else None)


def _parsed(opcode: tuple[str, ...]) -> tuple[str, Function, Function | None] | None:
    """Return (kind, comparison, boolean) of `setp.lt.and.ftz.f32`, or of `set` without its result type."""
    name, *flags, kind = opcode[1:] if len(opcode) > 2 else ("", "")
    compare = _comparison(name, kind)
    if compare is None:
        return None
    if "ftz" in flags:
        if kind == "f32":
            compare = flushing_operands(compare)
        elif kind not in ("f16", "f16x2"):
            return None
        flags.remove("ftz")
    if kind.startswith("bf16"):
        compare = _widened(compare)
    boolean = BOOLEAN.get(flags[0]) if flags else None
    return None if len(flags) > 1 or (flags and boolean is None) else (kind, compare, boolean)


def flushing_operands(function: Function) -> Function:
    """Return `function` with subnormal float32 operands read as zeros."""
    return lambda *xs: function(*map(flush, xs))


def _widened(compare: Function) -> Function:
    return lambda a, b: compare(widen(a), widen(b))


def _set_predicate(opcode: tuple[str, ...]) -> Operation | None:
    """`setp.lt.s32 p, a, b` and `setp.lt.and.s32 p, a, b, c`."""
    parsed = _parsed(opcode)
    if parsed is None:
        return None
    kind, compare, boolean = parsed
    if kind.endswith("x2"):
        return _set_predicates(kind[:-2], compare, boolean)
    return Operation("pred", (kind, kind) + ("pred",) * (boolean is not None), _combined(compare, boolean))


def _combined(compare: Function, boolean: Function | None) -> Function:
    """Return the comparison of a and b, combined with a third operand if there is a boolean operation."""
    return compare if boolean is None else lambda a, b, c: boolean(compare(a, b), c)


def _set_predicates(kind: str, compare: Function, boolean: Function | None) -> Operation:
    """`setp.lt.f16x2 p|q, a, b`: p of the low halves, q of the high ones."""

    combined = _combined(compare, boolean)

    def function(a: Array, b: Array, *c: Array) -> tuple[Array, ...]:
        pairs = zip(unpack(a, kind), unpack(b, kind), strict=True)
        return tuple(combined(x, y, *c) for x, y in pairs)

    return Operation("pred", ("b32", "b32") + ("pred",) * (boolean is not None), function, results=2)


def both_predicates(opcode: tuple[str, ...]) -> Operation | None:
    """`setp` with two destinations, p|q: q gets the result of the opposite comparison."""
    parsed = _parsed(opcode)
    if opcode[0] != "setp" or parsed is None:
        return None
    kind, compare, boolean = parsed
    if kind.endswith("x2"):
        return _set_predicates(kind[:-2], compare, boolean)

    def function(a: Array, b: Array, *c: Array) -> tuple[Array, Array]:
        outcome = compare(a, b)
        if boolean is None:
            return outcome, ~outcome
        return boolean(outcome, *c), boolean(~outcome, *c)

    return Operation("pred", (kind, kind) + ("pred",) * (boolean is not None), function, results=2)


def _set(opcode: tuple[str, ...]) -> Operation | None:
    """`set.lt.u32.f32 d, a, b`: all ones, or 1.0, if it holds, else 0; for pairs in each half of d."""
    if len(opcode) < 4 or (parsed := _parsed((*opcode[:-2], opcode[-1]))) is None:
        return None
    kind, compare, boolean = parsed
    result, paired = opcode[-2], kind.endswith("x2")
    each = (
        {"u32": "u16", "s32": "u16", "f16x2": "f16", "bf16x2": "bf16"}.get(result, "") if paired else result
    )
    true = {"bf16": 0x3F80, "f16": 1.0, "f32": 1.0, **{f"s{n}": -1 for n in (16, 32)}}
    true |= {f"u{n}": (1 << n) - 1 for n in (16, 32)}
    if each not in true or (paired and boolean is not None):
        return None
    yes, no = np.array(true[each], DTYPES[each]), np.array(0, DTYPES[each])
    combined = _combined(compare, boolean)

    def function(*operands: Array) -> Any:
        return np.where(combined(*operands), yes, no)

    if paired:
        return Operation("b32", ("b32", "b32"), pairwise(kind[:-2], function))
    return Operation(result, (kind, kind) + ("pred",) * (boolean is not None), function)


SELECTED = (*BITS[1:], *INTEGERS, "f32", "f64")


def _select(opcode: tuple[str, ...]) -> Operation | None:
    """`selp d, a, b, p`: p ? a : b."""
    if len(opcode) != 2 or opcode[1] not in SELECTED:
        return None
    kind = opcode[1]
    return Operation(kind, (kind, kind, "pred"), lambda a, b, p: np.where(p, a, b))


def _select_by_sign(opcode: tuple[str, ...]) -> Operation | None:
    """`slct d, a, b, c`: c >= 0 ? a : b, where -0 >= 0 and NaN is not."""
    *flags, kind, by = opcode[1:] if len(opcode) > 2 else ("", "")
    if (
        kind not in SELECTED
        or by not in ("s32", "f32")
        or flags not in ([], ["ftz"])
        or (flags and by == "s32")
    ):
        return None
    zero = np.array(0, DTYPES[by])

    def function(a: Array, b: Array, c: Array) -> Any:
        return np.where((flush(c) if flags else c) >= zero, a, b)

    return Operation(kind, (kind, kind, by), function)


def _test(opcode: tuple[str, ...]) -> Operation | None:
    """`testp.finite.f32` and other tests; zeros count as normal."""
    if len(opcode) != 3 or opcode[2] not in ("f32", "f64"):
        return None
    smallest = np.finfo(DTYPES[opcode[2]]).smallest_normal

    def is_subnormal(x: Array) -> Array:
        return (np.absolute(x) < smallest) & (x != 0)

    tests: dict[str, Function] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda x: ~np.isnan(x),
        "notanumber": np.isnan,
        "normal": lambda x: np.isfinite(x) & ~is_subnormal(x),
        "subnormal": is_subnormal,
    }
    test = tests.get(opcode[1])
    return Operation("pred", (opcode[2],), test) if test else None


BUILDERS: dict[str, list[Builder]] = {
    "setp": [_set_predicate],
    "set": [_set],
    "selp": [_select],
    "slct": [_select_by_sign],
    "testp": [_test],
}
