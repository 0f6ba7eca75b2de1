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
# # 3. CUDA from Python
#
# **Time:** about 1.5 hours. **Builds on:** lesson 02.
#
# A GPU has thousands of small arithmetic units, and runs tens of thousands of threads on them at a time. In
# this lesson you write programs for it in Python: one small function, which all of these threads run at once.
# You need no GPU. An emulator executes your compiled program, instruction by instruction. It finds the mistakes
# that a GPU would pass over in silence, and counts what the program does. The counts are the same on every
# machine. If there is a GPU, some cells also time the programs on it.

# %%
import numpy as np
from numba import cuda, float32

from checks.cuda_from_python import check, hint, or_solution
from checks.figures import ladder
from checks.kernels import gpu_seconds, in_words
from checks.pictures.threads import (
    blocks_over_an_array,
    sectors_of_a_load,
    strides_figure,
)
from minidist.kernels.cuda.emulator import Fault, launch, profile

ladder(3)

# %% [markdown]
# **The question.** Two programs double each element of the same matrix, with equally many threads and
# instructions. One of them moves several times as many bytes. How can that be, and how can you see it?
#
# ## A thread for each element
#
# A function that runs on a GPU is called a **kernel**. You call it once, and many **threads** run it. Each of
# them executes the whole function, and they differ only in one number, `cuda.grid(1)`. Where a Python program
# has a loop over the elements of `x`, a kernel has a thread for each element. `@cuda.jit` comes from Numba, and
# compiles the function below it for a GPU.


# %%
@cuda.jit
def double(x):
    i = cuda.grid(1)  # which thread am I?
    x[i] = x[i] + x[i]


x = np.arange(8, dtype=np.float32)
launch(double, 2, 4, x)  # 2 blocks of 4 threads
print(x)

# %% [markdown]
# There is no loop: eight threads ran, each with an `i` of its own. A kernel returns nothing; it writes its
# results into arrays.
#
# `launch(double, 2, 4, x)` started 2 **blocks** of 4 threads each; together they are the **grid** of this
# launch. (A block has 1024 threads at most; a grid may have millions of blocks.) Why blocks? A GPU is made of
# many **multiprocessors**, each with its own arithmetic units. A block runs on one of them from beginning to
# end, and blocks know nothing of each other. So the same program runs on a GPU with 20 multiprocessors and on
# one with 132, where it takes less time.
#
# Within its block a thread has the number `cuda.threadIdx.x`, and its block has the number `cuda.blockIdx.x`.
# `cuda.grid(1)` is short for `cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x`, where `blockDim.x` says
# how many threads a block has.
#
# (On a GPU, in Numba's own notation, the same launch is `double[2, 4](x)`. Numba compiles `double` to **PTX**,
# the assembly language of NVIDIA's GPUs, and `launch` executes that here, with NumPy.)
#
# ## Ragged edges
#
# All blocks of a launch have the same size. Ten elements need three blocks of four threads, which makes twelve
# threads:

# %%
blocks_over_an_array()

# %%
try:
    launch(double, 3, 4, np.arange(10, dtype=np.float32))
except Fault as fault:
    print(in_words(fault))

# %% [markdown]
# The emulator says which thread did it, and where. A GPU usually says nothing: it reads and writes whatever
# lies behind the array, and goes on. So kernels have a **guard**, an `if` that lets a thread work only if it
# has an element.
#
# **Exercise 3.1: add.** `z = x + y`, for three arrays of the same length. The kernel is launched with at least
# as many threads as there are elements, and often with more. `x.size` is the number of elements of `x`.
#
# Par: 2 reads and 1 write for each element. (Par is the cost of the lesson's own kernel. An answer that costs
# up to 1.5 times par passes. One that costs more does not pass, because it misses the idea.)


# %% tags=["exercise"]
@cuda.jit
def add(x, y, z):
    """z = x + y: a thread for each element."""
    ...  # about 3 lines


# %%
check(add)

# %% [markdown]
# No idea how to begin? `hint()` in a cell of its own gives the first of three hints. The next cell takes your
# kernel if it has passed. If not, it takes the lesson's own, so the rest of the lesson works.

