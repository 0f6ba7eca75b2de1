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
# # 2. CPU, GPU, TPU
#
# **Time:** about 1.5 hours. **Builds on:** lessons 00 and 01.
#
# In lesson 01 you taught one core to multiply matrices. Now look at the machines. Each of them does the same
# multiply-adds. They differ in how many they do at a time, and above all in how the numbers get to the
# multipliers. At the end of this lesson you will have built the heart of a TPU in a few lines of NumPy, and you
# will know why it looks so strange.

# %%
import numpy as np

from checks.cpu_gpu_tpu import check, hint, or_solution
from checks.figures import bars, ladder, said
from checks.pictures.roofs import roofline_figure
from checks.pictures.systolic import systolic_animation, utilisation_figure
from minidist.kernels import roofline
from minidist.kernels.cpu.support.vector_unit import vector_unit
from minidist.kernels.systolic import SystolicArray, compare

ladder(2)

# %% [markdown]
# **The question.** A chip has room for tens of thousands of multipliers. Each wants two new numbers in every
# tick of the clock. No memory in the world delivers that many. So how are they fed?
#
# ## One at a time
#
# The simplest processor is **scalar**: one instruction, one multiply-add. It fetches an element of `a` and an
# element of `b`, multiplies them, and adds the product to a sum that it keeps. The product of an (m, k) matrix
# and a (k, n) matrix has m n k multiply-adds, so that makes m n k instructions, and 2 m n k reads. (A read is
# an element that comes from outside of the arithmetic unit: from a cache, or from memory.)
#
# ## A row at a time: SIMD
#
# A **vector unit** does the same for several neighbours at once. Its register has a number of **lanes**, which
# hold neighbouring elements of a row of `c`. One instruction takes one element of `a`, gives it to all lanes,
# takes an element of `b` for each lane (a piece of a row), and does a multiply-add in every lane. (SIMD: single
# instruction, multiple data.)
#
# How much does that save? Count it.
#
# **Exercise 2.1: vector_cost.** Return two numbers for an (m, k) matrix times a (k, n) matrix on such a unit:
# the instructions, and the reads of both matrices together. The last piece of a row may fill only some of the
# lanes. It takes an instruction like any other piece, but it reads only as many elements of `b` as it has. (In
# Python `-(-n // lanes)` is n / lanes, rounded up.)


# %% tags=["exercise"]
def vector_cost(m, n, k, lanes):
    """Instructions and reads of a product on a vector unit."""
    ...  # about 2 lines


# %%
check(vector_cost)

# %% [markdown]
# No idea how to begin? `hint()` in a cell of its own gives the first of three hints. The next cell takes your
# function if it has passed. If not, it takes the lesson's own, so the rest of the lesson works.

# %%
vector_cost = or_solution(vector_cost)
work = 512**3
for lanes in (1, 4, 16, 64, 512):
    instructions, reads = vector_cost(512, 512, 512, lanes)
    print(
        f"{lanes:4} lanes: {work / instructions:5.0f} multiply-adds an instruction, "
        f"{reads / work:.3f} reads a multiply-add"
    )

# %% [markdown]
# Look at the last column. It falls from 2 towards 1 and stays there, however wide the vector is. The lanes
# share only the element of `a`. Each lane still needs its own element of `b`, every time. An instruction with
# sixteen lanes reads 17 elements, where a scalar one reads 2. So a vector saves *instructions*, but hardly any
# *reads*. (Your register tile of lesson 01 saved reads of both matrices: it kept sums of several rows at a
# time. Remember that thought.)
#
# How wide are the vectors of your machine? Their width is fixed in bytes, so smaller numbers mean more lanes,
# and more speed. The next cell measures the peaks, as in lesson 00 (this takes some seconds if it has not been
# done before):

# %%
unit, peaks = vector_unit(), roofline.measure()
for dtype in ("float64", "float32"):
    rate = peaks.one.peak(dtype) / 1e9
    print(
        f"{unit.name}, {dtype}: {unit.lanes(dtype):2} lanes, {rate:6.1f} GFLOP/s a core"
    )

