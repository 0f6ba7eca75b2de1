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
# Lesson 4 brought the numbers onto the chip. But its kernel still reads two of them from shared memory for each
# multiply-add, and now it waits for those reads. Here each thread computes a small tile of its own, in
# **registers**. Then you move 16 bytes at a time instead of 4, and copy the next tile while the kernel
# multiplies this one. As before, an emulator runs your kernels, names their faults, and counts.

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
# Take an H100 once more. Each of its multiprocessors has 128 units for float32. In one cycle of its clock they
# do 128 multiply-adds, which is the work of *four* warps' instructions. In the same cycle its shared memory
# does *one* pass: at most 32 words, for one warp. So all units are busy only if a warp needs no more than **a
# quarter of a pass for each multiply-add**.
#
# The tiled kernel of lesson 4 needs two passes: `total += tile_a[y, q] * tile_b[q, x]`. So it can keep an
# eighth of the units busy. (Other GPUs have other numbers, but the same problem.)
#
# ## A tile for each thread
#
# Where does `total` lie? In a **register**: a word right beside the arithmetic units, which belongs to one
# thread. Each instruction takes its numbers from registers, and these reads take no extra time. So a thread can
# use a number in a register again and again at no cost. But with a single sum, no number is used again. So give
# a thread *several* sums, a small rectangle of c. Press Play, or go step by step:

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
# function if it has passed. If not, it takes the lesson's own, so the rest of the lesson works.

# %%
loads_per_multiply_add = or_solution(loads_per_multiply_add)
for rows, columns in ((1, 1), (4, 1), (8, 1), (4, 4), (8, 8), (16, 16)):
    loads = loads_per_multiply_add(rows, columns)
    registers = rows * columns + rows + columns  # sums, and what they are made of
    print(f"{rows:2} x {columns:2}: {loads:5.3f} loads, {registers:3} registers")

# %% [markdown]
# Squares do best, and 8 x 8 reaches the quarter. Why not 16 x 16? A thread can have 255 registers at most, and
# needs some for addresses as well. And all threads of a multiprocessor share its 65,536 registers. If each
# thread takes many, there are few threads, and more often none of them can go on while the others wait. 8 x 8
# is a common choice. (Volkov 2010 showed how fast a few threads can be if each has much to do.)
#
# ## A product with register tiles
#
# Blocks have 16 x 16 threads, and a thread computes `OWN` x `OWN` elements. So a block computes a tile of c of
# `SIDE` x `SIDE`. For this it fetches `DEPTH` columns of a and as many rows of b at a time. The function
# `fetch` does this for you. Kernels can call it (`device=True`). The threads go through the tile in strides, as
# in lesson 3.

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
# Which elements belong to a thread? They are not `OWN` neighbours: thread (x, y) has rows y, y + 16, y + 32,
# ... of its block's tile, and columns x, x + 16, x + 32, ... Then 16 threads side by side read 16 neighbours of
# `tile_b`, which lie in 16 banks. If each thread had `OWN` neighbours, the threads would read every fourth
# word, or every eighth, and some of those share a bank.
#
# `cuda.local.array((OWN, OWN), float32)` is an array that belongs to one thread. It lies in registers, on one
# condition: registers have no addresses, so the compiler must know each index. It does if loops have a constant
# length, like `range(OWN)`, because it then writes out every round (**unrolling**). Otherwise the array lies in
# **local memory**, which is a piece of global memory, and slow.
#
# **Exercise 5.2: register_tile.** `c = a b` for float32 matrices of any size; k may be 0. There is a block for
# each tile of c. Two parts are missing: the `DEPTH` steps that add to the sums, and the lines that write the
# sums to c. In each step load `OWN` numbers of `tile_a` into `column`, as many of `tile_b` into `row`, and
# multiply each with each.
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
# Lesson 4's kernel takes 2 passes through shared memory for each multiply-add. How many does yours take with 8
# x 8 sums in a thread? (Do only loads cause passes?) Write down your guess, and only then run on.

