"""Vector loads and stores, and asynchronous copies from global to shared memory.

One instruction that moves 16 bytes takes one slot of the load/store units; four of 4 bytes take four. The
compiler does not join them by itself, because it can't know that the address is aligned.

An asynchronous copy does not pass through registers, and the thread does not wait for it. A thread groups its
copies (commit), and later waits until at most so many of its groups are under way. So the loads of one tile
run while another is multiplied. A thread waits for its own copies only; a barrier of the block shows them to
the other threads.

Source: PTX ISA, "Data Movement and Conversion Instructions": ld, st, cp.async.
"""

from __future__ import annotations

from llvmlite import ir

from .inline_ptx import INT32, AsmOperand, Assembler, Global, Known, Shared, Value, instruction, ptx


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


@instruction()
def load_128(to: Assembler, into: AsmOperand, i: AsmOperand, source: AsmOperand, j: AsmOperand) -> None:
    """load_128(into, i, source, j): into[i : i + n] = source[j : j + n], by one load of 16 bytes.

    `source` is global or shared memory, and element j lies at a multiple of 16 bytes; `into` is a local
    array. Elements of different sizes keep their bits. PTX: ld.v4.b32 (v2.b64). Any architecture.
    """
    loaded = to.builder.load(_vector_pointer(to, 16, source, j), align=16)
    count = 16 // into.element_bytes
    elements = to.builder.bitcast(loaded, ir.VectorType(to.start(into).type.pointee, count))
    to.store(into, i, [to.builder.extract_element(elements, ir.Constant(INT32, e)) for e in range(count)])


@instruction()
def store_128(to: Assembler, into: AsmOperand, i: AsmOperand, source: AsmOperand, j: AsmOperand) -> None:
    """store_128(into, i, source, j): into[i : i + n] = source[j : j + n], by one store of 16 bytes.

    `into` is global or shared memory, and element i lies at a multiple of 16 bytes; `source` is a local
    array. Elements of different sizes keep their bits. PTX: st.v4.b32 (v2.b64). Any architecture.
    """
    _move_out(to, 16, into, i, source, j)


@instruction()
def store_64(to: Assembler, into: AsmOperand, i: AsmOperand, source: AsmOperand, j: AsmOperand) -> None:
    """store_64(into, i, source, j): as `store_128`, 8 bytes. PTX: st.v2.b32."""
    _move_out(to, 8, into, i, source, j)


@ptx("cp.async.cg.shared.global.L2::128B [$0], [$1], 16;")
def cp_async_16(shared: Shared, i: int, source: Global, j: int) -> None:
    """cp_async_16(shared, i, source, j): begin to copy 16 bytes from global source[j] to shared[i].

    Both addresses are multiples of 16 bytes. The data bypass the first-level cache (.cg), and the second
    level fetches the whole 128-byte line. PTX: cp.async.cg.shared.global.L2::128B. sm_80.
    """


@ptx(
    """{
    .reg .pred outside;
    setp.eq.b32 outside, $2, 0;
    cp.async.cg.shared.global.L2::128B [$0], [$1], 16, outside;
    }"""
)
def cp_async_16_or_zeros(shared: Shared, i: int, source: Global, j: int, inside: int) -> None:
    """cp_async_16_or_zeros(shared, i, source, j, inside): as `cp_async_16` if `inside`, else write zeros.

    This takes one predicate, where a number of bytes takes four more instructions. Outside, nothing is read.
    PTX: cp.async with ignore-src. sm_80.
    """


@ptx("cp.async.ca.shared.global [$0], [$1], 4, $2;")
def cp_async_4_zfill(shared: Shared, i: int, source: Global, j: int, valid: int) -> None:
    """cp_async_4_zfill(shared, i, source, j, valid): copy 4 bytes through all caches, but read only `valid`.

    The rest becomes zeros, so what lies beyond the edge of a matrix adds nothing to a product. For data
    that are not aligned to 16 bytes, or are transposed on the way. PTX: cp.async.ca with src-size. sm_80.
    """


@ptx("cp.async.commit_group;")
def cp_async_commit() -> None:
    """cp_async_commit(): make a group of this thread's copies since the last one. sm_80."""


@ptx("cp.async.wait_group <groups>;")
def cp_async_wait(groups: Known) -> None:
    """cp_async_wait(groups): wait until at most `groups` of this thread's groups are under way, the youngest.

    `groups` is known when compiling. PTX: cp.async.wait_group. sm_80.
    """
