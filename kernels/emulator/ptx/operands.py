"""What an instruction of PTX acts on: registers, constants, special registers, addresses, vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Register:
    """A register: row `row` of the file of its width."""

    file: str  # "pred", "b16", "b32", "b64", "b128"
    row: int
    name: str
    negated: bool = False  # `!%p1`, where a predicate is read


@dataclass(frozen=True, slots=True)
class Immediate:
    """A constant. With a kind, `value` holds the bits of a floating-point number of that kind."""

    value: int
    kind: str  # "", "f32" or "f64"


@dataclass(frozen=True, slots=True)
class Special:
    """A special register, as `%tid.x`; `_` is the operand that takes a result nobody wants."""

    name: str


@dataclass(frozen=True, slots=True)
class Symbol:
    """A variable: its state space and the offset there."""

    name: str
    space: str
    offset: int


@dataclass(frozen=True, slots=True)
class Label:
    """A place in the code, looked up in the innermost of `scopes` that has it."""

    name: str
    scopes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pair:
    """`%p1|%p2`: two results."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Vector:
    """`{%f1, %f2}`."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Address:
    """`[base+offset]`, and what else stands in the brackets: `[%rd1, {%r1, %r2}]` has coordinates."""

    base: Operand
    offset: int
    more: tuple[Operand, ...] = ()


Operand: TypeAlias = Register | Immediate | Special | Symbol | Label | Pair | Vector | Address
