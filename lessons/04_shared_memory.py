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
# # 4. Shared memory and tiles
#
# **Time:** about 2 hours. **Builds on:** lesson 03.
#
# In lesson 3 each thread fetched all of its numbers from memory by itself. In a matrix product many threads
# need the same numbers. Here the threads of a block fetch these numbers together, once, and put them into
# memory on the chip, where all threads of the block can read them. You will write that kernel, and count how
# much it saves. You will also meet the two things that go wrong with shared memory: threads that do not wait
# for each other, and threads that want the same bank.

# %%
import numpy as np
from numba import cuda, float32

from checks.figures import ladder
from checks.kernels import gpu_seconds, in_words, with_constants
from checks.pictures.tiles import banks_picture, intensity, tiles_animation
from checks.shared_memory import check, hint, or_solution
from minidist.kernels.cuda.emulator import Fault, launch, profile

ladder(4)

# %% [markdown]
# **The question.** The product of two n x n matrices takes 2 n^3 operations, but there are only 2 n^2 numbers.
# How often does each number have to be fetched from memory?
#
# ## How often is an element read?
#
# Here is the plain kernel of lesson 3 again: a thread for each element of the result, and a sum over p.


# %%
@cuda.jit
def naive(a, b, c):
    j, i = cuda.grid(2)
    if i < c.shape[0] and j < c.shape[1]:
        total = float32(0)
        for p in range(a.shape[1]):
            total += a[i, p] * b[p, j]
        c[i, j] = total


