r"""What instructions compute: a table of opcodes, each with a function of whole arrays.

    @computes(r"shf\.(l|r)\.(clamp|wrap)\.b32")
    def funnel(direction: str, mode: str) -> Operation:
        ...

The pattern is a regular expression that spells opcodes as the manual does. Its groups are the arguments of
the function below, which returns the `Operation`; a group that is left out is "". `operation` looks up an
opcode.

An operation's function takes one array for each source operand, with an element for each lane of as many
warps, blocks and like instructions as the caller puts together. Shapes broadcast, so a constant may be one
element. Results are new arrays. Overflow, NaN and division by zero are ordinary results on a GPU, so callers
run everything under `numpy.errstate(all="ignore")`.

Source: PTX ISA manual, "Fundamental Types" and "Operand Size Exceeding Instruction-Type Size".
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..ptx.dtypes import DTYPES, SIZES, Array

Function: TypeAlias = Callable[..., Any]

# Alternatives of kinds, for patterns. Packed types (f16x2, s16x2, ...) are read as b32.
INTEGER = "[us](?:16|32|64)"
UNTYPED = "b(?:16|32|64)"


@dataclass(frozen=True, slots=True)
class Operation:
    """The computation of one instruction.

    Source operands are read in their kind (the low bits of a wider register). A result extends to a wider
    register by its sign if `result` is signed, else by zeros. The carry flag is a predicate.
    """

    result: str  # kind of the (first) destination
    operands: tuple[str, ...]  # kinds in which the source operands are read
    function: Function  # of an array for each operand
    reads_carry: bool = False  # the last operand is the carry flag (CC.CF), which the text does not name
    writes_carry: bool = False  # the function returns (d, carry flag), the flag a borrow after a subtraction


Build: TypeAlias = Callable[..., "Operation | None"]
_TABLE: list[tuple[re.Pattern[str], Build]] = []


def computes(*patterns: str) -> Callable[[Build], Build]:
    """Enter the decorated function for opcodes that match a pattern.

    It may still return None, for a combination of words that does not exist.
    """

    def register(build: Build) -> Build:
        _TABLE.extend((re.compile(pattern), build) for pattern in patterns)
        return build

    return register


@functools.cache
def operation(opcode: tuple[str, ...]) -> Operation | None:
    """Return what an opcode, split at its dots, computes, or None."""
    name = ".".join(opcode)
    for pattern, build in _TABLE:
        match = pattern.fullmatch(name)
        if match and (found := build(*match.groups(""))):
            return found
    return None


def words(*words: str) -> str:
    """Return the pattern of any of these words, in any order, as one group: words("ftz", "sat")."""
    return rf"((?:\.(?:{'|'.join(words)}))*)"


def bits(kind: str) -> int:
    """Return the bits of a kind."""
    return 8 * SIZES[kind]


def resized(kind: str, size: int) -> str:
    """Return the kind of the same letter with that many bits: resized("s16", 32) is "s32"."""
    return f"{kind[0]}{size}"


def uniform(kind: str, count: int, function: Function) -> Operation:
    """Return an operation whose result and `count` operands are all of one kind."""
    return Operation(kind, (kind,) * count, function)


def pack(low: Array, high: Array) -> Array:
    """Return b32 or b64 made of halves of 16 or 32 bits each: `mov.b64 x, {low, high}`."""
    half = 8 * low.dtype.itemsize
    narrow, wide = DTYPES[f"b{half}"], DTYPES[f"b{2 * half}"]
    return low.view(narrow).astype(wide) | (high.view(narrow).astype(wide) << wide.type(half))
