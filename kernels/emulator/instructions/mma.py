"""mma.sync, and ldmatrix and stmatrix, which move its tiles between shared memory and a warp's registers.

Many warps run at once: decode registers, one batched product, add c. Products of two float16, bfloat16 or
TF32 numbers are exact in float32. Sums here are float32, in the order of NumPy's product, each rounded to
nearest. A real tensor core adds blocks of products at once and cuts off low bits (kernels/tpu/tensor_core.py
models that to the last bit). Both stay within twice the error bound of a float32 sum in any order, and no
kernel may rely on more.

For ldmatrix and stmatrix, lanes 8 i to 8 i + 7 pass the addresses of the rows of matrix i, 16 bytes each,
which may lie anywhere. `fragments` has the register layouts (PTX ISA, "Warp-level matrix instructions").
"""

from __future__ import annotations

import functools
from typing import TypeAlias

import numpy as np

from ..accesses.access import Access
from ..accesses.loads_and_stores import fetch, put
from ..arithmetic.fragments import MMA, load_matrices, store_matrices
from ..base.addresses import of_all_lanes, whole_warps
from ..base.instruction_batch import Batch, Source
from ..base.instruction_registry import Run, unit
from ..machine.machine_state import Machine
from ..ptx.dtypes import Array, Mask
from ..ptx.fault import EmulatorError
from ..ptx.program import Operand

Pairs: TypeAlias = tuple[Array, Array]

BITS = {"f16": 16, "bf16": 16, "tf32": 32}  # of an element in a register


def multiply_add(shape: str, dtype: str, a: Array, b: Array, c: Array, pairs: Pairs | None = None) -> Array:
    """Return d = a b + c of mma.sync.aligned.{shape}.row.col.f32.{dtype}.{dtype}.f32.

    a and b (registers, ..., lanes) are 32-bit words, c and d float32. Lanes are those of any number of warps,
    and leading dimensions are independent instructions. With `pairs` = (indices into a, into b), a and b hold
    each tile once, and each instruction names its two tiles. Raises EmulatorError for an unknown shape or
    dtype.
    """
    layout = MMA.get((shape, BITS.get(dtype, 0)))
    if layout is None:
        raise EmulatorError(f"mma.sync {shape} of {dtype} is not emulated: use one of {list(MMA)}")
    left, right = layout.a.tile(decode(a, dtype)), layout.b.tile(decode(b, dtype))
    if pairs is not None:
        left, right = left[pairs[0]], right[pairs[1]]
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):  # answers here, as on a GPU
        d = layout.c.spread(np.matmul(left, right))
        d += c
    return d


def decode(registers: Array, dtype: str) -> Array:
    """Return the elements (n, ...) as float32 of registers (n, ...), or (n / 2, ...) for 16-bit dtypes.

    "tf32" uses the upper 19 bits of a float32 word, as the hardware does with operands that were not rounded.
    """
    words = registers if registers.dtype == np.uint32 else registers.view(np.uint32)
    if dtype == "tf32":
        return (words & np.uint32(0xFFFFE000)).view(np.float32)
    count, *rest = words.shape
    if dtype == "bf16":
        bits = np.empty((count, 2, *rest), np.uint32)
        np.left_shift(words, np.uint32(16), out=bits[:, 0])
        np.bitwise_and(words, np.uint32(0xFFFF0000), out=bits[:, 1])
        halves = bits.view(np.float32)
    else:
        halves = half_values(np.stack([words & np.uint32(0xFFFF), words >> np.uint32(16)], axis=1))
    return halves.reshape(2 * count, *rest)


def half_values(bits: Array) -> Array:
    """Return the float32 values of float16 bits, from a table: half the time of NumPy's conversion."""
    return _half_table().take(bits)


@functools.cache
def _half_table() -> Array:
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


