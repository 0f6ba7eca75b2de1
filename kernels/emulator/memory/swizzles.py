"""The swizzles of Hopper's shared memory: 16-byte chunks of a tile, permuted so that columns miss no bank.

If the rows of a tile are 128 bytes, a column of chunks lies in the same four of the 32 banks, and eight rows
of it get one eighth of the bandwidth. The swizzle XORs the chunk's index in its row with the row's index:
bits 4 to 6 of a byte's address with bits 7 to 9 (PTX ISA, "Swizzling Modes"). It depends on the address
alone, so tensor copies and wgmma apply it without knowing where the tile begins. But a tile must begin where
the pattern does, every 8 rows: 1024, 512 or 256 bytes.
"""

from __future__ import annotations

from ..ptx.dtypes import Array

CHUNK = 16  # bytes that stay together


def swizzle(addresses: Array, span: int) -> Array:
    """Return `addresses` under the swizzle of `span` bytes (0: none, 32, 64 or 128), its own inverse."""
    if span == 0:
        return addresses
    mask = (span - 1) & ~(CHUNK - 1)
    return addresses ^ ((addresses >> 3) & mask)


def pattern(span: int) -> int:
    """Return the bytes after which the swizzle repeats. A tile begins at a multiple of it."""
    return 8 * span if span else CHUNK
