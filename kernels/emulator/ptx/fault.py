"""The errors that the emulator raises: for what it cannot run, and for what a kernel does wrong."""

from __future__ import annotations


class EmulatorError(RuntimeError):
    """The emulator can't run this: it does not know an instruction, or the arguments don't fit."""


class Fault(EmulatorError):
    """The kernel does something that crashes a GPU or gives wrong numbers there.

    `kind` names the check that found it ("race", "out of bounds", ...), `where` is the line of the kernel's
    source ("file:line", "" if unknown), `instruction` the text of the PTX instruction.
    """

    def __init__(self, kind: str, message: str, where: str = "", instruction: str = "") -> None:
        self.kind = kind
        self.message = message
        self.where = where
        self.instruction = instruction
        line = f"{where}: " if where else ""
        code = f" [{instruction}]" if instruction else ""
        super().__init__(f"{line}{kind}: {message}{code}")


def of(count: int, what: str) -> str:
    """Return "1 byte", "4 bytes"."""
    return f"{count} {what}{'' if count == 1 else 's'}"
