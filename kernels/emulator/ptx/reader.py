"""Read PTX, the text that NVVM emits for a kernel, into a program.

PTX is NVIDIA's assembly language for a virtual GPU (PTX ISA manual, "Syntax" and "State Spaces, Types, and
Variables"). Each instruction keeps its file and line (from `.loc`), since faults name them. Calls of device
functions are inlined, so that a program is one list of instructions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from .body import BodyReader
from .dtypes import SIZES
from .fault import EmulatorError
from .program import DeviceFunction, Program, Variable, alignment_of, declaration
from .static_analysis import analyse


def parse(text: str) -> Program:
    """Return the program of the only kernel (`.entry`) in `text`; EmulatorError if it can't be read."""
    files = {int(number): name for number, name in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.M)}
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"^\s*\.file\b[^\n]*$", "", text, flags=re.M)
    text = re.sub(r"^\s*\.section\b[^{]*\{.*?^\s*\}", "", text, flags=re.M | re.S)
    text = re.sub(r"^(\s*\.loc\b[^\n]*)$", r"\1;", text, flags=re.M)
    functions = {function.name: function for function in _functions(text)}
    entries = [function for function in functions.values() if function.entry]
    if len(entries) != 1:
        raise EmulatorError(f"the PTX holds {len(entries)} kernels: pass the PTX of one kernel")
    entry = entries[0]
    program = Program(entry.name, directives=entry.directives)
    _module_variables(text, program)
    for parameter in entry.parameters:
        kind, name, size = declaration(parameter)
        program.parameters[name] = (kind, size)
    BodyReader(program, functions, files).read(entry)
    program.flow = analyse(program)
    return program


def _functions(text: str) -> Iterator[DeviceFunction]:
    for match in re.finditer(
        r"\.(entry|func)\b\s*(?:\(([^()]*)\))?\s*([\w$]+)\s*(?:\(([^()]*)\))?([^{;]*)([{;])", text
    ):
        kind, returns, name, parameters, directives, opening = match.groups()
        if opening == ";":
            continue  # a declaration
        limits = {
            word: tuple(int(number) for number in re.findall(r"\d+", numbers))
            for word, numbers in re.findall(
                r"\.(maxntid|reqntid|minnctapersm|maxnreg)\s+([\d,\s]+)", directives
            )
        }
        yield DeviceFunction(
            name,
            kind == "entry",
            [part for part in (returns or "").split(",") if part.strip()],
            [part for part in (parameters or "").split(",") if part.strip()],
            _braced(text, match.end() - 1),
            limits,
        )


def _braced(text: str, opening: int) -> str:
    """Return the text between the brace at `opening` and its partner."""
    depth = 0
    for match in re.compile(r"[{}]").finditer(text, opening):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return text[opening + 1 : match.start()]
    raise EmulatorError("the PTX ends within a function")


def _module_variables(text: str, program: Program) -> None:
    outside = re.sub(r"\.(?:entry|func)\b[^{;]*\{", "\0", text)
    pieces, depth = [], 0
    for part in re.split(r"([\0{}])", outside):
        if part in ("\0", "{"):
            depth += 1 if part == "\0" or depth else 0
            pieces.append("{" if part == "{" and not depth else "")
        elif part == "}" and depth:
            depth -= 1
        elif not depth:
            pieces.append(part)
    for statement in "".join(pieces).split(";"):
        match = re.search(r"\.(shared|global|const)\b(.*)", statement, re.S)
        if match is None:
            continue
        space, rest = match.groups()
        left, _, initial = rest.partition("=")
        kind, name, size = declaration(left)
        alignment = alignment_of(rest)
        contents = b"".join(
            (int(number, 0) % 256 ** SIZES[kind]).to_bytes(SIZES[kind], "little")
            for number in re.findall(r"-?(?:0x[0-9a-fA-F]+|\d+)", initial)
        )
        variable = Variable(space, size, contents=contents.ljust(size, b"\0"))
        if space == "shared" and size:
            program.shared = -(-program.shared // alignment) * alignment
            variable.offset = program.shared
            program.shared += size
        program.variables[name] = variable
    # Dynamic shared memory begins where the static ends: each `extern` array starts there, aligned.
    for name, variable in program.variables.items():
        if variable.space == "shared" and not variable.size:
            match = re.search(rf"\.align\s+\d+\s+\.\w+\s+{re.escape(name)}\b", text)
            alignment = max(16, alignment_of(match[0] if match else ""))
            variable.offset = -(-program.shared // alignment) * alignment
