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
# # 12. Cutting the model
#
# **Time:** about 3 hours. **Builds on:** lesson 08; lesson 09 helps.
#
# In data parallelism every rank has the whole model. A model that no single device can hold needs another way:
# give each rank some of its layers. In this lesson you cut a model, see why that alone keeps all ranks but one
# waiting, and write the schedules that put them to work.

# %%
import statistics

import torch
from torch import nn

import minidist as md
from checks.cutting_the_model import check, hint, or_solution
from checks.figures import ladder, said
from checks.pictures.schedules import beside_formula, fill_animation, gantt, measured
from checks.slow_layer import SlowLayer
from minidist import comm
from minidist.model import GPT, GPTConfig
from minidist.parallel import layerwise
from minidist.parallel.schedules import Instruction, simulate, with_messages

ladder(12)

# %% [markdown]
# **The question.** The layers of a model run one after the other: each needs what the one before it gives. How
# can ranks that hold different layers work at the same time?
#
# ## Where to cut
#
# Most models are a chain of layers, and a **stage** is a run of consecutive layers that one rank holds. Here is
# the chain of a small GPT, with two things that a layer can weigh: its parameters, and the time of its forward
# and backward pass.

# %%
model = GPT(GPTConfig(vocabulary=4096, context=64, layers=6, heads=4, width=64))
tokens = torch.randint(4096, (8, 64))
parameters = [sum(p.numel() for p in layer.parameters()) for layer in model.layers]
seconds = layerwise.measure(model.layers, tokens)
for layer, count, lasts in zip(model.layers, parameters, seconds, strict=True):
    print(f"{type(layer).__name__:10} {count:8,} parameters {lasts * 1e3:8.2f} ms")

# %% [markdown]
# The two differ. A table of embeddings has many parameters, and hardly anything to compute; a block has fewer,
# and more to do. **Memory** asks for stages with equally many parameters. **Speed** asks for stages that take
# equally long: what flows through all of them flows at the pace of the slowest.
#
# Whatever the weights are, the task is the same: cut a list of numbers into consecutive parts, so that the
# heaviest part is as light as can be. The trick is to ask an easier question first. Suppose that no part may
# weigh more than `most`: how many parts does it take?
#
# **Exercise 12.1: fill.** Cut the layers into consecutive parts. Begin at the left, and make each part as long
# as it can be without weighing more than `most`. Return a list of ranges: for weights `[2, 1, 1, 3]` and most 4
# it is `[range(0, 3), range(3, 4)]`. No layer weighs more than `most`; without layers there are no parts.
#
# Par: each weight is read once.


# %% tags=["exercise"]
def fill(weights, most):
    """Return the parts, as a list of ranges of layers."""
    ...  # about 9 lines


# %%
check(fill)

# %% [markdown]
# No idea how to begin? `hint()` in a cell of its own gives the first of three hints. The next cell takes your
# function where it has passed, and the lesson's own where it has not.

# %%
fill = or_solution(fill)
fill([2, 1, 1, 3], 4)

# %% [markdown]
# With that the cut is near: the best `most` is the smallest one for which the parts are few enough. It is the
# weight of some run of layers, so there are not many to try.


# %%
def cut(weights, parts):
    n = len(weights)
    runs = {sum(weights[i:j]) for i in range(n) for j in range(i + 1, n + 1)}
    possible = [most for most in runs if most >= max(weights)]
    return fill(weights, min(m for m in possible if len(fill(weights, m)) <= parts))


print("by parameters", cut(parameters, 4))
print("by time      ", cut(seconds, 4))
print("layerwise.cut", layerwise.cut(model.layers, 4))

