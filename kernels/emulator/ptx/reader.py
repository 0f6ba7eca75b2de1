"""Read PTX, the text that NVVM emits for a kernel, into a program.

PTX is NVIDIA's assembly language for a virtual GPU (PTX ISA manual, "Syntax" and "State Spaces, Types, and
Variables"). Each instruction keeps its file and line (from `.loc`), since faults name them.

Calls of device functions are inlined, so that a program is one list of instructions. Each inlined copy has
its own registers and labels. Its parameters and results are the caller's variables, and its `ret` becomes a
jump to behind the call.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from .dtypes import SIZES
from .fault import EmulatorError
from .program import (
    Address,
    DeviceFunction,
    Immediate,
    Label,
    Location,
    Operand,
    Pair,
    Program,
    PtxInstruction,
    Register,
    Special,
    Symbol,
    Variable,
    Vector,
    alignment_of,
    declaration,
)
from .static_analysis import analyse

VARIABLES = 1 << 33  # the address of the first global or constant variable


@functools.lru_cache(maxsize=128)
def parse(text: str) -> Program:
    """Return the program of the only kernel (`.entry`) in `text`; EmulatorError if it can't be read."""
    files = {int(number): name for number, name in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.M)}
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"^\s*\.file\b[^\n]*$", "", text, flags=re.M)
    text = re.sub(r"^\s*\.section\b[^{]*\{.*?^\s*\}", "", text, flags=re.M | re.S)
    text = re.sub(r"^(\s*\.loc\b[^\n]*)$", r"\1;", text, flags=re.M)
    functions, outside = _functions(text)
    entries = [function for function in functions.values() if function.entry]
    if len(entries) != 1:
        raise EmulatorError(f"the PTX holds {len(entries)} kernels: pass the PTX of one kernel")
    entry = entries[0]
    program = Program(entry.name, directives=entry.directives)
    _module_variables(outside, program)
    for parameter in entry.parameters:
        kind, name, size = declaration(parameter)
        program.parameters[name] = (kind, size)
    BodyReader(program, functions, files).read(entry)
    program.flow = analyse(program)
    return program


def _functions(text: str) -> tuple[dict[str, DeviceFunction], str]:
    """Return the functions of a module by name, and the text outside of them."""
    functions, outside, end = {}, "", 0
    for match in re.finditer(
        r"\.(entry|func)\b\s*(?:\(([^()]*)\))?\s*([\w$]+)\s*(?:\(([^()]*)\))?([^{;]*)([{;])", text
    ):
        kind, returns, name, parameters, directives, opening = match.groups()
        outside += text[end : match.start()] + ";"
        end = match.end()
        if opening == ";":
            continue  # a declaration
        body = _braced(text, match.end() - 1)
        end += len(body) + 1
        limits = {
            word: tuple(int(number) for number in re.findall(r"\d+", numbers))
            for word, numbers in re.findall(
                r"\.(maxntid|reqntid|minnctapersm|maxnreg)\s+([\d,\s]+)", directives
            )
        }
        results, formal = (
            [part for part in (declared or "").split(",") if part.strip()]
            for declared in (returns, parameters)
        )
        functions[name] = DeviceFunction(name, kind == "entry", results, formal, body, limits)
    return functions, outside + text[end:]


def _braced(text: str, opening: int) -> str:
    """Return the text between the brace at `opening` and its partner."""
    depth = 0
    for match in re.compile(r"[{}]").finditer(text, opening):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return text[opening + 1 : match.start()]
    raise EmulatorError("the PTX ends within a function")


