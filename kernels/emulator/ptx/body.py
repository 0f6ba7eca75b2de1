"""Read the body of a kernel, statement by statement, and of the device functions that it calls.

A called function is inlined: its registers and labels are new in each copy, its parameters and results are
the caller's variables, and its `ret` is a jump behind the call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .dtypes import SIZES
from .fault import EmulatorError
from .operands import Address, Immediate, Label, Operand, Pair, Register, Special, Symbol, Vector
from .program import Location, Program, PtxInstruction

LIBRARY = re.compile(r"[\\/]numba_cuda[\\/]|[\\/]site-packages[\\/]numba[\\/]")
CALL_DEPTH = 32  # device functions inside one another; deeper is taken for recursion


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
    """Return (kind, name, bytes) of `.param .align 8 .b8 name[16]` and its like."""
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
    """Return the alignment that a declaration asks for, in bytes."""
    match = re.search(r"\.align\s+(\d+)", declaration)
    return int(match[1]) if match else 1


class BodyReader:
    """Reads the bodies of functions into a program, one after another where they call each other."""

    def __init__(self, program: Program, functions: dict[str, DeviceFunction], files: dict[int, str]) -> None:
        self.program = program
        self.functions = functions
        self.files = files
        self.copies = 0  # of functions; each has registers and labels of its own

    def read(self, function: DeviceFunction, returns_to: str, location: Location | None, depth: int) -> None:
        """Append the body; its `ret` goes to the label `returns_to`, where that is not empty."""
        if depth > CALL_DEPTH:
            raise EmulatorError(
                f"{function.name} calls itself: the emulator inlines calls, so it runs no recursion"
            )
        self.copies += 1
        scopes: list[dict[str, Operand]] = [{}]
        prefix = f"{self.copies}:"
        label_scopes = [prefix]
        for statement in _statements(function.body):
            if statement == "{":
                self.copies += 1
                scopes.append({})
                label_scopes.append(f"{self.copies}:")
            elif statement == "}":
                scopes.pop()
                label_scopes.pop()
            elif statement.endswith(":"):
                self.program.labels[label_scopes[-1] + statement[:-1]] = len(self.program.instructions)
            elif statement.startswith(".loc "):
                location = self._location(statement) or location
            elif statement.startswith(".reg"):
                self._registers(statement, scopes[-1])
            elif statement.startswith((".local", ".param", ".shared")):
                self._variable(statement, scopes[-1])
            elif not statement.startswith("."):
                self._instruction(statement, scopes, label_scopes, returns_to, location, depth)

    def _location(self, statement: str) -> Location | None:
        """The place that `.loc file line column` names; of code from Numba itself, where it was called."""
        words = statement.replace(",", " ").split()
        places = [words[1:3]]
        if "inlined_at" in words:
            places.append(words[words.index("inlined_at") + 1 :][:2])
        found = [Location(self.files.get(int(file), "?"), int(line)) for file, line in places if int(line)]
        users = [place for place in found if not LIBRARY.search(place.file)]
        return next(iter(users or found), None)

    def _registers(self, statement: str, scope: dict[str, Operand]) -> None:
        kind, declared = re.match(r"\.reg\s+\.(\w+)\s+(.*)", statement, re.S).groups()  # type: ignore[union-attr]
        file = (
            "pred"
            if kind == "pred"
            else "b" + re.sub(r"\D", "", kind.replace("f16x2", "32").replace("bf16x2", "32"))
        )
        if file == "b8":
            file = "b16"
        for name in declared.split(","):
            name, _, count = name.strip().partition("<")
            for one in [f"{name}{i}" for i in range(int(count[:-1]))] if count else [name]:
                row = self.program.registers.get(file, 0)
                self.program.registers[file] = row + 1
                scope[one] = Register(file, row, one)

    def _variable(self, statement: str, scope: dict[str, Operand]) -> None:
        _, name, size = declaration(statement)
        if statement.startswith(".shared"):
            alignment = alignment_of(statement)
            self.program.shared = -(-self.program.shared // alignment) * alignment
            scope[name] = Symbol(name, "shared", self.program.shared)
            self.program.shared += size
            return
        self.program.local = -(-self.program.local // 16) * 16
        scope[name] = Symbol(name, "local", self.program.local)
        self.program.local += size

    def _instruction(
        self,
        statement: str,
        scopes: list[dict[str, Operand]],
        label_scopes: list[str],
        returns_to: str,
        location: Location | None,
        depth: int,
    ) -> None:
        text, guard, negated = statement, None, False
        if statement[0] == "@":
            word, statement = statement.split(None, 1)
            negated = word[1] == "!"
            found = self._operand(word[2 if negated else 1 :], scopes, label_scopes)
            if not isinstance(found, Register):
                raise EmulatorError(f"not a predicate: {text}")
            guard = found
        match = re.match(r"[\w.:]+", statement)
        if match is None:
            raise EmulatorError(f"not an instruction that the emulator reads: {text}")
        opcode = tuple(match[0].split("."))
        rest = statement[match.end() :].strip()
        if opcode[0] == "call":
            self._call(rest, guard, scopes, label_scopes, location, depth, text)
            return
        if opcode[0] in ("ret", "exit") and returns_to:
            operands: tuple[Operand, ...] = (Label(returns_to),)
            opcode = ("bra",)
        else:
            operands = tuple(self._operand(part, scopes, label_scopes) for part in _split(rest))
        self.program.instructions.append(PtxInstruction(opcode, operands, guard, negated, location, text))

    def _call(
        self,
        rest: str,
        guard: Register | None,
        scopes: list[dict[str, Operand]],
        label_scopes: list[str],
        location: Location | None,
        depth: int,
        text: str,
    ) -> None:
        parts = _split(rest)
        returned = _split(parts.pop(0)[1:-1]) if parts[0].startswith("(") else []
        name = parts.pop(0)
        passed = _split(parts[0][1:-1]) if parts else []
        variables = [self._operand(part, scopes, label_scopes) for part in (*returned, *passed)]
        function = self.functions.get(name)
        if function is None:
            self.program.instructions.append(
                PtxInstruction(("call", name), tuple(variables), guard, False, location, text)
            )
            return
        if guard is not None:
            raise EmulatorError(f"a call under a predicate is not one that the emulator reads: {text}")
        formal = [declaration(part)[1] for part in (*function.returns, *function.parameters)]
        after = f"return {self.copies + 1}"
        inner: dict[str, Operand] = dict(zip(formal, variables, strict=True))
        self._inline(function, inner, after, location, depth)
        self.program.labels[after] = len(self.program.instructions)

    def _inline(
        self,
        function: DeviceFunction,
        inner: dict[str, Operand],
        after: str,
        location: Location | None,
        depth: int,
    ) -> None:
        reader = _Inlined(self.program, self.functions, self.files, inner)
        reader.copies = self.copies
        reader.read(function, after, location, depth + 1)
        self.copies = reader.copies

    def _operand(self, text: str, scopes: list[dict[str, Operand]], label_scopes: list[str]) -> Operand:
        text = text.strip()

        def again(part: str) -> Operand:
            return self._operand(part, scopes, label_scopes)

        if text[0] == "{":
            return Vector(tuple(again(part) for part in _split(text[1:-1])))
        if text[0] == "[":
            return self._address(text[1:-1], again)
        if "|" in text:
            first, second = text.split("|")
            return Pair(again(first), again(second))
        if text[0] == "!":
            inner = again(text[1:])
            if isinstance(inner, Register):
                return Register(inner.file, inner.row, inner.name, negated=True)
        for scope in reversed(scopes):
            if text in scope:
                return scope[text]
        return self._outer(text, label_scopes)

    def _address(self, text: str, again: Callable[[str], Operand]) -> Address:
        parts = _split(text)
        match = re.match(r"(.+?)\s*\+\s*(-?\w+)$", parts[0])
        base = again(match[1] if match else parts[0])
        more = tuple(again(part) for part in parts[1:])
        return Address(base, int(match[2], 0) if match else 0, more)

    def _outer(self, text: str, label_scopes: list[str]) -> Operand:
        """What is no register and no variable of the function's own."""
        if text == "_":
            return Special("_")
        if text in self.program.variables:
            variable = self.program.variables[text]
            return Symbol(text, variable.space, variable.offset)
        if text in self.program.parameters:
            return Symbol(text, "param", 0)
        if text.startswith("%") or text in ("WARP_SZ",):
            return Special(text)
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text) or re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
            return Immediate(int(text[2:], 16), "f32" if text[1] in "fF" else "f64")
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
            return Immediate(int(text.rstrip("U"), 0), "")
        if re.fullmatch(r"-?\d+\.\d*(e[+-]?\d+)?", text):
            raise EmulatorError(f"decimal floating-point constants are not read: {text}")
        if text.startswith("generic("):
            return self._outer(text[8:-1], label_scopes)
        return Label(text, tuple(label_scopes))