# %% [markdown]
# The last line is minidist's own, by parameters: of all cuts whose heaviest part is as light it takes the most
# even one.
#
# ## One batch, layer by layer
#
# Now the ranks. Rank 0 runs its stage on the inputs and sends the **activations**, its outputs, to rank 1; the
# last rank knows the loss. Then the other way round: each rank gets the gradient of its *outputs*, runs its
# backward pass, which fills the gradients of its parameters, and sends the gradient of its *inputs* to the rank
# before.
#
# Autograd stops at the process boundary, so you have to bridge it in two places. Going forward, tell autograd
# that the tensor which has arrived needs a gradient: `x.requires_grad_()`. After the backward pass that gradient
# is in `x.grad`. Going backward, start from the gradient that has arrived, in place of a loss:
# `y.backward(gradient)`.
#
# **Exercise 12.2: step.** One forward and one backward pass through all ranks. Rank r has `stage`, a module.
# Inputs and targets are given on all ranks; only rank 0 uses `inputs`, and only the last rank `targets`. All
# tensors between stages have the shape and dtype of `inputs`. The loss is `((y - targets) ** 2).mean()`, and
# the last rank returns it as a number (`loss.item()`; a tensor would keep its graph in memory). In the end each
# rank's parameters have their gradients. A rank that is alone is first and last.
#
# Par: one message to the next rank, and one to the rank before.


# %% tags=["exercise"]
def step(stage, inputs, targets):
    """Run one batch forward and backward; return the loss on the last rank."""
    r, last = md.rank(), md.size() - 1
    ...  # about 12 lines


# %%
check(step)

# %% [markdown]
# The check compared your gradients with those of one process that has all layers, to the last digits of
# float64. Cutting a model changes where things are computed, and nothing else.

# %%
step = or_solution(step)
cluster = md.Cluster(ranks=4)


def one_step():
    torch.manual_seed(md.rank())  # each rank's stage has its own weights
    stage = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
    return step(stage, torch.ones(8, 5), torch.zeros(8, 5))


cluster.run(one_step)

# %% [markdown]
# ## Only one at a time
#
# Draw which rank worked when: one row for each rank, blue for a forward pass and orange for a backward pass. A
# backward pass is drawn twice as long, which is about right: where a forward pass multiplies by a weight matrix
# once, a backward pass has two products, one for the gradient of the input, one for the gradient of the
# weights.

# %%
one_batch = [[Instruction("forward", 0), Instruction("backward", 0)]] * 4
found = simulate(with_messages(one_batch))
gantt(
    {"one batch": found.timeline},
    f"One batch through four stages: ranks wait for {found.bubble:.0%} of the time.",
    alt="A staircase down of forward passes and up of backward passes: at any time one "
    "rank works, and the other three wait.",
)

# %% [markdown]
# Four ranks, and at any time one of them works. The model fits, which was the point; but it is no faster than
# one device with enough memory would be.
#
# ## Micro-batches
#
# The way out is an old one: an assembly line. Cut the *batch* too, into **micro-batches**. While rank 1 works
# on micro-batch 0, rank 0 can begin with micro-batch 1. Gradients of micro-batches add up to those of the
# batch, so that the result stays the same. This is **GPipe** (Huang et al. 2019): all forward passes, then all
# backward passes.
#
# What a rank does can be written down as data, before anything runs: a **schedule** is a list of instructions
# for each rank. `Instruction("forward", 3)` is the forward pass of micro-batch 3 through the rank's stage, and
# prints as F3. Messages are left out: `with_messages` puts a receive before each pass that needs one, and a
# send after it.

# %%
example = [[Instruction("forward", 0), Instruction("backward", 0)]] * 2
for rank, own in enumerate(with_messages(example)):
    print("rank", rank, *own, sep="   ")

# %% [markdown]
# **Exercise 12.3: gpipe.** Return the schedule: a list with a list for each rank, in which all forward passes
# come before all backward passes. Micro-batches count from 0, and come in the same order on all ranks.


# %% tags=["exercise"]
def gpipe(ranks, micro_batches):
    """Return for each rank its list of instructions."""
    ...  # about 3 lines


# %%
check(gpipe)

