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
- MN-major (transposed; 16-bit elements only): a line is one step of the depth, and 16 bytes are 8 rows of
  the tile. Without a swizzle the next 8 rows lie the stride offset further and the next 8 steps the leading
  offset; with one, `span` bytes of rows are neighbours, the next lie the leading offset further, and the next
  8 steps the stride offset.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..ptx.dtypes import Array
from ..ptx.fault import Fault

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


_SPAN = np.array([0, 128, 64, 32])  # bytes, by bits 62 and 63
_RESERVED = sum(1 << bit for bit in (14, 15, 30, 31, 46, 47, 48, *range(52, 62)))


@dataclass(frozen=True)
class Descriptors:
    """The fields of many descriptors, (groups,) int64 each, in bytes."""

    start: Array  # the address in shared memory
    leading: Array
    stride: Array
    base: Array  # base offset: 0 where the swizzle's pattern begins at a multiple of its size
    span: Array  # of the swizzle: 0, 32, 64 or 128


def decode_descriptors(words: Array) -> Descriptors:
    """Return the fields of descriptors (groups,) uint64. Raises Fault for a reserved bit that is set."""
    if (words & np.uint64(_RESERVED)).any():
        word = int(words[np.flatnonzero(words & np.uint64(_RESERVED))[0]])
        raise Fault("descriptor", f"{word:#018x} has reserved bits set: a matrix descriptor leaves them 0")
    bits = words.astype(np.int64)

    def field(first: int, size: int) -> Array:
        return bits >> first & (1 << size) - 1

    return Descriptors(
        field(0, 14) << 4, field(16, 14) << 4, field(32, 14) << 4, field(49, 3), _SPAN[field(62, 2)]
    )


def chunk_addresses(descriptors: Descriptors, mn: int, bits: int, transposed: bool) -> Array:
    """Return the addresses of the 16-byte chunks of tiles (mn, 32 bytes deep), swizzled.

    `bits` is the size of an element, 16 or 32. The result is (groups, mn, 2) for a K-major tile and
    (groups, depth, mn / 8) for a transposed one. Raises Fault for a form that the hardware does not have.
    """
    if transposed and bits != 16:
        raise Fault(
            "descriptor", f"a tile of {bits}-bit elements is transposed: only f16 and bf16 tiles can be"
        )
    spans = np.unique(descriptors.span)
    if len(spans) == 1:
        return _addresses(descriptors, int(spans[0]), mn, transposed)
    parts = [np.flatnonzero(descriptors.span == span) for span in spans]
    addresses = [
        _addresses(
            Descriptors(*(field[part] for field in vars(descriptors).values())), int(span), mn, transposed
        )
        for span, part in zip(spans, parts, strict=True)
    ]
    return np.concatenate(addresses)[np.argsort(np.concatenate(parts))]


def _addresses(descriptors: Descriptors, span: int, mn: int, transposed: bool) -> Array:
    _check_start(descriptors, span, min(2 * mn, span) if transposed else 2 * CHUNK)
    start, leading, stride = (
        field[:, None, None] for field in (descriptors.start, descriptors.leading, descriptors.stride)
    )
    if transposed:
        step, chunk = np.arange(16)[:, None], np.arange(mn // 8)
        if span:
            wide = span // CHUNK  # chunks in a row of the pattern
            offsets = chunk // wide * leading + chunk % wide * CHUNK + step // 8 * stride + step % 8 * span
        else:
            offsets = chunk * stride + step // 8 * leading + step % 8 * CHUNK
    else:
        row, chunk = np.arange(mn)[:, None], np.arange(2)
        if span:
            offsets = row // 8 * stride + row % 8 * span + chunk * CHUNK
        else:
            offsets = row // 8 * stride + row % 8 * CHUNK + chunk * leading
    return swizzle(start + offsets, span)


def _check_start(descriptors: Descriptors, span: int, inner: int) -> None:
    """Fault unless the tile begins in the first line of the pattern, which bits of the address define."""
    if descriptors.base.any():
        base = int(descriptors.base[np.flatnonzero(descriptors.base)[0]])
        raise Fault(
            "descriptor", f"the base offset is {base}: align the tile to {pattern(span)} bytes, and pass 0"
        )
    wrong = descriptors.start % pattern(span) + inner > span
    if span and wrong.any():
        start = int(descriptors.start[np.flatnonzero(wrong)[0]])
        raise Fault(
            "descriptor",
            f"{inner} bytes from {start:#x} leave the first line of the {span}-byte swizzle's pattern: "
            f"align the tile to {pattern(span)} bytes, and step through a line by whole tiles",
        )
