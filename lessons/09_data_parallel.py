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
# **Time:** about 1.5 hours. **Builds on:** lesson 08, and lesson 07 for gradients.
#
# Several ranks train *one* model: each computes with its own rows, and they exchange gradients. It is the
# simplest way to train on many machines, the one most used, and the easiest to get wrong without noticing. You
# build it from lesson 8's all-reduce, plant its classic bugs, and learn the one test that finds them all.

# %%
from functools import partial

import torch
from torch.nn import functional

import minidist as md
from checks.data_parallel import check, hint, or_solution
from checks.figures import bars, ladder, said
from checks.pictures.data_parallel_step import data_parallel_step
from minidist import comm
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
# ## Predict, then measure
#
# Now take *all* batches of the epoch. 1437 rows are 22 batches of 64, and one of 29. The four ranks' shares of
# that last one have 8, 7, 7 and 7 rows. How large is the gap after this one step more?

# %%
prediction = None  # your guess, such as 1e-12; None draws no guess

# %%
even = max(gap(model, reference) for model in cluster.run(train, averaged, steps))
reference = train(alone, batches(1))
uneven = max(
    gap(model, reference) for model in cluster.run(train, averaged, batches(1))
)
bars(
    {"22 batches of 64 rows": even, "and one of 29 rows": uneven},
    "largest difference in a weight from one process",
    f"One uneven batch takes the gap from {even:.0e} to {uneven:.0e}; {said(prediction)}.",
    alt="Two bars on a logarithmic scale: the gap before the uneven batch, and after it.",
    guess=("and one of 29 rows", prediction) if prediction else None,
)

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
#
# ## And with minidist's engine
#
# `md.prepare` does all of this: it sends the weights, and weighs each rank's rows. It reaches one process's
# weights also with the odd batch of 29.


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

# %%
cluster.close()

# %% [markdown]
# ## Further reading
#
# - Goyal et al., *Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour*, 2017: what a larger batch does
#   to training; its section 3 lists mistakes such as the ones above.
# - Shallue et al., *Measuring the Effects of Data Parallelism on Neural Network Training*, 2019: how many steps
#   a larger batch saves, and from which size on it saves none.
# - Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, 2020: its section
#   3.2.1 is this lesson, and the sections after it are the next one.
#
# ## Where your lines live
#
# The first rung of [the training ladder](../minidist/plain/__init__.py) with more than one rank:
#
# | You wrote | The rung | The engine |
# |---|---|---|
# | `batch_gradients` | plain/data_parallel.py: [`train`](../minidist/plain/data_parallel.py) | parallel/sharding/data_parallel_strategy.py: [`Replicated`](../minidist/parallel/sharding/data_parallel_strategy.py) |
# | `average_gradients` | – | parallel/sharding/data_parallel.py: [`DataParallel`](../minidist/parallel/sharding/data_parallel.py), which averages unless you give it the rows |
#
# The rung weighs each rank's loss by its rows, as you did. The engine does so too, in the class around your
# model; [`assert_in_sync`](../minidist/parallel/debugging/in_sync.py) is the comparison in the table above.
#
# Next: lesson 10 makes the messages fewer, and sends them while the ranks compute.
