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
# # 0. Your machine
#
# **Time:** about 1 hour. **Builds on:** nothing but Python.
#
# Welcome. Eighteen lessons lead from three loops that multiply two matrices to training one model on many
# machines. You write each step yourself, predict what it costs, and then measure it. This lesson is about the
# machine that you sit at. How fast can it compute? How fast can it move numbers? And which of the two will keep
# a program waiting? A pencil and a minute are enough to tell.
#
# This page is a **notebook**. It has text, and **cells** of Python code with their output below. Click on the
# next cell and press Shift+Enter: the cell runs, and the one after it is selected. Cells share their variables,
# so run them from top to bottom. (To start again: *Restart Kernel* in the menu above. Your answers stay.)

# %%
from time import process_time

import numpy as np
from numba import njit
from threadpoolctl import threadpool_limits

from checks.figures import ladder, said
from checks.pictures.machine import machine_picture, stairs_figure
from checks.pictures.roofs import roofline_figure
from checks.your_machine import check, hint, or_solution
from minidist.benchmarks.harness import describe_machine as machine
from minidist.kernels import roofline
from minidist.kernels.cpu.support.caches import caches
from minidist.kernels.cpu.support.vector_unit import vector_unit
from minidist.kernels.rung import empty

ladder(0)

# %% [markdown]
# **The question.** How fast could this machine run a program, if the program were perfect? And how can you know
# that before you have written a line of it?
#
# ## Your first exercise
#
# The programs of this course do two things: they compute, and they move numbers between memory and processor.
# So we count a program's work twice:
#
# - in **FLOPs**, floating-point operations: each addition and each multiplication is one;
# - in **bytes** that are read from memory or written to it. A number of the kind float32 has 4 bytes, one of
#   the kind float64 has 8.
#
# **Exercise 0.1: add_cost.** In NumPy, `y += x` adds each element of `x` to the element of `y` at the same
# place. For arrays of `n` elements, with `itemsize` bytes each, return two numbers: its FLOPs, and the bytes
# that have to be moved. All of `x` and all of `y` move to the processor, and the new `y` moves back to memory.
#
# Replace the three dots with your answer and run the cell. Then run the cell below it, which checks your
# answer.


# %% tags=["exercise"]
def add_cost(n, itemsize):
    """FLOPs and bytes of y += x."""
    ...  # 1 line: return flop, moved


# %%
check(add_cost)

# %% [markdown]
# That is how all exercises work. The check tries your function on fresh random inputs. If something is wrong,
# it shows the input, the expected result, your function's result, and anything that your function printed.
#
# - **A function's arguments belong to its caller.** Leave arrays as they are, unless the exercise tells you to
#   change them.
# - **Run All**, in the menu, goes as far as the first exercise without an answer, and stops there.
# - **Stuck?** `hint()`, in a cell of its own (the + in the bar above makes one), gives the first of three
#   hints; call it again for the next.
# - **Does it take for ever?** A check stops your function after 20 seconds, and names the line that it was in.
#   *Interrupt Kernel* in the menu stops it at once.
# - **No exercise blocks the way.** The next cell takes your function if it has passed. If not, it takes the
#   lesson's own, and says so. The rest of the lesson works with either.
# - **Your progress is kept** in a small file, `lessons/.progress.json`; `minidist lessons --progress`, in a
#   terminal, shows it as a table. Delete the file to start again.

# %%
add_cost = or_solution(add_cost)
flop, moved = add_cost(1_000_000, 4)
print(f"y += x with a million float32: {flop:,} FLOPs, {moved:,} bytes")
print(f"{flop / moved:.3f} FLOPs for each byte")

# %% [markdown]
# Keep that last number in mind: one addition for every twelve bytes that travel.
#
# ## What is inside
#
# Ask the operating system. (`minidist doctor`, in a terminal, says more, and names missing parts.)

# %%
about = machine.describe()
for part, value in about.items():
    print(f"{part:18}{value}")

