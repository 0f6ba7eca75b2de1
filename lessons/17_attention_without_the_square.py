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
# # 17. Attention without the square
#
# **Time:** about 2.5 hours. **Builds on:** lesson 04.
#
# Attention compares each token of a row with each other one: T tokens have T x T scores. This square is the
# reason why long rows were out of reach. In this lesson you compute attention without it, exactly and not
# approximately: first a softmax in one pass, then blocks of keys, then a kernel that an emulator runs and
# counts, and its backward pass. This is FlashAttention, with which most large models train.

# %%
import math
import time

import numpy as np
import torch
from numba import cuda, float32

from checks.attention_without_the_square import check, hint, or_solution, peak
from checks.figures import bars, curves, ladder, said
from checks.pictures.attention import hidden_blocks, one_row
from checks.rungs import counted_attention
from minidist.kernels import ATTENTION_LADDER, CUDA_ATTENTION_LADDER
from minidist.kernels.cuda.emulator import profile
from minidist.model import GPT, config, cross_entropy, dataset

ladder(17)

# %% [markdown]
# **The question.** The result of attention is no larger than its inputs. Does the square in between have to
# exist?
#
# ## The square
#
# Each token has a **query**, a **key** and a **value**: vectors of D numbers, the width of a head. A query's
# scores are its products with all keys. The softmax turns them into weights that add up to 1, and the result is
# the mean of all values with these weights. For one head that is three lines:


# %%
def attention(q, k, v):
    """softmax(q k^T / sqrt(D)) v, by the definition: T x T scores, then weights."""
    scores = q @ k.T / math.sqrt(q.shape[1])
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ v


# %% [markdown]
# The division by sqrt(D) keeps the scores small: a sum of D products grows with sqrt(D). The largest score of
# each row is taken off since exp(1000) overflows; that changes nothing, because the division removes the common
# factor.
#
# How much memory does it hold? `peak` counts what NumPy holds at most while a function runs.

# %%
rng = np.random.default_rng(0)
D, lengths = 16, [256, 512, 1024, 2048]
rows = [rng.standard_normal((3, T, D), dtype=np.float32) for T in lengths]
square = [peak(attention, *each) / 1e6 for each in rows]
for T, megabytes in zip(lengths, square):
    print(
        f"{T:5} tokens: {megabytes:6.1f} MB, and the result has {4 * T * D / 1e6:.2f}"
    )

# %% [markdown]
# Twice the tokens, four times the memory. At 16,384 tokens the scores of one head take 1 GiB, in each of a
# model's layers, and the backward pass needs the weights once more.
#
# Memory is one half of the problem. The other half is time: on a GPU the arrays of T x T go through global
# memory, which is the slow part (lesson 3).
#
# **Exercise 17.1: numbers_moved.** Take three kernels, one after the other: scores = q kᵀ; weights =
# softmax(scores); result = weights v. Let each be perfect: it reads every number that it needs from global
# memory once, and writes each number of its result once. How many numbers move for one head?


# %% tags=["exercise"]
def numbers_moved(T, D):
    """Numbers that the three kernels read from global memory, and write to it, for one head."""
    ...  # 1 line


# %%
check(numbers_moved)

# %% [markdown]
# No idea how to begin? `hint()` in a cell of its own gives the first of three hints. The next cell takes your
# function if it has passed. If not, it takes the lesson's own, so the rest of the lesson works.

# %%
numbers_moved = or_solution(numbers_moved)
for T in (1024, 16384):
    share = 4 * T * 64 / numbers_moved(T, 64)
    print(f"{T:5} tokens: inputs and result are {share:.1%} of what moves")

# %% [markdown]
# ## A softmax in one pass
#
# A query's result needs a sum over all keys, and each term of the sum needs the largest score. So it seems that
# all scores of a row have to be there before the first term. They need not. Suppose that you have added terms
# exp(score - largest) with the largest score *so far*, and a larger one comes. Then every term of the sum is
# too large by the same factor, exp(new - old), so **one** multiplication corrects them all.
#
# **Exercise 17.2: one_pass.** `scores` can be gone through only once: `for score in scores`. Return the largest
# of them, and the sum of exp(score - largest). There is at least one; they may be as large as 1000, or as small
# as -1000. Keep no list of them.


# %% tags=["exercise"]
def one_pass(scores):
    """The largest score, and the sum of exp(score - largest), from one pass over an iterator."""
    largest, total = -math.inf, 0.0
    ...  # about 6 lines


