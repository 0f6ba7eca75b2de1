"""What is in a cubin, and what the assembler said of it: a few instructions, told by their bits.

A cubin is an ELF file with a section ".text.<kernel>". From compute capability 7.0 on an instruction is 16
bytes; bits 0 to 8 are its opcode, and bits 73 to 75 the width of an access to memory. The numbers are those
that NVIDIA's disassembler (nvdisasm 13.5) shows beside the names, for sm_80 to sm_100.
"""

import struct
from collections import Counter

import numpy as np
import pytest

from minidist.kernels.attention_rung import AttentionRung
from minidist.kernels.cuda.runtime.kernel import Kernel
from minidist.kernels.measure import attention_reference as attention
from minidist.kernels.measure import product_checks

OPCODES = {
    0x023: "FFMA",  # multiply-add, float32
    0x02B: "DFMA",  # float64
    0x03B: "LDSM",  # ldmatrix
    0x03C: "HMMA",  # mma.sync
    0x044: "STSM",  # stmatrix
    0x11D: "BAR",
    0x147: "BRA",  # a jump
    0x181: "LDG",  # ld.global
    0x184: "LDS",  # ld.shared
    0x186: "STG",
    0x188: "STS",
    0x1A7: "SYNCS",  # mbarrier
    0x1AE: "LDGSTS",  # cp.async
    0x1B4: "UTMALDG",  # cp.async.bulk.tensor, a load
    0x1B5: "UTMASTG",  # and a store
    0x1C8: "USETMAXREG",  # setmaxnreg
    0x1F0: "HGMMA",  # wgmma
}
WIDTHS = {5: ".64", 6: ".128"}
WITH_WIDTH = ("LDG", "LDS", "STG", "STS")
TIGHT = 16  # instructions; a loop that makes operands uniform has 6 to 8, rung 10's loops have 98 or more


def instructions(cubin, entry):
    """Count the instructions of the kernel `entry`, by name: {"LDG.128": 2, "BAR": 2, ...}."""
    code = section(cubin, f".text.{entry}")
    found = Counter()
    for low, high in struct.iter_unpack("<QQ", code):
        name = OPCODES.get(low & 0x1FF, "other")
        found[name + WIDTHS.get(high >> 9 & 7, "") if name in WITH_WIDTH else name] += 1
    return found


def looped_copies(cubin, entry):
    """Count the copy engine's instructions that the assembler has put into a loop of their own, for sm_90a.

    Such an instruction takes one value of each operand for a warp. If the assembler can't tell that the lanes
    agree, it writes a loop over their values. A jump's distance from the next instruction is in units of 4
    bytes, its low 8 bits in bits 16 to 23, the others from bit 34 on.
    """
    code = list(struct.iter_unpack("<QQ", section(cubin, f".text.{entry}")))
    names = [OPCODES.get(low & 0x1FF, "other") for low, _ in code]
    count = 0
    for at, (low, high) in enumerate(code):
        if names[at] == "BRA":
            distance = ((high & 0x3FFFF) << 30 | low >> 34) << 8 | low >> 16 & 0xFF
            start = at + 1 + (distance - (distance >> 55 << 56)) // 4
            if at - TIGHT < start <= at:
                count += sum(name.startswith("UTMA") for name in names[start:at])
    return count


def shortcomings(compiled, registers, wanted):
    """What a kernel lacks, each by name: "registers" beyond so many, "spills", "stack", "warnings", ...

    `wanted` says of which instructions there should be at least so many.
    """
    report = compiled.report
    found = instructions(compiled.cubin, report.entry)
    names = {
        "registers": report.registers > registers,
        "spills": report.spill_stores + report.spill_loads > 0,
        "stack": report.stack > 0,
        "warnings": bool(report.warnings),
        "looped copies": looped_copies(compiled.cubin, report.entry) > 0,
    }
    names |= {f"missing {name}": found[name] < least for name, least in wanted.items()}
    return [name for name, fails in names.items() if fails]


def launched(step, dtype, n):
    """The kernel that a rung launches for n x n x n, its types and dynamic shared memory; nothing runs."""
    (found,) = launches(step, dtype, n)
    return found


def launches(step, dtype, n, width=64):
    """Like `launched`, all kernels of a rung, also of attention with n positions of this width."""
    caught = []

    def launch(self, grid, *args, shared=0, cluster=1, stream=None):
        caught.append((self, self.types(args), shared))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kernel, "launch", launch)
        if isinstance(step, AttentionRung):
            attention.run(step, ((1,), n, n, width), True, dtype)
        else:
            step.matmul(*(np.empty((n, n), product_checks.numpy_dtype(dtype)) for _ in "ab"))
    return caught


def section(elf, name):
    """The bytes of a section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<3H", elf, 0x3A)
    # Of each header: name, type, flags, address, offset, size.
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    strings = headers[names][4]
    for start, _, _, _, offset, length in headers:
        first = strings + start
        if elf[first : elf.index(b"\0", first)].decode() == name:
            return elf[offset : offset + length]
    raise AssertionError(f"the file has no section {name}")
