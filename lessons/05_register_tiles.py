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
# # 5. Register tiles
#
# **Time:** about 2 hours. **Builds on:** lesson 04.
#
# Lesson 4 brought the numbers onto the chip. Its kernel still reads two of them from shared memory for each
# multiply-add, and that is what it waits for now. Here each thread computes a small tile of its own, in
# **registers**. Then you move 16 bytes where you moved 4, and copy the next tile while the kernel multiplies this
# one. As before, an emulator runs your kernels, names their faults, and counts.

# %%
import numpy as np
from numba import cuda, float32

from checks.figures import ladder
from checks.kernels import gpu_seconds, in_words, with_constants
from checks.pictures.registers import levels, register_tiles, ring_of_slots
from checks.register_tiles import check, hint, or_solution
from checks.rungs import counted, on_gpu, speed
from minidist.kernels.cuda.emulator import Fault, launch, profile
from minidist.kernels.cuda.warp import (
    cp_async_16,
    cp_async_commit,
    cp_async_wait,
    load_128,
    store_128,
)

ladder(5)

# %% [markdown]
# **The question.** A multiprocessor multiplies faster than its shared memory hands out numbers. How many
# multiply-adds can one number serve?
#
# ## How much slower is shared memory?
#
# Take an H100 once more. Each of its multiprocessors has 128 units for float32: in one cycle of its clock they
# do 128 multiply-adds, which are those of *four* warps' instructions. In the same cycle its shared memory does
# *one* pass: at most 32 words, for one warp. So all units can only be busy if a warp needs no more than **a
# quarter of a pass for each multiply-add**.
#
# The tiled kernel of lesson 4 needs two: `total += tile_a[y, q] * tile_b[q, x]`. It can keep an eighth of the
# units busy. (Other GPUs have other numbers, and the same problem.)
#
# ## A tile for each thread
#
# Where does `total` lie? In a **register**: a word right beside the arithmetic units, which belongs to one
# thread. Each instruction takes its numbers from registers, and reading them takes no time of its own. So what
# is in a register can be used again and again for nothing. But with a single sum nothing is used again. Let a
# thread have *several* sums, a small rectangle of c. Press Play, or go step by step:

# %%
register_tiles()

# %% [markdown]
# **Exercise 5.1: loads_per_multiply_add.** A thread has `rows` x `columns` sums. How many numbers does it load
# from shared memory for each of its multiply-adds?


# %% tags=["exercise"]
def loads_per_multiply_add(rows, columns):
    """Loads from shared memory for each multiply-add."""
    ...  # 1 line


# %%
check(loads_per_multiply_add)

# %% [markdown]
# No idea how to begin? `hint()` in a cell of its own gives the first of three hints. The next cell takes your
# function where it has passed, and the lesson's own where it has not, so that all that follows works.

# %%
loads_per_multiply_add = or_solution(loads_per_multiply_add)
for rows, columns in ((1, 1), (4, 1), (8, 1), (4, 4), (8, 8), (16, 16)):
    loads = loads_per_multiply_add(rows, columns)
    registers = rows * columns + rows + columns  # sums, and what they are made of
    print(f"{rows:2} x {columns:2}: {loads:5.3f} loads, {registers:3} registers")

# %% [markdown]
# A square does best, and 8 x 8 gets to the quarter. Why not 16 x 16? A thread can have 255 registers at most,
# and needs some for addresses too. And a multiprocessor has 65,536 of them for all of its threads together:
# where each takes many there are few threads, and more often none that can go on while the others wait. 8 x 8
# is a common choice. (Volkov 2010 showed how far few threads can get that have much to do each.)
#
# ## A product with register tiles
#
# Blocks have 16 x 16 threads, and a thread computes `OWN` x `OWN` elements. So a block computes a tile of c of
# `SIDE` x `SIDE`, for which it fetches `DEPTH` columns of a and as many rows of b at a time. The fetching is
# done for you: `fetch` is a function for kernels to call (`device=True`). Its threads go through the tile in
# strides, as in lesson 3.