# %%
check(one_pass)

# %%
one_pass = or_solution(one_pass)
scores = rng.standard_normal(10) * 5
largest, total = one_pass(iter(scores.tolist()))
print(np.allclose(np.exp(scores - largest) / total, torch.tensor(scores).softmax(0)))

# %% [markdown]
# The same factor corrects a sum of *values*: if each value is weighted with exp(score - largest so far), then
# all of them are off by that one factor. Press Play, or go step by step:

# %%
one_row()

# %% [markdown]
# So all that a query has to keep is a largest score, a total, and D sums. Call this a **part**: what is known
# from some of the keys. The sums are divided by the total at the very end.
#
# **Exercise 17.3: merged.** Two parts come from different keys of the same query. Each is (largest, total,
# sums): total is the sum of exp(score - largest) over its keys, and sums (D numbers) is the sum of the values
# with these weights. Return the part of all these keys together. One of the two may have seen no key: its
# largest is -inf, its total 0, and its sums are zeros.


# %% tags=["exercise"]
def merged(one, other):
    """The part of all the keys, from the parts of some and of the others."""
    ...  # about 3 lines


# %%
check(merged)

# %%
merged = or_solution(merged)
nothing = (-math.inf, 0.0, np.zeros(2))
parts = [(float(score), 1.0, rng.standard_normal(2)) for score in scores]
ahead, back = nothing, nothing
for part in parts:
    ahead = merged(ahead, part)
for part in reversed(parts):
    back = merged(part, back)
print(ahead[2] / ahead[1], back[2] / back[1])

# %% [markdown]
# The order does not matter, and neither does who has seen which keys. So parts can be computed anywhere: by the
# thread blocks of a GPU that share one long row, or by ranks that each hold some of the tokens. The latter is
# ring attention.
#
# ## Blocks of keys
#
# Now for all queries of a head at once, with NumPy. Take a block of keys at a time: its scores are an array of
# T x block, and nothing is ever larger.
#
# **Exercise 17.4: attention_in_blocks.** Return the result of attention, (T, D) in float32, and for each query
# the logarithm of the sum of exp(score) over all keys, (T,), which is largest + log(total). (You will need
# these logarithms for the backward pass.) The number of keys may differ from the number of queries, and the
# last block may be shorter than the others.
#
# Par: no more is held at a time than 6 arrays of T x block.


# %% tags=["exercise"]
def attention_in_blocks(q, k, v, block):
    """The result (T, D) of attention, and the logarithms (T,) of the sums, from blocks of keys."""
    T, D = q.shape
    largest = np.full((T, 1), -np.inf, np.float32)
    total = np.zeros((T, 1), np.float32)
    sums = np.zeros((T, D), np.float32)
    ...  # about 8 lines


# %%
check(attention_in_blocks)

# %%
attention_in_blocks = or_solution(attention_in_blocks)
q, k, v = rows[-1]
print(np.allclose(attention_in_blocks(q, k, v, 32)[0], attention(q, k, v), atol=1e-6))
blocks = [peak(attention_in_blocks, *each, 32) / 1e6 for each in rows]
curves(
    lengths,
    {"T x T": square, "blocks of 32": blocks},
    {
        "T x T": [square[0] * (T / lengths[0]) ** 2 for T in lengths],
        "blocks of 32": [blocks[0] * T / lengths[0] for T in lengths],
    },
    ("tokens", "MB held at most"),
    f"Attention of one head with NumPy. At {lengths[-1]} tokens the definition holds "
    f"{square[-1] / blocks[-1]:.0f} times as much. Dashed: in proportion to T x T, and to T.",
    alt="Memory against tokens, 256 to 2048. The definition grows fourfold with each "
    "doubling, and blocks of keys twofold.",
)

# %% [markdown]
# ## A kernel of your own
#
# NumPy writes each block's scores to memory and reads them again. In a kernel they never leave the registers.
# This is where the bytes are saved.
#
# A **thread has one query**, and keeps the query, its largest score, its total and its sums in registers. The
# threads of a block, `QUERIES` of them, go through the keys together: they fetch a tile of `KEYS` keys and
# their values to shared memory, wait, and then each thread goes through the tile on its own. All threads of a
# warp read the same row of a tile at a time, and one pass serves them all (lesson 4). `WIDTH` is D. It is small
# here, so that the emulator takes a second and not a minute.
#
# **Causal** attention hides the keys that come after the query, which a model that predicts the next token must
# not see: query i sees keys 0 to i. So half of the square need not be computed, and with it half of the tiles
# need not be fetched:

# %%
hidden_blocks()

# %% [markdown]
# **Exercise 17.5: flash_attention.** Write the softmax of exercise 17.4 as a kernel. `out` is (T, WIDTH), and
# `logs` (T,) holds the logarithms. There may be any number of queries and of keys, at least one; `causal` is 1
# or 0, and where it is 1 there are as many keys as queries. Three parts are missing. The first makes `end`
# smaller if `causal` is set: the keys from `end` on are seen by no query of this block. (`end` must be the same
# for all threads of the block. Do you see why?) The second goes through a tile. The third writes the results.
#
# Par: each tile is read once for each block of queries that sees it; 2 barriers a tile; no bank conflicts;
# nothing in local memory.

# %%
WIDTH, KEYS, QUERIES = 16, 32, 64
SCALE = 1 / math.sqrt(WIDTH)


@cuda.jit(device=True)
def fetch(tile, matrix, first):
    """The block's threads copy as many rows of the matrix as the tile has."""
    rows, columns = tile.shape
    for s in range(cuda.threadIdx.x, rows * columns, cuda.blockDim.x):
        j, c = s // columns, s % columns
        inside = first + j < matrix.shape[0]
        tile[j, c] = matrix[first + j, c] if inside else float32(0)


# %% tags=["exercise"]
@cuda.jit
def flash_attention(q, k, v, out, logs, causal):
    """A thread for each query: its result in out, and the logarithm of its sum in logs."""
    tile_k = cuda.shared.array((KEYS, WIDTH), float32)
    tile_v = cuda.shared.array((KEYS, WIDTH), float32)
    query = cuda.local.array(WIDTH, float32)
    sums = cuda.local.array(WIDTH, float32)
    i = cuda.grid(1)
    largest, total = float32(-math.inf), float32(0)
    for c in range(WIDTH):
        query[c] = q[i, c] * float32(SCALE) if i < q.shape[0] else float32(0)
        sums[c] = float32(0)
    end = k.shape[0]
    ...  # 2 lines: with causal, a smaller end
    for first in range(0, end, KEYS):
        fetch(tile_k, k, first)
        fetch(tile_v, v, first)
        cuda.syncthreads()
        ...  # about 15 lines
        cuda.syncthreads()
    ...  # about 4 lines


# %%
check(flash_attention)

# %%
flash_attention = or_solution(flash_attention)
T = 256
q, k, v = rng.standard_normal((3, T, WIDTH), dtype=np.float32)