# %%
n = 64
rng = np.random.default_rng(0)
a, b = (rng.random((n, n), dtype=np.float32) for _ in range(2))
c = np.zeros((n, n), np.float32)
counts = profile(naive, (n // 32, n // 8), (32, 8), a, b, c)
read = counts.total.load_bytes // 4
print(
    f"{read:,} reads of {2 * n * n:,} elements: each is read {read // (2 * n * n)} times"
)

# %% [markdown]
# Each element is read n times: `a[i, p]` by the n threads that compute row i of c, `b[p, j]` by the n threads
# of column j.
#
# How fast can that be? Each step of the sum does 2 operations (**FLOP**: floating-point operations, here one
# multiplication and one addition), and asks for 8 bytes. 2 / 8 = 0.25 FLOP for each byte is the **arithmetic
# intensity** of this kernel. A GPU can do far more arithmetic than that in the time in which a byte arrives.
# NVIDIA's data sheet gives an H100 (SXM) 67 TFLOP/s in float32, and a memory of 3.35 TB/s:

# %%
print(f"{67e12 / 3.35e12:.0f} FLOP for each byte, to keep the arithmetic units busy")

# %% [markdown]
# So memory limits the naive kernel. (Caches help: some of its reads find a number that another thread has just
# fetched. How much they help depends on the GPU.) The remedy is to fetch once, and use often.
#
# ## Memory that a block shares
#
# Each multiprocessor of a GPU has some fast memory on the chip, about 100 to 200 KB, and each block gets a
# piece of it: **shared memory**. All threads of the block can read and write it; other blocks cannot, and when
# the block ends it is gone. In a kernel, `cuda.shared.array(128, float32)` is *one* array for the whole block,
# not one for each thread. Its size has to be a constant. Its contents are undefined at the beginning.
#
# In a first example, each thread writes one element to shared memory, and reads an element that another thread
# wrote.


# %%
@cuda.jit
def too_early(x, y):
    tile = cuda.shared.array(128, float32)
    t = cuda.threadIdx.x
    tile[t] = x[t]
    y[t] = tile[127 - t]


x, y = np.arange(128, dtype=np.float32), np.zeros(128, np.float32)
try:
    launch(too_early, 1, 128, x, y)
except Fault as fault:
    print(in_words(fault))

# %% [markdown]
# This is a **race**: the 128 threads are four warps, and nothing makes warp 3 write before warp 0 reads. On a
# GPU the result would be right on some days and wrong on others, without any message. The emulator keeps track
# of each write and each wait.
#
# `cuda.syncthreads()` is a **barrier**: a thread waits there until *all* threads of its block have come to it.
# After the barrier every thread can read what any of them wrote before it.
#
# **Exercise 4.1: backwards.** The kernel below turns each piece of 128 elements around: `y[0]` is `x[127]`,
# `y[127]` is `x[0]`, `y[128]` is `x[255]`, and so on. Only its barriers are missing. Add them. A block takes
# several pieces, one after the other, and uses the same `tile` for all of them. (The length of `x` is a
# multiple of 128.)
#
# Par: 2 barriers for each piece.


# %% tags=["exercise"]
@cuda.jit
def backwards(x, y):
    """Turn each piece of 128 elements of x around, into y."""
    tile = cuda.shared.array(128, float32)
    t = cuda.threadIdx.x
    for start in range(cuda.blockIdx.x * 128, x.size, cuda.gridDim.x * 128):
        tile[t] = x[start + t]
        y[start + t] = tile[127 - t]
    ...  # about 2 lines, each in a place of its own; then this one goes


# %%
check(backwards)

# %% [markdown]
# No idea how to begin? `hint()` in a cell of its own gives the first of three hints.

# %%
backwards = or_solution(backwards)
x, y = np.arange(256, dtype=np.float32), np.zeros(256, np.float32)
launch(backwards, 1, 128, x, y)
print(y[:3], y[-3:])

# %% [markdown]
# A thread waits for two different things. Before it reads, *the data has to be there*. Before it overwrites,
# *no other thread may still need the old data*. Nearly every kernel with shared memory has this pair of waits
# in its loop.
#
# ## Tiles
#
# Now the product. Cut c into square **tiles**. A block computes one tile, and has a thread for each of its
# elements. For this it needs some rows of a and some columns of b, which are too long for shared memory. So it
# takes them a tile at a time. Press Play, or go step by step:

# %%
tiles_animation()

# %% [markdown]
# A whole row or a whole column of threads uses each element that the block fetched. With tiles of T x T, each
# element is used T times. (The idea is older than GPUs: lesson 1 does the same for caches. Lam, Rothberg and
# Wolf 1991 explain when it works.)
#
# **Exercise 4.2: reads.** Predict how much that saves. `a` has m x k elements, `b` has k x n, and the tiles are
# `tile` x `tile`. Each block fetches the elements that its tile of c depends on, each of them once. If a size
# is not a multiple of `tile`, the last tiles are smaller: nothing beyond the edges is fetched. How many
# elements do all blocks together read? (`tile` = 1 is the naive kernel.)


# %% tags=["exercise"]
def reads(m, n, k, tile):
    """Elements of a and b that all threads together read from global memory."""
    ...  # about 2 lines


# %%
check(reads)

# %%
reads = or_solution(reads)
for tile in (1, 4, 16, 32):
    print(f"tiles of {tile:2} x {tile:2}: {reads(n, n, n, tile):9,} elements read")

# %% [markdown]
# The large memory outside of the chip is called **global memory**. The arrays that you pass to a kernel lie
# there.
#
# **Exercise 4.3: tiled_matmul.** `c = a b` for float32 matrices, `a` m x k and `b` k x n, of any size, k = 0
# too. The blocks are `(TILE, TILE)`, and there is one for each tile of c. Thread (x, y) of a block fetches
# element [y, x] of each tile. At the edges of the matrices, put `float32(0)` into the tiles, which adds
# nothing. No thread may leave before the last barrier.
#
# Par: for each step from tile to tile, every thread makes 2 reads of global memory and waits at 2 barriers;
# there are no bank conflicts. (The lesson explains bank conflicts below; a warp that reads along the rows of
# `tile_b` has none.) Sum in float32.

# %%
TILE = 16


# %% tags=["exercise"]
@cuda.jit
def tiled_matmul(a, b, c):
    """c = a b: blocks of TILE x TILE threads, each for a tile of c."""
    tile_a = cuda.shared.array((TILE, TILE), float32)
    tile_b = cuda.shared.array((TILE, TILE), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    j, i = cuda.blockIdx.x * TILE + x, cuda.blockIdx.y * TILE + y  # column, row of c
    ...  # about 11 lines


# %%
check(tiled_matmul)

# %%
tiled_matmul = or_solution(tiled_matmul)
counts = profile(tiled_matmul, (n // 16, n // 16), (16, 16), a, b, c)
print(
    np.allclose(c, a @ b), f"{counts.total.load_bytes // 4:,} elements read,", end=" "
)
print(f"{reads(n, n, n, 16):,} predicted")

# %% [markdown]
# ## Predict, then measure
#
# The naive kernel does 0.25 FLOP for each byte that its threads ask for. How many does yours do with tiles of
# 32 x 32? (`reads` could tell you, but guess first.) Write down your guess, and only then run on.

# %%
prediction = None  # your guess, such as 2.5; None draws no guess

# %% [markdown]
# `with_constants(tiled_matmul, TILE=8)` is your kernel compiled for another `TILE`. The next cell counts two
# things for each size: the bytes that threads *asked* for, and the bytes that *moved*, in whole sectors of 32.

# %%
sides, flop = [1, 4, 8, 16, 32], 2 * n**3
asked, moved = [], []
for side in sides:
    kernel, block = naive, (32, 8)
    if side > 1:
        kernel, block = with_constants(tiled_matmul, TILE=side), (side, side)
    counts = profile(kernel, (n // block[0], n // block[1]), block, a, b, c).total
    asked.append(flop / counts.load_bytes)
    moved.append(flop / (32 * counts.load_sectors))
    print(
        f"{side:2}: {counts.load_bytes:9,} bytes asked for, {32 * counts.load_sectors:9,} moved"
    )

# %%
model = [flop / (4 * reads(n, n, n, side)) for side in sides]
intensity(sides, asked, moved, model, prediction)

# %% [markdown]
# The bytes that threads ask for follow the formula: T / 4 FLOP for each byte. The bytes that move differ from
# it at the left end, for reasons that you know from lesson 3. In the naive kernel 32 threads ask for the *same*
# element of a, and one sector answers all of them. In a tile of 4 x 4 a row has 16 bytes, so half of its sector
# is never used. From 8 on, a row of a tile fills whole sectors, and both counts agree.
#
# A block of 1024 threads can have tiles of 32 x 32 at most. That gives 8 FLOP for each byte, still below the 20
# that an H100 needs. Caches close part of the gap. Lesson 5 closes the rest with larger tiles, in which each
# thread has several elements. If there is a GPU, the next cell times the kernels.

# %%
large = np.zeros((2048, 2048), np.float32)
wide = with_constants(tiled_matmul, TILE=32)
for label, kernel, block in (
    ("naive", naive, (32, 8)),
    ("tiles of 32", wide, (32, 32)),
):
    grid = (2048 // block[0], 2048 // block[1])
    t = gpu_seconds(kernel, grid, block, large, large, large)
    print(
        f"{label:12}",
        "no GPU here" if t is None else f"{2 * 2048**3 / t / 1e12:.2f} TFLOP/s",
    )

# %% [markdown]
# ## Banks
#
# Shared memory is fast because it can serve all 32 threads of a warp at once. To do that it consists of 32
# **banks**. It deals out its words of 4 bytes to them like cards: word w lies in bank w % 32. In one **pass**
# each bank hands out one word. If threads of a warp want different words of the *same* bank, they get them one
# after the other, and each word takes a pass: a **bank conflict**. Threads that want the same word share it, at
# no cost.
#
# **Exercise 4.4: passes.** A warp loads from shared memory: thread t, from 0 to 31, reads word `t * stride`. How
# many passes does it take? `stride` is 0 or more.


# %% tags=["exercise"]
def passes(stride):
    """Passes of a warp's load whose thread t reads word t * stride."""
    ...  # about 3 lines


# %%
check(passes)

# %% [markdown]
# Now count the same thing: one warp fills a tile and reads it with a stride.

# %%
passes = or_solution(passes)


@cuda.jit
def every(x, y, stride):
    tile = cuda.shared.array(1024, float32)
    t = cuda.threadIdx.x
    for i in range(t, 1024, 32):
        tile[i] = x[i]
    cuda.syncthreads()
    y[t] = tile[t * stride]


# %%
x, y = np.zeros(1024, np.float32), np.zeros(32, np.float32)
for stride in (0, 1, 2, 3, 4, 8, 16, 24, 31, 32, 33):
    conflicts = profile(every, 1, 32, x, y, stride).shared_conflicts
    print(f"stride {stride:2}: {passes(stride):2} predicted, {1 + conflicts:2} counted")

# %% [markdown]
# A stride of 32 is the worst, and the most common: it is a *column* of a tile of 32 x 32. A stride of 33 has no
# conflicts. So give each row one more word than it needs. This is called **padding**.

# %%
banks_picture()

# %% [markdown]
# ## A transpose
#
# `out = a.T` is a small kernel that needs all of this. It computes nothing. But a warp that reads `a` along
# rows has to write `out` along columns, with 32 sectors for each store. If it writes along rows, it has to read
# along columns. The remedy is to turn the tile in shared memory: read a tile of `a` along its rows, and write
# it along the rows of `out`.
#
# **Exercise 4.5: transpose.** `a` is m x n, `out` n x m, both of any size. Blocks are `(32, 32)`; there is one
# for each tile of a, with `blockIdx.x` counting tiles along the rows of a. `tile` may have another shape.
#
# Par: 4 sectors for each load, 4 for each store, no bank conflicts.


# %% tags=["exercise"]
@cuda.jit
def transpose(a, out):
    """out = a.T, through a tile in shared memory."""
    tile = cuda.shared.array((32, 32), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    j, i = cuda.blockIdx.x * 32 + x, cuda.blockIdx.y * 32 + y  # column, row of a
    ...  # about 7 lines


# %%
check(transpose)

# %% [markdown]
# Compare it with two other kernels: one without shared memory, and one without padding.

# %%
transpose = or_solution(transpose)


@cuda.jit
def straight(a, out):
    j, i = cuda.grid(2)
    if i < a.shape[0] and j < a.shape[1]:
        out[j, i] = a[i, j]


@cuda.jit
def unpadded(a, out):  # for multiples of 32
    tile = cuda.shared.array((32, 32), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    j, i = cuda.grid(2)
    tile[y, x] = a[i, j]
    cuda.syncthreads()
    out[cuda.blockIdx.x * 32 + y, cuda.blockIdx.y * 32 + x] = tile[x, y]


# %%
m, out = np.ones((128, 128), np.float32), np.zeros((128, 128), np.float32)
large, turned = np.zeros((8192, 8192), np.float32), np.zeros((8192, 8192), np.float32)
for kernel in (straight, unpadded, transpose):
    counts = profile(kernel, (4, 4), (32, 32), m, out)
    t = gpu_seconds(kernel, (256, 256), (32, 32), large, turned)
    print(
        f"{kernel.__name__:10} {counts.sectors_per_load:2.0f} sectors per load, "
        f"{counts.sectors_per_store:2.0f} per store, {counts.shared_conflicts:6,} conflicts, "
        + ("no GPU here" if t is None else f"{t * 1e3:.2f} ms for 8192 x 8192")
    )

# %% [markdown]
# ## What limits it now?
#
# Back to the product. Its numbers are on the chip now. But how do they get from there into the arithmetic
# units?

# %%
counts = profile(wide, (n // 32, n // 32), (32, 32), a, b, c)
adds, loads = (counts.instructions[kind] for kind in ("multiply-add", "load shared"))
print(f"{adds:,} multiply-adds of warps, {loads:,} loads from shared memory")

# %% [markdown]
# Each multiply-add loads two numbers, as the line `tile_a[y, q] * tile_b[q, x]` shows. (The assembler that
# turns PTX into a GPU's own code may join loads of neighbours, so a GPU may do fewer.) A multiprocessor can do
# several multiply-adds in the time of one load from shared memory. So now *shared memory* is the limit. The
# remedy is the same as before, one level up: fetch a number into a register, and use it for several results.
#
# Tiles in shared memory are also the idea of FlashAttention (Dao and others 2022). On an A100, the attention of
# GPT-2 medium (forward and backward) moved 40.3 GB from and to memory, and took 41.7 ms. With tiles it moves
# 4.4 GB and takes 7.3 ms, although it does *more* FLOPs, 75.2 billion instead of 66.6 (figure 2 of that paper).
#
# ## What breaks in practice, and how one sees it
#
# - **A missing barrier.** Results are wrong, sometimes, and never when you look. The emulator names both lines;
#   on a GPU it is `compute-sanitizer --tool racecheck`.
# - **A barrier that not all threads reach.** After an early `return`, or with a barrier inside an `if`, the
#   other threads wait for ever, or the hardware does something undefined. Guard the lines that touch memory,
#   never the barrier. The emulator says which thread waits at which line.
# - **Edges of tiles that no thread wrote.** Shared memory still holds the numbers of an earlier block. The
#   emulator reports a fault when you read them. Put zeros where there is no element.
# - **Bank conflicts.** The result is right, but the kernel takes longer. Only counts show it, here or in Nsight
#   Compute. Pad the rows, or turn the loop.
# - **Too much shared memory.** A block that takes half of a multiprocessor's shared memory leaves room for only
#   one more. While these two wait, no other block can work. The share of threads that fit is called
#   **occupancy**.
#
# ## Further reading
#
# - NVIDIA, *CUDA C++ Programming Guide*, 2007 to today: the section "Shared Memory" has the same product.
# - Ruetsch and Micikevicius, *Optimizing Matrix Transpose in CUDA*, 2009: sectors, banks and padding, with
#   times.
# - Boehm, *How to Optimize a CUDA Matmul Kernel for cuBLAS-like Performance: a Worklog*, 2022: the way from
#   lesson 3's kernel to lesson 5's and a little beyond, step by step, measured.
#
# Next: lesson 05 gives each thread a small tile of its own, in registers.
