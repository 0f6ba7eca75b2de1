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
# time*: each has a part of its matrices. In this lesson you cut an MLP and an attention layer so that each
# needs only two all-reduces, one forward and one backward. Then you find out how wide a layer has to be before
# this pays.

# %%
import statistics
import time

import numpy as np
import torch
from torch.nn import functional

import minidist as md
from checks.figures import curves, ladder, said
from checks.pictures.shared_heads import shared_heads, shared_vocabulary
from checks.pictures.shared_layers import shared_mlp, stream
from checks.tensor_parallel import check, hint, or_solution
from minidist import comm

ladder(13)

# %% [markdown]
# **The question.** How can n ranks share one matrix product, so that each does 1/n of the work with 1/n of the
# weights, and they send as little as possible? (In the training of Llama 3 405B, the 8 GPUs of a machine shared
# each matrix: Grattafiori et al. 2024. By the end of this lesson you know why 8, and why in one machine.)
#
# ## Two ways to cut a product
#
# Take y = x @ w. The matrix x has a row of features for each token, and w holds the weights. You can cut w by
# its columns or by its rows.

# %%
x, w = torch.randn(3, 8), torch.randn(8, 6)
columns, rows = w.tensor_split(2, dim=1), w.tensor_split(2, dim=0)
x_parts = x.tensor_split(2, dim=1)

by_columns = torch.cat([x @ columns[0], x @ columns[1]], dim=1)
by_rows = x_parts[0] @ rows[0] + x_parts[1] @ rows[1]
torch.allclose(by_columns, x @ w), torch.allclose(by_rows, x @ w, atol=1e-5)

# %% [markdown]
# - **By columns:** a rank needs all of x, and computes *its columns* of y. Nothing has to be sent.
# - **By rows:** a rank needs only *its columns* of x, and computes one **summand** of y. An all-reduce adds up
#   the summands.
#
# A cut by columns produces just what a cut by rows needs. So of two consecutive layers, cut the first by
# columns and the second by rows: then both together need a single all-reduce. The function between them must
# treat each element alone, as a ReLU does, and a GELU, its smooth relative.

# %%
shared_mlp()

# %% [markdown]
# **Exercise 13.1: shared_mlp_forward.** y = gelu(x @ a) @ b, where all ranks have `x`, and each has its own
# columns `a` and its own rows `b` of the two matrices. Return y on all ranks, and leave `x` as it is.
# `comm.all_reduce(t)` sums `t` over the ranks, in place.
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
# The results are the same, except for rounding: the ranks add up in another order.
#
# ## Backward
#
# Backward goes through the picture from right to left. All ranks have the same gradient of y. From it, each
# rank computes the gradients of its own columns and rows. These are right, and nothing has to be sent. But the
# gradient of x is not complete: each rank knows only the part that came through *its* columns. The whole
# gradient is the sum over the ranks.
#
# So the ranks communicate in two places: forward at the end of the shared part, and backward at its beginning.
# Shoeybi et al. (2019, section 3) call the operators at these two places g and f. Here their names are
#
# | | forward | backward |
# |---|---|---|
# | `enter` (f) | x itself | all-reduce |
# | `leave` (g) | all-reduce | the gradient itself |
#
# To give an operator its own backward, write a `torch.autograd.Function`. This is `leave`:


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
# `all_reduce` works in place, so sum a clone; clone gradients too.
#
# **Exercise 13.2: enter.** Forward, return x and send nothing. Backward, return the sum of all ranks'
# gradients. Change neither `x` nor `gradient`.
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
# With these two operators, autograd does all the rest. Is the gradient of x the same as in one process? And
# what if you forget `enter`?

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
# Here is attention in short. Each token makes a **query**, a **key** and a **value**: three products of x with
# three matrices. The token compares its query with the keys of all tokens up to itself. Then it takes a mean of
# their values, weighted by how well query and key fit. Several **heads** do this at once, each with its own
# columns of the three matrices. A last matrix mixes the results of the heads.
#
# The heads do not depend on each other until that last matrix. So cut query, key and value by columns, *between
# heads*, and cut the output matrix by rows. It is the MLP's pattern again.

# %%
shared_heads()

