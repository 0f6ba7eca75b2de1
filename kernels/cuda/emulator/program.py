"""A kernel as the emulator runs it: instructions, the labels among them, variables and registers."""

from __future__ import annotations

from dataclasses import dataclass, field

from .operands import Operand, Register

# Bytes of an item of each kind of PTX.
SIZES = {"pred": 1, "f16": 2, "bf16": 2, "f16x2": 4, "f32": 4, "f64": 8, "b128": 16}
SIZES |= {f"{letter}{bits}": bits // 8 for letter in "bus" for bits in (8, 16, 32, 64)}


@dataclass(frozen=True, slots=True)
class Location:
    """A place in the source of the kernel."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True, eq=False)
class Instruction:
    """One instruction: `@!%p1 ld.global.v2.f32 {%f1, %f2}, [%rd1+8];`."""

    opcode: tuple[str, ...]  # ("ld", "global", "v2", "f32")
    operands: tuple[Operand, ...]
    guard: Register | None  # the predicate that decides, lane by lane, whether it runs
    negated: bool  # it runs where the guard is false
    location: Location | None
    text: str

    @property
    def name(self) -> str:
        """The opcode as it is written."""
        return ".".join(self.opcode)


@dataclass
class Variable:
    """A variable of a state space: its place there, size, and first contents."""

    space: str  # "shared", "global", "const", "local", "param"
    size: int  # bytes; 0 where the launch decides (dynamic shared memory)
    offset: int = 0  # within the space
    contents: bytes = b""


@dataclass
class Program:
    """A kernel, ready to run: `labels` are indices into `instructions`."""

    name: str
    parameters: dict[str, tuple[str, int]] = field(default_factory=dict)  # name: (kind, size in bytes)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    registers: dict[str, int] = field(default_factory=dict)  # registers of each width: {"b32": 56, ...}
    shared: int = 0  # bytes of static shared memory; dynamic shared memory follows
    local: int = 0  # bytes of local memory of each thread
    target: str = ""
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)  # {"maxntid": (256,), ...}