# %% [markdown]
# Half the bytes, twice the lanes, twice the arithmetic. This is one reason why networks are trained in smaller
# and smaller numbers. (Lesson 06 goes down to 16 bits, and the first TPU to 8.)
#
# ## A warp at a time: SIMT
#
# A **GPU** also has vector units, and very many of them, but you program them differently. You write a program
# for *one* lane, called a **thread**. The hardware takes 32 threads, a **warp**, and makes all of them do the
# same instruction at the same time. (SIMT: single instruction, multiple threads; Lindholm and others 2008.) It
# looks as if each thread went its own way. Does it? Here is what a warp does with an `if`:


# %%
def steps_of(condition, steps_if=10, steps_else=10, warp=32):
    total = 0
    for taken in condition.reshape(-1, warp):
        total += steps_if * bool(taken.any())  # one thread is in it: all go along
        total += steps_else * bool((~taken).any())
    return total


threads = np.arange(1024)
print("first half takes the if: ", steps_of(threads < 512), "steps of warps")
print("every second thread does:", steps_of(threads % 2 == 0), "steps of warps")

# %% [markdown]
# If threads of one warp disagree, the warp goes *both* ways, first one and then the other. While it goes one
# way, the threads that chose the other wait. That is called **divergence**. It is the price of SIMT.
#
# A GPU also deals with memory in another way than a CPU. It keeps dozens of warps ready, and while one waits
# for memory, it runs another. So a CPU spends its chip on caches and on guessing what comes next, so that *one*
# program seldom waits. A GPU spends its chip on lanes and registers, so that waiting does not matter. Lessons
# 03 to 06 are about GPUs.
#
# But the lanes of a warp read as much as those of any vector. So the question is still open.
#
# ## A matrix at a time: the systolic array
#
# Count again, for a *grid* of multipliers with r rows and c columns. If an element of `a` served a whole row of
# the grid, and an element of `b` a whole column, then r + c elements would be enough for r c multiply-adds. A
# vector is a grid with one row. A square grid of 128 x 128 needs 256 new elements for 16384 multiply-adds, and
# a larger grid does even better.
#
# To send a number to 128 places at once takes long wires, and long wires are slow. Kung and Leiserson had a
# better idea in 1978: let each multiplier hand it on *to its neighbour*. Numbers then pulse through the grid,
# tick by tick, as blood does through a body, and so they called it a **systolic array**. Its multipliers, with
# their adders and a few registers, are called **processing elements**, PEs.
#
# Below is one that multiplies two matrices of 3 x 3. Elements of `a` come from the left and go right. Elements
# of `b` come from above and go down. Where two elements meet, the PE multiplies them and adds the product to
# its sum. Step through it, and follow one sum.

# %%
systolic_animation("output")

# %% [markdown]
# No address was sent. No PE knows its own place. Each does the same dull thing in every tick: take what the
# left and the upper neighbour held, multiply, add. The product comes out right only because of *when* numbers
# enter: row 1 one tick after row 0, row 2 one later. Then `a[i, p]` meets `b[p, j]` in PE (i, j), and elements
# with different p never meet there. That delay is called **skewing**.
#
# **Exercise 2.2: skew.** `x` has m rows of k elements. Return an array with m rows and m + k - 1 columns. Its
# row i lists the numbers that enter row i of the grid, tick by tick: first i zeros, then row i of `x`, then
# zeros again. `x` has at least one row and one column.


# %% tags=["exercise"]
def skew(x):
    """What enters each row of the grid, tick by tick (m, m + k - 1)."""
    m, k = x.shape
    ...  # about 4 lines


# %%
check(skew)

# %%
skew = or_solution(skew)
skew(np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]]))

# %% [markdown]
# Read it column by column: in tick 0 only a 1 enters, in row 0. In tick 1 a 2 enters there, and a 4 in row 1.
# (A zero does no harm: its products add nothing.) For `b` you delay the *columns* instead: `skew(b.T).T`.
#
# **Exercise 2.3: systolic_step.** One tick of the grid. `a`, `b` and `sums` have its shape (rows, columns) and
# say what each PE holds. `left` has an element for each row, `top` has one for each column.
#
# First everything moves: `a` one place to the right (the last column leaves the grid, `left` is the new first
# column), `b` one place down (the last row leaves, `top` is the new first row). Then every PE multiplies the
# two numbers that it holds *now*, and adds the product to its sum. Return the new `a`, `b` and `sums`. You may
# change the arrays that you were given.