# %% [markdown]
# **Exercise 13.3: shared_attention.** `x` (tokens, D) is the same on all ranks; `query`, `key` and `value` are
# this rank's columns, (D, D / n): whole heads of `head_size` columns each. `output` has this rank's rows, (D /
# n, D). Return the layer's y, (tokens, D), on all ranks. Backward has to be right as well.
#
# `functional.scaled_dot_product_attention(q, k, v, is_causal=True)` takes (heads, tokens, head_size) and
# returns the same shape. `t.unflatten(1, (-1, head_size)).transpose(0, 1)` turns (tokens, columns) into that
# shape, and `t.transpose(0, 1).flatten(1)` turns it back.
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
# A block of a transformer has an attention layer and an MLP, so a step through it takes **four all-reduces**:
# two forward and two backward. Each has the size of x, tokens times D.
#
# ## The last layer
#
# The last matrix of a GPT is the largest. It has a column for each token of the vocabulary, often 50,000 or
# more. If you cut it by columns, each rank has the scores (**logits**) of its part of the vocabulary. To gather
# the logits, you would have to send the largest tensor of all. But the loss of a row is
#
#     loss = -log softmax(z)[t] = log(sum of exp(z[j]) over all j) - z[t]
#
# where z are the row's logits and t is its target. It has two parts: a sum over the vocabulary, which the ranks
# can compute in parts, and one logit, which one of the ranks has. To keep the exponentials finite, first
# subtract the row's largest logit from all its logits, the largest over *all* ranks. So the ranks exchange
# three numbers for each row: `comm.all_reduce(t, "max")` finds the largest, and one more all-reduce adds up
# both parts.
#
# The gradient of the logits is softmax(z), minus 1 at the target, divided by the number of rows. Each rank can
# compute its own part without another message.

# %%
shared_vocabulary()

# %% [markdown]
# **Exercise 13.4: vocabulary_loss.** `logits` (rows, V / n) are this rank's columns; those of rank r begin at
# column r V / n. `targets` (rows,) are the right tokens, 0 to V - 1, as int64, the same on all ranks. Return the
# mean loss, the same on all ranks, and its gradient with respect to this rank's logits. Both have the dtype of
# the logits, float32 or float64 (the check's are float64, to compare ten digits). Leave `logits` and `targets`
# as they are.
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
# *Between* the shared parts are norms, dropout, and the sums x + attention(x) and x + mlp(x). They take little
# time to compute, but much memory to keep. Backward needs the results of forward, the **activations**, and
# between the shared parts every rank keeps all of them, the same as every other rank. But norms, dropout and
# sums treat each token alone. So give each rank 1/n of the *tokens* there (Korthikanti et al. 2022, section
# 4.2).

# %%
stream()

# %% [markdown]
# At the end of a shared part, each rank then needs the sum for its own tokens only: a reduce-scatter. At the
# beginning it needs all tokens: an all-gather. An all-reduce consists of just these two (lesson 08). So the
# ranks send **as many bytes as before**, and keep 1/n of the activations.
#
# Backward, the two change places. Why? In an all-gather a rank's token goes to all ranks. So backward, the
# gradients of all ranks come back to that token and add up.
#
# **Exercise 13.5: gather_tokens.** `x` is (tokens / n, D), this rank's tokens. Forward, return all tokens,
# (tokens, D), rank 0's first. Backward, return the gradient of this rank's tokens, summed over the ranks.
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
# `scatter_tokens` is its mirror image. The cell runs half a block both ways, without and with sequence
# parallelism: a norm, an MLP and the sum. `kept` counts the bytes that have to stay until backward.

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
# The second way sends the same bytes and keeps fewer. (Only the gathered input of the first product is still
# kept whole. `minidist` keeps only the rank's own tokens of it, and gathers them once more in backward, as the
# paper does. That makes five exchanges instead of four, and the fifth runs while the rank computes.)
#
# ## Dropout, and whose random numbers
#
# Dropout sets random elements to zero. Where all ranks have the same activations, they have to zero the *same*
# elements. If they do not, their copies become different, and no message ever shows it. Where each rank has its
# own heads or tokens, the ranks have to zero *different* elements, or else all heads lose the same places. So a
# rank needs two streams of random numbers.

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
# The first and the last number are the same on all ranks, and the middle one is different on each. After the
# rank's own number, the common stream went on where it was.
#
# ## Does it pay? Predict, then measure
#
# Take one block of width D and 128 tokens, on one rank or on two. The arithmetic for each token is 24 D²
# operations forward, and twice that backward. Each of the four all-reduces carries 4 D bytes for each token.
# **The arithmetic grows with D², the messages with D.** So from some width on, two ranks are faster than one.
# From which width on your machine?

# %%
prediction = None  # your guess, such as 300; None draws no guess

# %% [markdown]
# `parallelize` cuts a module in the same way as you did by hand. A plan names the parts.

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
    call()  # the first call takes longer
    times = []
    for _ in range(rounds):
        comm.barrier()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def time_block(width, shared):  # if not shared, each rank has a whole block
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
        f"about {messages[-1]:5.2f} of it messages"
    )

# %% [markdown]
# The model of the time on two ranks has three terms. The narrowest block does hardly any arithmetic: its time
# is what Python and torch need to start each operation. A cut does not make that shorter. Two ranks halve the
# rest of the block's time, and the messages come on top.

# %%
start = alone[0]
model = [start + (t - start) / 2 + m for t, m in zip(alone, messages)]


