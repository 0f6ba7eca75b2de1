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
# Several ranks train *one* model. Each computes with its own rows of the batch, and then they exchange their
# gradients. Data parallelism is the simplest way to train on many machines, the most used, and the easiest to
# get wrong without noticing. You build it from lesson 8's all-reduce, plant its classic bugs, and learn the one
# test that finds them all.

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
# **The question.** Four ranks share the rows of every batch. How do they end with exactly the weights that one
# process would have reached alone? And if they did not, how would you notice? (Goyal et al. 2017 trained
# ResNet-50 in one hour this way: 256 GPUs with 32 pictures each, so 8192 in a batch.)
#
# ## A sum can be shared out
#
# The loss of a batch is a mean over its rows: a sum, divided by the number of rows. The gradient of a sum is
# the sum of the gradients. So each rank takes some of the rows, its **shard**, and computes the gradient for
# these rows alone. An all-reduce adds up the ranks' gradients, and then every rank has the gradient of the
# whole batch. Press Play, or go step by step:

# %%
data_parallel_step()

# %% [markdown]
# The data are 1437 small pictures of handwritten digits, and the model has two layers. Everything is in
# float64, which keeps 16 digits, so that even a small difference means something. Of a batch's `rows`, rank r
# of n takes `rows.tensor_split(n)[r]`.

# %%
cluster = md.Cluster(ranks=4, threads=1)  # each rank computes on one core
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
# Each rank makes a model of its own. If two models begin with different weights, they stay different, because
# every step changes both by the same amount. So rank 0 first sends its weights to all ranks. This is called a
# **broadcast**.


# %%
def same_start(model):
    for parameter in model.parameters():
        comm.broadcast(parameter.detach(), source=0)  # detach() shares the memory
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
# After backward, `parameter.grad` holds the gradient of each parameter. It belongs to the mean loss over this
# rank's own rows.
#
# **Exercise 9.1: average_gradients.** Replace every `.grad` of the model by its mean over all ranks. Frozen
# parameters (`requires_grad` is False) have no gradient: their `.grad` is `None` on all ranks, and stays
# `None`. Return nothing. (`comm.all_reduce(x)` sums `x` over the ranks, in place.)
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
# function if it has passed, and the lesson's own if it has not, so that the rest of the lesson works either
# way.
#
# It also has a training loop, which differs from any other in two lines: `mine` are this rank's rows, and
# `gradients` stands for both backward and the exchange.

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
# This notebook is a process as well: a world with one rank, in which an all-reduce changes nothing. So `train`,
# called here, *is* training in one process. The cell prints, for each of the four ranks, the largest difference
# in any weight after 22 steps of 64 rows.


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
# The differences are only rounding: float64 keeps 16 digits, and the ranks add up in another order. **This is
# the test**: with the same seed and the same batches, in float64, the weights equal those of one process to ten
# digits or more. A loss that falls proves nothing.
#
# ## Predict, then measure
#
# Now take *all* batches of the epoch. 1437 rows are 22 batches of 64, and one of 29. For the last one, the four
# ranks' shards have 8, 7, 7 and 7 rows. How large is the gap after this one more step?

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
# One more batch, and most of the digits are gone. Nothing failed, no loss looks odd, and all ranks agree with
# each other. What happened? Each rank took the mean over its own rows, and then you took the mean over the four
# ranks: **a mean of means**. A row in the shard of 8 counted 1/4 x 1/8 = 1/32, and a row in a shard of 7
# counted 1/4 x 1/7 = 1/28. Each row should have counted 1/29.
#
# The remedy is to weigh by rows. Each rank divides the *sum* of its losses by the number of rows on *all*
# ranks. Then every row counts the same, whichever rank has it.
#
# **Exercise 9.2: batch_gradients.** This rank has the rows `inputs` and `targets`. Other ranks have other rows,
# perhaps more or fewer; a rank may have none at all. After your function, every `.grad` holds the gradient of
# the mean loss over all rows of all ranks. The loss is `functional.cross_entropy(outputs, targets)`: it takes
# the mean, or with `reduction="sum"` the sum. Every `.grad` is `None` at first, and the loss depends on every
# parameter.
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
# One uneven batch in an epoch does little harm. But shards can differ a lot if each rank reads its own files.
# Say the pictures were collected in four places: the first has all digits from 0 to 6, the second has only 7s,
# the third only 8s, and the fourth only 9s. In every step, each rank takes the same *fraction* of its pictures,
# so that all ranks finish the epoch together.


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
# Both runs end without an error, and in both the loss falls. But with the mean of means, a picture from the
# large place counts much less than a picture from a small one, so the model learns the digits 0 to 6 more
# slowly. From this run alone you could not tell that anything is wrong. The same happens with texts of
# different lengths: their loss is a mean over *tokens*, so weigh by tokens.
#
# Here are more classic bugs, each one line away from the right program. For each of them, the table shows the
# accuracy of rank 1's model on pictures that it was not trained with; whether all ranks still have the same
# model (`md.assert_in_sync` compares them); and the gap to one process.


# %%
def summed(model, inputs, targets):  # forgets to divide by the ranks
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
# Read it column by column. **The accuracy** shows nothing: it differs by a few points, and you cannot know
# which number is the right one. The sum may even look good. It acts as a learning rate four times as high,
# which helps until it is too high. **Whether the ranks agree** finds weights that were not sent and a layer
# that was not reduced, and nothing else. **The gap to one process** finds all five bugs, in a second, with a
# tiny model. minidist itself is tested this way, for every strategy (tests/helpers/contract.py).
#
#
# ## And with minidist's engine
#
# `md.prepare` does all of this: it sends rank 0's weights to all ranks, and weighs each rank by its rows. So
# even with the uneven batch of 29 rows, it reaches the weights of one process.


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
# - **Uneven shards.** The last batch is short, files have different lengths, or sequences are padded. Weigh by
#   rows, or by tokens. Only a comparison with one process shows this mistake.
# - **Weights that drift apart.** Somebody forgot the broadcast, or added a layer later, or one rank went on
#   from another checkpoint. `md.assert_in_sync(model)` compares 32 bytes from each rank, which is cheap enough
#   for every few hundred steps.
# - **More ranks, a larger batch.** If you double the ranks and keep the rows of each, the batch is twice as
#   large. That is a different training, and it may need another learning rate (Goyal et al. 2017 scale it with
#   the batch, after a warm-up). First check that the *same* global batch gives the same weights.
# - **The same rows on all ranks.** All ranks shuffle with the same seed, and each forgets to take its own
#   shard. They agree with each other, and on four ranks 3/4 of the work is wasted. Or each rank shuffles with a
#   seed of its own, and the shards overlap. Print the first few row numbers of each rank.

# %%
cluster.close()

# %% [markdown]
# ## Further reading
#
# - Goyal et al., *Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour*, 2017: how training changes with
#   a larger batch. Section 3 lists mistakes such as the ones above.
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
# | `batch_gradients` | plain/data_parallel.py: [`train`](../minidist/plain/data_parallel.py) | parallel/sharding/sharded.py: [`Sharded`](../minidist/parallel/sharding/sharded.py) |
# | `average_gradients` | – | parallel/sharding/loops/data_parallel.py: [`DataParallel`](../minidist/parallel/sharding/loops/data_parallel.py), which averages unless you give it the rows |
#
# The rung weighs each rank's loss by its rows, as you did, and so does the engine.
# [`assert_in_sync`](../minidist/parallel/debugging/in_sync.py) filled the second column of the table above.
#
# Next: lesson 10 makes the messages fewer, and sends them while the ranks compute.
