"""A kernel as the emulator runs it: instructions with their operands, labels, variables, declarations."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from .dtypes import SIZES, VECTORS
from .fault import EmulatorError


@dataclass(frozen=True, slots=True)
class Register:
    """A register: row `row` among the registers of its width."""

    file: str  # "pred", "b16", "b32", "b64", "b128"
    row: int
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
RegisterKey: TypeAlias = tuple[str, int]  # (file, row in the program)


def registers_in(*operands: Operand | None) -> Iterator[RegisterKey]:
    """Yield the registers in these operands, from left to right."""
    for operand in operands:
        if isinstance(operand, Register):
            yield operand.file, operand.row
        elif isinstance(operand, Vector):
            yield from registers_in(*operand.items)
        elif isinstance(operand, Pair):
            yield from registers_in(operand.first, operand.second)
        elif isinstance(operand, Address):
            yield from registers_in(operand.base, *operand.more)


@dataclass
class DeviceFunction:
    """A kernel or a device function, as text."""

    name: str
    entry: bool  # a kernel
    returns: list[str]  # declarations
    parameters: list[str]
    body: str
    directives: dict[str, tuple[int, ...]]


def declaration(text: str) -> tuple[str, str, int]:
    """Return (kind, name, bytes) of a declaration such as `.param .align 8 .b8 name[16]`."""
    match = re.search(
        r"\.([a-z]+\d+)(?:\s+\.ptr(?:\s*\.(?:global|shared|local|const))?(?:\s*\.align\s+\d+)?)?"
        r"\s+([%\w$]+)\s*(?:\[(\d*)\])?",
        text,
    )
    if match is None:
        raise EmulatorError(f"not a declaration that the emulator reads: {text.strip()}")
    kind, name, count = match.groups()
    return kind, name, SIZES[kind] * (int(count or 0) if count is not None else 1)


def alignment_of(declaration: str) -> int:
    """Return the alignment in bytes that a declaration asks for."""
    match = re.search(r"\.align\s+(\d+)", declaration)
    return int(match[1]) if match else 1


@dataclass(frozen=True, slots=True)
class Location:
    """A line of the kernel's source."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True, eq=False)
class PtxInstruction:
    """One instruction: `@!%p1 ld.global.v2.f32 {%f1, %f2}, [%rd1+8];`."""

    opcode: tuple[str, ...]  # ("ld", "global", "v2", "f32")
    operands: tuple[Operand, ...]
    guard: Register | None  # a predicate: only lanes where it holds run the instruction
    location: Location | None
    text: str
    number: int  # in its program, from 1 on

    @property
    def name(self) -> str:
        """The opcode as PTX writes it: "ld.global.v2.f32"."""
        return ".".join(self.opcode)

    @property
    def vector(self) -> int:
        """How many values a load or a store moves: 4 for `ld.global.v4.f32`."""
        return next((VECTORS[word] for word in self.opcode if word in VECTORS), 1)


@dataclass
class Variable:
    """A variable of a state space."""

    space: str  # "shared", "global", "const", "local", "param"
    size: int  # bytes; 0 if the launch decides (dynamic shared memory)
    offset: int = 0  # within the space; the address of a global or constant variable
    contents: bytes = b""  # initial


@dataclass(frozen=True)
class DataFlow:
    """The findings of `static_analysis` about a program. Sets of ints hold numbers of instructions."""

    atomic_results_used: bool = False  # of some atomics: threads learn what others have done
    global_atomic_results_used: bool = False  # the same of atomics that may act on global memory
    stored: frozenset[str] | None = None  # parameters that may be part of a store's address; None: any
    loads_checked_by_cas: frozenset[int] = frozenset()  # later, by a compare-and-swap of the same element
    stores_decided_by_loads: frozenset[int] = frozenset()  # which look at the same element
    releases: frozenset[int] = frozenset()  # stores that may release a lock


CONTROL = ("bra", "ret", "exit", "trap")  # instructions that end a basic block


@dataclass
class Program:
    """A kernel, ready to run."""

    name: str
    parameters: dict[str, tuple[str, int]] = field(default_factory=dict)  # name: (kind, size in bytes)
    instructions: list[PtxInstruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # indices into `instructions`
    variables: dict[str, Variable] = field(default_factory=dict)
    registers: dict[str, int] = field(default_factory=dict)  # registers of each width: {"b32": 56, ...}
    shared: int = 0  # bytes of static shared memory; dynamic shared memory follows
    local: int = 0  # bytes of local memory of each thread
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)  # {"maxntid": (256,), ...}
    flow: DataFlow = DataFlow()

    @functools.cached_property
    def basic_blocks(self) -> list[tuple[int, int]]:
        """The (start, end) of each run of instructions that can only be entered at its start."""
        after = (one.number for one in self.instructions if one.opcode[0] in CONTROL)
        bounds = sorted({0, *self.labels.values(), *after, len(self.instructions)})
        return list(itertools.pairwise(bounds))

    @functools.cached_property
    def granule(self) -> int:
        """The bytes of the smallest access to shared memory: races are tracked in granules of this size."""
        return min((_width(one) for one in self.instructions if _may_be_shared(one)), default=16)

    @functools.cached_property
    def asynchronous(self) -> bool:
        """Whether some instructions run asynchronously: copies, and a warp group's matrix instructions."""
        return any(one.opcode[0] in ("cp", "wgmma") for one in self.instructions)


def _may_be_shared(instruction: PtxInstruction) -> bool:
    if instruction.opcode[0] == "cp":  # cp.async.ca.shared.global: to shared memory from global
        return True
    spaces = {"global", "param", "local", "const"} & {*instruction.opcode}
    return instruction.opcode[0] in ("ld", "st", "atom", "red") and not spaces


def _width(instruction: PtxInstruction) -> int:
    """Return the bytes of one thread's access, at most 16."""
    opcode = instruction.opcode
    if opcode[0] == "cp":
        return 4 if "ca" in opcode and "bulk" not in opcode else 16
    return min(SIZES[opcode[-1]] * instruction.vector, 16)