# %% tags=["exercise"]
def systolic_step(a, b, sums, left, top):
    """One tick: move, multiply, add; return a, b, sums."""
    ...  # about 6 lines


# %%
check(systolic_step)

# %%
systolic_step = or_solution(systolic_step)
a, b, sums = (np.zeros((2, 3), int) for _ in range(3))
a, b, sums = systolic_step(a, b, sums, np.array([5, 0]), np.array([7, 0, 0]))
print(sums)  # in the corner the first two have met

# %% [markdown]
# You have the grid and its inputs. Now run it.
#
# **Exercise 2.4: systolic_matmul.** Multiply `x` (m, k) by `y` (k, n) on a grid of m rows and n columns, and
# return the product. All PEs begin with zeros. `step` is a function like your `systolic_step`. Call it once for
# each tick, with the `a`, `b` and `sums` that it returned last, so that the check can count the ticks. When all
# elements are in, only zeros enter, and `step` needs those as well: `np.pad(z, ((0, 0), (0, 5)))` is `z` with
# five more columns of zeros, on the right.
#
# Par: no tick after the last multiply-add.


# %% tags=["exercise"]
def systolic_matmul(x, y, step):
    """x times y, tick by tick."""
    (m, k), n = x.shape, y.shape[1]
    ...  # about 6 lines


# %%
check(systolic_matmul)

# %% [markdown]
# How busy is it? A PE **works** in a tick if it holds an element of `a` and one of `b`. In this count no
# element is 0, so a 0 is always padding.

# %%
systolic_matmul = or_solution(systolic_matmul)


def working(x, y):
    """How many PEs work in each tick of x times y."""
    counts = []

    def step(a, b, sums, left, top):
        a, b, sums = systolic_step(a, b, sums, left, top)
        counts.append(np.count_nonzero(a * b))
        return a, b, sums

    assert np.array_equal(systolic_matmul(x, y, step), x @ y)
    return np.array(counts)


# %%
rng = np.random.default_rng(0)
x, y = rng.integers(1, 9, (4, 6)), rng.integers(1, 9, (6, 5))
worked = working(x, y)
print("PEs that work in each tick, of 20:", *worked)

# %% [markdown]
# The array fills, works, and runs empty. How long does that take for given sizes, and what share of its PEs
# works?
#
# **Exercise 2.5: systolic_cost.** For an (m, k) matrix times a (k, n) matrix on a grid of m rows and n columns,
# return three numbers: the **ticks** until the last PE has done its last multiply-add; the **reads**, elements
# that enter the grid from outside (zeros do not count); and the **utilisation**, the multiply-adds of
# the product over those that all PEs could have done in these ticks, between 0 and 1. All sizes are at least 1.


# %% tags=["exercise"]
def systolic_cost(m, n, k):
    """Ticks, reads and utilisation of a product on m x n PEs."""
    ...  # about 4 lines


# %%
check(systolic_cost)

# %%
systolic_cost = or_solution(systolic_cost)
ticks, reads, utilisation = systolic_cost(4, 5, 6)
print(f"predicted: {ticks} ticks, {utilisation:.1%} busy")
print(f"counted:   {len(worked)} ticks, {worked.sum() / (20 * len(worked)):.1%} busy")

# %% [markdown]
# ## Predict, then count
#
# A grid of 16 x 16 PEs multiplies a (16, k) matrix by a (k, 16) matrix. For small k it does little more than
# fill and run empty. How large must k be so that its PEs are busy 90% of the time? Guess first, or work it out.

# %%
prediction = None  # your guess, such as 16; None draws no guess

# %%
lengths = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
counted = []
for k in lengths:
    x, y = rng.integers(1, 9, (16, k)), rng.integers(1, 9, (k, 16))
    worked = working(x, y)
    counted.append(worked.sum() / (16 * 16 * len(worked)))
needed = next(k for k in range(1, 10_000) if systolic_cost(16, 16, k)[2] >= 0.9)

# %%
utilisation_figure(
    lengths,
    counted,
    [systolic_cost(16, 16, k)[2] for k in lengths],
    guess=prediction and (prediction, 0.9),
    caption=f"Dots are counted, the line is the formula. 90% takes k = {needed}; "
    f"{said(prediction)}.",
    alt="Share of the PEs that work against k, from a few per cent at k = 1 to nearly "
    "all of them at k = 1024; the counts lie on the line of the formula.",
)

