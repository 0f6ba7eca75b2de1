"""Functions of a PTX module as text, and declarations of variables and parameters."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .dtypes import SIZES
from .fault import EmulatorError


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
