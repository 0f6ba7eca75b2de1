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
# # 1. Matmul on a CPU
#
# **Time:** about 1.5 hours. **Builds on:** lesson 00.
#
# Nearly all of a neural network's work is one operation: the product of two matrices. You will write it four
# times. The first version is the definition, and it is slow. The last version does the same additions and
# multiplications, and is thousands of times as fast. Only two things change in between: the *order* of the work,
# and where the numbers lie when they are needed.

# %%
from time import process_time

import numpy as np
from numba import njit
from threadpoolctl import threadpool_info, threadpool_limits

from checks.figures import bars, ladder, said
from checks.matmul_on_a_cpu import check, hint, or_solution
from checks.pictures.walks import blocks_animation, register_walk, walks_animation
from minidist.kernels.cpu.support.caches import caches

threadpool_limits(1)  # one core for all, NumPy's library too
ladder(1)

# %% [markdown]
# **The question.** A core can do billions of multiply-adds in a second. Three loops in Python do a few million.
# Where do all the others go, and how do you get them back?
#
# ## The definition
#
# `a` has m rows and k columns, `b` has k rows and n columns, and `c`, their product, has m rows and n columns.
# Element (i, j) of `c` is the sum over p of `a[i, p] * b[p, j]`: row i of `a` with column j of `b`.
#
# **Exercise 1.1: matmul_loops.** Fill `c` with the product, with three loops. Read and write single elements, as
# in `a[i, p]`. `c` arrives full of garbage; overwrite it. Sizes may be 0: the sum of nothing is 0. Use plain loops
# and numbers, here and in the next exercises: a compiler has to understand them later.
#
# Par: 2 reads for each multiply-add, and 1 write for each element of `c`.
#
# **Par** is the cost of the lesson's own answer. The check counts the cost of yours. Up to par you pass *at
# par*. Up to 1.5 times par you pass, above par. If your answer costs more, you do not pass, even if every
# result is right: it misses the exercise's idea, and the check says which idea. `minidist lessons --progress`
# shows how many exercises you passed, and how many of them at par.


# %% tags=["exercise"]
def matmul_loops(a, b, c):
    """Fill c with a times b, one sum for each element."""
    m, k = a.shape
    n = b.shape[1]
    ...  # about 6 lines


# %%
check(matmul_loops)

# %% [markdown]
# No idea how to begin? `hint()` in a cell of its own gives the first of three hints. The next cell takes your
# function if it has passed. If not, it takes the lesson's own, so the rest of the lesson works.

# %%
matmul_loops = or_solution(matmul_loops)


def matrices(n, seed=0):
    rng = np.random.default_rng(seed)
    a, b = (rng.standard_normal((n, n)).astype(np.float32) for _ in range(2))
    return a, b, np.empty((n, n), np.float32)


a, b, c = matrices(40)
matmul_loops(a, b, c)
np.abs(c - a @ b).max()

# %% [markdown]
# That is as exact as float32 gets. How fast is it? An n x n product has n³ multiply-adds, which are 2 n³
# floating-point operations, **FLOPs**. A billion of them in a second is one GFLOP/s. (`process_time` counts
# only the seconds in which this program had a core, so other programs do not count.)


# %%
def gflops(matmul, n, *more, rounds=3):
    a, b, c = matrices(n)
    best = np.inf
    for _ in range(rounds):
        start = process_time()
        matmul(a, b, c, *more)
        best = min(best, process_time() - start)
    return 2 * n**3 / best / 1e9


# %% [markdown]
# The rates of all versions go into one table. At its other end stands NumPy, which calls a library that people
# have tuned for decades (BLAS). How many times as fast as your Python loops is NumPy, on one core? Write down
# your guess before you run the next cell. (The lesson times NumPy and all later versions at n = 512. It times
# the Python loops at n = 64: their rate is about the same there, and at 512 you would wait for a minute.)

# %%
prediction = None  # your guess, such as 100; None draws no guess

# %%
N = 512
rates = {
    "Python loops": gflops(matmul_loops, 64, rounds=1),
    "NumPy, one core": gflops(np.matmul, N),
}
for way, rate in rates.items():
    print(f"{way:18}{rate:10.4f} GFLOP/s")
print(f"NumPy is {rates['NumPy, one core'] / rates['Python loops']:,.0f} times as fast")

