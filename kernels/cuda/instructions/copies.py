"""Vector loads and stores, and asynchronous copies from global to shared memory.

One instruction that moves 16 bytes takes one slot of the load/store units; four of 4 bytes take four. The
compiler does not join them by itself, because it can't know that the address is aligned.

An asynchronous copy does not pass through registers, and the thread does not wait for it. A thread groups its
copies (commit), and later waits until at most so many of its groups are under way. So the loads of one tile
run while another is multiplied. A thread waits for its own copies only; a barrier of the block shows them to
the other threads.

Numba's simulator (NUMBA_ENABLE_CUDASIM=1) runs a kernel's Python source: each GPU thread is a Python thread,
and arrays are NumPy's. It can't run PTX, so each instruction has a twin here that does the same in Python. A
twin copies at once, so there is nothing to commit or to wait for. That hides a missing wait; the emulator
shows it.

Source: PTX ISA, "Data Movement and Conversion Instructions": ld, st, cp.async.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import ir

from .inline_ptx import INT32, AsmOperand, Assembler, Value, instruction

SimulatedArray = Any  # NumPy's, or the simulator's wrapper around one


def copy(size: int, into: SimulatedArray, i: int, source: SimulatedArray, j: int) -> None:
    """Copy the elements of `size` bytes."""
    copy_and_fill(size, into, i, source, j, size)


def copy_and_fill(
    size: int, into: SimulatedArray, i: int, source: SimulatedArray, j: int, valid: int
) -> None:
    """Copy the elements of the first `valid` bytes, and write zeros in the rest of `size`."""
    count = valid // into.dtype.itemsize
    for e in range(size // into.dtype.itemsize):
        into[i + e] = source[j + e] if e < count else 0


def copy_16_or_fill(shared: SimulatedArray, i: int, source: SimulatedArray, j: int, inside: bool) -> None:
    """Copy the elements of 16 bytes where `inside` holds, else write zeros."""
    copy_and_fill(16, shared, i, source, j, 16 if inside else 0)


def nothing(*groups: int) -> None:
    """Do nothing to commit or to wait for: the copies are done."""


def _move_in(
    to: Assembler, size: int, into: AsmOperand, i: AsmOperand, source: AsmOperand, j: AsmOperand
) -> None:
    loaded = to.builder.load(_vector_pointer(to, size, source, j), align=size)
    count = size // into.element_bytes
    elements = to.builder.bitcast(loaded, ir.VectorType(to.start(into).type.pointee, count))
    to.store(into, i, [to.builder.extract_element(elements, ir.Constant(INT32, e)) for e in range(count)])


def _move_out(
    to: Assembler, size: int, into: AsmOperand, i: AsmOperand, source: AsmOperand, j: AsmOperand
) -> None:
    values = to.load(source, j, size // source.element_bytes)
    elements = ir.Constant(ir.VectorType(values[0].type, len(values)), ir.Undefined)
    for e, value in enumerate(values):
        elements = to.builder.insert_element(elements, value, ir.Constant(INT32, e))
    pointer = _vector_pointer(to, size, into, i)
    to.builder.store(to.builder.bitcast(elements, pointer.type.pointee), pointer, align=size)


def _vector_pointer(to: Assembler, size: int, array: AsmOperand, index: AsmOperand) -> Value:
    element = to.pointer(array, index)
    # LLVM would split a vector of 8 elements of 16 bits into two moves.
    word = element.type.pointee if array.element_bytes >= 4 else INT32
    vector = ir.VectorType(word, size // max(array.element_bytes, 4))
    return to.builder.bitcast(element, vector.as_pointer())


@instruction(twin=partial(copy, 16))
def load_128(to: Assembler, into: AsmOperand, i: AsmOperand, source: AsmOperand, j: AsmOperand) -> None:
    """load_128(into, i, source, j): into[i : i + n] = source[j : j + n], by one load of 16 bytes.

    `source` is global or shared memory, and element j lies at a multiple of 16 bytes; `into` is a local
    array. Elements of different sizes keep their bits. PTX: ld.v4.b32 (v2.b64). Any architecture.
    """
    _move_in(to, 16, into, i, source, j)


@instruction(twin=partial(copy, 16))
def store_128(to: Assembler, into: AsmOperand, i: AsmOperand, source: AsmOperand, j: AsmOperand) -> None:
    """store_128(into, i, source, j): into[i : i + n] = source[j : j + n], by one store of 16 bytes.

    `into` is global or shared memory, and element i lies at a multiple of 16 bytes; `source` is a local
    array. Elements of different sizes keep their bits. PTX: st.v4.b32 (v2.b64). Any architecture.
    """
    _move_out(to, 16, into, i, source, j)


@instruction(twin=partial(copy, 8))
def store_64(to: Assembler, into: AsmOperand, i: AsmOperand, source: AsmOperand, j: AsmOperand) -> None:
    """store_64(into, i, source, j): as `store_128`, 8 bytes. PTX: st.v2.b32."""
    _move_out(to, 8, into, i, source, j)


@instruction(twin=partial(copy, 16))
def cp_async_16(to: Assembler, shared: AsmOperand, i: AsmOperand, source: AsmOperand, j: AsmOperand) -> None:
    """cp_async_16(shared, i, source, j): begin to copy 16 bytes from global source[j] to shared[i].

    Both addresses are multiples of 16 bytes. The data bypass the first-level cache (.cg), and the second
    level fetches the whole 128-byte line. PTX: cp.async.cg.shared.global.L2::128B. sm_80.
    """
    operands = [to.shared_address(shared, i), to.global_address(source, j)]
    to.ptx("cp.async.cg.shared.global.L2::128B [$0], [$1], 16;", "r,l", operands)


@instruction(twin=copy_16_or_fill)
def cp_async_16_or_zeros(
    to: Assembler, shared: AsmOperand, i: AsmOperand, source: AsmOperand, j: AsmOperand, inside: AsmOperand
) -> None:
    """cp_async_16_or_zeros(shared, i, source, j, inside): as `cp_async_16` if `inside`, else write zeros.

    This takes one predicate, where a number of bytes takes four more instructions. Outside, nothing is read.
    PTX: cp.async with ignore-src. sm_80.
    """
    text = """{
    .reg .pred outside;
    setp.eq.b32 outside, $2, 0;
    cp.async.cg.shared.global.L2::128B [$0], [$1], 16, outside;
    }"""
    to.ptx(text, "r,l,r", [to.shared_address(shared, i), to.global_address(source, j), to.integer(inside)])


@instruction(twin=partial(copy_and_fill, 4))
def cp_async_4_zfill(
    to: Assembler, shared: AsmOperand, i: AsmOperand, source: AsmOperand, j: AsmOperand, valid: AsmOperand
) -> None:
    """cp_async_4_zfill(shared, i, source, j, valid): copy 4 bytes through all caches, but read only `valid`.

    The rest becomes zeros, so what lies beyond the edge of a matrix adds nothing to a product. For data
    that are not aligned to 16 bytes, or are transposed on the way. PTX: cp.async.ca with src-size. sm_80.
    """
    operands = [to.shared_address(shared, i), to.global_address(source, j), to.integer(valid)]
    to.ptx("cp.async.ca.shared.global [$0], [$1], 4, $2;", "r,l,r", operands)


@instruction(twin=nothing)
def cp_async_commit(to: Assembler) -> None:
    """cp_async_commit(): make a group of this thread's copies since the last one. sm_80."""
    to.ptx("cp.async.commit_group;", "")


@instruction(twin=nothing, literals=("groups",))
def cp_async_wait(to: Assembler, groups: AsmOperand) -> None:
    """cp_async_wait(groups): wait until at most `groups` of this thread's groups are under way, the youngest.

    `groups` is known when compiling. PTX: cp.async.wait_group. sm_80.
    """
    to.ptx(f"cp.async.wait_group {groups.literal};", "")
