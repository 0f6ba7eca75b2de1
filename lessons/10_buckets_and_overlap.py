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
# # 10. Buckets and overlap
#
# **Time:** about 2 hours. **Builds on:** lesson 09.
#
# The ranks of lesson 9 reach the weights of one process. They also send a small message for each parameter, and
# compute nothing meanwhile. Here no weight changes any more: you send fewer messages, send them while the ranks
# compute, and predict how much faster four ranks are than one.

# %%
import statistics
import time

import torch
from torch.nn import functional

import minidist as md
from checks.buckets_and_overlap import check, hint, or_solution
from checks.figures import ladder
from checks.pictures.scaling import scaling_picture
from checks.pictures.steps_in_time import steps_in_time
from checks.slow_layer import SlowLayer
from checks.slow_link import Link
from minidist import comm
from minidist.comm import cost
from minidist.model import MLP, digits

torch.set_num_threads(1)
ladder(10)

# %% [markdown]
# **The question.** Every step has to sum all gradients over all ranks. How few messages does that take, and how
# much of their time can pass while the ranks compute anyway? (PyTorch's `DistributedDataParallel` is this
# lesson. Li et al. 2020 scaled it to 256 GPUs. ResNet-50 has 161 gradients, 102 MB together; they leave in
# buckets of 25 MB, while backward still runs.)
#
# As before, the model has two layers and learns handwritten digits, in float64.

# %%
cluster = md.Cluster(ranks=4, threads=1)  # a rank is to be one core
data = digits()
x, y = data.train.inputs.double(), data.train.targets
order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
steps = [rows for rows in order.split(64) if len(rows) == 64]  # of one epoch


def network():
    return MLP((64, 32, 10), seed=0, dtype=torch.float64)  # the same on all ranks


# %% [markdown]
# ## What it costs
#
# So far each parameter has a message of its own. A message takes alpha seconds however small it is (lesson 8),
# and models have hundreds of small parameters. Also, no message starts before backward is done. Both can be
# mended (Li et al. 2020):

# %%
steps_in_time()

# %% [markdown]
# ## Buckets
#
# Few large messages in place of many small ones: copy several gradients one after the other into one flat
# tensor, a **bucket**, all-reduce that, and copy back. For two tensors it looks like this:


# %%
def two_together():
    a, b = torch.ones(2, 3), torch.full((2,), float(md.rank()))
    flat = torch.cat([a.reshape(-1), b.reshape(-1)])
    comm.all_reduce(flat)
    first, second = flat.split([a.numel(), b.numel()])
    a.copy_(first.view(a.shape))
    b.copy_(second.view(b.shape))
    return a, b


cluster.run(two_together)[0]

# %% [markdown]
# **Exercise 10.1: all_reduce_in_buckets.** Sum each of `tensors` over all ranks, in place. Neighbours in the
# list share a message as long as they have at most `limit` elements together. A tensor that alone has more gets
# a message of its own. There is at least one tensor. All have the same dtype, and on all ranks the same shapes.
# Not every tensor is contiguous: some lie in memory as `w.T` does.
#
# Par: as few messages as that allows in the order of the list, and each element sent once.


# %% tags=["exercise"]
def all_reduce_in_buckets(tensors, limit):
    """Sum each tensor over the ranks, in place, in flat messages of up to limit elements."""
    ...  # about 13 lines


# %%
check(all_reduce_in_buckets)

# %%
all_reduce_in_buckets = or_solution(all_reduce_in_buckets)


def one_bucket(tensors):
    all_reduce_in_buckets(tensors, limit=10**9)


def one_by_one(tensors):
    for tensor in tensors:
        comm.all_reduce(tensor)


# %% [markdown]
# How much is saved follows from alpha: a ring all-reduce is 2 (n - 1) messages (lesson 8), so each message less
# saves 2 (n - 1) alpha. To see that and nothing else, give each rank a link with an alpha of 4 ms, as in lesson
# 8. Then 79 all-reduces less among 4 ranks save 79 x 6 x 4 ms.


# %%
def seconds(call, rounds=9, group=None):
    times = []
    for _ in range(rounds):
        comm.barrier(group)  # all ranks begin together
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def on_80(way):
    tensors = [torch.zeros(500) for _ in range(80)]
    with Link(alpha=0.004, beta=50e-9):
        return seconds(lambda: way(tensors), rounds=3)