# %%
OWN = 4
SIDE = 16 * OWN
DEPTH = 16


@cuda.jit(device=True)
def fetch(tile, matrix, i0, j0):
    """All 256 threads copy the tile of the matrix that begins at [i0, j0]."""
    t = cuda.threadIdx.y * 16 + cuda.threadIdx.x
    rows, columns = tile.shape
    for s in range(t, rows * columns, 256):
        i, j = s // columns, s % columns
        inside = i0 + i < matrix.shape[0] and j0 + j < matrix.shape[1]
        tile[i, j] = matrix[i0 + i, j0 + j] if inside else float32(0)


# %% [markdown]
# Which elements are a thread's own? Not `OWN` neighbours: thread (x, y) has rows y, y + 16, y + 32, ... of its
# block's tile, and columns x, x + 16, x + 32, ... Then 16 threads side by side read 16 neighbours of `tile_b`,
# which lie in 16 banks. If each had `OWN` neighbours, they would read every fourth word, or every eighth, and
# some of those share a bank.
#
# `cuda.local.array((OWN, OWN), float32)` is an array of a thread's own. It lies in registers, on one condition:
# registers have no addresses, so the compiler must know each index. It does where loops have a constant length,
# like `range(OWN)`, since it then writes them out (**unrolling**). Otherwise the array lies in **local
# memory**, which is a piece of global memory, and slow.
#
# **Exercise 5.2: register_tile.** `c = a b` for float32 matrices of any size; k may be 0. There is a block for
# each tile of c. Two parts are missing: the `DEPTH` steps of the sums, and writing them to c. In each step load
# `OWN` numbers of `tile_a` into `column`, as many of `tile_b` into `row`, and multiply each with each.
#
# Par: 2 / `OWN` loads from shared memory for each multiply-add, no bank conflicts, no local memory.


# %% tags=["exercise"]
@cuda.jit
def register_tile(a, b, c):
    """c = a b: a thread computes OWN x OWN elements, 16 rows and 16 columns apart."""
    tile_a = cuda.shared.array((SIDE, DEPTH), float32)
    tile_b = cuda.shared.array((DEPTH, SIDE), float32)
    sums = cuda.local.array((OWN, OWN), float32)
    column = cuda.local.array(OWN, float32)  # of tile_a
    row = cuda.local.array(OWN, float32)  # of tile_b
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    i0, j0 = cuda.blockIdx.y * SIDE, cuda.blockIdx.x * SIDE  # the tile of c
    for e in range(OWN):
        for f in range(OWN):
            sums[e, f] = float32(0)
    for p in range(0, a.shape[1], DEPTH):
        fetch(tile_a, a, i0, p)
        fetch(tile_b, b, p, j0)
        cuda.syncthreads()
        ...  # about 7 lines
        cuda.syncthreads()
    ...  # about 5 lines


# %%
check(register_tile)

