# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 6. Tensor cores
#
# **Time:** about 2.5 hours. **Builds on:** lesson 05.
#
# Lesson 5 fed the arithmetic units as well as they can be fed. Since 2017 NVIDIA's GPUs have had units of
# another kind beside them: **tensor cores**, which do nothing but multiply small matrices. In this lesson you
# put the matrices into a warp's registers by hand, and multiply them with one instruction. Their numbers have
# only 16 bits. So you also find out how much accuracy that costs. At the end you do the same on a unit that many
# CPUs have.

# %%
import numpy as np
import torch
from numba import cuda, float32, uint16, uint32

from checks.figures import curves, ladder, said
from checks.kernels import with_constants
from checks.pictures.fragments import (
    formats,
    fragments,
    quarters,
    rate_against_error,
)
from checks.rungs import counted, on_gpu, speed
from checks.tensor_cores import check, hint, or_solution
from checks.tile_units import Tiles, gigaflops, here
from minidist.kernels.cpu.support.bf16_instructions import matrix_unit
from minidist.kernels.cuda.emulator import launch, profile
from minidist.kernels.cuda.warp import ldmatrix_x4, mma_m16n8k16_f16
from minidist.kernels.tpu import tensor_core as units

ladder(6)

# %% [markdown]
# **The question.** A multiply-add instruction of a warp does 32 multiply-adds, one in each thread. Another
# instruction does 2048. Where do its numbers come from, and how exact are its results?
#
# ## One instruction
#
# The instruction computes **D = A x B + C**, where A has 16 x 16 elements, B has 16 x 8, and C and D have 16 x
# 8. These sizes are in its name: `mma.m16n8k16`, for *matrix multiply-add*. That is 16 * 8 * 16 = 2048
# multiply-adds. The elements of A and B are **float16**: floating-point numbers of 16 bits; more about them
# below. C and D are float32.
#
# All operands are in registers. But in the registers of which thread? A, B and C would fill 320 registers, more
# than a thread has. So the *whole warp* executes the instruction together. Each of its 32 threads, which are
# called **lanes** here, holds a few elements of A, a few of B and a few of C, and gets a few of D. Such a share
# is called a **fragment**. A register has 32 bits and holds two float16: elements 2 r and 2 r + 1 are in
# register r. So a lane has 8 elements of A in 4 registers, 4 of B in 2 registers, and 4 of C in 4.
#
# Which elements are in which lane? The hardware decides that. Press Play, or go step by step. NVIDIA's manual
# writes g for `lane // 4`, and t for `lane % 4`.

# %%
fragments()

# %% [markdown]
# For B and C the rule looks like this:


# %%
def element_of_b(lane, i):
    """Row and column in B (16 x 8) of element i, 0 to 3, of this lane."""
    g, t = lane // 4, lane % 4
    return 2 * t + i % 2 + 8 * (i // 2), g


def element_of_c(lane, i):
    """Row and column in C and D (16 x 8) of element i, 0 to 3, of this lane."""
    g, t = lane // 4, lane % 4
    return g + 8 * (i // 2), 2 * t + i % 2


[element_of_b(5, i) for i in range(4)], [element_of_c(5, i) for i in range(4)]

# %% [markdown]
# **Exercise 6.1: element_of_a.** Now the same for A: return the row and column of element `i`, from 0 to 7, of
# lane `lane`. The picture shows all that you need.


# %% tags=["exercise"]
def element_of_a(lane, i):
    """Row and column in A (16 x 16) of element i, 0 to 7, of this lane."""
    g, t = lane // 4, lane % 4
    ...  # 1 line


# %%
check(element_of_a)

# %% [markdown]
# No idea how to begin? `hint()` in a cell of its own gives the first of three hints. The next cell takes your
# function if it has passed. If not, it takes the lesson's own, so the rest of the lesson works.

# %%
element_of_a = or_solution(element_of_a)
[element_of_a(5, i) for i in range(8)]

# %% [markdown]
# ## By hand
#
# With the three maps you can use a tensor core. The kernel below does not know what a matrix is. One warp runs
# it, and each lane gets a row of `a`, of `b` and of `c`: its fragments. `mma_m16n8k16_f16(c, ci, a, ai, b, bi)`
# is this project's function for the instruction. It takes 4 words of the local array `a`, from index `ai` on,
# and 2 words of `b`, and adds to 4 words of `c`.


# %%
@cuda.jit
def one_mma(a, b, c):
    lane = cuda.threadIdx.x
    fragment_a = cuda.local.array(4, uint32)
    fragment_b = cuda.local.array(2, uint32)
    sums = cuda.local.array(4, float32)
    for r in range(4):
        fragment_a[r], sums[r] = a[lane, r], c[lane, r]
    for r in range(2):
        fragment_b[r] = b[lane, r]
    mma_m16n8k16_f16(sums, 0, fragment_a, 0, fragment_b, 0)
    for r in range(4):
        c[lane, r] = sums[r]


# %% [markdown]
# The rest is Python: deal out the elements, multiply, and collect the result. `view(np.uint32)` takes two
# neighbours of float16 as one word.

# %%
rng = np.random.default_rng(0)
A, B, C = (
    rng.integers(-9, 10, shape).astype(np.float16)
    for shape in ((16, 16), (16, 8), (16, 8))
)
lanes = range(32)
held_a = np.array([[A[element_of_a(lane, i)] for i in range(8)] for lane in lanes])
held_b = np.array([[B[element_of_b(lane, i)] for i in range(4)] for lane in lanes])
held_c = np.array([[C[element_of_c(lane, i)] for i in range(4)] for lane in lanes])
sums = held_c.astype(np.float32)
launch(one_mma, 1, 32, held_a.view(np.uint32), held_b.view(np.uint32), sums)

D = np.zeros((16, 8), np.float32)
for lane in lanes:
    for i in range(4):
        D[element_of_c(lane, i)] = sums[lane, i]
np.array_equal(D, A.astype(np.float32) @ B + C)

# %% [markdown]
# ## A product
#
# Larger matrices need a loop. One warp computes 16 x 8 elements of c, in 4 registers of each lane. In each
# round it takes the next 16 columns of a, and the next 16 rows of b.
#
# **Exercise 6.2: tensor_matmul.** c has m x n elements of float32, and there is a block of *one warp* for each
# 16 x 8 of them. a and b come as words of two float16 each, which lie side by side in a row: `a[i, w]` holds
# columns 2 w and 2 w + 1 of row i. b comes **transposed**: `b[j, w]` holds rows 2 w and 2 w + 1 of column j. So
# two elements that a lane needs together, one below the other in B, lie side by side in memory. m and k are
# multiples of 16, n of 8; k may be 0.
#
# Par: 1 matrix instruction for each 16 x 8 x 16 multiply-adds, and 6 loads of the warp for each of those
# instructions.


# %% tags=["exercise"]
@cuda.jit
def tensor_matmul(a, b, c):
    """c = a b: a warp computes 16 x 8 elements; a and b^T come as words of two float16."""
    fragment_a = cuda.local.array(4, uint32)
    fragment_b = cuda.local.array(2, uint32)
    sums = cuda.local.array(4, float32)
    g, t = cuda.threadIdx.x // 4, cuda.threadIdx.x % 4
    i0, j0 = 16 * cuda.blockIdx.y, 8 * cuda.blockIdx.x  # where the tile of c begins
    for r in range(4):
        sums[r] = float32(0)
    ...  # about 10 lines


# %%
check(tensor_matmul)

# %%
tensor_matmul = or_solution(tensor_matmul)
n = 64
a, b = (rng.random((n, n)).astype(np.float16) for _ in range(2))
a_words, b_words = a.view(np.uint32), np.ascontiguousarray(b.T).view(np.uint32)
c = np.zeros((n, n), np.float32)
counts = profile(tensor_matmul, (n // 8, n // 16), 32, a_words, b_words, c)
print(np.allclose(c, a.astype(np.float32) @ b.astype(np.float32)))
print(
    f"{counts.total.matrix} matrix instructions with {counts.counts.matrix_flops:,} FLOP"
)

# %% [markdown]
# (**FLOP** are multiplications and additions: 4096 in each of these instructions, 64 in a warp's multiply-add.)
# These counts say how much work an instruction does, not how long it takes. NVIDIA's data sheet promises 989
# TFLOP/s in float16 for an H100 (SXM), and 67 in float32 without tensor cores.
#
# ## Loading a fragment
#
# A unit that does so much in one instruction is hard to feed. Our kernel has 6 loads for each instruction,
# straight from global memory, 4 bytes a lane. Real kernels first bring tiles to shared memory, as in lessons 4
# and 5. Then they load fragments with an instruction that knows the layout: **ldmatrix**.
#
# It loads four matrices of 8 x 8 float16 at once: in our case the quarters of A, one for each register. A row
# of such a matrix has 8 elements, 16 bytes. The 32 lanes give the addresses of the 32 rows. Lanes 0 to 7 give
# the rows of the first matrix, which fills register 0 of all lanes; lanes 8 to 15 give those of the second
# matrix, for register 1, and so on. So the row that a lane *gives* has nothing to do with the elements that it
# *gets*.

# %%
quarters()

# %% [markdown]
# **Exercise 6.3: row_for_ldmatrix.** Lane `lane` gives the address of 8 elements of A that lie side by side.
# Return the row and the column of A where they begin.


# %% tags=["exercise"]
def row_for_ldmatrix(lane):
    """Row and column in A (16 x 16) where the row of 8 elements begins that this lane gives."""
    ...  # 1 line


# %%
check(row_for_ldmatrix)

# %% [markdown]
# In the next kernel, rows of the tile begin `PITCH` elements apart. You will soon see why.

# %%
row_for_ldmatrix = or_solution(row_for_ldmatrix)
PITCH, ROOM = 16, 16 * 64


@cuda.jit
def load_fragment(a, starts, words):
    tile = cuda.shared.array(ROOM, uint16, alignment=16)
    fragment = cuda.local.array(4, uint32)
    lane = cuda.threadIdx.x
    for s in range(lane, 256, 32):
        tile[s // 16 * PITCH + s % 16] = a[s // 16, s % 16]
    cuda.syncthreads()
    ldmatrix_x4(fragment, 0, tile, starts[lane, 0] * PITCH + starts[lane, 1])
    for r in range(4):
        words[lane, r] = fragment[r]


# %%
starts = np.array([row_for_ldmatrix(lane) for lane in lanes])
words = np.zeros((32, 4), np.uint32)
launch(load_fragment, 1, 32, A.view(np.uint16), starts, words)
np.array_equal(words.view(np.float16), held_a)

# %% [markdown]
# One instruction replaces four, and it reads whole rows. In one pass shared memory delivers the 8 rows of a
# matrix, 128 bytes, if they lie in different banks. Do they? You know the question from lesson 4.

# %%
for pitch in (16, 24, 32, 40):
    kernel = with_constants(load_fragment, PITCH=pitch)
    counts = profile(kernel, 1, 32, A.view(np.uint16), starts, words)
    print(f"rows {2 * pitch:2} bytes apart: {counts.shared_conflicts:2} bank conflicts")

# %% [markdown]
# With rows 32 bytes apart, every fourth row begins in the same bank. So each of the four matrices takes two
# passes, where one would be enough. Padding helps, as it did in lesson 4. (Rung 9 of the project's ladder of
# kernels has no padding. It exchanges pieces of 16 bytes within a row, by an XOR with the row's number, and so
# wastes no memory.)
#
# Put together the ring of lesson 5, ldmatrix and mma, and you have `s9_tensor_core`, rung 9 of that ladder. The
# next cell compares it with rung 7, which has plain multiply-adds, for 128 x 128 x 128.

# %%
x, y = (rng.random((128, 128), dtype=np.float32) for _ in range(2))
for number, dtype in ((7, "float32"), (9, "float16")):
    counts = counted(number, x.astype(dtype), y.astype(dtype))
    print(
        f"{counts.kernel:16} {dtype}: {counts.total.instructions:6,} instructions, of which "
        f"{counts.instructions.get('multiply-add', 0):6,} multiply-adds, {counts.total.matrix:5,} matrix"
    )

# %% [markdown]
# ## Small numbers
#
# Why float16? A multiplier's area grows with the square of the number of bits. And a number of 16 bits needs
# half the memory of one with 32, and half the time to fetch it. Tensor cores take several formats:

# %%
formats()

# %% [markdown]
# The **exponent** decides how large and how small numbers may be. The **fraction** decides how fine they are. A
# number is **rounded** to the nearest one that the format has. With b significant bits, rounding multiplies a
# number by a factor between 1 - 2^-b and 1 + 2^-b, as long as the number is within range. **bfloat16** (from
# Google Brain) has the range of float32, but only 8 significant bits. float16 has 11 of them, but a small
# range. **TF32** is the format in which tensor cores take float32: they ignore its last 13 bits, so round it to
# 11 bits before.

# %%
for value in (1 / 3, 1000.25, 70_000.0, 1e-8):
    x = torch.tensor(value)
    print(
        f"{value:<8.6g} float16 {x.half().item():<12.8g} bfloat16 {x.bfloat16().item():.8g}"
    )

# %% [markdown]
# 70,000 is too large for float16, and becomes infinite. 1e-8 becomes 0. (In training, small gradients are lost
# that way. The lesson on ZeRO has the remedy.)
#
# **Exercise 6.4: rounded.** Round an array of float32 to `bits` significant bits, from 1 to 24. Take the
# nearest number with at most that many bits; halfway between two of them take the **even** one, whose last bit
# is 0. The result is float32 again, as if it had come from a smaller format. (Leave the range of exponents as
# it is.) `np.frexp` and `np.ldexp` take numbers apart and put them together.


# %% tags=["exercise"]
def rounded(x, bits):
    """Round float32 x to `bits` significant bits, to nearest, ties to even."""
    ...  # about 2 lines


# %%
check(rounded)

# %%
rounded = or_solution(rounded)
x = rng.standard_normal(1000, dtype=np.float32)
print(np.array_equal(rounded(x, 8), torch.tensor(x).bfloat16().float().numpy()))
print(rounded(np.array([1 / 3, 1000.25], np.float32), 11).tolist())

# %% [markdown]
# ## What a tensor core computes
#
# The product of two numbers of 11 bits has 22 at most, and float32 has room for 24: so **products are exact**.
# They are added in float32. So accuracy is lost only when the factors are rounded, and in the sums:


# %%
def tensor_core(a, b, c, bits):
    """D = A x B + C, with factors of `bits` significant bits and sums in float32."""
    return rounded(a, bits) @ rounded(b, bits) + c


# %%
a, b = (rng.random((n, n), dtype=np.float32) for _ in range(2))
a_words = a.astype(np.float16).view(np.uint32)
b_words = np.ascontiguousarray(b.T).astype(np.float16).view(np.uint32)
launch(tensor_matmul, (n // 8, n // 16), 32, a_words, b_words, c)
exact = a.astype(np.float64) @ b
mine = tensor_core(a, b, np.float32(0), 11)
print(f"your kernel and your model differ by  {np.max(np.abs(c - mine) / exact):.1e}")
print(
    f"your model and the exact product by   {np.max(np.abs(mine - exact) / exact):.1e}"
)

# %% [markdown]
# Your kernel and your model agree, except for the order in which they add float32 sums. Both differ from the
# exact product by hundreds of times more, because a and b were rounded.
#
# Why are the *sums* float32 if the factors are not? Add up ones:

# %%
for dtype in (torch.float16, torch.bfloat16, torch.float32):
    total, one = torch.zeros((), dtype=dtype), torch.ones((), dtype=dtype)
    for _ in range(5000):
        total += one
    print(f"5000 ones in {dtype!s:15} {total.item():g}")

# %% [markdown]
# At 2048 float16 has no bits left for the ones: 2049 would take 12 bits, so it is rounded to even, which is
# 2048 again. The sum is stuck. (bfloat16, with 8 bits, is stuck at 256.) A *product* is rounded once, but a
# *sum* is rounded with every term. That is why D = A x B + C uses two kinds of numbers.
#
# ## How large can the error be?
#
# You can compute that before you measure. Follow one product: each time it is rounded to b bits, alone or
# within a sum, it changes by a factor of at most 1 + 2^-b. (The book on this is Higham's *Accuracy and
# Stability of Numerical Algorithms*, 2002.)
#
# **Exercise 6.5: error_bound.** All elements of a and b are positive. They are rounded to `bits` bits. The
# products are exact. Beginning with 0, the k products are added one after the other, and after each addition
# the sum is rounded to the 24 bits of float32. Suppose that each rounding makes its number as much too large as
# it can. By what fraction of itself is the result too large? With `bits` = 11 and k = 1 it is about 0.001.


# %% tags=["exercise"]
def error_bound(bits, k):
    """The largest relative error of a sum of k products of positive numbers."""
    ...  # 1 line


# %%
check(error_bound)

# %%
error_bound = or_solution(error_bound)
for name, bits in (("float16", 11), ("TF32", 11), ("bfloat16", 8)):
    print(
        f"{name:9} k = 16: {error_bound(bits, 16):.5f}   k = 4096: {error_bound(bits, 4096):.5f}"
    )

# %% [markdown]
# The length of the sum changes little, because float32's share of the error is small. The bits of the factors
# decide.
#
# ## Predict, then measure
#
# Multiply the same random matrices twice, with factors in bfloat16 and in float16. How many times as large are
# the errors with bfloat16? Write down your guess, and only then run on.

# %%
prediction = None  # your guess, such as 2.5; None draws no guess


# %% [markdown]
# For comparison there is a third way, with sums in float16 as well. Its bound is like `error_bound`, but with
# 2^-11 in place of 2^-24, and with one more rounding, that of the product.


# %%
def half_sums(a, b):
    total = np.zeros((len(a), b.shape[1]), np.float16)
    a, b = a.astype(np.float16), b.astype(np.float16)
    for p in range(a.shape[1]):
        total += a[:, p, None] * b[p]
    return total


def worst(result, exact):
    return np.max(np.abs(result - exact) / exact)


# %%
depths = [16, 64, 256, 1024, 4096]
errors = {"bfloat16": [], "float16": [], "float16 sums": []}
for k in depths:
    a, b = rng.random((32, k), dtype=np.float32), rng.random((k, 32), dtype=np.float32)
    exact = a.astype(np.float64) @ b
    errors["bfloat16"].append(worst(tensor_core(a, b, np.float32(0), 8), exact))
    errors["float16"].append(worst(tensor_core(a, b, np.float32(0), 11), exact))
    errors["float16 sums"].append(worst(half_sums(a, b), exact))

# %%
bounds = {
    "bfloat16": [error_bound(8, k) for k in depths],
    "float16": [error_bound(11, k) for k in depths],
    "float16 sums": [(1 + 2**-11) ** (k + 3) - 1 for k in depths],
}
ratio = errors["bfloat16"][-1] / errors["float16"][-1]
curves(
    depths,
    errors,
    bounds,
    labels=("k, terms of a sum", "largest relative error"),
    guess=prediction and (depths[-1], prediction * errors["float16"][-1]),
    caption=f"Dots are measured, dashed lines are the bounds. At k = {depths[-1]} bfloat16's error is "
    f"{ratio:.1f} times float16's; {said(prediction)}.",
    alt="Relative error against the length of the sums. Bounds for factors in bfloat16 and float16 are flat, "
    "eight times apart; measured errors lie below them and fall. With sums in float16 bound and error rise.",
)

# %% [markdown]
# No dot is above its line: the bounds hold. And the errors differ by a factor of about 8 = 2^3, because
# bfloat16 has three bits less.
#
# But the dots *fall* where the lines are flat. The bound assumes that all roundings go the same way. In fact
# about as many go up as down, and in a long sum they nearly cancel. With k terms the error relative to the sum
# falls about as 1 / sqrt(k). Sums in float16 are another matter. As soon as a term is less than half of the
# sum's last bit, this term is lost, and so are the next ones. The sum of ones showed that.
#
# ## What real units do
#
# Your model, and the emulator, round each float32 sum to the nearest. Real tensor cores are a little coarser.
# They shift a block of products to the largest exponent, *cut off* the bits below, and add all products at
# once. NVIDIA does not document this; Fasi and others found it out by experiments.
# `minidist.kernels.tpu.tensor_core` models three GPUs after their results:

# %%
a, b = (
    rng.random((16, 16 * 64)).astype(np.float16),
    rng.random((16 * 64, 8)).astype(np.float16),
)
exact, zero = a.astype(np.float64) @ b, np.zeros((16, 8), np.float32)
for unit in ("float32", "V100", "A100", "H100"):
    error = worst(units.tensor_core_mma(a, b, zero, unit=unit), exact)
    print(f"{unit:8} error of the sums {error:.1e}")

# %% [markdown]
# These are errors of the *sums* alone, because the factors are float16 from the start. Cutting always goes
# down, so such errors do not cancel. They are still far below the 0.001 that rounding two factors may cost. But
# these three kinds of GPU do not agree to the last bit, so a program must not count on it. If there is a GPU,
# the next cell times rung 9.

# %%
for number, dtype in ((7, "float32"), (9, "float32"), (9, "bfloat16"), (9, "float16")):
    way = "TF32" if (number, dtype) == (9, "float32") else dtype
    print(f"rung {number}, {way:9}", speed(on_gpu(number, 4096, dtype)))

# %% [markdown]
# ## Where a data sheet's peak comes from
#
# **Exercise 6.6: tensor_core_peak.** A GPU has `multiprocessors` multiprocessors, with `cores` tensor cores in
# each. In each cycle of the clock a core multiplies an m x k matrix by a k x n matrix, and adds the product to
# its sums. `clock` is in cycles a second. How many FLOPs can the GPU do in a second?


# %% tags=["exercise"]
def tensor_core_peak(multiprocessors, cores, m, n, k, clock):
    """FLOP/s of all tensor cores together."""
    ...  # 1 line


# %%
check(tensor_core_peak)

# %%
tensor_core_peak = or_solution(tensor_core_peak)
for gpu, about in {
    "V100": (80, 8, 4, 4, 4, 1.53e9),
    "V100, if all 84 worked": (84, 8, 4, 4, 4, 1.53e9),
    "A100": (108, 4, 8, 8, 4, 1.41e9),
    "H100": (132, 4, 8, 16, 4, 1.83e9),
}.items():
    print(f"{gpu:24}{tensor_core_peak(*about) / 1e12:6.0f} TFLOP/s")

# %% [markdown]
# NVIDIA's data sheets say 125, 312 and 989. The chip of a V100 has 84 multiprocessors, but 80 are switched on,
# so that NVIDIA can also sell chips with a few faults. Over three generations the rate grew eightfold, and the
# clock hardly changed: a multiprocessor does four times as much in a cycle, and there are more of them.
# (NVIDIA's white papers give the multiply-adds of a core in a cycle: 64 for a V100, 256 for an A100, and twice
# that for an H100. The three sizes in the cell are one way to write that.)
#
# ## A tensor core you may own
#
# You need no GPU for such a unit. Intel's Xeons since 2023 have one beside each core: **AMX**, *advanced matrix
# extensions*. Zen 4, Zen 5 and those Xeons also have a smaller relative, an instruction on vectors (VDPBF16PS) that
# multiplies *pairs* of bfloat16. Which of them can your CPU execute? Flags do not always tell the truth, so minidist
# tries each instruction once, in a process of its own (the first time this takes some seconds):

# %%
matrix_unit() or "neither"

# %% [markdown]
# In AMX a fragment is a **tile**: a register of 16 rows with 64 bytes each. That is 16 x 32 bfloat16, or 16 x 16
# float32. A core has eight tiles. The program is the one that you know, with other names:
#
# | | a GPU's warp, rung 9 | a CPU's thread, AMX |
# |---|---|---|
# | a fragment is | some elements in each of 32 lanes | a tile |
# | configure | no need: the sizes are in the name `m16n8k16` | `ldtilecfg`: the rows of each tile, and the bytes of a row |
# | load | `ldmatrix`, from shared memory | `tileloadd`: an address, and the bytes from one row to the next |
# | multiply | `mma.sync`: 16 x 16 by 16 x 8 | `tdpbf16ps`: 16 x 32 by 32 x 16 |
# | store | each lane writes its own elements | `tilestored` |
# | at the end | nothing | `tilerelease`: else Linux saves 8 kB more whenever it switches threads |
#
# **Why b comes in pairs.** The unit takes a word of 32 bits of a row of A: two neighbours, columns 2 p and 2 p + 1.
# They have to meet rows 2 p and 2 p + 1 of B, which lie below each other. So a word of B's tile holds such a pair:
# row p of the tile is B[2p, 0], B[2p + 1, 0], B[2p, 1], B[2p + 1, 1], and so on. (Exercise 6.2 had the same need. It
# got its pairs by transposing b.)


# %%
def in_pairs(b):
    """Rows 2 p and 2 p + 1 of b (k, n) become one row of pairs: (k / 2, 2 n)."""
    k, n = b.shape
    pairs = b.reshape(k // 2, 2, n).swapaxes(1, 2)  # (k / 2, n, 2)
    return np.ascontiguousarray(pairs).reshape(k // 2, 2 * n)


print(np.arange(12).reshape(4, 3))
print(in_pairs(np.arange(12).reshape(4, 3)))

# %% [markdown]
# **Why two by two tiles.** A product keeps the unit busy for 16 cycles, but its sums can be added to again only
# after 52. So at least four products, on different sums, have to be under way. A load takes 8 cycles. With one tile
# of sums each product needs two loads, which take as long as the product. With two by two tiles, four loads serve
# four products:
#
# | | tile 6: columns 0 to 15 of b | tile 7: columns 16 to 31 |
# |---|---|---|
# | **tile 4**: rows 0 to 15 of a | tile 0 | tile 1 |
# | **tile 5**: rows 16 to 31 of a | tile 2 | tile 3 |
#
# `Tiles` is a model of the unit, in NumPy. It refuses what the CPU would refuse, and it counts. A method stands for
# an instruction:
#
# - `unit.configure(rows)` sets up all eight tiles, with 64 bytes a row, full of zeros;
# - `unit.zero(t)` fills tile t with zeros, for t from 0 to 3;
# - `unit.load(t, x, i, j)` fills tile t, 4 to 7, from array `x`: its first element is `x[i, j]`;
# - `unit.multiply(t)` adds to tile t, 0 to 3, the product of the two tiles beside its row and above its column in
#   the table: `multiply(1)` adds tile 4 times tile 7;
# - `unit.store(t, x, i, j)` writes tile t to array `x`, from `x[i, j]` on;
# - `unit.release()` gives the tiles back.
#
# **Exercise 6.7: tile_matmul.** c = a b. `a` (m, k) and `b` (k, n) hold bfloat16, as their 16 bits (uint16), and `c`
# (m, n) is float32, full of garbage. m, n and k are multiples of 32. `b` comes as it is: put it into pairs first,
# with `in_pairs`. Leave the unit as you would on a CPU: with its tiles released.
#
# Par: 4 loads for each 32 x 32 x 32 multiply-adds, and 4 stores for each 32 x 32 elements of `c`.


# %% tags=["exercise"]
def tile_matmul(unit, a, b, c):
    """c = a b by the unit's tiles, two by two; a and b are the bits of bfloat16."""
    (m, k), n = a.shape, b.shape[1]
    ...  # about 16 lines


# %%
check(tile_matmul)

# %% [markdown]
# Now run it on your CPU's own unit, if that is AMX, and on the model otherwise. The model's counts say how busy the
# unit is. (With one tile of sums, which waits 52 cycles for each product, it would be 31%.)

# %%
tile_matmul = or_solution(tile_matmul)


def bits_of(x):
    """float32 x, rounded to bfloat16: the upper 16 bits of each."""
    return (rounded(x, 8).view(np.uint32) >> 16).astype(np.uint16)


a, b = (rng.random(shape, dtype=np.float32) for shape in ((32, 512), (512, 32)))
c, counted_c = (np.full((32, 32), np.nan, np.float32) for _ in range(2))
unit, model = here(), Tiles()
tile_matmul(unit, bits_of(a), bits_of(b), c)
tile_matmul(model, bits_of(a), bits_of(b), counted_c)
print("by", unit.name + ":", np.allclose(c, rounded(a, 8) @ rounded(b, 8)))
counts = model.counts
print(f"{counts.loads} loads, {counts.products} products, {counts.cycles} cycles")
print(
    f"the unit multiplies in {16 * counts.products / counts.cycles:.0%} of these cycles"
)

# %% [markdown]
# ## float32 from three bfloat16
#
# Rounding to 8 bits leaves an error. But that error is a number too, so round *it* to a bfloat16, and keep both. Two
# parts hold about 16 bits of a float32, and three hold all 24. A product of sums is a sum of products. So with two
# parts a b becomes a1 b1 + a1 b2 + a2 b1 (a2 b2 is too small to count): three products of bfloat16, **bf16x3**. With
# three parts it takes six, **bf16x6** (Henry, Tang and Heinecke 2019).


# %%
def parts_of(x, count):
    """Arrays of bfloat16 whose sum is x, or nearly: the largest first."""
    parts = []
    for _ in range(count):
        parts.append(rounded(x, 8))
        x = x - parts[-1]
    return parts


def by_parts(a, b, count):
    """a b in float32, from products of parts; the smallest are added up first."""
    a, b, total = parts_of(a, count), parts_of(b, count), np.float32(0)
    for level in range(count - 1, -1, -1):
        for first in range(level + 1):
            total = total + a[first] @ b[level - first]
    return total


def rms(result, exact):
    return np.sqrt(np.mean((result - exact) ** 2) / np.mean(exact**2))


# %%
a, b = (rng.standard_normal((256, 256), dtype=np.float32) for _ in range(2))
exact = a.astype(np.float64) @ b
errors = {"float32": rms(a @ b, exact)}
for mode, count in (("bf16x6", 3), ("bf16x3", 2), ("bf16", 1)):
    errors[mode] = rms(by_parts(a, b, count), exact)
for mode, error in errors.items():
    print(f"{mode:8} relative error {error:.1e}")

# %% [markdown]
# What do you pay for it? Rung 8 of the CPU's ladder does all three: `matmul(a, b, mode="bf16x3")`. The next cell
# times it on one core, and rung 6, float32 in vectors, for comparison. (If your CPU has no products of bfloat16,
# there is nothing to time, and the picture shows the errors alone.)

# %%
rates = gigaflops(1024)
rate_against_error(rates, errors, matrix_unit())

# %% [markdown]
# From bf16 to bf16x3 and on to bf16x6, each step keeps about eight bits more, and takes three times, then twice as
# many products. Whether bf16x3 beats float32 depends on the unit. VDPBF16PS does twice the work of a float32
# multiply-add, and bf16x3 has three products: it cannot win. AMX does sixteen times that work in a cycle, and there
# it does win. NVIDIA's libraries do the same on tensor cores.
#
# ## What breaks in practice, and how one sees it
#
# - **A wrong map.** Elements in wrong lanes give a result with the right shape and wrong numbers. Multiply by
#   an identity matrix: each element that comes out in a wrong place shows which register is wrong. Random
#   matrices show nothing.
# - **b not in pairs.** On tiles the result has the right shape, and numbers of the right size, all of them wrong.
#   No error tells you. Compare a small product of whole numbers, which is exact.
# - **Not all lanes there.** mma and ldmatrix are instructions of the whole warp. In an `if` that only some
#   lanes take, the result is undefined; the emulator names the lanes.
# - **Infinities.** float16 ends at 65504. A single larger element turns all results that depend on it into
#   infinity or NaN. Look for them (`torch.isfinite`); use bfloat16, or scale.
# - **Float32 that is not.** On request PyTorch uses TF32 for products of float32
#   (`torch.set_float32_matmul_precision("high")`). Results then agree to three digits, not to seven.
# - **A test that asks for too much.** Another GPU adds in another order, and gets other last bits. Compare
#   within the error bound. Do not test for equality, and do not pick a tolerance that just happens to pass.
#
# ## Further reading
#
# - NVIDIA, *Parallel Thread Execution ISA*, 2007 to today: the section "Warp Level Matrix Multiply-Accumulate
#   Instructions" draws each fragment.
# - Fasi, Higham, Mikaitis and Pranesh, *Numerical behavior of NVIDIA tensor cores*, 2021: how one finds out
#   what an undocumented unit does.
# - Markidis, Chien, Laure, Peng and Vetter, *NVIDIA Tensor Core Programmability, Performance & Precision*,
#   2018: the abilities of the first tensor cores, and a way to win lost bits back.
#
# Next: lesson 07 trains a network on products of your own. Lesson 17 goes on with kernels: attention.