def pays_from(times):  # the first width from which two ranks stay faster than one
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
# Read it from the left. **Narrow:** the cut halves next to nothing, and adds four messages. Two costs that the
# model leaves out weigh most here: the calls of `enter` and `leave`, and the waiting, since at each message
# both ranks wait for the slower one. **Wide:** nearly all of the time is arithmetic, and two ranks halve it, if
# the machine has two free cores. They still share the memory and the power limit of the machine, so about half
# the time is the best case.
#
# ## A whole model
#
# `md.Layout(tp=2)` does this to a whole GPT: all blocks, the table of tokens, the last layer and the loss. Each
# block takes four all-reduces, the table takes one forward, and the last layer one backward. With L blocks that
# is 4 L + 2. For the loss, each rank also sends three numbers for each token.

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
# The prediction is right to the byte. Data parallelism sends the gradients once in a step, whatever the batch.
# Tensor parallelism sends activations in every layer, *while all ranks wait*, because the next product needs
# the sum. That is why it stays inside a machine.
#
# ## Machines that you do not have
#
# Take one block of GPT-3 with 2048 tokens on 8 GPUs. Say that each GPU does 300 TFLOP/s, and that an activation
# takes 2 bytes:

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
# Between the GPUs of one machine, the messages are a small part. Over a network between machines, they take as
# long as the arithmetic, or many times as long. So share the matrices within a machine, and the layers (lesson
# 12) or the batch (lesson 09) between machines.
#
# ## What breaks in practice, and how one sees it
#
# - **A forgotten `enter`.** The last layers train, the layers before them get only a part of their gradients,
#   and the loss still falls, more slowly. Compare the gradients with one process: `md.compare` names the first
#   layer that differs.
# - **A bias added n times.** If a layer that is cut by rows adds its bias before the all-reduce, every rank
#   adds it. Add the bias after the all-reduce.
# - **Copies that drift apart.** Every rank keeps the norms, and no message ever carries them. With a different
#   seed or dropout mask on one rank, they drift apart. `md.assert_in_sync(block.mlp_norm)` compares one of
#   them.
# - **Sequence parallel and norms.** A norm's weights are on all ranks, but each rank has seen only its own
#   tokens. So the weights' gradients have to be summed over the ranks, or the copies differ after one step.
# - **A number of heads that n does not divide**, such as GPT-2 XL's 25. A cut through a head gives wrong
#   attention, and if the shapes happen to fit there is no error.
# - **Clipping.** To get the norm of all gradients, sum the squares of cut parameters over the ranks, but count
#   those of copies once. If you sum everything over the ranks, copies count n times, and you clip too much.
#   (`md.prepare(..., clip_norm=1.0)` counts them once.)

# %%
pair.close()
cluster.close()

# %% [markdown]
# ## Further reading
#
# - Shoeybi and others, *Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism*,
#   2019: section 3 is what you wrote, with f and g.
# - Korthikanti and others, *Reducing Activation Recomputation in Large Transformer Models*, 2022: sequence
#   parallelism, and which activations are worth keeping.
# - Narayanan and others, *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*,
#   2021: tensor, pipeline and data parallelism together, and where each belongs.
#
# ## Where your lines live
#
# Two rungs of [the training ladder](../minidist/plain/__init__.py):
#
# | You wrote | The rung | The engine |
# |---|---|---|
# | `shared_mlp_forward`, `shared_attention` | plain/tensor_parallel.py: [`SharedBlock`](../minidist/plain/tensor_parallel.py) | parallel/tensor_parallel/linear_layers.py: [`ColumnParallelLinear.forward`](../minidist/parallel/tensor_parallel/linear_layers.py), [`RowParallelLinear.forward`](../minidist/parallel/tensor_parallel/linear_layers.py) |
# | `enter` (f), `leave` (g) | plain/tensor_parallel.py: [`Enter`](../minidist/plain/tensor_parallel.py), [`Leave`](../minidist/plain/tensor_parallel.py) | parallel/tensor_parallel/operators.py: [`copy_to_ranks`](../minidist/parallel/tensor_parallel/operators.py), [`reduce_from_ranks`](../minidist/parallel/tensor_parallel/operators.py) |
# | `gather_tokens` | plain/sequence_parallel.py: [`Gather`](../minidist/plain/sequence_parallel.py) | parallel/tensor_parallel/operators.py: [`gather_sequence`](../minidist/parallel/tensor_parallel/operators.py) |
# | `scatter_tokens` | plain/sequence_parallel.py: [`Scatter`](../minidist/plain/sequence_parallel.py) | parallel/tensor_parallel/operators.py: [`scatter_sequence`](../minidist/parallel/tensor_parallel/operators.py) |
# | `vocabulary_loss` | – | parallel/tensor_parallel/vocabulary.py: [`vocab_parallel_cross_entropy`](../minidist/parallel/tensor_parallel/vocabulary.py) |
#
# The rungs have your operators, forward and backward. They put them around the layers of a whole GPT, and leave
# its embedding and head whole. The engine cuts those as well, and any model by a plan. It computes the weights'
# gradient while the input's gradient is on its way.
#
# Next: lesson 14 takes the copies out of data parallelism.