# %%
register_tile = or_solution(register_tile)
n = 128
rng = np.random.default_rng(0)
a, b = (rng.random((n, n), dtype=np.float32) for _ in range(2))
c = np.zeros((n, n), np.float32)
launch(register_tile, (n // 64, n // 64), (16, 16), a, b, c)
np.allclose(c, a @ b)

# %% [markdown]
# ## Predict, then measure
#
# Lesson 4's kernel takes 2 passes through shared memory for each multiply-add. How many does yours take with
# 8 x 8 sums in a thread? (Do loads cause all of them?) Write down your guess, and only then run on.

# %%
prediction = None  # your guess, such as 0.5; None draws no guess

# %% [markdown]
# The next cell counts, for your kernel compiled with several `OWN`. For global memory it counts the FLOP for
# each byte that threads ask for, as in lesson 4: tiles of `SIDE` x `SIDE` do `SIDE` / 4.

# %%
owns = [1, 2, 4, 8]
multiply_adds = n**3 / 32  # of warps: an instruction does 32 of them
flop_per_byte, passes = [], []
for own in owns:
    kernel = with_constants(register_tile, OWN=own, SIDE=16 * own)
    grid = n // (16 * own)
    counts = profile(kernel, (grid, grid), (16, 16), a, b, c)
    flop_per_byte.append(2 * n**3 / counts.total.load_bytes)
    passes.append(counts.total.shared_passes / multiply_adds)
    print(
        f"{own} x {own}: {flop_per_byte[-1]:2.0f} FLOP for each byte, {passes[-1]:.3f} passes"
    )

# %%
levels(
    owns,
    flop_per_byte,
    [4 * own for own in owns],
    passes,
    [loads_per_multiply_add(own, own) for own in owns],
    prediction,
)

# %% [markdown]
# One change serves both levels. With 8 x 8 sums a block's tile is 128 x 128, and does 32 FLOP for each byte:
# more than the 20 that the memory of an H100 asks for.
#
# On the right the dots lie a little above the formula. It counts loads only, but each tile has to be *stored*
# in shared memory before: `SIDE` x `DEPTH` numbers each of a and of b, for `SIDE` x `SIDE` x `DEPTH`
# multiply-adds. That is 2 / `SIDE` more, 1/64 with 8 x 8 sums, and with it formula and count agree. So shared
# memory lets the units be busy in 16 cycles of 17.
#
# Neither picture shows the other instructions. For each multiply-add there are a few more, mostly for addresses,
# and they take time as well. The ladder's kernels, further down, need fewer of them.
#
# What does this step gain on a real GPU? Boehm (2022) measured the same ladder on an A6000, in per cent of the rate
# of NVIDIA's own library: 13% with tiles in shared memory, 36% with a column of 8 sums in a thread, 69% with 8 x 8
# sums, and 78% with loads of 16 bytes. Where there is a GPU, the next cell times yours.

# %%
large = np.zeros((2048, 2048), np.float32)
for own in (1, 4, 8):
    kernel = with_constants(register_tile, OWN=own, SIDE=16 * own)
    grid = 2048 // (16 * own)
    t = gpu_seconds(kernel, (grid, grid), (16, 16), large, large, large)
    print(
        f"{own} x {own} sums:",
        "no GPU here" if t is None else f"{2 * 2048**3 / t / 1e12:.2f} TFLOP/s",
    )

# %% [markdown]
# ## Sixteen bytes at a time
#
# A load takes an instruction, whether it brings 4 bytes to each thread or 16. GPUs have instructions for both
# (a **vector load**). In Numba one writes the second kind by a function of this project's:
# `load_128(into, i, source, j)` copies 128 bits, from `source[j]` on, to `into[i]` on. `into` is a local array:
# that is, four registers. `store_128` goes the other way.


# %%
@cuda.jit
def double_ones(x):
    i = cuda.grid(1)
    x[i] = x[i] + x[i]


@cuda.jit
def double_fours(x, first):
    four = cuda.local.array(4, float32)
    i = first + 4 * cuda.grid(1)
    load_128(four, 0, x, i)
    for e in range(4):
        four[e] += four[e]
    store_128(x, i, four, 0)


# %%
x = np.ones(4096, np.float32)
for counts in (
    profile(double_ones, 32, 128, x),
    profile(double_fours, 8, 128, x, 0),
):
    print(
        f"{counts.kernel:12} {counts.total.instructions:5,} instructions, "
        f"{counts.total.loads:3} loads, {counts.total.load_sectors} sectors"
    )

# %% [markdown]
# The sectors are the same, since the same bytes move, and a quarter of the loads and stores is enough. There
# are as many additions as before. There is a price: the 16 bytes must begin at a multiple of 16. This is called
# **alignment**.

# %%
try:
    launch(double_fours, 1, 128, x, 2)
except Fault as fault:
    print(in_words(fault))

# %% [markdown]
# This is one mistake that a GPU does not pass over: the kernel stops with "misaligned address". Element
# `[i, j]` of a matrix lies `i * columns + j` elements from its beginning, so where 4 divides j, it is aligned
# in *all* rows only if 4 also divides `columns`. Libraries copy matrices that do not fit, or take 4 bytes at a
# time there.
#
# **Exercise 5.3: axpy.** `y = alpha x + y`, for arrays of n elements, any n. (The name is that of the same
# function in BLAS, the oldest library of linear algebra.) The arrays themselves begin at multiples of 16 bytes.
# There are at least n / 4 threads, and thread i takes elements 4 i to 4 i + 3. Mind the last one to three
# elements.
#
# Par: where 128 divides n, 2 loads of a warp for each 128 elements, and 1 store.


# %% tags=["exercise"]
@cuda.jit
def axpy(alpha, x, y):
    """y = alpha x + y: a thread for four elements, 16 bytes at a time."""
    four_x = cuda.local.array(4, float32)
    four_y = cuda.local.array(4, float32)
    ...  # about 10 lines


# %%
check(axpy)

# %%
axpy = or_solution(axpy)
x, y = np.arange(10, dtype=np.float32), np.ones(10, np.float32)
launch(axpy, 1, 32, np.float32(2), x, y)
print(y)

# %% [markdown]
# In the product, vector loads save instructions at both ends. Four neighbours of a row of b come in one
# instruction, and go into shared memory in another one. And the inner loop reads its 8 numbers of `tile_b` by
# two loads. (A thread's own columns then are two groups of four neighbours. And `tile_a` has to lie turned, so
# that a thread finds its *rows* side by side.)
#
# It does not save passes. Shared memory still hands out 32 words in each, so a warp's load of 16 bytes takes
# four.
#
# ## Copies that go on by themselves
#
# One kind of waiting is left. A number from global memory takes hundreds of cycles to arrive. Our kernel
# fetches a tile and waits for it, then multiplies, while memory waits; then it fetches again. Could it fetch
# the *next* tile while it multiplies this one?
#
# GPUs since 2020 (Ampere) have an instruction for it, an **asynchronous copy**. A thread begins to copy 16
# bytes from global to shared memory, and goes on with something else at once:
#
# - `cp_async_16(shared, i, source, j)` begins to copy 16 bytes of `source[j]` on to `shared[i]` on;
# - `cp_async_commit()` makes a **group** of all copies that this thread began since the last commit;
# - `cp_async_wait(g)` waits until at most g of its groups are still under way: the g youngest. g is a constant.
#
# Below 128 threads turn 512 elements around, as in lesson 4. Each copies 16 bytes, 4 elements, and then writes
# 4. (`alignment=16` has the shared array begin at a multiple of 16 bytes: vector loads need that, and so do
# these.)

# %%
PIECE = 512  # elements: 16 bytes for each of 128 threads


@cuda.jit
def does_not_wait(x, y):
    piece = cuda.shared.array(PIECE, float32, alignment=16)
    t = cuda.threadIdx.x
    cp_async_16(piece, 4 * t, x, 4 * t)
    cp_async_commit()
    cuda.syncthreads()
    for i in range(t, PIECE, 128):
        y[i] = piece[PIECE - 1 - i]


x, y = np.arange(PIECE, dtype=np.float32), np.zeros(PIECE, np.float32)
try:
    launch(does_not_wait, 1, 128, x, y)
except Fault as fault:
    print(in_words(fault))

# %% [markdown]
# The barrier waits for *threads*, not for copies. A `cp_async_wait(0)` before it is what is missing. It can't
# take the barrier's place either: a thread waits for *its own* copies only, and reads what others have copied.
# So it takes both, in this order: **each thread waits for its own copies, then all wait for each other.**
#
# ## A ring of slots
#
# To copy ahead, one needs more than one place to copy to. Take several **slots**, and use them in turns:

# %%
ring_of_slots()

# %% [markdown]
# Lesson 4 had two barriers in each round, "the data is there" and "no thread needs it any more". Here one says
# both. This is called a **software pipeline**. With `SLOTS` slots there are up to `SLOTS` - 1 copies under way.
#
# **Exercise 5.4: ring_backwards.** One block of 128 threads turns each piece of 512 elements of x around, into
# y, as `backwards` did in lesson 4, and copies `SLOTS` - 1 pieces ahead. Piece p goes to slot `p % SLOTS`,
# which is `ring[p % SLOTS * PIECE]` and on. There may be fewer pieces than slots. When a piece is waited for,
# the copies of the next `PENDING` = `SLOTS` - 2 pieces may still be under way.
#
# Mind the end: `cp_async_wait` counts *groups*. It counts right if each round commits one, even an empty one.
#
# Par: 1 barrier for each piece, and no wait for a piece that is not needed yet.

# %%
SLOTS = 3
RING = SLOTS * PIECE
PENDING = SLOTS - 2


# %% tags=["exercise"]
@cuda.jit
def ring_backwards(x, y):
    """Turn each piece of x around, into y: while one is turned the next ones are copied."""
    ring = cuda.shared.array(RING, float32, alignment=16)
    t, pieces = cuda.threadIdx.x, x.size // PIECE
    ...  # about 13 lines


# %%
check(ring_backwards)

# %%
ring_backwards = or_solution(ring_backwards)
x, y = np.arange(8 * PIECE, dtype=np.float32), np.zeros(8 * PIECE, np.float32)
counts = profile(ring_backwards, 1, 128, x, y)
print(y[:3], y[-3:], f"{counts.counts.copied_bytes:,} bytes copied asynchronously")

# %% [markdown]
# You have met all of the pieces of a fast product. The project's ladder puts them together, one a file, in
# `minidist/kernels/cuda`. Here are four of its rungs, counted. "Requests" are instructions that go to shared
# memory. Instructions, requests and passes are for each multiply-add of a warp.

# %%
print(f"{'':20}instructions  requests  passes  barriers")
for number in (3, 5, 6, 7):
    counts = counted(number, a, b)
    total = counts.total
    print(
        f"{counts.kernel:20}{total.instructions / multiply_adds:12.2f}"
        f"{total.shared_requests / multiply_adds:10.3f}"
        f"{total.shared_passes / multiply_adds:8.3f}{counts.instructions['barrier']:10}"
    )

# %% [markdown]
# `s3_shared_tile` is lesson 4. `s5_thread_tile_2d` has 8 x 8 sums: about an eighth of its requests, and of its
# passes. `s6_vector_loads` has about a quarter of those requests, but as many passes, as you know.
# `s7_async_copy` has four slots, and half the barriers. It has a few *more* instructions than rung 6: counts do
# not show what it is good for, which is waiting that does not happen. That is what a clock is for, and it takes
# a GPU.

# %%
for number in (3, 5, 6, 7):
    print(f"rung {number}:", speed(on_gpu(number, 4096)))

# %% [markdown]
# ## What breaks in practice, and how one sees it
#
# - **A local array that is not in registers.** One index that is not known when compiling, and the whole array
#   lies in local memory. Results are right. The emulator's counts have "load local"; on a GPU the compiler
#   reports "spill" and "stack frame".
# - **Too many registers.** With more than 255 the compiler spills some into local memory; with somewhat fewer,
#   only one block fits a multiprocessor. Try other sizes of tile, and measure.
# - **Misaligned address.** It works for sizes that 4 divides, and stops for others. Test with ragged sizes, and
#   with arrays that begin in the middle of another one.
# - **A wait that counts wrong.** A commit within an `if`, and near the end the last pieces are read too early.
#   On a GPU this goes well nearly always, since the copy mostly has arrived. The emulator carries out copies as
#   late as they may be, so that it always shows.
# - **A ring that is too deep.** Slots are shared memory, and what a block takes other blocks do not have. Three
#   or four slots are common.
#
# ## Further reading
#
# - Volkov, *Better Performance at Lower Occupancy*, 2010: why a thread should have much to do, with registers
#   as the fastest memory.
# - NVIDIA, *CUTLASS: Efficient GEMM in CUDA*, 2017 to today: tiles of blocks, warps and threads, and the
#   software pipeline, in the words of those who make the library.
# - NVIDIA, *CUDA C++ Programming Guide*, 2007 to today: the section "Asynchronous Data Copies".
#
# Next: lesson 06 leaves the multiply-adds to a unit that does 2048 of them in one instruction.