# %%
each, joined = (max(cluster.run(on_80, way)) for way in (one_by_one, one_bucket))
print(f"80 messages   {each * 1e3:6.0f} ms")
print(f"one bucket    {joined * 1e3:6.0f} ms")
print(f"saved         {(each - joined) * 1e3:6.0f} ms, predicted {79 * 6 * 4} ms")

# %% [markdown]
# ## While backward still runs
#
# Backward goes from the last layer to the first. When it has done with the last layer, that gradient is
# complete, and could be on its way while the other layers compute. PyTorch tells: a function given to
# `parameter.register_post_accumulate_grad_hook` is called, with the parameter, as soon as backward has put its
# gradient into `parameter.grad`. Such a function is called a **hook**.


# %%
model = network()
for label, parameter in model.named_parameters():
    parameter.register_post_accumulate_grad_hook(
        lambda parameter, label=label: print(f"{label:24} has its gradient")
    )
functional.cross_entropy(model(x[:8]), y[:8]).backward()

# %% [markdown]
# **Exercise 10.2: reduce_in_backward.** Give each parameter a hook that begins the all-reduce of its gradient
# and does not wait for it: `work = comm.all_reduce(x, async_op=True)` comes back at once, and `x` may be used
# after `work.wait()`. Return a function `finish`, which is called without arguments after each backward: after
# it, every gradient is the mean over the ranks. Every parameter gets a gradient. Steps come one after the
# other: `zero_grad`, backward, `finish`.
#
# Par: one all-reduce for each gradient, begun in backward; backward waits for none.


# %% tags=["exercise"]
def reduce_in_backward(model):
    """Begin to reduce each gradient as soon as it is there; return what waits for all."""
    ...  # about 11 lines


# %%
check(reduce_in_backward)

# %%
reduce_in_backward = or_solution(reduce_in_backward)