# %%
prediction = None  # your guess, such as 0.5; None draws no guess

# %% [markdown]
# The next cell compiles your kernel for several values of `OWN`, and counts these passes. It also counts the
# FLOP for each byte that threads ask for from global memory, as in lesson 4: tiles of `SIDE` x `SIDE` do `SIDE`
# / 4.

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
# One change helps on both levels. With 8 x 8 sums a block's tile is 128 x 128, and does 32 FLOP for each byte.
# That is more than the 20 that an H100 needs.
#
# On the right the dots lie a little above the formula. The formula counts loads only, but each tile first has
# to be *stored* in shared memory: `SIDE` x `DEPTH` numbers of a and as many of b, for `SIDE` x `SIDE` x `DEPTH`
# multiply-adds. That adds 2 / `SIDE`, which is 1/64 with 8 x 8 sums, and then formula and count agree. So
# shared memory lets the units be busy in 16 of 17 cycles.
#
# Neither picture shows the other instructions. For each multiply-add there are a few others, mostly for
# addresses, and they take time as well. The project's own kernels, further down, need fewer of them.
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
# A load takes one instruction, whether it brings 4 bytes to each thread or 16. GPUs have instructions for both;
# the second is called a **vector load**. In Numba you write it as `load_128(into, i, source, j)`, a function of
# this project. It copies 128 bits: four elements, from `source[j]` on, to `into[i]` and the next three. `into`
# is a local array, so the elements go to four registers. `store_128` goes the other way.


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
# The sectors are the same, because the same bytes move, but a quarter of the loads and stores is enough. There
# are as many additions as before. The price: the 16 bytes must begin at a multiple of 16. This is called
# **alignment**.

# %%
try:
    launch(double_fours, 1, 128, x, 2)
except Fault as fault:
    print(in_words(fault))

# %% [markdown]
# A GPU does not pass over this mistake: the kernel stops with "misaligned address". Element `[i, j]` of a
# matrix lies `i * columns + j` elements from its beginning. So even if 4 divides j, the element is aligned in
# *all* rows only if 4 also divides `columns`. For other matrices, libraries make a copy that fits, or take 4
# bytes at a time.
#
# **Exercise 5.3: axpy.** `y = alpha x + y`, for arrays of n elements, any n. (The name comes from BLAS, an old
# library of linear algebra.) The arrays begin at multiples of 16 bytes. There are at least n / 4 threads, and
# thread i takes elements 4 i to 4 i + 3. Be careful with the last one to three elements.
#
# Par, if 128 divides n: 2 loads and 1 store of a warp for each 128 elements.


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
# In the product, vector loads save instructions in two places. One instruction brings four neighbours of a row
# of b, and another puts them into shared memory. And the inner loop reads its 8 numbers of `tile_b` with two
# loads. (A thread's columns are then two groups of four neighbours. And `tile_a` has to be stored transposed,
# so that a thread finds its *rows* side by side.)
#
# Vector loads do not save passes. Shared memory still hands out 32 words in each pass, so a warp's load of 16
# bytes for each thread takes four.
#
# ## Copies that go on by themselves
#
# One kind of waiting is left. A number from global memory takes hundreds of cycles to arrive. Our kernel
# fetches a tile and waits for it. Then it multiplies while the memory has nothing to do. Then it fetches again.
# Could it fetch the *next* tile while it multiplies this one?
#
# GPUs since 2020 (Ampere) have an instruction for this, an **asynchronous copy**. A thread begins to copy 16
# bytes from global to shared memory, and at once goes on with something else:
#
# - `cp_async_16(shared, i, source, j)` begins to copy 16 bytes from `source[j]` and the next elements to
#   `shared[i]` and the next ones;
# - `cp_async_commit()` makes a **group** of all copies that this thread began since the last commit;
# - `cp_async_wait(g)` waits until at most g of its groups are still under way, namely the g latest. g is a
#   constant.
#
# In the next kernel 128 threads turn 512 elements around, as in lesson 4. Each thread copies 4 elements (16
# bytes), and then writes 4 of them. (`alignment=16` makes the shared array begin at a multiple of 16 bytes.
# Vector loads need that, and these copies need it too.)

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
# The barrier waits for *threads*, not for copies. The kernel lacks a `cp_async_wait(0)` before the barrier.
# That wait cannot replace the barrier: a thread waits only for *its own* copies, but reads elements that others
# have copied. So you need both, in this order: **each thread waits for its own copies, then all wait for each
# other.**
#
# ## A ring of slots
#
# To copy ahead, you need more than one place to copy to. Take several **slots**, and use them in turn:

