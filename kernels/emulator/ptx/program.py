"""A kernel as the emulator runs it: instructions, the labels among them, variables and registers."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .operands import Operand, Register

if TYPE_CHECKING:
    from .static_analysis import Flow

# Bytes of an item of each kind of PTX.
SIZES = {"pred": 1, "f16": 2, "bf16": 2, "f16x2": 4, "f32": 4, "f64": 8, "b128": 16}
SIZES |= {f"{letter}{bits}": bits // 8 for letter in "bus" for bits in (8, 16, 32, 64)}

VECTORS = {"v2": 2, "v4": 4, "v8": 8}


@dataclass(frozen=True, slots=True)
class Location:
    """A place in the source of the kernel."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True, eq=False)
class PtxInstruction:
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
    instructions: list[PtxInstruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    registers: dict[str, int] = field(default_factory=dict)  # registers of each width: {"b32": 56, ...}
    shared: int = 0  # bytes of static shared memory; dynamic shared memory follows
    local: int = 0  # bytes of local memory of each thread
    target: str = ""
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)  # {"maxntid": (256,), ...}

    @functools.cached_property
    def flow(self) -> Flow:
        """What can be seen in the instructions before they run."""
        from .static_analysis import Flow

        return Flow(self)

    @functools.cached_property
    def numbers(self) -> dict[int, int]:
        """The number of each instruction, from 1, by its id."""
        return {id(one): 1 + i for i, one in enumerate(self.instructions)}

    @functools.cached_property
    def granule(self) -> int:
        """The smallest access to shared memory, in bytes: what is watched as one."""
        return min((_width(one) for one in self.instructions if _may_be_shared(one)), default=16)

    @functools.cached_property
    def asynchronous(self) -> bool:
        """Whether some instructions go on by themselves: copies, and matrix instructions of a warp group."""
        return any(one.opcode[0] in ("cp", "wgmma") for one in self.instructions)


def _may_be_shared(instruction: PtxInstruction) -> bool:
    if instruction.opcode[0] == "cp":  # cp.async.ca.shared.global: to shared memory from global
        return True
    spaces = {"global", "param", "local", "const"} & {*instruction.opcode}
    return instruction.opcode[0] in ("ld", "st", "atom", "red") and not spaces


def _width(instruction: PtxInstruction) -> int:
    """Bytes that a thread accesses at once; 16 where it is a matter of more than that."""
    opcode = instruction.opcode
    if opcode[0] == "cp":
        return 4 if "ca" in opcode and "bulk" not in opcode else 16
    count = next((VECTORS[word] for word in opcode if word in VECTORS), 1)
    return min(SIZES[opcode[-1]] * count, 16)