# %% [markdown]
# ## 1. Compile it
#
# Python keeps each number in an object, a *box*. For each multiply-add it fetches two boxes, finds out what `*`
# and `+` mean for them, makes new boxes, and throws the old ones away. **Numba** compiles the very same loops
# to machine code. It sees that every value is a plain number, so it needs no boxes. You change nothing.

# %%
compiled_loops = njit(matmul_loops)
compiled_loops(*matrices(4))  # the first call compiles
rates["compiled"] = gflops(compiled_loops, N)
print(f"{rates['compiled']:.2f} GFLOP/s")

# %% [markdown]
# Much better, and still far from NumPy. The processor now waits for something else: for numbers.
#
# ## 2. How many bytes for how much work?
#
# **Arithmetic intensity** is work per byte: FLOPs, divided by the bytes that have to come from memory or go to
# it. A matrix product is special. It has m k n multiply-adds, but only m k + k n + m n elements. So each
# element could be used many times once it is there.
#
# **Exercise 1.2: intensity.** Return the FLOPs per byte of an m x k times k x n product, if `a` and `b` are
# read once and `c` is written once. An element has `itemsize` bytes.


# %% tags=["exercise"]
def intensity(m, k, n, itemsize):
    """FLOPs for each byte that has to be moved."""
    ...  # 1 line


# %%
check(intensity)

# %%
intensity = or_solution(intensity)
for n in (1, 16, 64, 512, 4096):
    print(f"n = {n:5}: {intensity(n, n, n, 4):8.2f} FLOPs per byte")

# %% [markdown]
# It grows with n. So a large product *need* not wait for memory, as long as each number is used often before the
# cache drops it. The loops above do not manage that. Here is why.
#
# ## 3. Walk along the rows
#
# Memory does not move single elements. It moves **cache lines** of 64 bytes: 16 float32 that lie side by side. A
# cache keeps the lines that were used last. NumPy lays a matrix down row by row, so a line is a piece of a *row*.
# Below is a tiny model: matrices of 8 x 8, lines of 4 elements, a cache of 8 lines. Press Play and watch `b`.

# %%
walks_animation("ijp")

# %% [markdown]
# Your loops walk *down a column* of `b`. Each step lands in another line, fetches all of it, and uses one
# element. The line is gone before its other elements are wanted. Swap the two inner loops, and you do the same
# products in another order:

# %%
walks_animation("ipj")

# %% [markdown]
# Now each line is used to its end. There is a second gain: the inner loop now adds to n *separate* sums side by
# side, so the compiler may do 8 or 16 of them at once with one **SIMD** instruction. (It may not do that with
# one long sum: it would add in another order, and round differently.)
#
# **Exercise 1.3: matmul_rows.** The product again, with j in the innermost loop. A sum is complete only when the
# loop over p has ended, so the sums grow in `c`. The line `c[:] = 0` sets all of it to 0.
#
# Par: the cache lines that the right order fetches, counted with a cache of 24 lines.


# %% tags=["exercise"]
def matmul_rows(a, b, c):
    """Fill c with a times b; the inner loop walks along rows of b and c."""
    m, k = a.shape
    n = b.shape[1]
    ...  # about 6 lines


# %%
check(matmul_rows)

# %%
matmul_rows = or_solution(matmul_rows)
compiled_rows = njit(matmul_rows)
compiled_rows(*matrices(4))
rates["rows"] = gflops(compiled_rows, N)
print(f"{rates['rows']:.2f} GFLOP/s")

# %% [markdown]
# ## 4. Stay in the cache
#
# For each row of `c` the loops go through *all* of `b`. That is fine while `b` fits into a cache. If `b` is larger,
# every row of `c` fetches all of `b` from memory anew. The remedy is a **block** of `b` that does fit: a few of its
# rows. Use it for all rows of `a`, and only then go on to the next block.

# %%
blocks_animation()

# %% [markdown]
# **Exercise 1.4: matmul_blocks.** As in `matmul_rows`, but take only `size` rows of `b` at a time, and use them
# for all rows of `a`. The last block may have fewer rows.
#
# Par: again cache lines, with a cache that is too small for `b` but large enough for one block.


# %% tags=["exercise"]
def matmul_blocks(a, b, c, size):
    """Fill c with a times b, one block of `size` rows of b after the other."""
    m, k = a.shape
    n = b.shape[1]
    ...  # about 7 lines