# %%
gpipe = or_solution(gpipe)
found = simulate(with_messages(gpipe(4, 8)))
gantt(
    {"GPipe, 8 micro-batches": found.timeline},
    f"Ranks wait for {found.bubble:.1%} of the time, in place of 75%.",
    alt="The forward passes of eight micro-batches flow through four ranks like a "
    "parallelogram, then the backward passes flow back. A triangle is empty at each corner.",
)

# %% [markdown]
# What is empty is called the **bubble**: the pipeline has to fill, and to drain.
#
# **Exercise 12.4: bubble.** Which share of the time do ranks wait, with p ranks and m micro-batches? All stages
# take equally long, messages take no time, and the schedule is GPipe. Count in the picture: how long does each
# rank work, and how long does it all take?


# %% tags=["exercise"]
def bubble(ranks, micro_batches):
    """Return the share of time, from 0 to 1, in which ranks wait."""
    ...  # 1 line


# %%
check(bubble)

# %%
bubble = or_solution(bubble)
for m in (1, 4, 8, 16, 32, 64):
    print(
        f"{m:3} micro-batches: "
        + ", ".join(f"{p} ranks {bubble(p, m):5.1%}" for p in (2, 4, 8, 16))
    )

# %% [markdown]
# A paper may say it in another way. Narayanan et al. 2021 divide the time lost by the time *worked*, which is
# (p - 1) / m: for 4 ranks and 8 micro-batches 37.5% more time, where you say that 27.3% of all time is lost.
#
# Read down a column: more micro-batches, less waiting. Read along a row: each rank more costs. To keep waiting
# below a fifth it takes about four times as many micro-batches as ranks. In real life: Llama 3 405B was trained
# with its layers cut into 16 pipeline stages, on up to 16,384 GPUs (Grattafiori et al. 2024, section 3.3). With
# 16 micro-batches and GPipe each of those GPUs would wait for nearly half of the time.
#
# ## Predict, then measure
#
# A formula for four ranks wants four devices, and your machine may have fewer cores. So the layer that is
# measured here does not compute; it *sleeps*, for a time in proportion to its rows, as if a device of its own
# were busy meanwhile. Everything else is real: four processes, messages, autograd, and `md.Pipeline`, which
# executes schedules, yours as well.
#
# The same batch of 32 rows goes through four stages, cut into 1, 2, 4, up to 32 micro-batches. How many times
# as fast as whole is it in 8 micro-batches? Write down your guess.

# %%
prediction = None  # your guess, such as 5; None draws no guess


# %%
def events_of(schedule, rows=32, seconds=0.002):
    """In a rank: run a batch by the schedule; what it did, and when."""
    layer, x = SlowLayer(seconds=0), torch.ones(rows, 1)
    pipeline = md.Pipeline(layer, with_messages(schedule), loss=nn.MSELoss())
    pipeline.step(x, x)  # the first time ranks tell each other shapes
    layer.seconds = seconds  # that a row takes forward; backward it takes twice that
    comm.barrier()
    with pipeline.timed() as events:
        pipeline.step(x, x)
    return events


# %%
def lasts(timeline):
    ends = [event.end for events in timeline for event in events]
    return max(ends) - min(event.start for events in timeline for event in events)


def median_ms(schedule, seconds=0.002, rounds=3):
    runs = [cluster.run(events_of, schedule, 32, seconds) for _ in range(rounds)]
    return statistics.median(lasts(measured(events)) for events in runs)


# %%
counts = [1, 2, 4, 8, 16, 32]
times = [median_ms(gpipe(4, m)) for m in counts]
formula = [32 * 3 * 2 / (1 - bubble(4, m)) for m in counts]  # each rank works 192 ms
for m, ms, model_ms in zip(counts, times, formula, strict=True):
    print(f"{m:2} micro-batches: {ms:4.0f} ms, by the formula {model_ms:4.0f} ms")

# %% [markdown]
# The formula says what waiting costs, and nothing of what a pass itself costs: its messages, Python, waking up.
# Measure that, too, with a layer that takes almost no time: what is left is a fixed time for each of the m + p
# - 1 steps.

