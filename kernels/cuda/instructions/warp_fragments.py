"""Steps that a warp takes together for its tensor core: load fragments, multiply them, store them.

A tensor core multiplies small matrices whose elements are spread over the registers of a warp's 32 lanes: a
"fragment". Below, g = lane / 4 is a lane's group (0 to 7) and t = lane % 4 its number in the group. A
register of 32 bits holds two elements of 16 bits, the first in its low half, or one of 32 bits.

    mma.m16n8k16   a (16, 16): registers 0 to 3 hold rows g, g + 8, g, g + 8; columns 2t and 2t + 1, from
    16 bits                    register 2 on 8 further
                   b (16, 8):  registers 0 and 1 hold rows 2t and 2t + 1, and 8 further; column g
    mma.m16n8k8    a (16, 8):  registers 0 to 3 hold rows g, g + 8, g, g + 8; column t, from register 2 on 4
    TF32                       further
                   b (8, 8):   registers 0 and 1 hold rows t and t + 4; column g
    both           c (16, 8):  registers 0 to 3 hold rows g, g, g + 8, g + 8; columns 2t and 2t + 1 in turns

Source: PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions": matrix fragments for mma.m16n8k16 and
mma.m16n8k8, ldmatrix, stmatrix.
"""

from __future__ import annotations

from typing import Any

from .inline_ptx import FLOAT32, AsmOperand, Assembler, Function, Value, instruction, ptx


def numbered(first: int, count: int) -> str:
    """Return `count` operands from number `first` on, as inline assembly names them: "{$4, $5}"."""
    return "{" + ", ".join(f"${first + e}" for e in range(count)) + "}"


@instruction()
def ldmatrix_x4(
    to: Assembler, fragment: AsmOperand, i: AsmOperand, shared: AsmOperand, j: AsmOperand
) -> None:
    """ldmatrix_x4(fragment, i, shared, j): load four 8 x 8 matrices of 16-bit elements to fragment[i] on.

    A row of a matrix is 16 bytes of shared memory. Lanes 8q to 8q + 7 give the index j of the first element
    of rows 0 to 7 of matrix q, a multiple of 16 bytes, and register q of a lane gets row g, columns 2t and 2t
    + 1 of matrix q. With 32-bit elements a row holds four, and the lane gets column t. `fragment` is a local
    array of uint32. There are no bank conflicts if the eight rows of a matrix differ in bits 4 to 6 of their
    addresses. PTX: ldmatrix.sync.aligned.m8n8.x4.shared.b16. sm_75.
    """
    _load_matrices(to, "", fragment, i, shared, j)


@instruction()
def ldmatrix_x4_trans(
    to: Assembler, fragment: AsmOperand, i: AsmOperand, shared: AsmOperand, j: AsmOperand
) -> None:
    """ldmatrix_x4_trans(fragment, i, shared, j): as `ldmatrix_x4`, and transpose each matrix.

    Register q gets rows 2t and 2t + 1, column g of matrix q. PTX: ldmatrix with .trans. sm_75.
    """
    _load_matrices(to, ".trans", fragment, i, shared, j)


def _load_matrices(
    to: Assembler, option: str, fragment: AsmOperand, i: AsmOperand, shared: AsmOperand, j: AsmOperand
) -> None:
    text = f"ldmatrix.sync.aligned.m8n8.x4{option}.shared.b16 {numbered(0, 4)}, [$4];"
    to.store(fragment, i, to.ptx(text, "=r,=r,=r,=r,r", [to.shared_address(shared, j)], results=4))


@instruction()
def load_shared(
    to: Assembler, fragment: AsmOperand, i: AsmOperand, shared: AsmOperand, j: AsmOperand
) -> None:
    """load_shared(fragment, i, shared, j): fragment[i] = shared[j], a word of 32 bits, by 32-bit addresses.

    For words that ldmatrix can't load. A constant added to the index j costs no instruction here; in
    shared[j], whose address has 64 bits, it does. PTX: ld.shared.b32. Any architecture.
    """
    to.store(
        fragment, i, to.ptx("ld.shared.b32 $0, [$1];", "=r,r", [to.shared_address(shared, j)], results=1)
    )