# %%
check(matmul_blocks)

# %% [markdown]
# Blocks win only where `b` does not fit into a cache. At n = 512 `b` has 1 MB, and most machines have a cache
# for that. So the next cell looks up the caches of *your* machine, and makes a `b` at least twice as large as
# the largest of them. (512 MB at most: a few servers have caches beyond that, and there blocks win less.) `a`
# has 32 rows, so that you do not wait.

# %%
matmul_blocks = or_solution(matmul_blocks)
compiled_blocks = njit(matmul_blocks)
compiled_blocks(*matrices(4), 2)

largest = max(caches().l2, caches().l3)
K = 4096  # a row of b has as many columns: 16 kB
while min(2 * largest, 512e6) > 4 * K * 4096:
    K *= 2
rng = np.random.default_rng(0)
wide_a, wide_b = (
    rng.random((rows, columns), np.float32) for rows, columns in ((32, K), (K, 4096))
)
wide_c = np.empty((32, 4096), np.float32)


def wide_gflops(matmul, *more):
    best = np.inf
    for _ in range(3):
        start = process_time()
        matmul(wide_a, wide_b, wide_c, *more)
        best = min(best, process_time() - start)
    return 2 * wide_a.size * 4096 / best / 1e9


print(f"largest cache {largest / 2**20:.0f} MiB, b {wide_b.nbytes / 2**20:.0f} MiB")
rates["rows, large b"] = wide_gflops(compiled_rows)
print(f"all of b for each row: {rates['rows, large b']:6.2f} GFLOP/s")
for size in (4, 8, 16, 64, 256):
    rate = wide_gflops(compiled_blocks, size)
    rates["blocks, large b"] = max(rate, rates.get("blocks, large b", 0))
    print(f"blocks of {size:3} rows of b: {rate:6.2f} GFLOP/s")
wide_a = wide_b = wide_c = None  # their memory is free again

# %% [markdown]
# The large `b` costs your rows much of their rate, and blocks win most of it back. A block of 16 rows has 256
# kB, so it stays in a second cache while all rows of `a` use it. A block can be too large: then it does not fit
# either. It can also be too small: each further block goes through all of `c` once more.
#
# ## 5. Stay in the registers
#
# Count what the inner loop does for each multiply-add: it reads `b[p, j]`, reads `c[i, j]`, and writes `c[i, j]`.
# Three trips to the cache, for one multiply-add! Even the fastest cache delivers only two or three vectors in a
# cycle, and a core could do two multiply-adds in the same cycle.
#
# The fastest memory is a **register**: a few dozen numbers (or SIMD vectors) inside the core. Take 2 rows of `a`
# and 4 of its columns: 8 numbers that stay in registers for a whole walk along j. Then 4 elements of `b` serve
# *two* rows of `c`, and *four* products are added to an element of `c` at a time. That is 6 reads and 2 writes for 8
# multiply-adds.

# %%
register_walk()

# %% [markdown]
# **Exercise 1.5: matmul_tile.** Fill `c` with the product. Take 2 rows and 4 columns of `a` at a time. m is a
# multiple of 2 and k of 4, so nothing is left over.
#
# Par: the reads and writes above, the reads of the 8 elements of `a`, and the writes of the zeros.


# %% tags=["exercise"]
def matmul_tile(a, b, c):
    """Fill c with a times b, with 2 x 4 elements of a in variables."""
    m, k = a.shape
    n = b.shape[1]
    ...  # about 10 lines


# %%
check(matmul_tile)

# %%
matmul_tile = or_solution(matmul_tile)
compiled_tile = njit(matmul_tile)
compiled_tile(*matrices(4))
rates["tile"] = gflops(compiled_tile, N)
print(f"{rates['tile']:.2f} GFLOP/s")

# %% [markdown]
# ## Where you are, and where the top is
#
# `minidist.kernels` has the same ladder, rung by rung, as files to read. Its sixth rung goes to the end of this
# road. It keeps a tile of `c` in registers, as large as possible, and uses the processor's vector instructions
# directly. It first copies (*packs*) blocks of `a` and `b` into the order in which the tile reads them.

# %%
from minidist.kernels import rung

top = rung("s6_register_tile")
top.matmul(*matrices(64))  # the first call compiles
rates["minidist, rung 6"] = gflops(top.matmul, N)

