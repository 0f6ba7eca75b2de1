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
# # 13. Tensor and sequence parallel
#
# **Time:** about 2.5 hours. **Builds on:** lessons 08 and 12.
#
# Lesson 12 gave whole layers to ranks, one after the other. Here all ranks work on *the same layer at the same
# time*: each has a part of its matrices. In this lesson you cut an MLP and an attention layer so that two
# messages each are enough, backward included, and find out how wide a layer has to be for that to pay.

# %%
import statistics
import time

import numpy as np
import torch
from torch.nn import functional

import minidist as md
from checks.figures import curves, ladder, said
from checks.pictures.shared_layers import shared_mlp, stream
from checks.tensor_parallel import check, hint, or_solution
from minidist import comm

ladder(13)

# %% [markdown]
# **The question.** How can n ranks share one matrix product, so that each does 1/n of the work with 1/n of the
# weights, and they talk as little as possible? (Llama 3 405B was trained with its matrices shared by 8 GPUs,
# those of one machine: Grattafiori et al. 2024. By the end of this lesson you know why 8, and why of one
# machine.)
#
# ## Two ways to cut a product
#
# Take y = x @ w, with x a row of features for each token, and w a matrix. w can be cut by its columns or by its
# rows.

# %%
x, w = torch.randn(3, 8), torch.randn(8, 6)
columns, rows = w.tensor_split(2, dim=1), w.tensor_split(2, dim=0)
x_parts = x.tensor_split(2, dim=1)

by_columns = torch.cat([x @ columns[0], x @ columns[1]], dim=1)
by_rows = x_parts[0] @ rows[0] + x_parts[1] @ rows[1]
torch.allclose(by_columns, x @ w), torch.allclose(by_rows, x @ w, atol=1e-5)

# %% [markdown]
# - **By columns:** a rank needs all of x, and gets *its columns* of y. Nothing has to be sent.
# - **By rows:** a rank needs only *its columns* of x, and gets a **summand** of y. The sum is an all-reduce.
#
# The first leaves what the second needs. So of two layers in a row cut the first by columns and the second by
# rows, and there is one message in all. What lies between may only look at each element alone: a ReLU does, and
# so does a GELU, its smooth relative.

# %%
shared_mlp()

# %% [markdown]
# **Exercise 13.1: shared_mlp_forward.** y = gelu(x @ a) @ b, where all ranks have `x`, and each has its columns
# of a and its rows of b. All ranks return y. `x` stays as it is. `comm.all_reduce(t)` sums `t` over the ranks,
# in place.
#
# Par: 2 (n - 1) / n times the bytes of y.


# %% tags=["exercise"]
def shared_mlp_forward(x, a, b):
    """y of gelu(x @ a) @ b, from this rank's columns of a and rows of b."""
    ...  # about 2 lines; functional.gelu


# %%
check(shared_mlp_forward)

# %%
shared_mlp_forward = or_solution(shared_mlp_forward)
cluster = md.Cluster(ranks=4)
x, a, b = torch.randn(5, 16), torch.randn(16, 64), torch.randn(64, 16)


def my_part(w, dim):
    return w.tensor_split(md.size(), dim)[md.rank()]


whole = functional.gelu(x @ a) @ b
shared = cluster.run(lambda: shared_mlp_forward(x, my_part(a, 1), my_part(b, 0)))
[f"{(y - whole).abs().max():.0e}" for y in shared]

# %% [markdown]
# The same, but for rounding: the sums are taken in another order.
#
# ## Backward
#
# Going back, the picture turns around. The gradient of y is the same on all ranks, and each computes with it
# the gradients of its own columns and rows: right, and nothing to send. But the gradient of x is wrong: each
# rank knows only what came through *its* columns. The whole is the sum over the ranks.
#
# So there are two places where ranks talk, at the end of the shared part going forward, and at its beginning
# going backward. Shoeybi et al. (2019, section 3) call the operators at these places g and f. Here they are
# called
#
# | | forward | backward |
# |---|---|---|
# | `enter` (f) | x itself | all-reduce |
# | `leave` (g) | all-reduce | the gradient itself |
#
# An operator with a backward of its own is a `torch.autograd.Function`. This is `leave`:


# %%
def leave(x):
    """The sum over the ranks; its gradient goes on as it is."""

    class Leave(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return comm.all_reduce(x.clone())

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    return Leave.apply(x)


# %% [markdown]
# It sums a copy: x is not its own, and somebody else may need it. The same holds for a gradient.
#
# **Exercise 13.2: enter.** Forward: x, sending nothing. Backward: the sum of all ranks' gradients. Neither `x`
# nor `gradient` is changed.
#
# Par: nothing forward, 2 (n - 1) / n times the bytes of x backward.


# %% tags=["exercise"]
def enter(x):
    """x itself; its gradient is summed over the ranks."""

    class Enter(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            """x itself; x.view_as(x) is a new tensor on the same memory."""
            ...  # 1 line

        @staticmethod
        def backward(ctx, gradient):
            """The gradient of x."""
            ...  # 1 line

    return Enter.apply(x)


# %%
check(enter)

# %% [markdown]
# With both, autograd does all the rest. Is the gradient of x that of one process? And what if somebody forgets
# `enter`?

# %%
enter = or_solution(enter)


def gradient_of_x(forgotten):
    mine = x.clone().requires_grad_()
    inside = mine if forgotten else enter(mine)
    hidden = functional.gelu(inside @ my_part(a, 1))
    leave(hidden @ my_part(b, 0)).sum().backward()
    return mine.grad


alone = x.clone().requires_grad_()
(functional.gelu(alone @ a) @ b).sum().backward()
for forgotten in (False, True):
    off = (cluster.run(gradient_of_x, forgotten)[0] - alone.grad).abs().max()
    print(f"without enter: {forgotten!s:5}  off by {off:.1e}")

# %% [markdown]
# ## Attention, by heads
#
# Attention in three sentences. Each token makes a **query**, a **key** and a **value**: three products of x
# with three matrices. It compares its query with the keys of the tokens up to it, and takes the mean of their
# values, weighted by how well they fit. That is done by several **heads** at once, each with its own columns of
# the three matrices, and a last matrix mixes what the heads found.
#
# Heads know nothing of each other until that last matrix. So: query, key and value by columns, cut *between
# heads*; the output matrix by rows. It is the MLP's pattern again.
#
# **Exercise 13.3: shared_attention.** `x` (tokens, D) is the same on all ranks; `query`, `key` and `value` are
# this rank's columns, (D, D / n), which are whole heads of `head_size` columns each; `output` is this rank's
# rows, (D / n, D). Return the layer's y, (tokens, D), on all ranks, such that backward is right, too.
#
# `functional.scaled_dot_product_attention(q, k, v, is_causal=True)` takes (heads, tokens, head_size) and
# returns the same shape. From (tokens, columns) to that: `t.unflatten(1, (-1, head_size)).transpose(0, 1)`;
# back again: `t.transpose(0, 1).flatten(1)`.
#
# Par: one all-reduce of x's size forward, one backward.


# %% tags=["exercise"]
def shared_attention(x, query, key, value, output, head_size):
    """Causal attention with this rank's heads; y on all ranks."""
    ...  # about 6 lines, with enter and leave


# %%
check(shared_attention)

# %%
shared_attention = or_solution(shared_attention)
tokens, matrices = torch.randn(6, 32), [torch.randn(32, 32) / 6 for _ in range(4)]


def bytes_of_attention():
    query, key, value = (my_part(w, 1) for w in matrices[:3])
    mine, output = tokens.clone().requires_grad_(), my_part(matrices[3], 0)
    with comm.ledger() as ledger:
        y = shared_attention(mine, query, key, value, output, head_size=4)
        y.sum().backward()
    return ledger.bytes_sent


print("sent", cluster.run(bytes_of_attention), "bytes")
print("two all-reduces:", 2 * 2 * 3 * tokens.nbytes // 4)

# %% [markdown]
# A block of a transformer is attention and an MLP, so a pass through it takes **four all-reduces**: two
# forward, two backward. Each is of the size of x: tokens times D.
#
# ## The last layer
#
# The last matrix of a GPT is the largest: a column for each token of the vocabulary, often 50,000 or more. Cut
# it by columns, and each rank has the scores (**logits**) of its part of the vocabulary. To gather them would
# send the largest tensor of all. But the loss of a row is
#
#     loss = -log softmax(z)[t] = log(sum of exp(z[j]) over all j) - z[t]
#
# with z the row's logits and t its target: a sum over the vocabulary, which ranks can do in parts, and one
# logit, which one of them has. To keep the exponentials finite, the largest logit of the row is subtracted from
# all first: that needs the largest over *all* ranks. Three numbers a row: `comm.all_reduce(t, "max")` gives the
# first, one all-reduce both sums.
#
# The gradient for the logits is softmax(z), less 1 at the target, over the number of rows. Each rank has all
# that it needs for its part.
#
# **Exercise 13.4: vocabulary_loss.** `logits` (rows, V / n) are this rank's: rank r has columns r V / n and on.
# `targets` (rows,) are the right tokens, 0 to V - 1, the same on all ranks. Return the mean loss, the same on
# all ranks, and its gradient for these logits.
#
# Par: all-reduces of three numbers a row.


# %% tags=["exercise"]
def vocabulary_loss(logits, targets):
    """(mean loss, its gradient for this rank's logits), without gathering logits."""
    ...  # about 14 lines


# %%
check(vocabulary_loss)

# %%
vocabulary_loss = or_solution(vocabulary_loss)
rows, vocabulary = 256, 8192


def loss_and_bytes():
    torch.manual_seed(0)  # the same numbers on all ranks
    logits = torch.randn(rows, vocabulary)
    targets = torch.randint(vocabulary, (rows,))
    with comm.ledger() as ledger:
        loss, _ = vocabulary_loss(my_part(logits, 1), targets)
    return loss.item(), ledger.bytes_sent, functional.cross_entropy(logits, targets)


loss, sent, right = cluster.run(loss_and_bytes)[0]
gathering = 3 * rows * vocabulary // 4 * 4
print(f"loss {loss:.6f}, in one process {right:.6f}")
print(f"sent {sent:,} bytes; to gather the logits takes {gathering:,}")

# %% [markdown]
# ## Sequence parallel
#
# What lies *between* the shared parts? Norms, dropout, and the sums x + attention(x) and x + mlp(x). They are
# cheap to compute, but not to keep: backward needs what forward computed, the **activations**, and of these
# each rank keeps all there, the same as all others. But norms, dropout and sums look at each token alone. So
# let each rank have 1/n of the *tokens* there (Korthikanti et al. 2022, section 4.2).

# %%
stream()

# %% [markdown]
# At the end of a shared part each rank then needs the sum for its own tokens: a reduce-scatter. At the
# beginning it needs all tokens: an all-gather. And these two are what an all-reduce is made of (lesson 08):
# **as many bytes as before**, and 1/n of the activations.
#
# Backward, the two change places again. What does the gradient of an all-gather do? A rank's token went to all
# ranks, so the gradients of all ranks come back to it and add up.
#
# **Exercise 13.5: gather_tokens.** `x` is (tokens / n, D), this rank's tokens. Forward: all tokens, (tokens,
# D), rank 0's first. Backward: the sum over the ranks of the gradients of this rank's tokens.
# (`comm.all_gather(t)` and `comm.reduce_scatter(t)` take and return parts of the first dimension.)
#
# Par: n - 1 times the bytes of `x` in each direction.


# %% tags=["exercise"]
def gather_tokens(x):
    """(tokens / n, D) -> (tokens, D); the gradients of all ranks are summed."""

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            """All tokens."""
            ...  # 1 line

        @staticmethod
        def backward(ctx, gradient):
            """The gradient of this rank's tokens."""
            ...  # 1 line

    return Gather.apply(x)


# %%
check(gather_tokens)

# %% [markdown]
# `scatter_tokens` is its mirror image. With both, half a block in the two ways, a norm, an MLP and the residual
# sum; `kept` is the bytes that backward has to keep.

# %%
from minidist.parallel.training.activation_memory import ActivationCounter

gather_tokens = or_solution(gather_tokens)


def scatter_tokens(x):
    class Scatter(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return comm.reduce_scatter(x)

        @staticmethod
        def backward(ctx, gradient):
            return comm.all_gather(gradient)

    return Scatter.apply(x)


# %%
def half_block(x, begin, end):
    normed = functional.layer_norm(x, x.shape[-1:])
    return x + end(functional.gelu(begin(normed) @ my_part(a, 1)) @ my_part(b, 0))


def kept_and_sent(by_tokens):
    begin, end = (gather_tokens, scatter_tokens) if by_tokens else (enter, leave)
    x = torch.linspace(-1, 1, 64 * 16).view(64, 16)
    x = (my_part(x, 0) if by_tokens else x).clone().requires_grad_()
    with ActivationCounter() as counter, comm.ledger() as ledger:
        y = half_block(x, begin, end)
        y.sum().backward()
    return counter.peak, ledger.bytes_sent


for by_tokens in (False, True):
    kept, sent = cluster.run(kept_and_sent, by_tokens)[0]
    print(f"by tokens: {by_tokens!s:5}  kept {kept:,} bytes, sent {sent:,}")

# %% [markdown]
# The same bytes sent, fewer kept. (What stays whole is the input of the first product, gathered. `minidist`
# keeps a rank's own tokens of it only and gathers them once more in backward, as the paper does: five exchanges
# in place of four, and the fifth goes on while it computes.)
#
# ## Dropout, and whose random numbers
#
# Dropout zeroes random elements. Where all ranks have the same activations, they all have to zero the *same*
# ones: else their copies part, and no message ever tells. Where each has its own heads or its own tokens, they
# have to draw *different* ones: else all heads lose the same places. So a rank needs two streams of random
# numbers.

# %%
from minidist.parallel.training.random_state import own_random_state


def draws():
    torch.manual_seed(1)  # the same start on all ranks
    common = torch.rand(1)
    with own_random_state():
        own = torch.rand(1)
    again = torch.rand(1)
    return [round(number.item(), 3) for number in (common, own, again)]


cluster.run(draws)

# %% [markdown]
# The first and the last number are the same on all ranks, the one between is each rank's own: the common stream
# goes on where it was.
#
# ## Does it pay? Predict, then measure
#
# One block of width D, 128 tokens, on one rank or on two. The arithmetic is 24 D² operations a token forward,
# and twice that backward. The four messages carry 4 D bytes a token each. **Arithmetic grows with D², messages
# with D**: so there is a width from which on two ranks are faster than one. Which is it on your machine?

# %%
prediction = None  # your guess, such as 300; None draws no guess

# %% [markdown]
# `parallelize` cuts a module by a plan that names its parts, in just the way that you did by hand.

# %%
from minidist.model.blocks import Block
from minidist.model.configs import GPTConfig
from minidist.parallel.tensor_parallel import parallelize

PLAN = {
    "attention.query|key|value": "column",
    "attention.output": "row",
    "mlp.up": "column",
    "mlp.down": "row",
}


def block_of(width):
    shape = GPTConfig(context=128, layers=1, heads=4, width=width)
    torch.manual_seed(0)
    block = Block(shape)
    for parameter in block.parameters():  # made without values
        torch.nn.init.normal_(parameter, std=0.02)
    return block


# %%
def seconds(call, rounds=9):
    call()  # the first time takes longer
    times = []
    for _ in range(rounds):
        comm.barrier()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def time_block(width, shared):  # not shared: each of both ranks has a block of its own
    block = block_of(width)
    if shared:
        parallelize(block, PLAN)
    x = torch.randn(1, 128, width, requires_grad=True)
    return seconds(lambda: block(x).sum().backward())


def time_messages(width):
    x = torch.ones(128, width)
    return 4 * seconds(lambda: comm.all_reduce(x))


# %%
pair = md.Cluster(ranks=2)
widths = (32, 64, 128, 256, 512, 1024)
alone, shared, messages = [], [], []
for width in widths:
    alone.append(max(pair.run(time_block, width, False)) * 1e3)
    shared.append(max(pair.run(time_block, width, True)) * 1e3)
    messages.append(max(pair.run(time_messages, width)) * 1e3)
    print(
        f"D {width:5}  one rank {alone[-1]:7.2f} ms, two {shared[-1]:7.2f} ms, "
        f"of which messages about {messages[-1]:5.2f}"
    )

# %% [markdown]
# The model: of a block's time on one rank, what the narrowest block takes is no arithmetic to speak of: Python
# and torch begin each operation, however small, and no cut makes that less. The rest is halved. The messages
# come on top.

# %%
start = alone[0]
model = [start + (t - start) / 2 + m for t, m in zip(alone, messages)]


def pays_from(times):  # the width from which on all are faster than on one rank
    wins = [two < one for one, two in zip(alone, times)]
    return next((w for i, w in enumerate(widths) if all(wins[i:])), "no width")


# %%
at = prediction and (prediction, float(np.interp(prediction, widths, alone)))
curves(
    widths,
    {"one rank": alone, "two ranks": shared},
    {"two ranks": model},
    labels=("width D", "milliseconds, forward and backward"),
    guess=at,
    caption="Dots are measured, the dashed line is the model for two ranks. Two are faster from "
    f"D = {pays_from(shared)} on, and by the model from {pays_from(model)}; "
    f"{said(prediction)}.",
    alt="Time of a block against its width on one rank and on two: alike or worse on two for narrow "
    "blocks, and towards a half of the time for wide ones.",
)

# %% [markdown]
# Read it from the left. **Narrow:** the cut halves next to nothing and adds four messages. What the model leaves
# out counts most there: the calls of the operators at the ends of the shared parts, and that at each message
# both ranks wait for the slower one. **Wide:** the arithmetic is nearly all, and it is halved, if the machine
# has two cores that are free. Two ranks share more than they seem to, memory and a power limit among it, and so
# about a half is the best case.
#
# ## A whole model
#
# `md.Layout(tp=2)` does this to a whole GPT: all blocks, the table of tokens, the last layer and the loss.
# Blocks take four all-reduces each; the table takes one forward, the last layer one backward. Count them: with
# L blocks it is 4 L + 2, and three numbers a token for the loss, which each rank sends to the other.

# %%
from functools import partial

from minidist.model import GPT

shape = GPTConfig(context=64, layers=4, heads=4, width=64)


def bytes_of_a_step(layout):
    make = partial(torch.optim.AdamW, lr=1e-3)
    engine = md.prepare(GPT(shape), make, layout)
    tokens = torch.arange(8 * 65).view(8, 65) % 256
    engine.step(tokens[:, :-1], tokens[:, 1:])
    with comm.ledger() as ledger:
        engine.step(tokens[:, :-1], tokens[:, 1:])
    return ledger.bytes_sent, engine.memory()


sent, memory = pair.run(bytes_of_a_step, md.Layout(tp=2))[0]
number = 4 * 8 * 64  # bytes of one number for each token, in float32
# Two ranks send 2 (n - 1) / n = 1 times the bytes in an all-reduce.
print(f"predicted {(4 * 4 + 2) * number * 64 + 3 * number:,} bytes a step")
print(f"measured  {sent:,}")

# %%
layout = md.Layout(tp=2, sequence_parallel=True)
_, by_tokens = pair.run(bytes_of_a_step, layout)[0]
print("activations:")
print(f"  tensor parallel        {memory.activations:,} bytes")
print(f"  and sequence parallel  {by_tokens.activations:,} bytes")

# %% [markdown]
# To the byte. Data parallelism sends the gradients once a step, whatever the batch. Tensor parallelism sends
# activations, in every layer, *while everybody waits*: the next product needs the sum. That is why it lives
# inside a machine.
#
# ## Machines that you do not have
#
# One block of GPT-3 with 2048 tokens on 8 GPUs. Suppose each does 300 TFLOP/s, and activations take 2 bytes
# each:

# %%
from minidist.comm import cost

D, tokens, n = 12288, 2048, 8
compute = 3 * 24 * D**2 * tokens / n / 300e12
print(
    f"arithmetic of a block on each GPU: {compute * 1e3:.1f} ms, and four all-reduces:"
)
for network in ("nvlink4", "infiniband_ndr", "100gbe", "25gbe"):
    t = 4 * cost.predict("all_reduce", "ring", 2 * D * tokens, n, network)
    print(f"  {network:16}{t * 1e3:8.1f} ms")

# %% [markdown]
# Between GPUs of one machine the messages are a small part. Over a network between machines they take as long
# as the arithmetic, or many times as long. So cut the layers (lesson 12) or the batch (lesson 09) between
# machines, and the matrices within one.
#
# ## What breaks in practice, and how one sees it
#
# - **A forgotten f.** The last layers train, those before them get parts of their gradients, and the loss
#   falls, only more slowly. Compare gradients with one process: `md.compare` names the first layer that
#   differs.
# - **A bias added n times.** A layer cut by rows adds its bias before the all-reduce, on each rank. Add it
#   after.
# - **Copies that part.** Norms are kept on all ranks, and nothing ever sends them. Another seed, another
#   dropout mask, and they drift. `md.assert_in_sync(block.mlp_norm)` looks at one.
# - **Sequence parallel and norms.** A norm's weights are on all ranks, but each has seen its own tokens only:
#   their gradients have to be summed, or the copies part after one step.
# - **Heads that ranks do not divide**, such as GPT-2 XL's 25: a cut through a head gives wrong attention
#   without any error, where the shapes happen to fit.
# - **Clipping.** For the norm of all gradients the squares of cut parameters are summed over the ranks, and
#   those of copies count once. A sum of all of them counts copies n times, and clips too much
#   (`md.prepare(..., clip_norm=1.0)` does not).

# %%
pair.close()
cluster.close()

# %% [markdown]
# ## Further reading
#
# - Shoeybi and others, *Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism*,
#   2019: section 3 is what you wrote, f and g included.
# - Korthikanti and others, *Reducing Activation Recomputation in Large Transformer Models*, 2022: sequence
#   parallelism, and what of the activations is worth keeping.
# - Narayanan and others, *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*,
#   2021: tensor, pipeline and data parallel together, and which belongs where.
#
# ## Where your lines live
#
# Two rungs of [the training ladder](../minidist/plain/__init__.py):
#
# | You wrote | The rung | The engine |
# |---|---|---|
# | `shared_mlp_forward`, `shared_attention` | plain/tensor_parallel.py: [`SharedBlock`](../minidist/plain/tensor_parallel.py) | parallel/tensor/column_parallel.py: [`ColumnParallelLinear.forward`](../minidist/parallel/tensor/column_parallel.py); parallel/tensor/row_parallel.py: [`RowParallelLinear.forward`](../minidist/parallel/tensor/row_parallel.py) |
# | `enter` (f), `leave` (g) | plain/tensor_parallel.py: [`Enter`](../minidist/plain/tensor_parallel.py), [`Leave`](../minidist/plain/tensor_parallel.py) | parallel/tensor/operators.py: [`copy_to_ranks`](../minidist/parallel/tensor/operators.py), [`reduce_from_ranks`](../minidist/parallel/tensor/operators.py) |
# | `gather_tokens` | plain/sequence_parallel.py: [`Gather`](../minidist/plain/sequence_parallel.py) | parallel/tensor/operators.py: [`gather_sequence`](../minidist/parallel/tensor/operators.py) |
# | `scatter_tokens` | plain/sequence_parallel.py: [`Scatter`](../minidist/plain/sequence_parallel.py) | parallel/tensor/operators.py: [`scatter_sequence`](../minidist/parallel/tensor/operators.py) |
# | `vocabulary_loss` | – | parallel/tensor/vocabulary.py: [`vocab_parallel_cross_entropy`](../minidist/parallel/tensor/vocabulary.py) |
#
# The rungs have your operators, forward and backward. They put them around the layers of a whole GPT, whose
# embedding and head stay whole. The engine cuts those too, cuts any model by a plan, and computes a weight's
# gradient while the input's is on its way.
#
# Next: lesson 14 takes the copies out of data parallelism.