@instruction()
def stmatrix_x4(
    to: Assembler, shared: AsmOperand, j: AsmOperand, fragment: AsmOperand, i: AsmOperand
) -> None:
    """stmatrix_x4(shared, j, fragment, i): store four 8 x 8 matrices, the inverse of `ldmatrix_x4`.

    PTX: stmatrix.sync.aligned.m8n8.x4.shared.b16. sm_90.
    """
    text = f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {numbered(1, 4)};"
    to.ptx(text, "r,r,r,r,r", [to.shared_address(shared, j), *to.load(fragment, i, 4)])


def _mma(name: str, shape: str, dtype: str, words: str) -> Function:
    """Return the instruction c += a b of this shape, with float32 sums, for elements of this dtype."""
    text = (
        f"mma.sync.aligned.{shape}.row.col.f32.{dtype}.{dtype}.f32 "
        f"{numbered(0, 4)}, {numbered(4, 4)}, {numbered(8, 2)}, {numbered(10, 4)};"
    )
    constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)

    def lower(
        to: Assembler,
        c: AsmOperand,
        ci: AsmOperand,
        a: AsmOperand,
        ai: AsmOperand,
        b: AsmOperand,
        bi: AsmOperand,
    ) -> None:
        operands = [*to.load(a, ai, 4), *to.load(b, bi, 2), *to.load(c, ci, 4)]
        to.store(c, ci, to.ptx(text, constraints, operands, results=4, kind=FLOAT32, pure=True))

    lower.__name__ = lower.__qualname__ = name
    lower.__doc__ = (
        f"{name}(c, ci, a, ai, b, bi): c[ci : ci + 4] += a[ai : ai + 4] times b[bi : bi + 2], fragments.\n\n"
        f"c is a local array of float32, a and b of uint32 that hold {words}. "
        f"PTX: mma.sync.aligned.{shape}.row.col.f32.{dtype}.{dtype}.f32. sm_80."
    )
    return instruction()(lower)


mma_m16n8k16_f16 = _mma("mma_m16n8k16_f16", "m16n8k16", "f16", "two float16 each")
mma_m16n8k16_bf16 = _mma("mma_m16n8k16_bf16", "m16n8k16", "bf16", "two bfloat16 each")
mma_m16n8k8_tf32 = _mma("mma_m16n8k8_tf32", "m16n8k8", "tf32", "a float32 rounded to TF32 each")


@ptx("cvt.rn.bf16x2.f32 $0, $2, $1;", returns="uint32", pure=True)
def cvt_bf16x2(low: float, high: float) -> Any:
    """cvt_bf16x2(low, high): round two float32 to bfloat16, to nearest even, in one word of 32 bits.

    PTX: cvt.rn.bf16x2.f32, whose first operand is the high half. sm_80.
    """


@ptx("cvt.rn.f16x2.f32 $0, $2, $1;", returns="uint32", pure=True)
def cvt_f16x2(low: float, high: float) -> Any:
    """cvt_f16x2(low, high): as `cvt_bf16x2`, to float16; values that are too large become infinity.

    PTX: cvt.rn.f16x2.f32. sm_80.
    """


@instruction(returns="uint32")
def cvt_tf32(to: Assembler, word: AsmOperand) -> Value:
    """cvt_tf32(word): round a float32, given as its bits, to the 11 significant bits of TF32, as bits again.

    To nearest, ties away from 0. Without it the tensor core cuts off the low bits, with twice the error. PTX:
    cvt.rna.tf32.f32. sm_80.
    """
    number = to.builder.bitcast(to.integer(word, "uint32"), FLOAT32)
    return to.ptx("cvt.rna.tf32.f32 $0, $1;", "=r,f", [number], 1, pure=True)[0]


@ptx("shfl.sync.idx.b32 $0, $1, 0, 31, -1;", returns="int32", pure=True)
def uniform(x: int) -> Any:
    """uniform(x): the first lane's x in every lane, so that the compiler knows it to be the same.

    The compiler then keeps it in a uniform register, where wgmma's descriptors have to be. All lanes call it.
    PTX: shfl.sync.idx.b32. Any architecture.
    """


@ptx(
    """{
    .reg .pred chosen;
    elect.sync _|chosen, -1;
    selp.b32 $0, 1, 0, chosen;
    }""",
    returns="int32",
)
def elect_one() -> Any:
    """elect_one(): 1 in one lane of the warp, 0 in the others. All lanes call it.

    The copy engine's instructions (`tma.py`) read uniform registers, which hold one value for a warp. Where
    only the elected lane runs, the assembler moves values there as they are. Where `thread == 0` holds, it
    can't tell that one lane runs, and puts a loop over the lanes' values around each copy. PTX: elect.sync.
    sm_90.
    """