# %%
add = or_solution(add)
x, y, z = (np.arange(10, dtype=np.float32) for _ in range(3))
threads = 4
blocks = -(-z.size // threads)  # rounded up: as many blocks as cover all elements
launch(add, blocks, threads, x, y, z)
print(z)

# %% [markdown]
# ## Warps: 32 threads, one instruction
#
# Threads do not run one by one. The hardware takes the threads of a block in groups of 32, which are called
# **warps**: threads 0 to 31, 32 to 63, and so on. A warp executes *one instruction for all 32 threads* at a
# time. So the time depends on how many instructions the warps execute, and a profiler counts those.
#
# `profile` runs a kernel as `launch` does, and returns what it did. Here are 1024 threads, which are 32 warps:

# %%
x = np.zeros(1024, np.float32)
counts = profile(double, 4, 256, x)
print(counts)

# %% [markdown]
# There are 32 loads and 32 stores, one of each for every warp. (The next section explains "sectors", and later
# lessons explain "copied into shared memory" and "matrix instructions".) The other instructions compute `i` and
# the address of `x[i]`. The last rows show the same counts for each line of the kernel. (The number with .py is
# Jupyter's name of the cell.)
#
# What if threads of one warp take different ways at an `if`? All of them have to execute the same instruction.
# So the warp goes *both* ways, one after the other, and on each way the threads that did not choose it wait.
# This is called **divergence**. In the kernel below, half of all threads always go one way and half the other;
# `group` says how many neighbours go together.


# %%
@cuda.jit
def two_ways(x, group):
    i = cuda.grid(1)
    v = x[i]
    if i // group % 2 == 0:
        for _ in range(100):
            v = v * v + float32(1)
    else:
        for _ in range(100):
            v = v / (v + float32(2))
    x[i] = v


# %%
for group in (1, 4, 16, 32, 64):
    counts = profile(two_ways, 4, 256, np.zeros(1024, np.float32), group)
    print(f"{group:3} neighbours together: {counts.total.instructions:7,} instructions")

# %% [markdown]
# From 32 on, each warp has only one way to go, and nearly half of the instructions are gone. The threads did
# the same work in all five runs. So an `if` is cheap where whole warps agree. A guard is cheap too, because
# only the threads of the last warp can disagree.
#
# ## Memory comes in sectors
#
# Memory does not hand out single numbers. It moves **sectors** of 32 bytes, which hold eight elements of
# float32. Each sector begins at a multiple of 32. When a warp executes a load, the hardware looks at the 32
# addresses that its threads ask for. It finds the sectors in which they lie, and fetches each of these sectors
# once. A sector always comes as a whole, even if only one of its elements was asked for. Press Play, or go step
# by step:

# %%
sectors_of_a_load()

# %% [markdown]
# So neighbouring threads should read neighbouring elements. Then the 32 elements of a warp are 128 bytes, which
# are 4 sectors, and each byte that comes is used. Such an access is called **coalesced**. In the worst case
# there are 32 sectors, for the same 128 bytes.
#
# **Exercise 3.2: sectors.** Predict the number of sectors. Thread t of a warp, t from 0 to 31, reads the
# element of 4 bytes at the address `first + t * stride`. `first` and `stride` count bytes and are multiples of
# 4; `stride` may be 0 or negative. How many sectors does this load touch?


# %% tags=["exercise"]
def sectors(first, stride):
    """How many sectors of 32 bytes a warp's load touches."""
    ...  # 1 line


# %%
check(sectors)

# %%
sectors = or_solution(sectors)
for stride in (4, 8, 12, 64, 0, -4):
    print(f"stride {stride:3}, sectors: {sectors(4096, stride):2}")

# %% [markdown]
# One more to think about: with the first element at address 4096, neighbours touch 4 sectors. Why 5 at 4100?

# %%
sectors(4096, 4), sectors(4100, 4)

# %% [markdown]
# ## Predict, then measure
#
# Matrices have two dimensions, and a grid can have two as well: `cuda.grid(2)` gives a thread's place in x and
# in y. In a block of `(32, 8)` threads, x counts fastest: **a warp is 32 threads that are neighbours in x**,
# with the same y. Here are the two programs of the question. A matrix lies in memory row by row.


# %%
@cuda.jit
def by_rows(m):
    j, i = cuda.grid(2)  # neighbours in x: neighbouring columns of one row
    if i < m.shape[0] and j < m.shape[1]:
        m[i, j] += m[i, j]


@cuda.jit
def by_columns(m):
    i, j = cuda.grid(2)  # neighbours in x: neighbouring rows of one column
    if i < m.shape[0] and j < m.shape[1]:
        m[i, j] += m[i, j]


# %% [markdown]
# The matrix has 256 x 256 elements of 4 bytes. `by_columns` moves more bytes than `by_rows`. How many times as
# many? Write down your guess, and only then run on.

# %%
prediction = None  # your guess, such as 2.5; None draws no guess


# %%
def moved(counts):
    """Bytes between memory and the warps: 32 for each sector."""
    return 32 * (counts.total.load_sectors + counts.total.store_sectors)


matrix = np.ones((256, 256), np.float32)  # 8 x 32 blocks of 32 x 8 threads
rows = profile(by_rows, (8, 32), (32, 8), matrix)
columns = profile(by_columns, (8, 32), (32, 8), matrix)
for counts in (rows, columns):
    print(
        f"{counts.kernel:10} {counts.total.instructions:7,} instructions, "
        f"{counts.sectors_per_load:4.0f} sectors per load, {moved(counts):9,} bytes moved"
    )

# %% [markdown]
# The same number of instructions, and 8 times the bytes. Your `sectors` could have told you: the elements of a
# column lie 1024 bytes apart, which is the length of a row, and `sectors(0, 1024) / sectors(0, 4)` is 32 / 4.
# In the next cell the emulator counts other strides. The cell after it draws these counts beside your function.


# %%
@cuda.jit
def every(x, y, stride):
    i = cuda.grid(1)
    y[i] = x[i * stride]


strides = [1, 2, 3, 4, 6, 8, 16, 32, 64, 256]
y = np.zeros(1024, np.float32)
counted = [
    profile(every, 4, 256, np.zeros(1024 * s, np.float32), y, s).sectors_per_load
    for s in strides
]

# %%
predicted = [sectors(0, 4 * stride) for stride in strides]
strides_figure(strides, counted, predicted, prediction)

# %% [markdown]
# Model and count agree exactly, because both follow the same rule. (The emulator applies it to the addresses
# that your threads really ask for.) Neither knows about **caches**. The 32 sectors of a column also hold the
# next seven columns. If another warp asks for those soon enough, a cache still has them, and nothing has to
# come from memory. So the time on a GPU grows with the sectors, but not by a factor of 8. The factor depends on
# the GPU and on the matrix. The next cell times both kernels where there is a GPU.

# %%
large = np.zeros((8192, 8192), np.float32)  # takes no memory before it is used
for kernel in (by_rows, by_columns):
    t = gpu_seconds(kernel, (256, 1024), (32, 8), large)
    print(kernel.__name__, "no GPU here" if t is None else f"{t * 1e3:.2f} ms")

# %% [markdown]
# ## Which index goes first?
#
# Now write a whole matrix product, with a thread for each element of the result. The grid replaces two of the
# three loops, and one is left: the sum.
#
# **Exercise 3.3: matmul.** `c = a b`, for float32 matrices: `a` has m rows and k columns, `b` k rows and n
# columns. Any of these sizes may be 1, and k may be 0. The blocks are `(32, 8)`, and the grid has at least
# max(m, n) threads in x and in y. So you are free to choose which of the two counts the rows. Begin the sum
# with `float32(0)`: a plain `0.0` is a float64, and many GPUs are many times slower with those.
#
# Par: 2.5 sectors for a warp's load on average (4 for one of `a` and `b`, 1 for the other), and 4 for a store.
# Each thread reads 2 k elements and writes 1.


# %% tags=["exercise"]
@cuda.jit
def matmul(a, b, c):
    """c = a b: a thread for each element of c."""
    ...  # about 6 lines


# %%
check(matmul)

# %%
matmul = or_solution(matmul)
a = np.random.default_rng(0).random((64, 64), dtype=np.float32)
c = np.zeros((64, 64), np.float32)
counts = profile(matmul, (2, 8), (32, 8), a, a, c)
np.allclose(c, a @ a), counts.sectors_per_load

# %% [markdown]
# Look at one step of the sum, in one warp. All 32 threads read the *same* `a[i, p]`: one sector. They also read
# 32 neighbours `b[p, j]`: four sectors. With the other choice of index they would read 32 elements of a column
# of `a`: the same result and the same instructions, but 33 sectors instead of 5. This mistake is the most
# common of all, because no test of the result finds it.
#
# ## Fewer threads than elements
#
# A grid does not need a thread for each element. For example, to add up an array, each thread can add up a
# share of it; then you only have to add the threads' sums. But *which* share? On a CPU each thread would get a
# piece of the array: the first thread the first piece, and so on.
#
# **Exercise 3.4: sums.** Each thread adds up its share of `x`, in float32, and writes the sum to its own
# element of `partial`, which has as many elements as the grid has threads. `x` has any number of elements, and
# each element has to be in exactly one share. A thread without elements writes 0. `cuda.gridsize(1)` is the
# number of threads in the grid.
#
# Par: 4 sectors for each load of a warp, and 1 load for 32 elements. (Think of the first step of the loop:
# which 32 elements does a warp read?)


# %% tags=["exercise"]
@cuda.jit
def sums(x, partial):
    """Add up x: each thread its share, into an element of partial of its own."""
    ...  # about 4 lines


# %%
check(sums)

# %% [markdown]
# The loop that reaches par is called a **grid-stride loop** (Harris 2013). It works with any grid and any size,
# so it needs no guard, and a kernel with it can be launched with as many blocks as a GPU runs at a time. The
# next cell compares it with pieces, as a CPU would take them:

# %%
sums = or_solution(sums)


@cuda.jit
def sums_of_pieces(x, partial):
    i, piece = cuda.grid(1), x.size // cuda.gridsize(1)  # for sizes that divide evenly
    total = float32(0)
    for p in range(i * piece, (i + 1) * piece):
        total += x[p]
    partial[i] = total


# %%
x, partial = np.ones(32768, np.float32), np.zeros(1024, np.float32)
large, many = np.zeros(2**26, np.float32), np.zeros(2**17, np.float32)
for kernel in (sums, sums_of_pieces):
    counts = profile(kernel, 4, 256, x, partial)
    t = gpu_seconds(kernel, 512, 256, large, many)
    print(
        f"{kernel.__name__:15} sum {partial.sum():.0f}, {counts.sectors_per_load:4.1f} sectors per load, "
        + ("no GPU here" if t is None else f"{t * 1e3:.2f} ms for 2^26 elements")
    )

# %% [markdown]
# So a pattern that suits a CPU's core is bad for a warp. A core walks through its piece alone, and its cache
# line holds the elements that it reads next. In a warp 32 threads walk at the same time, and only one thing
# matters: which elements they read *together*.
#
# How many threads does a real GPU run? An H100 (SXM) has 132 multiprocessors, and each holds up to 2,048
# threads (NVIDIA's white paper): 270,336 threads at a time, in 8,448 warps. Llama 3 405B was trained on 16,384
# such GPUs (Grattafiori and others 2024), so with four billion threads. Each of them ran kernels like yours.
#
# ## What breaks in practice, and how one sees it
#
# - **No guard.** Threads beyond the edge write into whatever lies there. The result may even be right, until it
#   is not. The emulator names the thread and the array; on a GPU run the program under NVIDIA's
#   `compute-sanitizer`.
# - **The wrong index first.** The result is right, and several times the bytes move. Only counts show it:
#   sectors per request, here or in NVIDIA's Nsight Compute. For 4-byte elements 4 is good and 32 is the worst.
# - **Two threads write the same element.** The last one wins, and that may be either. The emulator calls it a
#   race; a GPU says nothing, and the result changes from run to run. Give each thread an element of its own, as
#   `partial` does.
# - **float64 by accident.** A literal such as `0.5`, or an integer times a float32, makes the expression
#   float64 in Numba. The results are fine, but the kernel is slow. `float32(0.5)` and `float32(i)` keep it in
#   float32.
# - **A launch is not the end.** On a GPU a launch returns at once, and the kernel runs later. If you do not
#   wait for it (`cuda.synchronize()`) before you stop the clock, you time nothing. An error turns up at some
#   later call.
#
# ## Further reading
#
# - Nickolls, Buck, Garland and Skadron, *Scalable Parallel Programming with CUDA*, 2008: grids, blocks and
#   threads, and the reasons for them, by the people who made them.
# - NVIDIA, *CUDA C++ Best Practices Guide*, 2007 to today: the section "Coalesced Access to Global Memory" is
#   what you counted.
# - Harris, *CUDA Pro Tip: Write Flexible Kernels with Grid-Stride Loops*, 2013: the loop of the last exercise.
#
# Next: lesson 04 has the threads of a block fetch together what they all need.