@unit("mma.sync", order="pure", counted="matrix", uses=True)
def mma(batch: Batch) -> Run:
    """mma.sync.aligned.shape.row.col.d.a.b.c d, a, b, c: each warp's product of small matrices."""
    opcode = batch.first.opcode
    shape, kind = opcode[3], opcode[-2]
    if opcode[4:] != ("row", "col", "f32", kind, kind, "f32"):
        raise EmulatorError(f"this form of mma.sync is not emulated: {batch.first.text}")
    depth = int(shape.rpartition("k")[2])
    a, of_a = _each_once(batch, 1)
    b, of_b = _each_once(batch, 2)
    c, write = batch.sources(3, "f32"), batch.targets(0, "f32")

    def run(machine: Machine, mask: Mask) -> None:
        lanes = whole_warps(machine, mask)
        left, right, added = (of_lanes_that_run(read(machine), machine, lanes) for read in (a, b, c))
        d = multiply_add(shape, kind, left, right, added, (of_a, of_b))
        if machine.counts is not None:
            for instruction in batch.instructions:
                machine.counts.matrix(instruction, lanes.size // 32, 2 * 16 * 8 * depth)
        write(machine, of_all_lanes(d, machine, lanes), mask)

    return run


def _each_once(batch: Batch, index: int) -> tuple[Source, Array]:
    """Return a function that reads each distinct operand `index` once, and which one each instruction uses.

    Several instructions multiply the same tile of a: decoding it once saves most of the work.
    """
    numbers: dict[Operand, int] = {}
    which = [numbers.setdefault(operand, len(numbers)) for operand in batch.operands(index)]
    firsts = [batch.instructions[which.index(number)] for number in range(len(numbers))]
    return Batch(firsts, batch.program, batch.layout).sources(index, "b32"), np.array(which)


def of_lanes_that_run(values: Array, machine: Machine, lanes: Array) -> Array:
    """Return the registers (items, instructions, lanes) of some lanes."""
    every = np.broadcast_to(values, (*values.shape[:-1], machine.lanes))
    return every if lanes.size == machine.lanes else np.ascontiguousarray(every[..., lanes])


_COUNTS = {"x1": 1, "x2": 2, "x4": 4}


@unit("ldmatrix", order="load", counted="ldmatrix")
def ldmatrix(batch: Batch) -> Run:
    """ldmatrix.sync.aligned.m8n8.num{.trans}{.shared}.b16 r, [p]."""
    count, transposed, space = _form(batch)
    address, write = batch.address(1), batch.targets(0, "b32")

    def run(machine: Machine, mask: Mask) -> None:
        lanes = whole_warps(machine, mask)
        addresses, givers = _rows(address(machine), machine, len(batch), lanes, count)
        data = fetch(Access(machine, batch, addresses, 16, givers, "reads"), space)  # (n, rows, 16) uint8
        rows = data.view(np.uint16).reshape(len(batch), -1, count, 8, 8)
        write(machine, of_all_lanes(load_matrices(rows, transposed), machine, lanes), mask)

    return run


@unit("stmatrix", order="store", results=0, counted="stmatrix")
def stmatrix(batch: Batch) -> Run:
    """stmatrix.sync.aligned.m8n8.num{.trans}{.shared}.b16 [p], r."""
    count, transposed, space = _form(batch)
    address, read = batch.address(0), batch.sources(1, "b32")

    def run(machine: Machine, mask: Mask) -> None:
        lanes = whole_warps(machine, mask)
        addresses, givers = _rows(address(machine), machine, len(batch), lanes, count)
        rows = store_matrices(of_lanes_that_run(read(machine), machine, lanes), transposed)
        data = np.ascontiguousarray(rows).view(np.uint8).reshape(len(batch), -1, 16)
        put(Access(machine, batch, addresses, 16, givers, "writes"), space, data)

    return run


def _form(batch: Batch) -> tuple[int, bool, str]:
    """Return the number of matrices, whether they are transposed, and the state space."""
    opcode = batch.first.opcode
    if opcode[3] != "m8n8" or opcode[4] not in _COUNTS or opcode[-1] != "b16":
        raise EmulatorError(f"this form of {opcode[0]} is not emulated: {batch.first.text}")
    space = "shared" if any(word.startswith("shared") for word in opcode) else "generic"
    return _COUNTS[opcode[4]], "trans" in opcode, space


def _rows(
    address: Array, machine: Machine, instructions: int, lanes: Array, count: int
) -> tuple[Array, Array]:
    """Return the rows' addresses, (instructions, warps * 8 * count), and the lanes that pass them."""
    givers = lanes.reshape(-1, 32)[:, : 8 * count].reshape(-1)
    return np.broadcast_to(address, (instructions, machine.lanes))[:, givers], givers