def _module_variables(text: str, program: Program) -> None:
    address, dynamic = VARIABLES, []
    for statement in text.split(";"):
        match = re.search(r"\.(shared|global|const)\b(.*)", statement, re.S)
        if match is None:
            continue
        space, rest = match.groups()
        left, _, initial = rest.partition("=")
        kind, name, size = declaration(left)
        contents = b"".join(
            (int(number, 0) % 256 ** SIZES[kind]).to_bytes(SIZES[kind], "little")
            for number in re.findall(r"-?(?:0x[0-9a-fA-F]+|\d+)", initial)
        )
        variable = Variable(space, size, contents=contents.ljust(size, b"\0"))
        if space != "shared":
            variable.offset = address
            address += -(-max(size, 1) // 256) * 256
        elif size:
            variable.offset = _static_shared(program, size, alignment_of(rest))
        else:
            dynamic.append((variable, max(16, alignment_of(rest))))
        program.variables[name] = variable
    # Dynamic shared memory begins where the static ends: each `extern` array starts there, aligned.
    for variable, alignment in dynamic:
        variable.offset = -(-program.shared // alignment) * alignment


def _static_shared(program: Program, size: int, alignment: int) -> int:
    """Return the offset of new static shared memory."""
    start = -(-program.shared // alignment) * alignment
    program.shared = start + size
    return start


LIBRARY = re.compile(r"[\\/]numba_cuda[\\/]|[\\/]site-packages[\\/]numba[\\/]")
CALL_DEPTH = 32  # deeper nesting of device functions is taken for recursion


@dataclass
class _InlinedCall:
    """One inlined copy of a function, while it is read."""

    depth: int  # calls around it
    returns_to: str  # the label that `ret` jumps to; "" in the kernel itself
    location: Location | None
    variables: list[dict[str, Operand]]  # by name, in each open scope; the outermost holds the parameters
    label_scopes: list[str] = field(default_factory=list)


class BodyReader:
    """Appends the bodies of a kernel and of the functions that it calls to a program."""

    def __init__(self, program: Program, functions: dict[str, DeviceFunction], files: dict[int, str]) -> None:
        self.program = program
        self.functions = functions
        self.files = files
        self.scopes = 0  # opened so far; each has its own registers and labels

    def read(self, kernel: DeviceFunction) -> None:
        """Append the body of the kernel."""
        self._read(kernel, _InlinedCall(0, "", None, [{}]))

    def _read(self, function: DeviceFunction, copy: _InlinedCall) -> None:
        if copy.depth > CALL_DEPTH:
            raise EmulatorError(
                f"{function.name} calls itself: the emulator inlines calls, so it runs no recursion"
            )
        self._open(copy)
        for statement in _statements(function.body):
            if statement == "{":
                self._open(copy)
            elif statement == "}":
                copy.variables.pop()
                copy.label_scopes.pop()
            elif statement.endswith(":"):
                self.program.labels[copy.label_scopes[-1] + statement[:-1]] = len(self.program.instructions)
            elif statement.startswith(".loc "):
                copy.location = self._location(statement) or copy.location
            elif statement.startswith(".reg"):
                self._registers(statement, copy.variables[-1])
            elif statement.startswith((".local", ".param", ".shared")):
                self._variable(statement, copy.variables[-1])
            elif not statement.startswith("."):
                self._instruction(statement, copy)

    def _open(self, copy: _InlinedCall) -> None:
        self.scopes += 1
        copy.variables.append({})
        copy.label_scopes.append(f"{self.scopes}:")

    def _location(self, statement: str) -> Location | None:
        """Return the line that `.loc file line column` names; inside Numba's own code, its caller's."""
        words = statement.replace(",", " ").split()
        lines = [words[1:3]]
        if "inlined_at" in words:
            lines.append(words[words.index("inlined_at") + 1 :][:2])
        found = [Location(self.files.get(int(file), "?"), int(line)) for file, line in lines if int(line)]
        users = [one for one in found if not LIBRARY.search(one.file)]
        return next(iter(users or found), None)

    def _registers(self, statement: str, scope: dict[str, Operand]) -> None:
        kind, declared = re.match(r"\.reg\s+\.(\w+)\s+(.*)", statement, re.S).groups()  # type: ignore[union-attr]
        # Registers of 8 bits live among those of 16.
        file = "pred" if kind == "pred" else f"b{max(8 * SIZES[kind], 16)}"
        for name in declared.split(","):
            name, _, count = name.strip().partition("<")
            for one in [f"{name}{i}" for i in range(int(count[:-1]))] if count else [name]:
                row = self.program.registers.get(file, 0)
                self.program.registers[file] = row + 1
                scope[one] = Register(file, row)

    def _variable(self, statement: str, scope: dict[str, Operand]) -> None:
        _, name, size = declaration(statement)
        if statement.startswith(".shared"):
            start = _static_shared(self.program, size, alignment_of(statement))
            scope[name] = Symbol(name, "shared", start)
            return
        self.program.local = -(-self.program.local // 16) * 16
        scope[name] = Symbol(name, "local", self.program.local)
        self.program.local += size

    def _instruction(self, statement: str, copy: _InlinedCall) -> None:
        operands: list[Operand]
        text, guard = statement, None
        if statement[0] == "@":
            word, statement = statement.split(None, 1)
            found = self._operand(word[1:], copy)
            if not isinstance(found, Register):
                raise EmulatorError(f"not a predicate: {text}")
            guard = found
        match = re.match(r"[\w.:]+", statement)
        if match is None:
            raise EmulatorError(f"not an instruction that the emulator reads: {text}")
        opcode = tuple(match[0].split("."))
        rest = statement[match.end() :].strip()
        if opcode[0] == "call":
            called = self._call(rest, guard, copy, text)
            if called is None:
                return
            opcode, operands = called
        elif opcode[0] in ("ret", "exit") and copy.returns_to:
            opcode, operands = ("bra",), [Label(copy.returns_to)]
        else:
            operands = [self._operand(part, copy) for part in _split(rest)]
        number = len(self.program.instructions) + 1
        self.program.instructions.append(
            PtxInstruction(opcode, tuple(operands), guard, copy.location, text, number)
        )

    def _call(
        self, rest: str, guard: Register | None, copy: _InlinedCall, text: str
    ) -> tuple[tuple[str, ...], list[Operand]] | None:
        """Inline a function, or return opcode and operands of its call if the PTX does not define it."""
        parts = _split(rest)
        returned = _split(parts.pop(0)[1:-1]) if parts[0].startswith("(") else []
        name = parts.pop(0)
        passed = _split(parts[0][1:-1]) if parts else []
        variables = [self._operand(part, copy) for part in (*returned, *passed)]
        function = self.functions.get(name)
        if function is None:
            return ("call", name), variables
        if guard is not None:
            raise EmulatorError(f"the emulator reads no call under a predicate: {text}")
        formal = [declaration(part)[1] for part in (*function.returns, *function.parameters)]
        after = f"return {self.scopes + 1}"
        inner: dict[str, Operand] = dict(zip(formal, variables, strict=True))
        self._read(function, _InlinedCall(copy.depth + 1, after, copy.location, [inner]))
        self.program.labels[after] = len(self.program.instructions)
        return None

    def _operand(self, text: str, copy: _InlinedCall) -> Operand:
        text = text.strip()
        if text[0] == "{":
            return Vector(tuple(self._operand(part, copy) for part in _split(text[1:-1])))
        if text[0] == "[":
            return self._address(text[1:-1], copy)
        if "|" in text:
            first, second = text.split("|")
            return Pair(self._operand(first, copy), self._operand(second, copy))
        if text[0] == "!":
            inner = self._operand(text[1:], copy)
            if isinstance(inner, Register):
                return replace(inner, negated=True)
        return self._named(text, copy)

    def _address(self, text: str, copy: _InlinedCall) -> Address:
        parts = _split(text)
        match = re.match(r"(.+?)\s*\+\s*(-?\w+)$", parts[0])
        base = self._operand(match[1] if match else parts[0], copy)
        more = tuple(self._operand(part, copy) for part in parts[1:])
        return Address(base, int(match[2], 0) if match else 0, more)

    def _named(self, text: str, copy: _InlinedCall) -> Operand:
        """Return the variable, constant, special register or label that `text` names."""
        for scope in reversed(copy.variables):
            if text in scope:
                return scope[text]
        if text == "_":
            return Special("_")
        if text in self.program.variables:
            variable = self.program.variables[text]
            return Symbol(text, variable.space, variable.offset)
        if text in self.program.parameters:
            return Symbol(text, "param", 0)
        if text.startswith("%") or text == "WARP_SZ":
            return Special(text)
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text) or re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
            return Immediate(int(text[2:], 16), "f32" if text[1] in "fF" else "f64")
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
            return Immediate(int(text.rstrip("U"), 0), "")
        if re.fullmatch(r"-?\d+\.\d*(e[+-]?\d+)?", text):
            raise EmulatorError(f"the emulator reads no decimal floating-point constants: {text}")
        if text.startswith("generic("):
            return self._named(text[8:-1], copy)
        return Label(text, tuple(copy.label_scopes))


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
    """Split at the commas outside all brackets."""
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
