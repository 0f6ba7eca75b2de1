"""The arithmetic of wgmma.mma_async: d (64, n) = a (64, depth) b (depth, n) + d, of many warp groups at once.

A warp group is four warps. b is read from shared memory through a descriptor, a likewise or from registers;
the sums stay in registers (PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions").
Sums are float32, as `matrix_units` has them.
"""

from __future__ import annotations

import numpy as np

from ..arithmetic.fragments import WGMMA_A, wgmma_sums
from ..memory.descriptors import chunk_addresses, decode_descriptors
from ..memory.swizzles import CHUNK
from ..ptx.dtypes import Array
from ..ptx.fault import Fault
from .mma import BITS, decode, encode, values16

ROWS = 64  # of a and d


def operand_addresses(descriptors: Array, mn: int, dtype: str, transposed: bool, size: int) -> Array:
    """Return the addresses of the 16-byte chunks that an operand's descriptors (groups,) uint64 name.

    (groups, lines, chunks) int64, as `descriptors.chunk_addresses` has them. `size` is a block's shared
    memory in bytes. Raises Fault for a descriptor that leaves it, or is of a form that wgmma does not take.
    """
    addresses = chunk_addresses(decode_descriptors(descriptors), mn, BITS[dtype], transposed)
    if int(addresses.max()) + CHUNK > size:
        group = int(np.argmax(addresses.max(axis=(1, 2))))
        raise Fault(
            "out of bounds",
            f"the matrix descriptor {int(descriptors[group]):#018x} reads up to byte "
            f"{int(addresses[group].max()) + CHUNK} of shared memory, and the block has {size}",
        )
    return addresses


def read_operand(shared: Array, blocks: Array, addresses: Array, dtype: str, transposed: bool) -> Array:
    """Return tiles (groups, mn, depth) float32 from shared memory (all blocks, bytes) uint8.

    `blocks` (groups,) says whose memory a group reads, `addresses` are those of `operand_addresses`. A
    block's bytes are a multiple of 16.
    """
    chunks = shared.reshape(-1).view("V16")
    first = blocks * (shared.shape[1] // CHUNK)
    read = chunks[first[:, None, None] + addresses // CHUNK]
    words = read.view(np.uint32 if dtype == "tf32" else np.uint16)
    lines = decode(words, "tf32") if dtype == "tf32" else values16(words, dtype)
    lines = lines.reshape(*addresses.shape[:-1], -1)
    return lines.swapaxes(1, 2) if transposed else lines


def register_operand(registers: Array, dtype: str) -> Array:
    """Return tiles of a, (groups, 64, depth) float32, of registers (4, lanes) uint32."""
    return WGMMA_A[BITS[dtype]].tile(decode(registers, dtype))


def multiply_add(a: Array, b: Array, accumulators: Array | None, sums: str = "f32") -> Array:
    """Return the registers of d = a b + d, of which `accumulators` are the old ones; None starts from 0.

    a is (groups, 64, depth) float32 of any depth, b (groups, n, depth); registers are (n / 2, lanes) float32,
    or for sums "f16" (n / 4, lanes) uint32, two float16 each; a group has 128 lanes.
    """
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):  # answers here, as on a GPU
        products = wgmma_sums(b.shape[1]).spread(np.matmul(a, b.swapaxes(1, 2)))
        if accumulators is not None:
            products += decode(accumulators, sums)
    return encode(products, sums)