# %% [markdown]
# Here the prediction is exact: nothing in such an array depends on luck. There are no cache misses and no
# guesses at branches. A compiler knows the tick in which each number arrives. This is one reason why the
# machine around the array can be simple.
#
# ## The TPU does it the other way round
#
# In your array the sums stay, and both matrices move. That is called **output-stationary**. The complete sums
# still have to get out, which takes m more ticks. The matrix unit of Google's TPU is **weight-stationary**
# (Jouppi and others 2017): it loads the elements of `b`, the weights of a network, first, and they stay. `a`
# goes right as before. Now the *sums* go down, and grow on their way. They leave at the bottom, complete.

# %%
systolic_animation("weight")

# %% [markdown]
# Which is better? A network's weights are used for every example. If they stay, the rows of `a` can stream by
# for as long as there are examples, and nothing has to be filled or emptied in between.
# `minidist.kernels.systolic` has both. It takes products that are larger than the array, cuts them into tiles,
# and counts the ticks for loading and draining as well. The table also has the scalar processor and the vector
# unit from the beginning of this lesson:

# %%
arrays = [
    SystolicArray(128, 128, f"{kind}_stationary") for kind in ("output", "weight")
]
comparison = compare(512, 512, 512, *arrays, lanes=16)
print(" " * 34 + "ticks  busy  multiply-adds an access")
for each in comparison.rows:
    print(
        f"{each.machine:27}{each.cycles:12,}{each.utilisation:6.0%}"
        f"{each.multiply_adds_per_access:25.2f}"
    )

# %% [markdown]
# The last column answers this lesson's question. It says how many multiply-adds the machine does each time that
# it reads or writes an element (`print(comparison)` lists these reads and writes). The array does sixteen
# thousand multiply-adds in a tick, and a few hundred elements feed it. It is also busy: filling and emptying
# cost little now.
#
# Compare your own array with minidist's:

# %%
x, y = rng.integers(-9, 9, (20, 30)), rng.integers(-9, 9, (30, 12))
ran = SystolicArray(20, 12, "output_stationary").matmul(x, y)
ticks, reads, _ = systolic_cost(20, 12, 30)
print(f"yours: {ticks} ticks and {reads} reads; + 20 to get the sums out: {ticks + 20}")
print(
    f"minidist: {ran.cycles} ticks and {ran.counts.a_reads + ran.counts.b_reads} reads"
)

# %% [markdown]
# ## Why it matters: energy
#
# Reads are not only slow, they also heat the chip. Horowitz (2014) gave rough numbers for one technology (45
# nm), in picojoules. A multiplication takes 3.7 and an addition 0.9, in float32. An instruction takes about 70
# besides its arithmetic (to fetch it, decode it, and keep track of it). 64 bits from a cache of 32 kB take 20,
# and from main memory 1300 or more; a float32 is half of that. Here are the same counts as energy (an array
# gets one instruction a tick, for all its PEs):


# %%
def picojoules(counts):
    """Of one multiply-add: its arithmetic, its share of instructions, of accesses."""
    work = counts.multiply_adds
    return 4.6, 70 * counts.cycles / work, 10 * counts.accesses / work


energy = {}
print(" " * 29 + "arithmetic  instructions  accesses")
for counts in comparison.rows:
    parts = picojoules(counts)
    energy[counts.machine] = sum(parts)
    print(f"{counts.machine:29}" + "{:10.3f}{:14.3f}{:10.3f}".format(*parts))

# %%
bars(
    energy,
    "picojoules for one multiply-add",
    logarithmic=False,
    caption="Energy of a multiply-add in a product of 512 x 512 matrices: arithmetic, "
    "instructions and reads from a cache. A model, with Horowitz's numbers of 2014.",
    alt="Bars for a scalar processor, a vector unit of 16 lanes, and two systolic "
    "arrays of 128 x 128: each far shorter than the one before, the arrays alike.",
)

