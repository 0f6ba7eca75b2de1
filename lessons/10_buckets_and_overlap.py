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
# The ranks of lesson 9 reach the same weights as one process. But they send a small message for each parameter,
# and they compute nothing while they send. In this lesson the weights stay exactly the same, and the step gets
# faster. You send fewer messages, you send them while the ranks still compute, and you predict how much faster
# four ranks are than one.

# %%
import statistics
import time

import torch
from torch.nn import functional

import minidist as md
from checks.buckets_and_overlap import check, hint, or_solution
from checks.figures import ladder
from checks.pictures.buckets import buckets_animation
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
# **The question.** Every step has to sum all gradients over all ranks. How few messages are enough? And how
# much of the sending can happen while the ranks compute? (PyTorch's `DistributedDataParallel` does what you
# write here, and Li et al. 2020 ran it on 256 GPUs. A ResNet-50 has 161 gradients with 102 MB in all. They are
# sent in buckets of 25 MB, while backward still runs.)
#
# The model is the one from lesson 9. It has two layers and learns handwritten digits, in float64.

# %%
cluster = md.Cluster(ranks=4, threads=1)  # each rank computes on one core
data = digits()
x, y = data.train.inputs.double(), data.train.targets
order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
steps = [rows for rows in order.split(64) if len(rows) == 64]  # of one epoch


def network():
    return MLP((64, 32, 10), seed=0, dtype=torch.float64)  # the same on all ranks


# %% [markdown]
# ## What it costs
#
# So far each parameter has a message of its own. A message takes at least alpha seconds, however small it is
# (lesson 8), and models have hundreds of small parameters. Also, no message starts before backward is done. Li
# et al. 2020 improve both, as the picture shows:

# %%
steps_in_time()

# %% [markdown]
# ## Buckets
#
# Send a few large messages instead of many small ones. Copy several gradients, one after the other, into one
# flat tensor, a **bucket**. All-reduce the bucket, and copy the sums back. For two tensors it looks like this:


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
# Which tensors share a message? Walk the list, and put as many neighbours together as fit:

# %%
buckets_animation()

# %% [markdown]
# **Exercise 10.1: all_reduce_in_buckets.** Sum each of `tensors` over all ranks, in place. Walk the list; add a
# tensor to the message while its total stays at most `limit` elements. A tensor with more than `limit` elements
# gets a message of its own. There is at least one tensor. All tensors have the same dtype, and each has the same
# shape on all ranks. Some tensors are not contiguous in memory, just as `w.T` is not.
#
# Par: the fewest messages that this rule allows. The tensors stay in the order of the list, and each element is
# sent once.


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
# You can predict what this saves. In a ring all-reduce each rank sends 2 (n - 1) messages (lesson 8), so each
# all-reduce that you avoid saves 2 (n - 1) alpha. To see this effect alone, give each rank a link of its own,
# as in lesson 8, but with an alpha of 4 ms. One bucket instead of 80 messages avoids 79 all-reduces. Among 4
# ranks, that saves 79 x 6 x 4 ms.


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
        return seconds(lambda: way(tensors), rounds=1)


# %%
each, joined = (max(cluster.run(on_80, way)) for way in (one_by_one, one_bucket))
print(f"80 messages   {each * 1e3:6.0f} ms")
print(f"one bucket    {joined * 1e3:6.0f} ms")
print(f"saved         {(each - joined) * 1e3:6.0f} ms, predicted {79 * 6 * 4} ms")

# %% [markdown]
# ## While backward still runs
#
# Backward goes from the last layer to the first. Once backward is done with the last layer, that layer's
# gradients are complete. You can send them while backward still computes the other layers. PyTorch tells you
# when a gradient is complete. Give a function to `parameter.register_post_accumulate_grad_hook`. As soon as
# backward has put the gradient into `parameter.grad`, PyTorch calls the function with the parameter. Such a
# function is called a **hook**.


# %%
model = network()
for label, parameter in model.named_parameters():
    parameter.register_post_accumulate_grad_hook(
        lambda parameter, label=label: print(f"{label:24} has its gradient")
    )
functional.cross_entropy(model(x[:8]), y[:8]).backward()

