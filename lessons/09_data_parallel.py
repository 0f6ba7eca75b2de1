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
# # 9. Data parallel
#
# **Time:** about 3 hours, with a good place for a break in the middle. **Builds on:** lesson 08, and lesson 07
# for gradients.
#
# Several ranks train *one* model: each computes with its own rows, and they exchange gradients. It is the
# simplest way to train on many machines, the one most used, and the easiest to get wrong without noticing. You
# build it from lesson 8's all-reduce, plant its classic bugs, and learn the one test that finds them all.

# %%
import statistics
import time
from functools import partial

import torch
from torch.nn import functional

import minidist as md
from checks.data_parallel import check, hint, or_solution
from checks.figures import ladder
from checks.pictures.data_parallel_step import data_parallel_step
from checks.pictures.scaling import scaling_picture
from checks.pictures.steps_in_time import steps_in_time
from checks.slow_layer import SlowLayer
from checks.slow_link import Link
from minidist import comm
from minidist.comm import cost
from minidist.model import MLP, accuracy, digits

torch.set_num_threads(1)
ladder(9)

# %% [markdown]
# **The question.** Four ranks share the rows of every batch. How do they reach, together, the very weights that
# one process would have reached alone? And how would you notice if they did not? (Goyal et al. 2017 trained
# ResNet-50 in one hour this way: 256 GPUs, 32 pictures on each, 8192 in a batch.)
#
# ## A sum can be dealt out
#
# The loss of a batch is a mean over its rows: a sum, divided by their number. The gradient of a sum is the sum
# of the gradients. So each rank can take some of the rows, its **shard**, compute the gradient of *their* sum,
# and one all-reduce of the gradients gives everybody that of the whole batch. Press Play, or go step by step:

# %%
data_parallel_step()

# %% [markdown]
# The data are 1437 small pictures of handwritten digits, the model has two layers. Everything is in float64,
# with 16 digits: so small differences will mean something. On rank r of n, the rows of a batch are
# `rows.tensor_split(n)[r]`.

# %%
cluster = md.Cluster(ranks=4, threads=1)  # a rank is to be one core
data = digits()
x, y = data.train.inputs.double(), data.train.targets
test_x, test_y = data.test.inputs.double(), data.test.targets


def network(seed=0):
    return MLP((64, 32, 10), seed=seed, dtype=torch.float64)


def batches(epochs, size=64):
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    return list(order.split(size)) * epochs  # the same on all ranks


# %% [markdown]
# ## The same start
#
# Each rank makes a model of its own. If they begin with different weights they stay different: the same
# gradient is then taken from different places. So rank 0 sends its weights to all: a **broadcast**.


# %%
def same_start(model):
    for parameter in model.parameters():
        comm.broadcast(parameter.detach(), source=0)  # detach: the same memory
    return model


def first_weight(send):
    model = network(seed=md.rank())
    if send:
        same_start(model)
    return round(model.layers[0].linear.weight[0, 0].item(), 6)


print("each its own:", cluster.run(first_weight, send=False))
print("sent by 0:   ", cluster.run(first_weight, send=True))

# %% [markdown]
# ## The plainest way
#
# After backward, a gradient for each parameter lies in `parameter.grad`: of the mean over the rank's own rows.
#
# **Exercise 9.1: average_gradients.** Every `.grad` of the model becomes the mean of all ranks' gradients of
# that parameter. Frozen parameters (`requires_grad` is False) have none: their `.grad` is `None` on all ranks,
# and stays so. Nothing is returned. (`comm.all_reduce(x)` sums `x` over the ranks, in place.)
#
# Par: one all-reduce for each gradient.


# %% tags=["exercise"]
def average_gradients(model):
    """Make every gradient the mean over the ranks."""
    ...  # about 4 lines


# %%
check(average_gradients)

# %% [markdown]
# No idea how to begin? `hint()` in a cell of its own gives the first of three hints. The next cell takes your
# function where it has passed, and the lesson's own where it has not, so that all that follows works.
#
# Then a training loop like any other, but for two lines: which rows are mine, and `gradients`, which is
# backward and the exchange.