def moved(threads, causal):
    """Numbers that the kernel reads and writes in global memory, with so many queries in a block."""
    out, logs = np.empty_like(q), np.empty(T, np.float32)
    counts = profile(flash_attention, T // threads, threads, q, k, v, out, logs, causal)
    if not causal:
        assert np.allclose(out, attention(q, k, v), atol=1e-5)
    return (counts.total.load_bytes + counts.total.store_bytes) / 4


# %% [markdown]
# ## Predict, then measure
#
# Three perfect kernels move `numbers_moved(256, 16)` = 278,528 numbers for these 256 tokens. Yours fetches the
# tiles of keys once for each of its four blocks of 64 queries. How many times fewer numbers does it move? Write
# down your guess, and only then run on.

# %%
prediction = None  # your guess, such as 3; None draws no guess

# %%
three, guess = numbers_moved(T, WIDTH) / 1000, None
found = {"three kernels": three}
for threads in (32, 64, 128, 256):
    found[f"{threads} queries in a block"] = moved(threads, causal=0) / 1000
found["64 queries, causal"] = moved(64, causal=1) / 1000
times = three / found["64 queries in a block"]
if prediction is not None:
    guess = "64 queries in a block", three / prediction
bars(
    found,
    "thousand numbers through global memory",
    f"256 tokens, D = 16: with 64 queries in a block your kernel moves {times:.1f} times "
    f"fewer numbers than three perfect kernels; {said(prediction)}.",
    alt="Bars of the numbers moved: three kernels most, then the kernel with 32, 64, 128 "
    "and 256 queries in a block, each less than the one before; causal less than without.",
    guess=guess,
    logarithmic=False,
)

# %% [markdown]
# The kernel reads T D numbers of q, writes T D of the result and T logarithms, and reads 2 T D numbers of k and
# v for each of its T / `QUERIES` blocks. So what it moves still grows with T x T, but with a small factor: 2 D
# / `QUERIES`, where three kernels have 4. More queries in a block save more, as long as they fit. It is the
# rule of lesson 4 again: a number that was fetched should serve as much work as possible. What the square took
# in *memory* is gone altogether.
#
# The work is not less: the kernel computes as many products as the definition does, and more exponentials. It
# is faster because it no longer waits for the square.
#
# ## The way back
#
# In training, the backward pass needs the weights. They were in registers, and are gone. To store them would be
# the square once more. FlashAttention computes them **again**: weights = exp(scores - logs), where `logs` are
# the logarithms that you returned. They need neither a largest score nor a sum, so each block stands for
# itself. With d for the gradient of the loss by each array:
#
# - d_v = weightsᵀ d_out
# - d_weights = d_out vᵀ
# - d_scores = weights (d_weights - mean), element by element
# - d_q = d_scores k / sqrt(D), and d_k = d_scoresᵀ q / sqrt(D)
#
# The **mean** belongs to the softmax: if one weight grows, the others shrink, since they add up to 1. It is the
# mean of a query's d_weights with its weights. That looks like a sum over all keys, but it is the same as the
# sum of out times d_out over the D columns, which is there before the first block.
#
# **Exercise 17.6: gradients_in_blocks.** Return d_q, d_k and d_v, from blocks of keys. No mask, and float32.
#
# Par: no more is held at a time than 9 arrays of T x block.


# %% tags=["exercise"]
def gradients_in_blocks(q, k, v, out, logs, d_out, block):
    """The gradients of q, k and v, (T, D) each, from that of the result."""
    root = math.sqrt(q.shape[1])
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    ...  # about 8 lines


# %%
check(gradients_in_blocks)

# %%
gradients_in_blocks = or_solution(gradients_in_blocks)
d_out = rng.standard_normal((T, WIDTH), dtype=np.float32)
out, logs = attention_in_blocks(q, k, v, 32)
mine = gradients_in_blocks(q, k, v, out, logs, d_out, 32)
tensors = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
result = torch.nn.functional.scaled_dot_product_attention(*tensors)
result.backward(torch.tensor(d_out))
[np.allclose(x, t.grad, atol=1e-5) for x, t in zip(mine, tensors)]

# %% [markdown]
# Your gradients are those of torch. The forward pass keeps q, k, v, the result and T logarithms for the
# backward pass: nothing with T x T. The price is one product more, of five instead of four. Such a trade,
# arithmetic for memory, is called **recomputation** (lesson 14).
#
# ## The rungs
#
# The project has two ladders of attention. The one on a CPU begins with the definition, and goes on with your
# exercises: one pass, blocks of keys. Then it uses the matmul ladder's tile of registers for both products.
# Here they are, with one head of 1024 tokens:

# %%
q, k, v = rng.standard_normal((3, 1024, 64), dtype=np.float32)
exact = attention(*(x.astype(np.float64) for x in (q, k, v)))
for step in ATTENTION_LADDER:
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        found = step.attention(q, k, v)
        seconds.append(time.perf_counter() - began)
    error = np.abs(found - exact).max() / np.abs(exact).max()
    print(
        f"{step.name:17} {1e3 * min(seconds):7.1f} ms, error {error:.0e}: {step.idea}"
    )

# %% [markdown]
# And the memory? At 16,384 tokens of 64 the scores of this one head would take 1 GiB.

# %%
q, k, v = rng.standard_normal((3, 16384, 64), dtype=np.float32)
last = ATTENTION_LADDER[-1]
print(f"q, k and v: {3 * q.nbytes / 2**20:.0f} MiB")
print(f"{last.name} holds {peak(last.attention, q, k, v) / 2**20:.0f} MiB beside them")

# %% [markdown]
# The other ladder is for GPUs. The emulator counts what its rungs do, for 128 tokens of 64, forward:

# %%
q, k, v = (torch.randn(128, 64) for _ in range(3))
for step in CUDA_ATTENTION_LADDER:
    counts = counted_attention(step, q, k, v)
    total = counts.total
    print(
        f"{step.name:18} {total.load_bytes + total.store_bytes:9,} bytes, {total.instructions:7,} "
        f"instructions, {total.matrix:4} matrix: {step.idea}"
    )

# %% [markdown]
# Rung 1 is the three kernels. In rung 2 the scores stay in registers, but each query fetches all keys for
# itself. Rung 3 has tiles, as yours, and moves over 40 times fewer bytes. Rungs 4 and 5 take float16, which
# halves the bytes once more. They need few instructions, since one of them multiplies whole tiles (lesson 6).
#
# A model takes any of these rungs, `GPT(config, attention=rung)`, and trains on it forward and backward. Up to
# rounding it does not matter which:

# %%
bytes_of_text = dataset("bytes", length=64, limit=400).train
for rung in (None, "s1_three_passes", "s7_backward"):
    model = GPT(config("byte-tiny"), attention=rung)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for start in range(0, 160, 16):
        inputs, targets = bytes_of_text[start : start + 16]
        loss = cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{rung or 'torch':15} loss after 10 steps {loss.item():.5f}")

# %% [markdown]
# ## What breaks in practice, and how one sees it
#
# - **NaN in some rows.** A query that sees no key, such as padding under a mask, has the largest score -inf,
#   and -inf - (-inf) is NaN. One such row spoils all gradients. Look for it with `torch.isnan(out).any(-1)`,
#   and let each query see at least itself.
# - **The square comes back.** You pass a mask as an array, or ask for the weights (`need_weights=True`). Then
#   the library cannot use its fast kernel, says nothing, and memory grows with T x T again. Give
#   `is_causal=True` in place of a mask, and watch the peak as you double T.
# - **Sums in 16 bits.** q, k and v may be bfloat16, but the total, the sums and the logarithms have to be
#   float32. In lesson 6 a sum of ones in bfloat16 was stuck at 256, and a row of keys is longer than that.
# - **Dropout.** The backward pass must drop the weights that the forward pass dropped. They are not stored, so
#   it draws the same random numbers again: the kernel keeps a seed and counts.
# - **Different digits in each run.** On a GPU many thread blocks may add to the same d_q, in any order. The
#   last digits then change from run to run. Libraries have a slower, deterministic mode for a comparison.
# - **A mask that is one off.** If the query sees the next token, the loss falls fast and far, and the model
#   writes nonsense. Change a later token: the logits before it must stay as they are.
#
# ## Further reading
#
# - Milakov and Gimelshein, *Online normalizer calculation for softmax*, 2018: five pages, with the proof of
#   what you wrote in 17.2 and 17.3.
# - Dao, Fu, Ermon, Rudra and Ré, *FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness*,
#   2022: section 3 counts what moves, and appendix B has the backward pass.
# - Dao, *FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning*, 2023: what to do
#   next, once the square is gone: fewer other operations, and a better division among warps.
#
# ## Where your lines live
#
# The rungs of attention on [a CPU](../kernels/cpu/attention/__init__.py) and in
# [CUDA](../kernels/cuda/attention/__init__.py), and in the library:
#
# | You wrote | The rung | The library |
# |---|---|---|
# | `one_pass` | cpu/attention/s2_one_pass.py: [`compute`](../kernels/cpu/attention/s2_one_pass.py) | – |
# | `merged` | plain/ring_attention.py: [`RingSoftmax.forward`](../minidist/plain/ring_attention.py) | context_parallel/blockwise_attention.py: [`RungSoftmax.add`](../minidist/parallel/context_parallel/blockwise_attention.py) |
# | `attention_in_blocks` | cpu/attention/s3_key_blocks.py: [`compute`](../kernels/cpu/attention/s3_key_blocks.py) | context_parallel/blockwise_attention.py: [`OnlineSoftmax.add`](../minidist/parallel/context_parallel/blockwise_attention.py) |
# | `flash_attention` | cuda/attention/s3_shared_tiles.py: [`kernel`](../kernels/cuda/attention/s3_shared_tiles.py) | model/attention.py: [`attention`](../minidist/model/attention.py) |
# | `gradients_in_blocks` | cpu/attention/support/backward_pass.py: [`attend`](../kernels/cpu/attention/support/backward_pass.py) | context_parallel/blockwise_attention.py: [`SoftmaxGradient.add`](../minidist/parallel/context_parallel/blockwise_attention.py) |
#
# The rungs add what makes them fast: both products in tiles of registers or on tensor cores, and exponentials
# in vectors. The library lets a GPT train on any of them, and ring attention merge what ranks computed.
#
# Next: your own kernel, with tensor cores, or for a mask of your own.
