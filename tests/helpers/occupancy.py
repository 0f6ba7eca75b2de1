"""How many blocks of a kernel a multiprocessor holds, from the assembler's report.

A multiprocessor hides the latency of one warp behind the work of others, as many as its registers and shared
memory have room for: the occupancy.

Source: NVIDIA, CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability", and the
rules of allocation in the CUDA Occupancy Calculator (Nsight Compute).
"""

from dataclasses import dataclass

from minidist.kernels.cuda.runtime.compiler import Report
from minidist.kernels.cuda.runtime.device import capability

WARP = 32
REGISTERS = 65536  # of 4 bytes, in a multiprocessor of any architecture from 7.5 to 12.1
REGISTER_UNIT = 256  # a warp gets whole units; the register file has four parts, and a warp lies in one
SHARED_UNIT = {7: 256}  # bytes that are allocated at once, by major version; 128 from 8.0 on
RESERVED_SHARED = 1024  # bytes of a block's shared memory that the system keeps, from 8.0 on


@dataclass(frozen=True)
class Limits:
    """What a multiprocessor has room for."""

    warps: int
    blocks: int
    shared: int  # bytes, in a multiprocessor
    shared_per_block: int  # bytes, with the opt-in above 48 KB


LIMITS = {
    (7, 5): Limits(32, 16, 64 * 1024, 64 * 1024),
    (8, 0): Limits(64, 32, 164 * 1024, 163 * 1024),
    (8, 6): Limits(48, 16, 100 * 1024, 99 * 1024),
    (8, 7): Limits(48, 16, 164 * 1024, 163 * 1024),
    (8, 9): Limits(48, 24, 100 * 1024, 99 * 1024),
    (9, 0): Limits(64, 32, 228 * 1024, 227 * 1024),
    (10, 0): Limits(64, 32, 228 * 1024, 227 * 1024),
    (10, 3): Limits(64, 32, 228 * 1024, 227 * 1024),
    (11, 0): Limits(48, 24, 228 * 1024, 227 * 1024),
    (12, 0): Limits(48, 24, 100 * 1024, 99 * 1024),
    (12, 1): Limits(48, 24, 100 * 1024, 99 * 1024),
}


@dataclass(frozen=True)
class Occupancy:
    """How many blocks of a kernel one multiprocessor holds at a time."""

    blocks: int
    warps: int
    limit: str  # the scarcest resource: "registers", "shared memory", "warps" or "blocks"
    share: float  # warps over the most that a multiprocessor holds


def occupancy(report: Report, threads: int, dynamic_shared: int = 0, architecture: str = "") -> Occupancy:
    """Return the occupancy of a kernel in blocks of `threads`, with `dynamic_shared` bytes beyond its own.

    `architecture` is the report's own unless given. Raises ValueError for an architecture whose limits are
    not known, and for a block that no multiprocessor can hold.
    """
    major, minor, _ = capability(architecture or report.architecture)
    limits = LIMITS.get((major, minor))
    if limits is None:
        known = ", ".join(f"sm_{a}{b}" for a, b in LIMITS)
        raise ValueError(f"architecture is sm_{major}{minor}, whose limits are not known: pass {known}")
    if not 1 <= threads <= 1024:
        raise ValueError(f"threads is {threads}: a block has 1 to 1024")
    shared = report.shared + dynamic_shared
    if shared > limits.shared_per_block:
        raise ValueError(
            f"a block takes {shared} bytes of shared memory, and sm_{major}{minor} gives it "
            f"{limits.shared_per_block}: take smaller tiles or fewer stages"
        )
    warps = -(-threads // WARP)
    per_warp = -(-report.registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
    # Each quarter of the register file serves a quarter of the warps.
    warps_by_registers = REGISTERS // 4 // per_warp * 4 if per_warp else limits.warps
    taken = shared + (RESERVED_SHARED if (major, minor) >= (8, 0) else 0)
    unit = SHARED_UNIT.get(major, 128)
    taken = -(-taken // unit) * unit
    fits = {
        "warps": limits.warps // warps,
        "blocks": limits.blocks,
        "registers": warps_by_registers // warps,
        "shared memory": limits.shared // taken if taken else limits.blocks,
    }
    limit = min(fits, key=lambda name: fits[name])
    blocks = fits[limit]
    if blocks < 1:
        raise ValueError(
            f"a block of {threads} threads with {report.registers} registers each does not fit "
            f"sm_{major}{minor}: launch fewer threads, or bound the kernel's registers"
        )
    return Occupancy(blocks, blocks * warps, limit, blocks * warps / limits.warps)