# %%
fixed = median_ms(gpipe(4, 32), seconds=1e-6) / (32 + 4 - 1)
print(f"a forward and a backward pass cost {fixed:.2f} ms besides their work")
with_fixed = [ms + fixed * (m + 3) for m, ms in zip(counts, formula, strict=True)]

# %%
beside_formula(
    counts,
    times,
    {"bubble alone": formula, "and a fixed cost": with_fixed},
    guess=prediction,
    caption=f"In 8 micro-batches it is {times[0] / times[3]:.1f} times as fast as whole; "
    f"the bubble alone says {formula[0] / formula[3]:.1f}; {said(prediction)}.",
)

# %% [markdown]
# The first few micro-batches win nearly all. After that the bubble has little left to give, while the fixed
# cost grows with every pass; where it is large, on a busy machine, the curve turns up again. On a GPU there is
# a second reason to stop: a micro-batch of a few rows does not keep it busy (lesson 00: a small product has few
# operations for each byte). So m is made just large enough.
#
# ## 1F1B: start backward passes early
#
# GPipe has a second price. The backward pass of a micro-batch needs the activations of its forward pass, so a
# rank **holds** them in between: in GPipe those of *all* micro-batches. That is a pity, as the last rank could
# begin with the backward pass of micro-batch 0 as soon as its forward pass is done. The rank before it could
# then follow at once.
#
# So: each rank begins with a few forward passes, just as many as it takes for the ranks after it to have
# something to do. Then come **one forward and one backward pass in turn** (1F1B; Narayanan et al. 2019), and
# each backward pass frees what one forward pass will need. In the end come the backward passes that are left.
#
# **Exercise 12.5: one_f_one_b.** Return that schedule. With 3 ranks and 4 micro-batches:
#
# | rank | instructions |
# |---|---|
# | 0 | F0 F1 F2 B0 F3 B1 B2 B3 |
# | 1 | F0 F1 B0 F2 B1 F3 B2 B3 |
# | 2 | F0 B0 F1 B1 F2 B2 F3 B3 |
#
# There may be fewer micro-batches than ranks. Rank r is never to hold more than p - r micro-batches.
#
# Par: 3 (m + p - 1) units of time, with 1 for a forward and 2 for a backward pass, the same as GPipe.


# %% tags=["exercise"]
def one_f_one_b(ranks, micro_batches):
    """Return for each rank its list of instructions."""
    ...  # about 10 lines


# %%
check(one_f_one_b)

# %% [markdown]
# Press Play, or go step by step, and watch the column on the right: how many micro-batches each rank holds.

# %%
one_f_one_b = or_solution(one_f_one_b)
fill_animation({"GPipe": gpipe(4, 6), "1F1B": one_f_one_b(4, 6)})

# %% [markdown]
# The bubble is the same, to the unit: the pipeline fills and drains as before. What is won is memory. Rank r
# holds p - r micro-batches at most, however many there are: m can grow, and the bubble shrink, and no rank
# holds more for it.
#
# ## Zero bubble: a backward pass has two halves
#
# Look again at a backward pass. It computes two gradients, and each takes about as long as a forward pass:
#
# - that of the stage's **input** (I): the rank before waits for it;
# - that of the stage's **weights** (W): it is needed by the optimizer's step, and no earlier.
#
# Written as one instruction, the rank before waits for both. Qi et al. 2024 split it, and send the input's
# gradient as soon as it is there; W goes where the rank would wait. As instructions:
# `Instruction("backward_input", i)` and `Instruction("backward_weight", i)`, printed I and W.
#
# **Exercise 12.6: my_schedule.** Write a schedule of your own that is shorter than 1F1B, with whichever of the
# four kinds of instruction you like. F, I and W take 1 unit each. Any order that works is right: every rank
# has, for each micro-batch, F before I and I before W, and no rank waits for what never comes. With fewer units
# you win.
#
# Par: 3 m + p - 1 units where there are at least as many micro-batches as ranks, holding no more than p
# micro-batches. (1F1B takes 3 m + 3 (p - 1).)