# %% [markdown]
# The scalar processor spends a twentieth of its energy on arithmetic. The lanes of a vector share the
# instruction, and now reads dominate. The array shares instructions and reads, and little is left *but*
# arithmetic. Do not take the numbers further than they go. They leave out registers, the hops between
# neighbours, and the clock. They are also old. Transistors have become smaller since then, which saves more
# energy in arithmetic than in wires, so reads weigh *more* today.
#
# A GPU's tensor cores (lesson 06) use the same idea on a small scale: one instruction of a warp multiplies
# whole tiles, and so uses each fetched element many times.
#
# ## Three machines under their roofs
#
# How fast are they? The roofline of lesson 00 gives the limit: the peak, or bandwidth times intensity,
# whichever is lower. Jouppi and others (2017, table 2) published both numbers for the first TPU, and for the
# CPU and the GPU in Google's data centres at that time. The CPU is a Haswell with 18 cores, the GPU one of the
# two chips of a K80. The TPU's operations are on int8, those of the other two on float32.

# %%
published = {
    "CPU": (1.3e12, 51e9),
    "GPU": (2.8e12, 160e9),
    "TPU": (92e12, 34e9),
}
roofline_figure(
    published,
    marks={"an int8 weight, used once": 2, "used 100 times": 200},
    words=("operations per byte", "billions of operations in a second"),
    caption="Rooflines of 2015's machines, from Jouppi and others 2017, table 2.",
    alt="Three rooflines. The TPU's slope lies lowest, for its memory is the slowest, "
    "and its flat part lies far above the others, from a far higher ridge on.",
)

# %% [markdown]
# The TPU has by far the most arithmetic, *and* the slowest memory. Left of the ridges it is the slowest of the
# three! Such an array is worth its price only if each number that comes from memory is used very often. A layer
# of a network uses each of its weights once for every example in the batch. So the ridge says **how large the
# batch has to be**:

# %%
today = {
    "CPU (Haswell), float32": (1.3e12, 51e9, 4),
    "GPU (K80), float32": (2.8e12, 160e9, 4),
    "TPU v1, int8": (92e12, 34e9, 1),
    "H100 SXM, float32": (67e12, 3.35e12, 4),
    "H100 SXM, tensor cores, bfloat16": (989e12, 3.35e12, 2),
    "TPU v4, bfloat16": (275e12, 1.2e12, 2),
}
for roof in peaks.roofs:
    today[f"yours ({roof.name}), float32"] = roof.peak("float32"), roof.bandwidth, 4
for machine, (peak, bandwidth, itemsize) in today.items():
    ridge = peak / bandwidth  # operations per byte; a weight has two per example
    print(f"{machine:34} ridge {ridge:6.0f}, batch of {ridge * itemsize / 2:6.0f}")

# %% [markdown]
# (H100: NVIDIA's data sheet, without the sparsity that doubles its figure. TPU v4: Google's Cloud TPU
# documentation. Yours is measured, as in lesson 00.)
#
# This table is the reason for much that follows. Such a chip needs hundreds of examples at a time, in each
# layer. So people feed it large batches (lesson 09 spreads them over ranks) and large matrices. A server that
# generates text for one reader, one word after the other, leaves nearly all of its arithmetic idle.
#
# ## Other machines
#
# GPUs and TPUs are not the only answers. Each machine below feeds its multipliers in another way. Peaks are for
# 16-bit numbers, without sparsity, as the makers state them.
#
# | Machine | How it feeds its multipliers | Peak, TFLOP/s | Memory | Bandwidth, TB/s | Source |
# |---|---|---|---|---|---|
# | NVIDIA H100 | threads, and tensor cores in each multiprocessor | 989 | 80 GB HBM | 3.35 | data sheet |
# | Google TPU v4 | systolic arrays of 128 x 128 | 275 | 32 GiB HBM | 1.2 | Google, Cloud TPU documentation |
# | AWS Trainium, Inferentia2 | two cores; each has a systolic array beside a vector unit | 190 | 32 GiB HBM | 0.82 | AWS, Neuron documentation |
# | SambaNova SN40L | **dataflow**: 1,040 compute and 1,040 memory units, wired anew for each network | 638 | 520 MB on the chip, 64 GB HBM, 1.5 TB DDR | 1.6 (HBM) | Prabhakar, Hot Chips 2024 |
# | Graphcore GC200 | 1,472 cores, **each with its own memory** | 250 | 0.9 GB on the chip | 47.5 | Knowles, Hot Chips 2021 |
# | Tesla Dojo D1 | 354 cores in a mesh, each with 1.25 MB of its own; 25 chips make a tile | 362 | 0.44 GB on the chip | 10 (the mesh) | Tesla AI Day 2021 |
# | Cerebras WSE-2 | **a whole wafer**: 850,000 cores, each with its own memory | about 7,500 (reckoned) | 40 GB on the wafer | 20,000 | Cerebras's announcement, 2021 |
#
# (Cerebras's announcement names no peak. We reckon with 850,000 cores, each with 4 multiply-adds a cycle, at
# 1.1 GHz, so take that peak as a rough one. AWS gives Trainium's bandwidth as 820 GB/s on one page and as 820
# GiB/s, which is 0.88 TB/s, on another.)