def train(begin):
    model = network()
    finish = begin(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for rows in steps:
        mine = rows.tensor_split(md.size())[md.rank()]
        optimizer.zero_grad()
        functional.cross_entropy(model(x[mine]), y[mine]).backward()
        finish()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def alone(model):  # one process has nothing to reduce
    return lambda: None


reference = train(alone)
on_rank_3 = cluster.run(train, reduce_in_backward)[3]
pairs = zip(on_rank_3, reference, strict=True)
max((mine - right).abs().max().item() for mine, right in pairs)

# %% [markdown]
# Real libraries do both at once: hooks fill buckets, and a bucket goes as soon as it is full. Since gradients
# come from the last layer to the first, buckets are filled in that order.
#
# ## Several backward passes, one message
#
# A batch that does not fit into memory is cut into **micro-batches**. Each backward *adds* to `.grad`; the
# optimizer makes its step after the last. This is **gradient accumulation**. The bug to avoid is an expensive
# one: sending after each micro-batch costs a message for each, and only the last sum is needed.
#
# **Exercise 10.3: accumulate_gradients.** `micro_batches` is this rank's list of (inputs, targets). Ranks may
# have different numbers of them, with different numbers of rows, and a rank may have none. Leave in every
# `.grad` the gradient of the mean loss over all rows of all ranks, as in exercise 9.2. Only one micro-batch fits
# into memory at a time, with all that its forward pass keeps for backward.
#
# Par: messages and bytes as if each rank had one batch.


# %% tags=["exercise"]
def accumulate_gradients(model, micro_batches):
    """Gradients of the mean loss over all micro-batches of all ranks, sent once."""
    ...  # about 8 lines


# %%
check(accumulate_gradients)

# %%
accumulate_gradients = or_solution(accumulate_gradients)


def bytes_for(parts):
    rows = torch.arange(240).tensor_split(4)[md.rank()]
    micro_batches = [(x[part], y[part]) for part in rows.tensor_split(parts)]
    with comm.ledger() as ledger:
        accumulate_gradients(network(), micro_batches)
    return ledger.bytes_sent


for parts in (1, 2, 8):
    sent = cluster.run(bytes_for, parts)[0]
    print(f"micro-batches: {parts}, bytes that each rank sends: {sent:,}")

# %% [markdown]
# ## All of it, as a library has it
#
# `md.DataParallel` has these steps as options of one class. What it sends is in the ledger, and what it takes
# is measured here: 40 small layers, then 3 large ones. "Alone" sends nothing (`no_sync`).


# %%
def step_of(sizes, options, send=True):
    model = md.DataParallel(MLP(sizes), **options)
    inputs, targets = torch.rand(32, sizes[0]), torch.zeros(32, dtype=torch.long)

    def step():
        model.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        model.synchronize()

    def without():
        with model.no_sync():
            model.zero_grad()
            functional.cross_entropy(model(inputs), targets).backward()

    step(), step()  # the first settles the buckets
    with comm.ledger() as ledger:
        step()
    return len(ledger.calls), ledger.bytes_sent, seconds(step if send else without)


# %%
ways = {
    "a message each, after": {"bucket_mb": 0, "overlap": False},
    "buckets, after": {"overlap": False},
    "small buckets, in backward": {"bucket_mb": 1 / 16},
}
for sizes in ((32,) * 41, (512,) * 4):
    print(f"\n{len(sizes) - 1} layers of {sizes[0]} x {sizes[0]}:")
    for way, options in ways.items():
        found = cluster.run(step_of, sizes, options)
        (calls, sent, _), t = found[0], max(run[2] for run in found)
        print(f"{way:30}{calls:4} messages{sent:12,} bytes{t * 1e3:9.2f} ms")
    t = max(run[2] for run in cluster.run(step_of, sizes, {}, send=False))
    print(f"{'alone':30}   0 messages{0:12,} bytes{t * 1e3:9.2f} ms")

# %% [markdown]
# The bytes are the same whichever way; the messages are not, and for many small layers they are what one pays
# for. To send *in backward* helps where somebody else does the sending: a network card, or a GPU's copy engine.
# Here ranks share cores, and a message is work for the same cores that compute. What is hidden behind backward
# makes backward longer, so that less is won than there, or nothing. That is this machine's limit, and no fault
# of the idea.
#
# ## When do the messages outweigh the work?
#
# Let a model have P parameters, and each rank b rows. Forward and backward take about 6 P b FLOPs (lesson 7).
# An all-reduce of the gradients sends 2 (n - 1) / n times 4 P bytes. *Both grow with P.* With R FLOPs in a
# second, and beta seconds for a byte, they take the same time at
#
# b = 4/3 x (n - 1) / n x R x beta
#
# rows on each rank. **P cancels**: a larger model does not make it worse. What counts is how fast a rank
# computes, against how fast it sends. The cell asks, for an accelerator with 100 TFLOP/s, how many rows a rank
# needs until computing takes as long as an all-reduce among 8 ranks. (In a language model a row is a token.) A
# small model needs more: its messages are short, and alpha, which the formula left out, is most of their time.


# %%
def break_even(parameters, ranks, flops, network):
    messages = cost.predict("all_reduce", "ring", 4 * parameters, ranks, network)
    return messages * flops / (6 * parameters)


print(f"{'rows a rank, at least':24}{'1 million':>14}{'1 billion parameters':>24}")
for link in ("25gbe", "100gbe", "infiniband_ndr", "nvlink4"):
    few, many = (break_even(p, 8, 100e12, link) for p in (1e6, 1e9))
    print(f"{link:24}{few:14,.0f}{many:24,.0f}")

# %% [markdown]
# With fewer rows the ranks wait for messages most of the time, unless backward hides them. With more, they
# compute. That is why data parallelism likes large batches, and why accumulation helps: it makes b larger
# without more memory.
#
# ## Predict, then measure
#
# One batch of 64 rows, dealt to 1, 2 and 4 ranks: **strong scaling**, the same work on more ranks. A rank shall
# be a device of its own here, with a link of its own. So its layer does not compute, it *sleeps*, 6 ms for each
# row forward and backward; and messages take alpha = 2 ms and 50 ns a byte. The model has 1 MB of parameters.
# How many times as fast as one rank are four?

# %%
prediction = None  # your guess, such as 2.5; None draws no guess

# %%
ROW, ALPHA, BETA, PARAMETERS = 0.002, 2e-3, 50e-9, 250_000


def scaled(n, rows=64):
    group = comm.Mesh(dp=n, pp=4 // n).group("dp")  # of n ranks; 0 to n - 1 are one
    if md.rank() >= n:
        return 0.0  # the others sleep
    model = SlowLayer(ROW, PARAMETERS)  # 2 ms a row forward, 4 ms backward
    inputs = torch.ones(rows // n, 1)

    def step():
        model.zero_grad()
        model(inputs).mean().backward()
        flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        comm.all_reduce(flat, "mean", group=group)  # one bucket

    with Link(ALPHA, BETA):
        return seconds(step, rounds=3, group=group)


# %% [markdown]
# The model: what one rank computes, divided by the ranks; and the all-reduce, by the formula that you found in
# lesson 8.

# %%
measured, predicted = {}, {}
for n in (1, 2, 4):
    measured[n] = max(cluster.run(scaled, n))
    computing = 64 / n * 3 * ROW
    messages = 2 * (n - 1) * (ALPHA + BETA * 4 * PARAMETERS / n)
    predicted[n] = computing + messages
    print(
        f"{n} ranks: step {measured[n] * 1e3:4.0f} ms, model {predicted[n] * 1e3:4.0f} ms, "
        f"of it all-reduce {messages * 1e3:3.0f} ms"
    )

# %%
scaling_picture(measured, predicted, prediction)

# %% [markdown]
# How to read it. The work is divided by the ranks; **the all-reduce is not**. From 2 ranks to 4 it even grows a
# little, towards twice the gradient's bytes. So each doubling of the ranks wins less than the one before, and
# with a thousand ranks a step would last as long as its all-reduce. Three things move the dots up: more rows on
# each rank, a faster network, and sending while backward runs.
#
# With layers that compute in place of sleeping, ranks of one machine would share its cores: four ranks on two
# cores take turns, and are at the very best twice as fast as one.
#
# ## What breaks in practice, and how one sees it
#
# - **A parameter that one rank did not use.** It has no gradient there, that rank makes one call fewer, and all
#   wait for ever. `check=True` names the call; `md.DataParallel` sends zeros for it.
# - **Gradients that arrive in another order.** Buckets filled in the order of arrival hold different gradients
#   on different ranks, and the sums are of unlike things. Agree on the order once, as `md.DataParallel` does.
# - **A gradient used too early.** Clipping, logging or a step before `finish` sees this rank's gradient or half
#   a sum. The comparison with one process (lesson 9) finds it.
# - **Accumulation that sends every time**: right, and slow. The ledger's calls a step tell.

# %%
cluster.close()

# %% [markdown]
# ## Further reading
#
# - Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, 2020: buckets, hooks,
#   overlap and `no_sync`, with measurements of each. Section 3.2 is this lesson.
# - Sergeev and Del Balso, *Horovod: fast and easy distributed deep learning in TensorFlow*, 2018: data
#   parallelism as one all-reduce that anyone can add to a script, and why tensors are fused.
# - Peng et al., *A Generic Communication Scheduler for Distributed DNN Training Acceleration*, 2019: the next
#   step needs the first layers' gradients first, and backward brings them last.
#
# ## Where your lines live
#
# Two rungs of [the training ladder](../minidist/plain/__init__.py), each with one idea more than the one before:
#
# | You wrote | The rung | The engine |
# |---|---|---|
# | `all_reduce_in_buckets` | plain/buckets.py: [`groups_of`](../minidist/plain/buckets.py), [`bucket_of`](../minidist/plain/buckets.py) | parallel/sharding/bucket_assignment.py: [`BucketAssignment`](../minidist/parallel/sharding/bucket_assignment.py) |
# | `reduce_in_backward` | plain/overlap.py: [`Bucket.arrived`](../minidist/plain/overlap.py) | parallel/sharding/reducer.py: [`Reducer.arrived`](../minidist/parallel/sharding/reducer.py) |
# | `accumulate_gradients` | – | parallel/sharding/data_parallel.py: [`DataParallel.no_sync`](../minidist/parallel/sharding/data_parallel.py) |
#
# The rungs group gradients by your rule. Their buckets are never copied: each gradient is a view of its bucket,
# and the bucket leaves as soon as it is full. The engine deals gradients to buckets in the order in which they
# arrive, and copes with parameters that are unused or shared.
#
# Next: lesson 11 asks whether the ranks have to wait for each other at all.