# %% tags=["exercise"]
def my_schedule(ranks, micro_batches):
    """Return for each rank its list of instructions."""
    ...  # about 13 lines


# %%
check(my_schedule)

# %%
my_schedule = or_solution(my_schedule)
drawn = {"1F1B": one_f_one_b(4, 8), "mine": my_schedule(4, 8)}
gantt(
    {key: simulate(with_messages(each)).timeline for key, each in drawn.items()},
    "Green are gradients of weights: no rank waits for them, so they fill the bubble.",
    alt="Two charts one above the other. In the lower one backward passes are in two parts, "
    "the parts for weights fill the places where ranks waited, and it ends earlier.",
)

# %% [markdown]
# The name promises no bubble at all, and a small one is left: here the pipeline still fills. Qi et al. get rid
# of that too, with more activations held, and with optimizer steps that do not wait for each other.
#
# ## Does it run?
#
# A schedule that looks right in a picture has to run. First: are the gradients right? Eight layers of real
# arithmetic, cut over four ranks, against one process.


# %%
def chain():
    torch.manual_seed(11)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(8)]
    return nn.Sequential(*layers).double(), torch.randn(20, 6, dtype=torch.float64)


def gradients(schedule):
    layers, x = chain()
    stage = layers[2 * md.rank() : 2 * md.rank() + 2]
    md.Pipeline(stage, with_messages(schedule), loss=nn.MSELoss()).step(x, x.flip(0))
    return [p.grad for p in stage.parameters()]


# %%
layers, x = chain()
nn.functional.mse_loss(layers(x), x.flip(0)).backward()
right = [p.grad for p in layers.parameters()]
for schedule in (gpipe(4, 8), one_f_one_b(4, 8), my_schedule(4, 8)):
    found = [each for rank in cluster.run(gradients, schedule) for each in rank]
    print(max(float((a - b).abs().max()) for a, b in zip(found, right, strict=True)))

# %% [markdown]
# Nothing but rounding: 20 rows in 8 micro-batches (some of 3 rows, some of 2) add up in another order.
#
# And the time? `timed()` notes when each rank began and ended each instruction; all processes of a machine read
# the same clock. Beside it is the simulation of the same schedule, with 8 ms for each pass.

# %%
schedule = my_schedule(4, 8)
events = measured(cluster.run(events_of, schedule))
passes = ("forward", "backward_input", "backward_weight")
expected = simulate(with_messages(schedule), dict.fromkeys(passes, 8))
gantt(
    {"simulated": expected.timeline, "measured": events},
    f"Simulated {expected.seconds:.0f} ms, measured {lasts(events):.0f} ms.",
    alt="The measured chart has the shape of the simulated one, with thin gaps between boxes.",
    unit="ms",
)

# %% [markdown]
# The shape is the same, with thin gaps: messages, and Python. One thing differs by design. On rank 0 nobody
# waits for the gradient of its input, the data; so `md.Pipeline` leaves all of rank 0's backward pass to W, and
# its green boxes are twice as long.
#
# All schedules beside each other, simulated and measured, now with 4 ms a row in each pass:

# %%
table = {"one batch": gpipe(4, 1), "GPipe": gpipe(4, 8), "1F1B": one_f_one_b(4, 8)}
table["mine"] = schedule
print(f"{'':10} simulated   measured   a rank holds at most")
for key, each in table.items():
    m = sum(instruction.kind == "forward" for instruction in each[0])
    found = simulate(with_messages(each), dict.fromkeys(passes, 128 / m))
    held = f"{max(found.peak_activations)} of {m} micro-batches"
    print(f"{key:10} {found.seconds:6.0f} ms {median_ms(each, 0.004):7.0f} ms   {held}")