# %% [markdown]
# **Exercise 10.2: reduce_in_backward.** Give each parameter a hook that begins the all-reduce of its gradient
# and does not wait for it. `work = comm.all_reduce(x, async_op=True)` returns at once, and you may use `x`
# after `work.wait()`. Return a function `finish`. The training loop calls `finish()` after each backward. When
# `finish` returns, every gradient has to be the mean over the ranks. You may rely on backward to give every
# parameter a gradient. Each step calls `zero_grad`, backward and `finish`, and your hooks have to work in every
# step.
#
# Par: one all-reduce for each gradient. It begins as soon as the gradient is there, and backward does not wait
# for it.


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
# Real libraries do both: each hook puts its gradient into a bucket, and a full bucket is sent at once.
# Gradients arrive from the last layer to the first, so the buckets are filled in that order.
#
# ## Several backward passes, one message
#
# A batch that does not fit into memory is cut into **micro-batches**. Each backward *adds* its gradients to
# `.grad`, and the optimizer makes its step after the last one. This is **gradient accumulation**. An expensive
# bug is easy to make here: if you send after each micro-batch, you pay for a message each time, although you
# need only the last sum.
#
# **Exercise 10.3: accumulate_gradients.** `micro_batches` is this rank's list of (inputs, targets). Another
# rank may have more or fewer micro-batches, and its micro-batches may have more or fewer rows. A rank may have
# none. After your function, every `.grad` holds the gradient of the mean loss over all rows of all ranks, as in
# exercise 9.2. Memory is short. The forward pass keeps tensors for backward, and there is room for those of
# *one* micro-batch only.
#
# Par: as many messages and bytes as when each rank has one batch.


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
# `md.DataParallel` has these ideas as options of one class. The next two cells count with the ledger what a
# step sends, and measure how long the step takes. The first model has 40 small layers, the second has 3 large
# ones. "Alone" is a step that sends nothing (`no_sync`).


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
# All ways send the same bytes. They differ in the number of messages, and with many small layers that number
# matters most. Sending *in backward* helps if other hardware does the sending: a network card, or a GPU's copy
# engine. Here the ranks share the machine's cores, and copying a message takes time from the cores that
# compute. So a message that hides behind backward makes backward longer, and little or nothing is gained. That
# is a limit of this machine, and no fault of the idea.
#
# ## When do the messages take longer than the work?
#
# Say that a model has P parameters and each rank has b rows. Forward and backward take about 6 P b FLOPs
# (lesson 7). In an all-reduce of the gradients, each rank sends 2 (n - 1) / n times 4 P bytes. *The FLOPs and
# the bytes both grow with P.* If a rank does R FLOPs in a second, and its link takes beta seconds for a byte,
# computing takes as long as sending when each rank has
#
# b = 4/3 x (n - 1) / n x R x beta
#
# rows. **P cancels**: a larger model does not make it worse. Only the ratio of two speeds counts: how fast a
# rank computes, and how fast it sends. The next cell assumes 8 ranks of 100 TFLOP/s each. It prints how many
# rows a rank needs for computing to take as long as the all-reduce. (In a language model a row is a token.) A
# small model needs more rows than a large one, because its messages are short and most of their time is alpha.
# The formula above leaves alpha out; the cell counts it.


# %%
def break_even(parameters, ranks, flops, network):
    messages = cost.predict("all_reduce", "ring", 4 * parameters, ranks, network)
    return messages * flops / (6 * parameters)


print(f"{'rows a rank, at least':24}{'1 million':>14}{'1 billion parameters':>24}")
for link in ("25gbe", "100gbe", "infiniband_ndr", "nvlink4"):
    few, many = (break_even(p, 8, 100e12, link) for p in (1e6, 1e9))
    print(f"{link:24}{few:14,.0f}{many:24,.0f}")

# %% [markdown]
# With fewer rows than that, the ranks spend most of the time on messages, unless backward hides the messages.
# With more rows the ranks spend most of the time on computing. So data parallelism works best with large
# batches. Accumulation helps, since it makes b larger without more memory.
#
# ## Predict, then measure
#
# Share one batch of 64 rows among 1, 2 and 4 ranks. Sharing the same work among more ranks is called **strong
# scaling**. Each rank plays a device of its own, with a link of its own. Its layer does not compute: it
# *sleeps* 6 ms for each row (2 ms forward, 4 ms backward). A message takes alpha = 2 ms, and 50 ns more for
# each byte. The model has 1 MB of parameters. How many times as fast as one rank are four ranks?

