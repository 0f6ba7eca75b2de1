"""Operands of a PTX instruction: registers, constants, special registers, addresses, vectors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Register:
    """A register: row `row` among the registers of its width."""

    file: str  # "pred", "b16", "b32", "b64", "b128"
    row: int
    name: str
    negated: bool = False  # `!%p1`: reads the opposite


@dataclass(frozen=True, slots=True)
class Immediate:
    """A constant. With a kind, `value` holds the bits of a floating-point number of that kind."""

    value: int
    kind: str  # "", "f32" or "f64"


@dataclass(frozen=True, slots=True)
class Special:
    """A special register such as `%tid.x`. `_` stands for a result that nobody wants."""

    name: str


@dataclass(frozen=True, slots=True)
class Symbol:
    """A variable: its state space and the offset there."""

    name: str
    space: str
    offset: int


@dataclass(frozen=True, slots=True)
class Label:
    """A label in the code, looked up in the innermost of `scopes` that defines it."""

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
    """`[base+offset]`. `more` holds other operands in the brackets: `[%rd1, {%r1, %r2}]` has coordinates."""

    base: Operand
    offset: int
    more: tuple[Operand, ...] = ()


Operand: TypeAlias = Register | Immediate | Special | Symbol | Label | Pair | Vector | Address


def registers_in(operand: Operand) -> Iterator[Register]:
    """Yield the registers in an operand, from left to right."""
    if isinstance(operand, Register):
        yield operand
    elif isinstance(operand, Vector):
        for item in operand.items:
            yield from registers_in(item)
    elif isinstance(operand, Pair):
        yield from registers_in(operand.first)
        yield from registers_in(operand.second)
    elif isinstance(operand, Address):
        yield from registers_in(operand.base)
        for item in operand.more:
            yield from registers_in(item)