# %% [markdown]
# 1F1B is no faster than GPipe, but it holds half the activations. `mine` is the shortest by the simulation.
# Measured it wins less: it has half as many instructions again as 1F1B, and each has its fixed cost; the longer
# the passes are beside that, the more of the gain is left.
#
# With layers that compute in place of sleeping you would see less of this, where ranks outnumber the cores that
# they share: a rank that waits leaves its core to another, so that a bubble costs hardly anything, and four
# ranks on two cores are never four times as fast. Pipelines pay where each rank has a device of its own.
#
# ## What breaks in practice, and how one sees it
#
# - **A deadlock in the messages.** In 1F1B rank 0 sends activations while rank 1 sends it a gradient. Where a
#   send waits for its receiver, as over sockets, both wait for ever. Begin sends and do not wait for them, as
#   `md.Pipeline` does; and let `schedules.check` prove, before anything runs, that a schedule comes to its end.
# - **One slow stage.** The formula is for equal stages. With unequal ones all ranks wait for the slowest; in
#   the chart of `timed()` it is the only row without gaps. Measure the layers, and cut by time.
# - **Layers that look across rows.** Batch normalization over 4 rows is not that over 32: the model trains
#   differently, without any error. Layer normalization does not care.
# - **Weights at both ends.** A GPT may use its token table as its last matrix, too. Then two stages hold a
#   copy, and the copies' gradients have to be summed; forgotten, they drift apart. `md.Pipeline(tied=...)` does
#   it, `md.prepare` finds them.
# - **A mean of means.** Micro-batches of 3 and of 2 rows must not count alike: weigh each by its rows, or
#   gradients are slightly wrong, for ever.

# %%
cluster.close()

# %% [markdown]
# ## Further reading
#
# - Huang et al., *GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism*, 2019:
#   micro-batches, the bubble, and recomputing activations (lesson 14) to hold less.
# - Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*, 2021:
#   1F1B at scale, and `schedules.interleaved`: several smaller stages a rank, which divide the bubble.
# - Qi et al., *Zero Bubble Pipeline Parallelism*, 2024: the two halves of a backward pass, schedules found by a
#   solver, and how the rest of the bubble goes.
#
# ## Where your lines live
#
# Two rungs of [the training ladder](../minidist/plain/__init__.py):
#
# | You wrote | The rung | The engine |
# |---|---|---|
# | `fill` | plain/layer_by_layer.py: [`own_layers`](../minidist/plain/layer_by_layer.py) | parallel/pipeline/layer_by_layer.py: [`cut`](../minidist/parallel/pipeline/layer_by_layer.py) |
# | `step` | plain/layer_by_layer.py: [`train`](../minidist/plain/layer_by_layer.py) | parallel/pipeline/layer_by_layer.py: [`LayerByLayer`](../minidist/parallel/pipeline/layer_by_layer.py) |
# | `gpipe`, `one_f_one_b` | plain/pipeline.py: [`gpipe`](../minidist/plain/pipeline.py), [`one_f_one_b`](../minidist/plain/pipeline.py) | parallel/pipeline/schedules.py: [`gpipe`](../minidist/parallel/pipeline/schedules.py), [`one_f_one_b`](../minidist/parallel/pipeline/schedules.py) |
# | `bubble` | – | parallel/pipeline/simulation.py: [`simulate`](../minidist/parallel/pipeline/simulation.py) |
# | `my_schedule` | – | parallel/pipeline/schedules.py: [`zero_bubble`](../minidist/parallel/pipeline/schedules.py) |
# | what runs a schedule | plain/pipeline.py: [`run`](../minidist/plain/pipeline.py) | parallel/pipeline/stage_passes.py: [`StagePasses.execute`](../minidist/parallel/pipeline/stage_passes.py) |
#
# The rungs send the same messages as your `step`, and their schedules are your lists, with `("F", 3)` for
# `Instruction("forward", 3)`. They deal layers by number and not by weight. The engine writes sends and receives
# into the schedule as well, which lets it prove a schedule free of deadlock before it runs.
#
# Next: lesson 13 cuts within a layer, so that all ranks work on the same matrix product.
