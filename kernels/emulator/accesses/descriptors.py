"""How tiles lie in shared memory: the swizzles of Hopper, and the descriptors by which wgmma finds a tile.

If the rows of a tile are 128 bytes, a column of 16-byte chunks lies in the same four of the 32 banks, and
eight rows of it get one eighth of the bandwidth. The swizzle XORs the chunk's index in its row with the row's
index: bits 4 to 6 of a byte's address with bits 7 to 9 (PTX ISA, "Swizzling Modes"). It depends on the
address alone, so tensor copies and wgmma apply it without knowing where the tile begins. But a tile must
begin where the pattern does, every 8 rows: 1024, 512 or 256 bytes.

A descriptor has 64 bits: the tile's start, two strides, and the swizzle (PTX ISA, "Matrix Descriptor
Format"). A tile is (mn, depth), where mn is the rows of a or the columns of b, and 32 bytes deep. It is
stored in pieces of 8 lines of 16 bytes:

- K-major (not transposed): a line is a row of the tile. Without a swizzle the two pieces of a row lie the
  leading offset apart; with one they are neighbours in a row of `span` bytes. The next 8 rows lie the stride
  offset further.
- MN-major (transposed): a line is one step of the depth, and 16 bytes are 8 rows of
  the tile. Without a swizzle the next 8 rows lie the stride offset further and the next 8 steps the leading
  offset; with one, `span` bytes of rows are neighbours, the next lie the leading offset further, and the next
  8 steps the stride offset.
"""

from __future__ import annotations

import numpy as np

from ..ptx.dtypes import Array
from ..ptx.fault import Fault

CHUNK = 16  # bytes that stay together


def swizzle(addresses: Array, span: Array | int) -> Array:
    """Return `addresses` under the swizzle of `span` bytes (0: none, 32, 64 or 128), its own inverse."""
    return addresses ^ ((addresses >> 3) & (np.maximum(span, CHUNK) - CHUNK))


_SPAN = np.array([0, 128, 64, 32])  # bytes, by bits 62 and 63
_RESERVED = np.uint64(sum(1 << bit for bit in (14, 15, 30, 31, 46, 47, 48, *range(52, 62))))


def chunk_addresses(words: Array, mn: int, transposed: bool) -> Array:
    """Return the addresses of the 16-byte chunks of tiles (mn, 16 elements of 16 bits deep), swizzled.

    words: descriptors (groups,) uint64. The result is (groups, mn, 2) for a K-major tile and
    (groups, 16, mn / 8) for a transposed one. Raises Fault for a descriptor that the hardware does not take.
    """
    if (reserved := words & _RESERVED != 0).any():
        word = int(words[np.argmax(reserved)])
        raise Fault("descriptor", f"{word:#018x} has reserved bits set: a matrix descriptor leaves them 0")

    def field(first: int, size: int) -> Array:
        return words.astype(np.int64)[:, None, None] >> first & (1 << size) - 1

    start, leading, stride = (field(first, 14) << 4 for first in (0, 16, 32))  # in bytes
    span = _SPAN[field(62, 2)]
    _check_start(start, field(49, 3), span, 2 * mn if transposed else 2 * CHUNK)
    row = np.maximum(span, CHUNK)  # of the pattern: without a swizzle, one chunk
    if transposed:
        step, chunk, wide = np.arange(16)[:, None], np.arange(mn // 8), row // CHUNK
        further, deeper = np.where(span, leading, stride), np.where(span, stride, leading)
        offsets = chunk // wide * further + chunk % wide * CHUNK + step // 8 * deeper + step % 8 * row
    else:
        line, chunk = np.arange(mn)[:, None], np.arange(2)
        offsets = line // 8 * stride + line % 8 * row + chunk * np.where(span, CHUNK, leading)
    return swizzle(start + offsets, span)


def _check_start(start: Array, base: Array, span: Array, line: int) -> None:
    """Fault unless a tile begins in the first line of the pattern, which bits of the address define.

    base: the base offset, 0 where the pattern begins at a multiple of its size. line: bytes of the tile.
    """
    pattern, inner = np.where(span, 8 * span, CHUNK), np.minimum(span, line)
    if base.any():
        first = np.argmax(base != 0)
        raise Fault(
            "descriptor",
            f"the base offset is {base.flat[first]}: "
            f"align the tile to {pattern.flat[first]} bytes, and pass 0",
        )
    if (wrong := start % pattern + inner > np.where(span, span, pattern)).any():
        first = np.argmax(wrong)
        raise Fault(
            "descriptor",
            f"{inner.flat[first]} bytes from {start.flat[first]:#x} leave the first line of the "
            f"{span.flat[first]}-byte swizzle's pattern: align the tile to {pattern.flat[first]} bytes, "
            "and step through a line by whole tiles",
        )