# %%
ring_of_slots()

# %% [markdown]
# Lesson 4 had two barriers in each round, one for "the data is there" and one for "no thread needs the old data
# any more". Here one barrier is enough for both. This scheme is called a **software pipeline**. With `SLOTS`
# slots there are up to `SLOTS` - 1 copies under way.
#
# **Exercise 5.4: ring_backwards.** One block of 128 threads turns each piece of 512 elements of x around, into
# y, as `backwards` did in lesson 4, and copies `SLOTS` - 1 pieces ahead. Piece p goes to slot `p % SLOTS`,
# which begins at `ring[p % SLOTS * PIECE]`. There may be fewer pieces than slots. When a thread waits for a
# piece, the copies of the next `PENDING` = `SLOTS` - 2 pieces may still be under way.
#
# Be careful at the end: `cp_async_wait` counts *groups*. The count is right if each round commits one group,
# even an empty one.
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
# You now know all the parts of a fast product. The project's ladder of kernels puts them together in
# `minidist/kernels/cuda`, one more in each file. Here are the counts of four of its rungs. "Requests" are
# instructions that go to shared memory. Instructions, requests and passes are for each multiply-add of a warp.

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
# `s3_shared_tile` is the kernel of lesson 4. `s5_thread_tile_2d` has 8 x 8 sums: it needs about an eighth of
# the requests and passes of rung 3. `s6_vector_loads` needs about a quarter of the requests of rung 5, but as
# many passes, as you know. `s7_async_copy` has four slots, and half the barriers. It has a few *more*
# instructions than rung 6, and its gain is that it waits less. Counts do not show that: you need a clock, and a
# GPU.

# %%
for number in (3, 5, 6, 7):
    print(f"rung {number}:", speed(on_gpu(number, 4096)))

# %% [markdown]
# ## What breaks in practice, and how one sees it
#
# - **A local array that is not in registers.** If the compiler does not know one index, the whole array lies in
#   local memory. The results are right, but the kernel is slow. The emulator's counts then have "load local";
#   on a GPU the compiler reports "spill" and "stack frame".
# - **Too many registers.** With more than 255 the compiler spills some into local memory; with somewhat fewer,
#   only one block fits a multiprocessor. Try other sizes of tile, and measure.
# - **Misaligned address.** The kernel works for sizes that 4 divides, and stops for others. Test with sizes
#   that 4 does not divide, and with arrays that begin in the middle of another one.
# - **A wait that counts wrong.** With a commit inside an `if`, the kernel reads the last pieces too early. On a
#   GPU this nearly always goes well, because the copy has mostly arrived. The emulator carries out each copy as
#   late as the rules allow, so the mistake always shows.
# - **A ring that is too deep.** Slots take shared memory, and then other blocks do not have it. Three or four
#   slots are common.
#
# ## Further reading
#
# - Volkov, *Better Performance at Lower Occupancy*, 2010: why a thread should have much to do, with registers
#   as the fastest memory.
# - NVIDIA, *CUTLASS: Efficient GEMM in CUDA*, 2017 to today: tiles of blocks, warps and threads, and the
#   software pipeline, explained by the makers of the library.
# - NVIDIA, *CUDA C++ Programming Guide*, 2007 to today: the section "Asynchronous Data Copies".
#
# Next: lesson 06 leaves the multiply-adds to a unit that does 2048 of them in one instruction.
