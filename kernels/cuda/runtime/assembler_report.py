"""The assembler's report on a kernel: registers, spills, stack, shared memory; known without a GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """The resources that a kernel needs on one architecture."""

    architecture: str
    registers: int  # per thread
    spill_stores: int  # bytes per thread that did not fit registers and are stored to local memory
    spill_loads: int  # bytes per thread that are loaded back
    stack: int  # bytes per thread: local arrays that did not become registers
    shared: int  # bytes per block that the source declares; dynamic shared memory comes on top
    warnings: tuple[str, ...] = ()  # of the assembler
    entry: str = ""  # the kernel's name in the machine code


def parse(log: str, architecture: str) -> Report:
    """Return the report from the log of the assembler's `-v`; raise ValueError if the log has no kernel."""

    def number(pattern: str) -> int:
        match = re.search(pattern, log)
        if not match:
            raise ValueError(f"the assembler's log has no {pattern!r}: {log!r}")
        return int(match[1])

    # Not from the machine code's section: from 9.0 on that includes the system's 1024 bytes.
    shared = re.search(r"(\d+) bytes smem", log)
    entry = re.search(r"Compiling entry function '([^']+)'", log)
    return Report(
        architecture=architecture,
        registers=number(r"Used (\d+) registers"),
        spill_stores=number(r"(\d+) bytes spill stores"),
        spill_loads=number(r"(\d+) bytes spill loads"),
        stack=number(r"(\d+) bytes stack frame"),
        shared=int(shared[1]) if shared else 0,
        warnings=tuple(re.findall(r"^.*\bwarning\s*:\s*(.+?)\s*$", log, re.MULTILINE | re.IGNORECASE)),
        entry=entry[1] if entry else "",
    )
