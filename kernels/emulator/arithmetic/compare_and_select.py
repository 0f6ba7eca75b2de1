"""Compare and select: setp, selp, testp.

Source: PTX ISA manual, "Comparison and Selection Instructions" and "Comparisons of Floating-Point Operands":
an ordered comparison with a NaN is false, an unordered one (`ltu`, `neu`, ...) is true.
"""

from __future__ import annotations

import re

import numpy as np

from ..ptx.dtypes import Array
from .floats import widen
from .operations import INTEGER, UNTYPED, Function, Operation, computes
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
OF_FLOATS: dict[str, Function] = {
    **ORDER,
    "ne": _differs,
    "equ": _not(_differs),
    "neu": np.not_equal,
    "ltu": _not(np.greater_equal),
    "leu": _not(np.greater),
    "gtu": _not(np.less_equal),
    "geu": _not(np.less),
    "num": _not(_is_nan),
    "nan": _is_nan,
}
TESTS: dict[str, Function] = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda x: ~np.isnan(x),
    "notanumber": np.isnan,
}


@computes(
    rf"setp\.(eq|ne)()\.({UNTYPED})", rf"setp\.(\w+)()\.({INTEGER}|b?f16|f64)", r"setp\.(\w+)(\.ftz)?\.(f32)"
)
def set_predicate(name: str, ftz: str, kind: str) -> Operation | None:
    """`setp.lt.s32 p, a, b`."""
    compare = (ORDER if re.fullmatch(f"{INTEGER}|{UNTYPED}", kind) else OF_FLOATS).get(name)
    if compare is None:
        return None
    change = widen if kind == "bf16" else flush if ftz else None
    function = compare if change is None else lambda a, b: compare(change(a), change(b))
    return Operation("pred", (kind, kind), function)


@computes(rf"selp\.({UNTYPED}|{INTEGER}|f32|f64)")
def select(kind: str) -> Operation:
    """`selp d, a, b, p`: p ? a : b."""
    return Operation(kind, (kind, kind, "pred"), lambda a, b, p: np.where(p, a, b))


@computes(rf"testp\.({'|'.join(TESTS)})\.(f32|f64)")
def test(name: str, kind: str) -> Operation:
    """`testp.finite.f32` and other tests."""
    return Operation("pred", (kind,), TESTS[name])
