"""Compare and select: setp, set, selp, slct, testp.

Source: PTX ISA manual, "Comparison and Selection Instructions" and "Comparisons of Floating-Point Operands":
an ordered comparison with a NaN is false, an unordered one (`ltu`, `neu`, ...) is true.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from ..ptx.dtypes import DTYPES, Array
from .floats import widen
from .operations import INTEGER, UNTYPED, Function, Operation, computes, pairwise, unpack, words
from .rounding import flush


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


JOINED = words("and", "or", "xor", "ftz")  # a boolean operation at most, and .ftz
SELECTED = rf"({UNTYPED}|{INTEGER}|f32|f64)"


def _comparison(name: str, flags: str, kind: str) -> tuple[Function, Function | None] | None:
    """Return the comparison of operands of `kind`, and the boolean operation that joins a third operand."""
    known: dict[str, Function] = {}
    if re.fullmatch(r"b?f(16|16x2|32|64)", kind):
        known = {**ORDER, **UNORDERED, "ne": _differs}
    elif re.fullmatch(INTEGER, kind):
        known = {**ORDER, **(UNSIGNED if kind[0] == "u" else {})}
    elif re.fullmatch(UNTYPED, kind):
        known = {name: ORDER[name] for name in ("eq", "ne")}
    compare, joins = known.get(name), [flag for flag in flags.split(".") if flag in BOOLEAN]
    if compare is None or len(joins) > 1 or ("ftz" in flags and kind not in ("f16", "f16x2", "f32")):
        return None
    if kind.startswith("bf16"):
        widened = compare
        compare = lambda a, b: widened(widen(a), widen(b))  # noqa: E731
    elif kind == "f32" and "ftz" in flags:
        unflushed = compare
        compare = lambda a, b: unflushed(flush(a), flush(b))  # noqa: E731
    return compare, BOOLEAN[joins[0]] if joins else None


def _joined(compare: Function, boolean: Function | None) -> Function:
    """Return the comparison of a and b, joined with a third operand if there is a boolean operation."""
    return compare if boolean is None else lambda a, b, c: boolean(compare(a, b), c)


def _of_pairs(kind: str, compare: Function, boolean: Function | None) -> Operation:
    """`setp.lt.f16x2 p|q, a, b`: p of the low halves, q of the high ones."""
    joined = _joined(compare, boolean)

    def function(a: Array, b: Array, *c: Array) -> tuple[Array, ...]:
        pairs = zip(unpack(a, kind), unpack(b, kind), strict=True)
        return tuple(joined(x, y, *c) for x, y in pairs)

    return Operation("pred", ("b32", "b32") + ("pred",) * (boolean is not None), function, results=2)


@computes(rf"setp\.(\w+){JOINED}\.(\w+)")
def set_predicate(name: str, flags: str, kind: str) -> Operation | None:
    """`setp.lt.s32 p, a, b` and `setp.lt.and.s32 p, a, b, c`."""
    if (found := _comparison(name, flags, kind)) is None:
        return None
    if kind.endswith("x2"):
        return _of_pairs(kind[:-2], *found)
    return Operation("pred", (kind, kind) + ("pred",) * (found[1] is not None), _joined(*found))


@computes(rf"setp\.(\w+){JOINED}\.(\w+)", results=2)
def set_predicates(name: str, flags: str, kind: str) -> Operation | None:
    """`setp` with two destinations, p|q: q gets the result of the opposite comparison."""
    if (found := _comparison(name, flags, kind)) is None:
        return None
    if kind.endswith("x2"):
        return _of_pairs(kind[:-2], *found)
    compare, boolean = found

    def function(a: Array, b: Array, *c: Array) -> tuple[Array, Array]:
        outcome = compare(a, b)
        if boolean is None:
            return outcome, ~outcome
        return boolean(outcome, *c), boolean(~outcome, *c)

    return Operation("pred", (kind, kind) + ("pred",) * (boolean is not None), function, results=2)


@computes(rf"set\.(\w+){JOINED}\.(\w+)\.(\w+)")
def set_number(name: str, flags: str, result: str, kind: str) -> Operation | None:
    """`set.lt.u32.f32 d, a, b`: all ones, or 1.0, if it holds, else 0; for pairs in each half of d."""
    paired = kind.endswith("x2")
    halves = {"u32": "u16", "s32": "u16", "f16x2": "f16", "bf16x2": "bf16"}
    each = halves.get(result, "") if paired else result
    true = {"bf16": 0x3F80, "f16": 1.0, "f32": 1.0, "s16": -1, "s32": -1, "u16": 0xFFFF, "u32": 0xFFFFFFFF}
    found = _comparison(name, flags, kind)
    if each not in true or found is None or (paired and found[1] is not None):
        return None
    yes, no = np.array(true[each], DTYPES[each]), np.array(0, DTYPES[each])
    joined = _joined(*found)

    def function(*operands: Array) -> Any:
        return np.where(joined(*operands), yes, no)

    if paired:
        return Operation("b32", ("b32", "b32"), pairwise(kind[:-2], function))
    return Operation(result, (kind, kind) + ("pred",) * (found[1] is not None), function)


@computes(rf"selp\.{SELECTED}")
def select(kind: str) -> Operation:
    """`selp d, a, b, p`: p ? a : b."""
    return Operation(kind, (kind, kind, "pred"), lambda a, b, p: np.where(p, a, b))


@computes(rf"slct()\.{SELECTED}\.(s32)", rf"slct(\.ftz)?\.{SELECTED}\.(f32)")
def select_by_sign(ftz: str, kind: str, by: str) -> Operation:
    """`slct d, a, b, c`: c >= 0 ? a : b, where -0 >= 0 and NaN is not."""
    zero = np.array(0, DTYPES[by])

    def function(a: Array, b: Array, c: Array) -> Any:
        return np.where((flush(c) if ftz else c) >= zero, a, b)

    return Operation(kind, (kind, kind, by), function)


@computes(r"testp\.(finite|infinite|number|notanumber|normal|subnormal)\.(f32|f64)")
def test(name: str, kind: str) -> Operation:
    """`testp.finite.f32` and other tests; zeros count as normal."""
    smallest = np.finfo(DTYPES[kind]).smallest_normal

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
    return Operation("pred", (kind,), tests[name])