# %% [markdown]
# How does that compare with NumPy? NumPy calls a BLAS library, which picks one of its kernels by the name of
# your processor. Rung 6 finds out what your processor can do. If the library's kernel suits your processor as
# well, the two differ by a few per cent. If rung 6 is far ahead, the library took a kernel for an older
# processor (the next cell prints which). If it is far behind, the library uses instructions that rung 6 does
# not know.

# %%
library = next((each for each in threadpool_info() if each["user_api"] == "blas"), {})
print("NumPy's library:", library.get("internal_api"), library.get("architecture"))
print(
    f"rung 6 has {rates['minidist, rung 6'] / rates['NumPy, one core']:.2f} times its rate"
)

# %%
ways = (
    "Python loops",
    "compiled",
    "rows",
    "rows, large b",
    "blocks, large b",
    "tile",
    "minidist, rung 6",
)
shown = {way: rates[way] for way in (*ways, "NumPy, one core")}
guess = prediction and prediction * rates["Python loops"]
bars(
    shown,
    "GFLOP/s, one core",
    guess=guess and ("NumPy, one core", guess),
    caption=f"Rates at n = {N} (Python loops: 64), a grid line ten times the one before. NumPy is "
    f"{rates['NumPy, one core'] / rates['Python loops']:,.0f} times as fast as "
    f"the Python loops; {said(prediction)}.",
    alt="One bar for each way, growing from Python loops over compiled loops, rows and "
    "the register tile to the tuned kernels. With a large b rows fall back, and blocks "
    "are in between.",
)

# %% [markdown]
# The scale is logarithmic: each grid line to the right is ten times the one before. The bars tell the story of
# the counts. Every bar has the same multiply-adds. All the rest shrinks: the interpreter's work, the cache
# lines, and the reads and writes for each multiply-add. (The two bars for a large `b` are about another
# product, whose `b` comes from memory.)
#
# What does such a factor mean for a real model? Llama 3 405B (Grattafiori and others 2024) has layers that
# multiply a batch by a matrix of 16,384 x 53,248. It was trained on sequences of 8,192 tokens. Here is one of
# the many such products in a step:

# %%
flops = 2 * 8192 * 16_384 * 53_248
for way in ("Python loops", "minidist, rung 6"):
    print(f"{way:18}{flops / rates[way] / 1e9:14,.0f} seconds")
print(f"{'one H100':18}{flops / 989e12:14.3f} seconds at the peak of its data sheet")

# %% [markdown]
# ## What breaks in practice, and how one sees it
#
# - **Compiled loops check no index.** In Python `a[i, p]` past the end is an `IndexError`. Compiled code reads
#   whatever lies there, or crashes. Run new loops in Python first, as the checks here do, or with
#   `njit(boundscheck=True)`.
# - **An index that may be negative.** Python's negative indices count from the end. For `c[i, j0 + j]` Numba
#   tests each index for that, and then it cannot use SIMD: the same loop is many times slower. Loop over
#   `range(n)`, or take a slice before the loop. Only a measurement shows it.
# - **The first call compiles.** Time the first call and you time the compiler. Call once, then measure, and take
#   the best or the median of several rounds.
# - **Sizes that are powers of two** can be slow with columns: the elements of a column then fall into the same
#   few places of a cache and push each other out. Compare n = 512 with n = 520 in `compiled_loops`.
# - **Other orders give other bits.** `rows` adds one product after the other, `tile` four at a time: results differ
#   in the last digits, and both are right. Compare with a tolerance, never with `==`.
# - **All cores at once.** NumPy uses all cores unless you tell it otherwise. Then a comparison with one-core
#   code means nothing. `threadpool_limits` (above) or `OMP_NUM_THREADS=1` limits it to one core.
#
# ## Further reading
#
# - Goto and van de Geijn, *Anatomy of High-Performance Matrix Multiplication*, 2008: blocks for each cache, packing,
#   and the register tile; how BLAS libraries are built to this day.
# - Drepper, *What Every Programmer Should Know About Memory*, 2007: lines, caches, and how to see them. Section 6
#   has this very product.
# - Boehm, *Fast Multidimensional Matrix Multiplication on CPU from Scratch*, 2022: the same road in C++, with the
#   assembly that the compiler makes of it.
#
# Next: lesson 02 looks at the machines that were built for this one operation.
