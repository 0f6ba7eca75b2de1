"""What the emulator raises: for what it cannot run, and for what a kernel does wrong."""

from __future__ import annotations


class EmulatorError(RuntimeError):
    """The emulator can't run this: an instruction that it does not know, arguments that don't fit."""


class Fault(EmulatorError):
    """The kernel does what a GPU would not forgive, or would answer with wrong numbers.

    `kind` is the name of the check that found it ("race", "out of bounds", ...), `where` the place in the
    kernel's source ("file:line") where PTX has one, `instruction` the instruction's text.
    """

    def __init__(self, kind: str, message: str, where: str = "", instruction: str = "") -> None:
        self.kind = kind
        self.message = message
        self.where = where
        self.instruction = instruction
        place = f"{where}: " if where else ""
        code = f" [{instruction}]" if instruction else ""
        super().__init__(f"{place}{kind}: {message}{code}")


def of(count: int, what: str) -> str:
    """Return "1 byte", "4 bytes"."""
    return f"{count} {what}{'' if count == 1 else 's'}"