# %%
others = {
    "H100": (989e12, 3.35e12),
    "TPU v4": (275e12, 1.2e12),
    "Trainium": (190e12, 0.82e12),
    "SN40L": (638e12, 1.6e12),
    "GC200": (250e12, 47.5e12),
    "WSE-2": (7.5e15, 20e15),
}
roofline_figure(
    others,
    marks={"a 16-bit weight, used once": 1, "used 100 times": 100},
    words=("operations per byte", "billions of operations in a second"),
    caption="Rooflines of six machines, from the table. GC200 and WSE-2 keep all of "
    "their numbers on the chip.",
    alt="Six rooflines. Four with memory beside the chip have ridges from 200 to 400 "
    "operations per byte. GC200's ridge is at 5, and WSE-2's at 0.4, far to the left.",
)

# %% [markdown]
# There are two families. Four machines have a large memory beside the chip, and their ridge lies at hundreds of
# operations per byte. GC200, Dojo and WSE-2 have memory beside each core. The ridges of GC200 and WSE-2 lie far
# to the left: these two need to use each number only a few times to keep their multipliers busy. The price is
# room: a GC200 holds 0.9 GB, and an H100 80.
#
# Some work has no use for any matrix unit. A decision tree compares, and jumps to an address that depends on
# the answer; the next comparison has to wait for it. A search for nearest neighbours in a tree does the same.
# (To compare *all* pairs of points is a matrix product again.) There are machines for such work as well. Anton
# 3 (Shaw and others 2021) simulates molecules: its chip has units that find the pairs of atoms which are close
# to each other, and units that compute the forces between them.
#
# ## What breaks in practice, and how one sees it
#
# - **One column too many.** An array of 128 columns takes two passes for 129, the second with one column busy.
#   See for yourself: `SystolicArray(128, 128).counts(512, 129, 512).utilisation`. Hence the habit of sizes that
#   are multiples of 128 (of 8 or 16 for tensor cores): GPT-2 has a vocabulary of 50257, and nanoGPT pads it to
#   50304.
# - **A batch that is too small.** The chip is at 100% "in use" and at 2% of its peak. A tool that only shows
#   how long the chip was busy does not show that. Compute FLOP/s, and divide by the peak.
# - **A data sheet's peak.** It may assume matrices that are half zeros (sparsity), the highest clock, and
#   another number format than yours. Compare in the same format, dense.
# - **Everything that is not a product.** Normalising, softmax, adding: each reads and writes everything for few
#   FLOPs, and an array of multipliers does not help. If these take a third of the time, an array that is ten
#   times as fast makes the whole at most 2.5 times as fast (Amdahl's law).
# - **Fewer bits, other results.** int8 and bfloat16 round more. For that reason products are summed in 32 bits.
#   Lesson 06, and later the lesson on ZeRO, show what small numbers do to training.
#
# ## Further reading
#
# - Kung, *Why Systolic Architectures?*, 1982: ten pages, by one of the inventors. The argument of this lesson,
#   with convolution as its example.
# - Jouppi and others, *In-Datacenter Performance Analysis of a Tensor Processing Unit*, 2017: the first TPU,
#   with rooflines of real workloads. Most of those are memory-bound.
# - Horowitz, *Computing's Energy Problem (and what we can do about it)*, 2014: where the picojoules are from.
#
# Next: lesson 03 programs a GPU, from Python.