# %%
prediction = None  # your guess, such as 2.5; None draws no guess

# %%
ROW, ALPHA, BETA, PARAMETERS = 0.002, 2e-3, 50e-9, 250_000


def scaled(n, rows=64):
    group = comm.Mesh(dp=n, pp=4 // n).group("dp")  # ranks 0 to n - 1 are one
    if md.rank() >= n:
        return 0.0  # the others sit this one out
    model = SlowLayer(ROW, PARAMETERS)  # 2 ms a row forward, 4 ms backward
    inputs = torch.ones(rows // n, 1)

    def step():
        model.zero_grad()
        model(inputs).mean().backward()
        flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        with Link(ALPHA, BETA):
            comm.all_reduce(flat, "mean", group=group)  # one bucket

    return seconds(step, rounds=3, group=group)


# %% [markdown]
# Predict a step's time as the sum of two terms. The first is the time that one rank alone computes, divided by
# the number of ranks. The second is the time of the all-reduce, from the formula that you found in lesson 8.

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
# More ranks divide the work, **but they do not divide the all-reduce**. With 4 ranks the all-reduce takes even
# longer than with 2, because each rank sends more messages and more bytes. So each doubling of the ranks gains
# less than the one before. With a thousand ranks, nearly all of a step would be its all-reduce. Three things
# move the dots of the figure up: more rows on each rank, a faster network, and sending while backward runs.
#
# If the layers computed instead of sleeping, the ranks would share this machine's cores. Four ranks on two
# cores take turns, and are at best twice as fast as one.
#
# ## What breaks in practice, and how one sees it
#
# - **A parameter that one rank did not use.** The parameter has no gradient on that rank, so the rank makes one
#   call fewer, and all ranks wait for ever. `md.Cluster(ranks=4, check=True)` names the call. `md.DataParallel`
#   sends zeros for such a parameter.
# - **Gradients that arrive in another order.** Each rank fills its buckets in the order of arrival. If that
#   order differs between ranks, they add up gradients of different parameters. So let the ranks agree on one
#   order, as `md.DataParallel` does.
# - **A gradient used too early.** If you clip, log or update before `finish`, you use this rank's own gradient,
#   or half a sum. The comparison with one process (lesson 9) finds this bug.
# - **Accumulation that sends every time.** The result is right, and the step is slow. Count the calls of a step
#   in the ledger.

# %%
cluster.close()

# %% [markdown]
# ## Further reading
#
# - Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, 2020: buckets, hooks,
#   overlap and `no_sync`, with measurements of each. Section 3.2 is this lesson.
# - Sergeev and Del Balso, *Horovod: fast and easy distributed deep learning in TensorFlow*, 2018: data
#   parallelism as one call that anyone can add to a script, and why it fuses small tensors into large messages.
# - Peng et al., *A Generic Communication Scheduler for Distributed DNN Training Acceleration*, 2019: the next
#   step needs the first layers' gradients first, but backward computes them last, so the order of the messages
#   matters.
#
# ## Where your lines live
#
# Two rungs of [the training ladder](../minidist/plain/__init__.py) do what you wrote. Each rung has one idea
# more than the rung before:
#
# | You wrote | The rung | The engine |
# |---|---|---|
# | `all_reduce_in_buckets` | plain/buckets.py: [`groups_of`](../minidist/plain/buckets.py), [`bucket_of`](../minidist/plain/buckets.py) | parallel/sharding/whole/whole_parameters.py: [`WholeParameters`](../minidist/parallel/sharding/whole/whole_parameters.py) |
# | `reduce_in_backward` | plain/overlap.py: [`Bucket.arrived`](../minidist/plain/overlap.py) | parallel/sharding/whole/reducer.py: [`Reducer.arrived`](../minidist/parallel/sharding/whole/reducer.py) |
# | `accumulate_gradients` | – | parallel/sharding/loops/data_parallel.py: [`DataParallel.no_sync`](../minidist/parallel/sharding/loops/data_parallel.py) |
#
# The rungs group gradients by your rule. They never copy a gradient into a bucket: each gradient is a view of
# its bucket. The second rung sends a bucket as soon as it is full. The engine puts gradients into buckets in
# the order in which they arrive on rank 0, and also handles parameters that are unused or shared.
#
# Next: lesson 11 asks whether the ranks have to wait for each other at all.