# %% [markdown]
# A **core** executes a program: a stream of instructions, several in each tick of its clock, a few billion
# ticks a second. Two cores execute two programs at once, or two parts of one that is cut in two.
#
# Modern cores have **vector instructions**, too: one instruction adds or multiplies a whole row of numbers side
# by side. Each place in that row is a **lane**. (The field calls it SIMD: single instruction, multiple data.)
#
# Numbers live in **memory**, which is large, and far away: a core could do hundreds of additions while it waits
# for one number from there. So between the two there are **caches**, small memories that keep the numbers that
# were used last. Each level is larger, farther away and slower than the one before it. Cores share the last
# level; on some machines a few cores also share the level before it. (Sizes: 1 KiB is 1024 bytes, 1 MiB is 1024
# KiB, 1 GiB is 1024 MiB. Speeds: 1 GB/s is a billion bytes in a second.)

# %%
unit = vector_unit()
lanes = unit.lanes("float32")
machine_picture(about["cores"], caches(), about["memory_bytes"], unit.name, lanes)

# %% [markdown]
# ## How fast do bytes come?
#
# The loop below is `y += x`, over the same two arrays again and again. From the second round on, small arrays
# stay in the smallest cache, called L1. Larger ones fit only into a larger cache, and the largest fit into
# none. (`@njit` compiles the function with Numba, so that we do not measure Python's own slowness.
# `process_time` counts only the seconds in which this program had a core, so other programs do not count. We
# take the best of several rounds, because we look for a limit.) `empty` is like NumPy's, but its memory begins
# at a multiple of 64 bytes. The end of this lesson says why.


# %%
@njit
def walk(x, y, times):
    for _ in range(times):
        for i in range(x.size):
            y[i] = x[i] + y[i]


def two_arrays(size):
    """x and y, together `size` bytes; 512 elements lie between them."""
    n = size // 8
    memory = empty(1, 2 * n + 512, "float32")[0]
    memory[:] = 1
    return memory[:n], memory[n + 512 :]