# %%
average_gradients = or_solution(average_gradients)


def train(gradients, rows_of_steps, send=True):
    model = network(seed=md.rank())
    if send:
        same_start(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for rows in rows_of_steps:
        mine = rows.tensor_split(md.size())[md.rank()]
        optimizer.zero_grad()
        gradients(model, x[mine], y[mine])
        optimizer.step()
    return model


def averaged(model, inputs, targets):
    functional.cross_entropy(model(inputs), targets).backward()
    average_gradients(model)


# %% [markdown]
# ## The one test
#
# This notebook is a process, too: a world of one rank, where an all-reduce has nothing to do. So `train` here
# *is* training in one process. The largest difference in any weight, after 22 steps of 64 rows:


# %%
def gap(model, reference):
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max((mine - right).abs().max().item() for mine, right in pairs)


def alone(model, inputs, targets):
    functional.cross_entropy(model(inputs), targets).backward()


steps = [rows for rows in batches(1) if len(rows) == 64]
reference = train(alone, steps)
[f"{gap(model, reference):.0e}" for model in cluster.run(train, averaged, steps)]

# %% [markdown]
# Nothing but rounding: float64 keeps 16 digits, and sums were formed in another order. **This is the test**:
# same seed, same batches, float64, and the weights of one process to ten digits or more. Not "the loss falls".
#
# Now take *all* batches of the epoch. 1437 rows are 22 batches of 64, and one of 29.

# %%
reference = train(alone, batches(1))
[f"{gap(model, reference):.0e}" for model in cluster.run(train, averaged, batches(1))]

# %% [markdown]
# One batch more, and most of the digits are gone. Nothing failed, no loss looks odd, and all ranks agree with
# each other. What happened? 29 rows on 4 ranks are 8, 7, 7 and 7. Each rank takes the mean over its own rows,
# and then the mean of the four is formed: **a mean of means**. Each row of the short shards counts 1/28, each
# of the long one 1/32, and all of them should count 1/29.
#
# The remedy is to weigh by rows. Divide a *sum* of losses by the number of rows on *all* ranks: then every row
# counts the same, wherever it lies.
#
# **Exercise 9.2: batch_gradients.** This rank has `inputs` and `targets`, other ranks have others, and perhaps
# another number of them; a rank may have no rows at all. Leave in every `.grad` the gradient of the mean loss
# over all rows of all ranks. The loss is `functional.cross_entropy(outputs, targets)`, which takes the mean, or
# the sum with `reduction="sum"`. Every `.grad` is `None` before, and each parameter is used.
#
# Par: one all-reduce for each parameter, and one more.


# %% tags=["exercise"]
def batch_gradients(model, inputs, targets):
    """Gradients of the mean loss over the rows of all ranks, in .grad."""
    ...  # about 5 lines


# %%
check(batch_gradients)

# %%
batch_gradients = or_solution(batch_gradients)
models = cluster.run(train, batch_gradients, batches(1))
[f"{gap(model, reference):.0e}" for model in models]

# %% [markdown]
# ## The bug that trains worse, silently
#
# One odd batch an epoch does little harm. But shares differ a lot where each rank reads its own files. Say that
# the pictures were collected in four places: one has all digits from 0 to 6, the others have the 7s, the 8s and
# the 9s. In every step each rank takes the same *fraction* of what it has, so that all get through at the same
# time.


# %%
def from_places(gradients, epochs=5):
    model = same_start(network(seed=md.rank()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    here = (y < 7, y == 7, y == 8, y == 9)[md.rank()].nonzero().squeeze(1)
    for rows in list(here.tensor_split(22)) * epochs:
        optimizer.zero_grad()
        gradients(model, x[rows], y[rows])
        optimizer.step()
    outputs = model(test_x)
    low, high = test_y < 7, test_y >= 7
    return [accuracy(outputs[of], test_y[of]).item() for of in (low, high)]


for gradients in (batch_gradients, averaged):
    low, high = cluster.run(from_places, gradients)[0]
    print(f"{gradients.__name__:16} digits 0-6: {low:4.0%} right, 7-9: {high:4.0%}")

# %% [markdown]
# Both runs end without an error. In both the loss falls. But with the mean of means an image of the large place
# counts a fraction of what one of the small places does, and the model learns its digits more slowly. From this
# run alone you could not tell that it could be better. The same happens with texts of different lengths, where
# rows are *tokens*: weigh by tokens.
#
# Here are other classics, each one line away from right. For each the table has the accuracy of rank 1's model
# on pictures that were held out, whether all ranks' models are still the same (`md.assert_in_sync` looks), and
# the gap to one process.


# %%
def summed(model, inputs, targets):  # forgets to divide
    functional.cross_entropy(model(inputs), targets).backward()
    for parameter in model.parameters():
        comm.all_reduce(parameter.grad)


def forgets_one(model, inputs, targets):  # a parameter that is never reduced
    functional.cross_entropy(model(inputs), targets).backward()
    average_gradients(model.layers[1])


# %%
def same_rows(gradients, rows_of_steps):  # every rank takes the first shard
    one = [rows.tensor_split(md.size())[0] for rows in rows_of_steps]
    return train(gradients, [rows.repeat(md.size()) for rows in one])


runs = {
    "right": partial(train, batch_gradients),
    "mean of means": partial(train, averaged),
    "sum, not mean": partial(train, summed),
    "all ranks the same rows": partial(same_rows, averaged),
    "weights not sent": partial(train, batch_gradients, send=False),
    "one layer not reduced": partial(train, forgets_one),
}


# %%
def examined(run, rows_of_steps):
    model = run(rows_of_steps)
    try:
        md.assert_in_sync(model)
        agree = "yes"
    except md.OutOfSync:
        agree = "no"
    return model, accuracy(model(test_x), test_y).item(), agree


reference = train(alone, batches(5))
print(f"{'':26}{'accuracy':>9}{'ranks agree':>13}{'gap':>9}")
for bug, run in runs.items():
    model, right, agree = cluster.run(examined, run, batches(5))[1]
    print(f"{bug:26}{right:9.1%}{agree:>13}{gap(model, reference):9.0e}")

# %% [markdown]
# Read the columns. **Accuracy** shows nothing: a few points more or less, and no way to know which of these
# numbers is the right one. The sum may even look good: it is a learning rate four times as high, until the day
# that this is too high. **Do the ranks agree?** finds what was not sent or not reduced, and nothing else. **The
# gap to one process** finds all of them, in a second, with a tiny model. It is how minidist itself is tested,
# for every strategy (tests/helpers/contract.py).
#
# This is half of the lesson, and a good place for a break: from here on the weights stay as they are, and the
# question is how long they take.
#
# ## What it costs
#
# So far a message for each parameter. A message takes alpha seconds however small it is (lesson 8), and models
# have hundreds of small parameters. And all of them wait until backward is done. Both can be helped (Li et al.
# 2020):

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
# **Exercise 9.3: all_reduce_in_buckets.** Sum each of `tensors` over all ranks, in place. Neighbours in the
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
alone(model, x[:8], y[:8])

# %% [markdown]
# **Exercise 9.4: reduce_in_backward.** Give each parameter a hook that begins the all-reduce of its gradient
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


def train_with_hooks(rows_of_steps):
    model = same_start(network(seed=md.rank()))
    finish = reduce_in_backward(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for rows in rows_of_steps:
        mine = rows.tensor_split(md.size())[md.rank()]
        optimizer.zero_grad()
        functional.cross_entropy(model(x[mine]), y[mine]).backward()
        finish()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


reference = train(alone, steps)
on_rank_3 = cluster.run(train_with_hooks, steps)[3]
pairs = zip(on_rank_3, reference.parameters(), strict=True)
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
# **Exercise 9.5: accumulate_gradients.** `micro_batches` is this rank's list of (inputs, targets). Ranks may
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
# ## And with minidist's engine
#
# `md.prepare` puts it together: weights sent, rows weighed, buckets, overlap. It gives one process's weights
# also with the odd batch of 29.


# %%
def with_the_engine(epochs=2):
    sgd = partial(torch.optim.SGD, lr=0.3)
    engine = md.prepare(network(seed=md.rank()), sgd, md.Layout(dp=4))
    with comm.ledger() as ledger:
        for rows in batches(epochs):
            mine = rows.tensor_split(4)[md.rank()]
            engine.step(x[mine], y[mine])
    return engine.full_state_dict(), ledger.table()


state, table = cluster.run(with_the_engine)[2]
reference = train(alone, batches(2)).state_dict()
print(table)
max((state[key] - reference[key]).abs().max().item() for key in reference)

# %% [markdown]
# ## What breaks in practice, and how one sees it
#
# - **Uneven shares.** The last batch, files of different lengths, sequences with padding. Weigh by rows (or
#   tokens). Only a comparison with one process shows it.
# - **Weights that drift apart.** A forgotten broadcast, a layer that was added later, a rank that went on from
#   another checkpoint. `md.assert_in_sync(model)` compares 32 bytes a rank: cheap enough to call every few
#   hundred steps.
# - **More ranks, a larger batch.** Keep the rows of each rank, double the ranks, and you train with twice the
#   batch: another training, that may need another learning rate (Goyal et al. 2017: scale it with the batch,
#   after a warm-up). First see that the *same* global batch gives the same weights.
# - **All ranks with the same rows.** Each rank shuffles with the same seed and forgets its rank: all agree, and
#   3/4 of the work is for nothing. Or each shuffles with a seed of its own, and shards overlap. Print the first
#   row numbers of each rank.
# - **A parameter that one rank did not use.** It has no gradient there, that rank makes one call fewer, and all
#   wait for ever. `check=True` names the call; `md.DataParallel` sends zeros for it.
# - **Accumulation that sends every time**: right, and slow. The ledger's calls a step tell.

# %%
cluster.close()

# %% [markdown]
# ## Further reading
#
# - Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, 2020: buckets, hooks,
#   overlap and `no_sync`, with measurements of each. Section 3.2 is this lesson.
# - Goyal et al., *Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour*, 2017: what a larger batch does
#   to training; its section 3 lists mistakes such as the ones above.
# - Sergeev and Del Balso, *Horovod: fast and easy distributed deep learning in TensorFlow*, 2018: data
#   parallelism as one all-reduce that anyone can add to a script, and why tensors are fused.
#
# ## Where your lines live
#
# Three rungs of [the training ladder](../minidist/plain/__init__.py), each with one idea more than the one
# before:
#
# | You wrote | The rung | The engine |
# |---|---|---|
# | `batch_gradients` | plain/data_parallel.py: [`train`](../minidist/plain/data_parallel.py) | parallel/sharding/data_parallel_strategy.py: [`Replicated`](../minidist/parallel/sharding/data_parallel_strategy.py) |
# | `all_reduce_in_buckets` | plain/buckets.py: [`groups_of`](../minidist/plain/buckets.py), [`bucket_of`](../minidist/plain/buckets.py) | parallel/sharding/bucket_assignment.py: [`BucketAssignment`](../minidist/parallel/sharding/bucket_assignment.py) |
# | `reduce_in_backward` | plain/overlap.py: [`Bucket.arrived`](../minidist/plain/overlap.py) | parallel/sharding/reducer.py: [`Reducer.arrived`](../minidist/parallel/sharding/reducer.py) |
# | `accumulate_gradients` | – | parallel/sharding/data_parallel.py: [`DataParallel.no_sync`](../minidist/parallel/sharding/data_parallel.py) |
#
# The rungs weigh each rank's loss by its rows, as you did, and group gradients by your rule. Their buckets are
# never copied: each gradient is a view of its bucket, and it is the bucket that leaves as soon as it is full.
# The engine deals gradients to buckets in the order in which they arrive, and copes with parameters that are
# unused or shared.
#
# Next: lesson 10 asks whether the ranks have to wait for each other at all.