class _Inlined(BodyReader):
    """Reads a called function, whose parameters and results are variables of the caller."""

    def __init__(
        self,
        program: Program,
        functions: dict[str, DeviceFunction],
        files: dict[int, str],
        inner: dict[str, Operand],
    ) -> None:
        super().__init__(program, functions, files)
        self.inner = inner

    def _outer(self, text: str, label_scopes: list[str]) -> Operand:
        return self.inner[text] if text in self.inner else super()._outer(text, label_scopes)


def _statements(body: str) -> Iterator[str]:
    """Yield statements, labels (with their colon) and the braces of scopes, in order."""
    for piece in body.split(";"):
        piece = piece.strip()
        while piece:
            if piece[0] in "{}":
                yield piece[0]
                piece = piece[1:].lstrip()
            elif label := re.match(r"([\w$]+)\s*:(?!:)", piece):
                yield label[1] + ":"
                piece = piece[label.end() :].lstrip()
            else:
                yield " ".join(piece.split())
                break


def _split(text: str) -> list[str]:
    """Split at the commas that stand in no bracket."""
    parts, depth, start = [], 0, 0
    for match in re.finditer(r"[\[\](){},]", text):
        if match[0] in "[({":
            depth += 1
        elif match[0] in "])}":
            depth -= 1
        elif depth == 0:
            parts.append(text[start : match.start()].strip())
            start = match.end()
    last = text[start:].strip()
    return [*parts, last] if last else parts