# %%
def gigabytes_per_second(size, rounds=25):
    x, y = two_arrays(size)
    times = max(1, 30_000_000 // size)
    _, moved = add_cost(x.size, 4)
    best = np.inf
    for _ in range(rounds):
        start = process_time()
        walk(x, y, times)
        best = min(best, process_time() - start)
    return times * moved / best / 1e9


# %% [markdown]
# Bytes come faster from the smallest cache than from memory. How many times as fast? Write your guess below in
# place of `None`, *before* you run on. Nobody grades it, but after a guess you look at the answer with other
# eyes.

# %%
prediction = None  # your guess, such as 3; None draws no guess

# %%
walk(*two_arrays(64), 1)  # the first call compiles
sizes = [2**k for k in range(13, 28)]  # 8 kB to 134 MB
speeds = [gigabytes_per_second(size) for size in sizes]
fastest = max(speeds[:2])
ratio = fastest / speeds[-1]
stairs_figure(
    sizes,
    speeds,
    caches(),
    prediction,
    f"Bytes come {ratio:.1f} times as fast from the smallest cache as from memory; "
    f"{said(prediction)}.",
)

# %% [markdown]
# Read the curve from left to right. It goes down like stairs, and each step ends about where a cache ends
# (dotted lines). The edges are not always sharp. A cache is full a little earlier than its size says, because
# other things live in it too. Where other programs or other cores share a cache or the memory with you, the
# right part moves from one minute to the next. Run the cell again, and see how much. (If your largest cache has
# more than 134 MB, you do not see the last step.)
#
# So one question decides more about speed than any other: **where do the numbers come from?**
#
# ## How fast can it compute?
#
# The other limit is arithmetic. The fastest instruction of a core is a vector of **fused multiply-adds**. It
# computes `x * y + z` in every lane at once, which counts as two FLOPs for each lane. `roofline.measure` makes
# a core do nothing else, on numbers that never leave the core. The rate is the core's **peak**, in FLOP/s:
# operations in a second (a GFLOP/s is a billion of them). It also measures the memory's **bandwidth**, the
# bytes that come in a second, with a loop like yours. (The first time takes some seconds; then the result is
# kept in a file. If it says that other programs ran meanwhile, close them, and measure again:
# `roofline.measure(fresh=True)`.)

# %%
peaks = roofline.measure()
print(peaks)

# %%
peak, bandwidth = peaks.one.peak("float32"), peaks.one.bandwidth
print(f"one core: {peak / (2 * lanes) / 1e9:.2f} vector multiply-adds in a nanosecond")
print(f"{bandwidth / 4 / 1e9:.2f} float32 from or to memory in a nanosecond")
print(f"{peak / bandwidth:.1f} FLOPs in the time of one byte")

# %% [markdown]
# A clock of 3 GHz ticks three times in a nanosecond, and most cores start one to four vector multiply-adds at
# each tick: that is where the first number comes from. Remember the last number. A program that does fewer
# FLOPs than this for each byte cannot keep the core busy, however well it is written.
#
# ## Work per byte
#
# A program's **arithmetic intensity** is its FLOPs, divided by the bytes that it has to move. For `y += x` you
# found 1/12 in float32: no program can do better, since each number is used once. The product of two matrices
# is different.
#
# `a` has m rows and k columns, `b` has k rows and n columns. Element (i, j) of `c = a @ b` is a sum of k
# products: `a[i, 0] * b[0, j] + a[i, 1] * b[1, j] + ...`, row i of `a` with column j of `b`.
#
# **Exercise 0.2: matmul_cost.** Return the FLOPs and the bytes of `c = a @ b`. Count one multiplication and one
# addition for each of the k products of a sum, as the whole field does. For the bytes, take the best case: each
# element of `a` and of `b` is read from memory once, and each element of `c` is written once.


# %% tags=["exercise"]
def matmul_cost(m, k, n, itemsize):
    """FLOPs and bytes of an (m, k) matrix times a (k, n) matrix."""
    ...  # about 3 lines


# %%
check(matmul_cost)

# %%
matmul_cost = or_solution(matmul_cost)
N = 4096
costs = {
    "y += x": add_cost(N * N, 4),
    "dot": matmul_cost(1, N * N, 1, 4),  # a row times a column: one number
    "matrix @ vector": matmul_cost(N, N, 1, 4),
    "matrix @ matrix": matmul_cost(N, N, N, 4),
}
for kernel, (flop, moved) in costs.items():
    print(f"{kernel:16}{flop:>17,} FLOPs{moved:>15,} bytes{flop / moved:10.3f} a byte")

# %% [markdown]
# All four work on arrays of 16 million elements, which are 64 MiB. A matrix times a vector uses each element of
# the matrix once, and gets half a FLOP out of each byte. A matrix times a matrix *could* use each element n
# times. (A piece of a program like one of these is often called a **kernel**.)
#
# ## The roofline
#
# So there are two limits. A core cannot compute faster than its peak. Nor can it compute faster than its
# numbers arrive: with `bandwidth` bytes in a second and `intensity` FLOPs for each byte, it does at most
# `bandwidth` times `intensity` FLOPs in a second. The lower of the two is the limit (Williams, Waterman and
# Patterson 2009).
#
# **Exercise 0.3: attainable.** Return the FLOP/s that these two limits allow. `intensity` is a number or a
# NumPy array. For an array, the result is an array as well.


# %% tags=["exercise"]
def attainable(peak, bandwidth, intensity):
    """FLOP/s that a program of this intensity can reach at most."""
    ...  # 1 line


# %%
check(attainable)

# %%
attainable = or_solution(attainable)
for intensity in (1 / 12, 1 / 2, 4, 32, 256):
    rate = attainable(peak, bandwidth, intensity)
    print(
        f"{intensity:8.3f} FLOP/byte: {rate / 1e9:8.2f} GFLOP/s, {rate / peak:4.0%} of peak"
    )

# %% [markdown]
# Drawn against the intensity, this limit looks like a roof, so it is called a **roofline**. Its slope is the
# memory, its flat part is the arithmetic, and they meet at the **ridge point**, peak / bandwidth. Left of the
# ridge a program is **memory-bound**: a faster core would not help it at all. Right of the ridge it is
# **arithmetic-bound** (or compute-bound): faster memory would not help.

# %%
roofline_figure(
    {"one core": (peak, bandwidth)},
    caption=f"The roofline of one of your cores, in float32. Its ridge is at "
    f"{peak / bandwidth:.1f} FLOP/byte.",
    alt="GFLOP/s against FLOP/byte, both logarithmic: a slope that rises up to the "
    "ridge point, and a flat line from there on.",
)

# %% [markdown]
# **Exercise 0.4: predict.** A program does `flop` FLOPs and moves `moved` bytes, and does both at the same
# time. Return two things: how many seconds it takes, and the string `"memory"` or `"arithmetic"`, whichever
# takes longer. If both take equally long (the program sits on the ridge), say `"arithmetic"`. Some programs
# have 0 FLOPs (a copy), and some move 0 bytes.


# %% tags=["exercise"]
def predict(flop, moved, peak, bandwidth):
    """Seconds at the least, and what limits: "memory" or "arithmetic"."""
    ...  # about 4 lines


# %%
check(predict)

# %%
predict = or_solution(predict)
kernels = ("y += x", "matrix @ vector", "matrix @ matrix")
for kernel in kernels:
    seconds, limit = predict(*costs[kernel], peak, bandwidth)
    print(f"{kernel:16}{seconds * 1e3:10.2f} ms, bound by {limit}")

# %% [markdown]
# The same pencil works for the largest models. Llama 3 405B took 3.8e25 FLOPs on 16,384 GPUs of the kind H100
# (Grattafiori and others 2024). NVIDIA's data sheet gives each of them 989 TFLOP/s in 16-bit numbers:

# %%
seconds, _ = predict(3.8e25, 0, 16_384 * 989e12, 1)
print(f"{seconds / 86_400:.0f} days, if all of them did nothing but compute")

# %% [markdown]
# Meta measured about 400 TFLOP/s for each GPU, 40% of the peak. That makes 67 days. Most of this course is about
# the other 60%.
#
# ## Predict, then measure
#
# `matrix @ matrix` does 4096 times the FLOPs of `matrix @ vector`, with the same matrix. How many times as long
# will it take? Compare the two predictions above if you like, and write down a number.

# %%
prediction = None  # your guess, such as 4096; None draws no guess


# %%
def best_seconds(call, rounds):
    call()  # once without a clock: memory is fetched, libraries wake up
    best = np.inf
    for _ in range(rounds):
        start = process_time()
        call()
        best = min(best, process_time() - start)
    return best


rng = np.random.default_rng(0)
a, b = (rng.random((N, N), np.float32) for _ in range(2))
v, x, y = b[0].copy(), a.ravel(), b.ravel().copy()
c = np.empty_like(a)

# %%
with threadpool_limits(1):  # one core, as in the model
    times = {
        "y += x": best_seconds(lambda: np.add(x, y, out=y), 9),
        "matrix @ vector": best_seconds(lambda: a @ v, 9),
        "matrix @ matrix": best_seconds(lambda: np.matmul(a, b, out=c), 2),
    }
rates = {kernel: costs[kernel][0] / times[kernel] for kernel in kernels}
for kernel in kernels:
    expected, _ = predict(*costs[kernel], peak, bandwidth)
    print(
        f"{kernel:16}{times[kernel] * 1e3:10.2f} ms, predicted {expected * 1e3:10.2f} ms"
    )

# %%
intensities = {kernel: flop / moved for kernel, (flop, moved) in costs.items()}
points = {kernel: (intensities[kernel], rates[kernel]) for kernel in kernels}
points["in L1"] = (1 / 12, fastest * 1e9 / 12)
ratio = times["matrix @ matrix"] / times["matrix @ vector"]
guessed = prediction and costs["matrix @ matrix"][0] / (
    prediction * times["matrix @ vector"]
)
roofline_figure(
    {"one core": (peak, bandwidth)},
    points,
    guess=prediction and (intensities["matrix @ matrix"], guessed),
    caption=f"Rings are predicted, dots are measured. The product of matrices takes "
    f"{ratio:,.0f} times as long as that with a vector; {said(prediction)}.",
    alt="The roofline of one core with three measured kernels near it: y += x and "
    "matrix @ vector on the slope, matrix @ matrix below the flat part; a fourth, "
    "y += x in the L1 cache, far above the slope.",
)

# %% [markdown]
# Look at how far each dot is from its ring.
#
# - **On the slope** dots lie near the line, or somewhat below it: a loop has to ask for its bytes early enough
#   to keep the memory busy, and not every loop does. A dot may also lie a little above it: the memory's speed
#   changes with the machine's other work, the peaks were taken at another moment, and a very large cache keeps
#   a part of these arrays.
# - **Under the flat part** the product stays below the peak. NumPy's library reaches much of the peak. The rest
#   goes into fetching: while an instruction loads a number, it does not compute. In lesson 01 you write such
#   products yourself, and begin far lower. (On Apple's processors it may lie *above* the peak: the library
#   there uses a unit for matrices, which this peak does not include.)
# - **Far above the slope** is the small `y += x`. Is the model wrong? No, we asked it the wrong question. These
#   bytes come from the L1 cache, and the slope shows the memory. A cache has a roof of its own, with a steeper
#   slope. **A roofline says what limits you only if you count the bytes where they really come from.**
#
# ## All cores
#
# So far we used one core. Two cores have twice the arithmetic. Do they have twice the bandwidth?

# %%
roofline_figure(
    {roof.name: (roof.peak("float32"), roof.bandwidth) for roof in peaks.roofs},
    caption="The rooflines of this machine, in float32: one core, all of its cores, "
    "and the GPU where there is one.",
    alt="The rooflines of one core and of all cores, and of the GPU if there is one.",
)
for roof in peaks.roofs:
    times_peak = roof.peak("float32") / peak
    times_bandwidth = roof.bandwidth / bandwidth
    print(f"{roof.name}: ridge at {roof.ridge('float32'):.1f} FLOP/byte,")
    print(f"  {times_peak:.1f} times the arithmetic of one core,")
    print(f"  {times_bandwidth:.1f} times its bandwidth")

# %% [markdown]
# Each core brings its own arithmetic, but all cores share the memory. On a machine with many cores, a few of
# them use up all of its bandwidth, and every further core moves the ridge to the right: **the more arithmetic a
# machine has, the more work per byte it wants.** That sentence is the reason for half of this course. It holds
# even more for a GPU than for a CPU, and even more for many machines in a network than for one.
#
# ## What breaks in practice, and how one sees it
#
# - **Somebody else is working.** Peaks that were measured while other programs ran are too low, and then dots
#   lie above the roof. `peaks.busy` says so; `roofline.measure(fresh=True)` measures again.
# - **A laptop gets hot**, and lowers its clock after some seconds; on battery it may never raise it. Measure
#   twice, some minutes apart. If all numbers fell by the same factor, it is the clock.
# - **The first time is slow.** The first call compiles, and the first write to new memory makes the operating
#   system find that memory. Call once without a clock, then several times. Take the best time for a limit, and
#   the median for the usual time.
# - **Bytes that are easy to forget.** To write to an array that is not in a cache, most processors first *read*
#   the old values. `z = x + y` then moves 16 bytes for each element, not 12. (`y += x` has read `y` anyway,
#   which is why this lesson uses it.)
# - **Where an array begins.** Caches hold pieces of 64 bytes. A vector that lies across two of them takes two
#   accesses instead of one, and NumPy does not promise where an array begins. So the same loop may take half as
#   long again in the next run. Two arrays that are a multiple of 4096 bytes apart may slow each other down. Put
#   `np.ones` into `two_arrays`, and see whether the stairs suffer.
# - **Cores that are not there.** Two hardware threads of one core share its arithmetic, and a container may
#   allow fewer cores than the machine has. Then twice the workers are not twice as fast. `minidist doctor` says
#   what is allowed.
#
# ## Further reading
#
# - Williams, Waterman and Patterson, *Roofline: An Insightful Visual Performance Model for Multicore
#   Architectures*, 2009: where the picture comes from, and what to do about a program left or right of the
#   ridge.
# - McCalpin, *Memory Bandwidth and Machine Balance in Current High Performance Computers*, 1995: how bandwidth
#   is measured (STREAM), and that arithmetic grows faster than it.
# - Drepper, *What Every Programmer Should Know About Memory*, 2007: caches, and why the stairs look as they do.
#
# Next: lesson 01 takes one of these kernels, the product of two matrices, from the bottom of the picture to its
# roof.
