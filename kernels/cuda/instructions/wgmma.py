"""Hopper's matrix instruction: four warps multiply tiles in shared memory, asynchronously.

A warp group is four warps, the first a multiple of four. wgmma multiplies a (64, 16) by b (16, n), both in
shared memory, and adds to sums (64, n) in registers: elements of 16 bits, sums of float32. It is
asynchronous: `fence` comes before the first, so that the registers are as written; `commit` makes a group of
those begun; `wait` waits until at most so many groups are under way. In between nothing else touches the
sums.

With g = l / 4 and t = l % 4, lane l of warp w holds in registers 4j to 4j + 3 the sums of rows 16w + g (two)
and 16w + g + 8 (two), columns 8j + 2t and 8j + 2t + 1.

A descriptor of 64 bits says where a tile lies, here always with the 128-byte swizzle of the copy engine
(`tma.py`). A tile has one of two layouts. The letters are a's; b's are the same with n for m:

    along k (K-major)     a line is 64 elements of k for one m, 128 bytes; 8 lines are 1024 bytes, and the
                          next 8 lie `stride` further. 16 on in k is 32 bytes on.
    across k (MN-major)   a line is 64 elements of m for one k; 8 lines are 1024 bytes, and the next 8 lie
                          `stride` further. The next 64 elements of m lie `leading` further. 16 on in k is
                          two strides on.

Sources: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions": register fragments, matrix descriptor
format, strides, wgmma.fence. sm_90a only: newer GPUs have other instructions.
"""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir

from .inline_ptx import FLOAT32, INT32, INT64, AsmOperand, Assembler, Function, Known, Value, instruction, ptx
from .warp_fragments import numbered

SWIZZLE_128 = 1 << 62  # of a descriptor
LARGEST_ADDRESS = (1 << 18) - 1  # a descriptor holds 14 bits of an address, without the last 4


class WarpGroupMultiply(NamedTuple):
    """The instructions for sums of one width; `sums` is the local array of a thread's n / 2 float32."""

    multiply: Function  # multiply(sums, a, b, add): of two descriptors; add = 0 begins from zero
    fence: Function  # fence(sums)
    wait: Function  # wait(sums, groups), groups known when compiling


@instruction(returns="int64", literals=("leading", "stride"))
def descriptor(
    to: Assembler, shared: AsmOperand, i: AsmOperand, leading: AsmOperand, stride: AsmOperand
) -> Value:
    """descriptor(shared, i, leading, stride): the tile at shared[i], with these strides in bytes (literals).

    Adding bytes / 16 to a descriptor moves it. `leading` is not read for a tile along k; pass 16.
    """
    # In a cluster, a block's addresses hold its rank from bit 24 on, which must stay out of the other fields.
    address = to.builder.and_(to.shared_address(shared, i), ir.Constant(INT32, LARGEST_ADDRESS))
    address = to.builder.lshr(address, ir.Constant(INT32, 4))
    fields = SWIZZLE_128 | stride.literal >> 4 << 32 | leading.literal >> 4 << 16
    return to.builder.or_(to.builder.zext(address, INT64), ir.Constant(INT64, fields))


@ptx("wgmma.commit_group.sync.aligned;")
def wgmma_commit() -> None:
    """wgmma_commit(): make a group of the multiplications begun. PTX: wgmma.commit_group.sync.aligned."""


def warp_group_multiply(n: int, dtype: str, a_across: bool, b_across: bool) -> WarpGroupMultiply:
    """Return the instructions for sums (64, n), n a multiple of 8 up to 256.

    `dtype` is "f16" or "bf16"; `a_across` and `b_across` say which operands lie across k. PTX:
    wgmma.mma_async.sync.aligned.m64nNk16.f32, whose last two numbers are the transpositions;
    wgmma.fence.sync.aligned, wgmma.wait_group.sync.aligned.
    """
    count = n // 2
    # The same registers go in and come out, also for fence and wait. Otherwise the compiler could read or
    # move the sums while the tensor core still works on them.
    results = ",".join(["=f"] * count)
    again = ",".join(str(e) for e in range(count))
    text = f"""{{
    .reg .pred further;
    setp.ne.b32 further, ${2 * count + 2}, 0;
    wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype} {numbered(0, count)},
    ${2 * count}, ${2 * count + 1}, further, 1, 1, {int(a_across)}, {int(b_across)};
    }}"""

    def through(
        to: Assembler, sums: AsmOperand, text: str, more: str = "", operands: tuple[Value, ...] = ()
    ) -> None:
        before = to.load(sums, 0, count)
        constraints = f"{results},{again}{more}"
        after = to.ptx(text, constraints, [*before, *operands], results=count, kind=FLOAT32)
        to.store(sums, 0, after)

    @instruction()
    def multiply(to: Assembler, sums: AsmOperand, a: AsmOperand, b: AsmOperand, add: AsmOperand) -> None:
        """multiply(sums, a, b, add): begin to add the product of the tiles of two descriptors."""
        operands = (to.integer(a, "int64"), to.integer(b, "int64"), to.integer(add))
        through(to, sums, text, ",l,l,r", operands)

    @instruction()
    def fence(to: Assembler, sums: AsmOperand) -> None:
        """fence(sums): make wgmma see what was written to the registers before."""
        through(to, sums, "wgmma.fence.sync.aligned;")

    @instruction(literals=("groups",))
    def wait(to: Assembler, sums: AsmOperand, groups: AsmOperand) -> None:
        """wait(sums, groups): wait until at most `groups` groups of multiplications are under way."""
        through(to, sums, f"wgmma.wait_group.sync.aligned {groups.literal};")

    return WarpGroupMultiply(multiply, fence, wait)


@ptx("setmaxnreg.inc.sync.aligned.u32 <count>;")
def setmaxnreg_inc(count: Known) -> None:
    """setmaxnreg_inc(count): take registers from the block's pool, up to `count` for each thread; a literal.

    All of a warp group calls it; `count` is a multiple of 8 from 24 to 256. It waits until that many are
    free: for ever, if all warps together ask for more than the block began with. PTX:
    setmaxnreg.inc.sync.aligned.u32. sm_90a.
    """


@ptx("setmaxnreg.dec.sync.aligned.u32 <count>;")
def setmaxnreg_dec(count: Known) -> None:
    """setmaxnreg_dec(count): give registers back to the pool, down to `count` for each thread. sm_90a."""
