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
# In data parallelism every rank has the whole model. If no single device can hold the model, give each rank
# some of its layers. In this lesson you cut a model, see why all ranks but one then wait, and write the
# schedules that put them to work.

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
# **The question.** The layers of a model run one after the other: each needs the output of the one before. How
# can ranks that hold different layers work at the same time?
#
# ## Where to cut
#
# Most models are a chain of layers, and a **stage** is a run of consecutive layers that one rank holds. Here is
# the chain of a small GPT, a model that predicts the next piece of a text. Such a piece is called a **token**.
# The first layer, the **embedding**, looks up a vector for each token in a table. Then come **blocks**, all of
# the same shape, which do most of the computing. The last layer, the **head**, gives every token of the
# vocabulary a score. A layer's weight can mean two things here: the number of its parameters, or the time of
# its forward and backward pass.

# %%
model = GPT(GPTConfig(vocabulary=4096, context=64, layers=6, heads=4, width=64))
tokens = torch.randint(4096, (8, 64))
parameters = [sum(p.numel() for p in layer.parameters()) for layer in model.layers]
seconds = layerwise.measure(model.layers, tokens)
for layer, count, lasts in zip(model.layers, parameters, seconds, strict=True):
    print(f"{type(layer).__name__:10} {count:8,} parameters {lasts * 1e3:8.2f} ms")

# %% [markdown]
# The two differ. The embedding has many parameters and hardly anything to compute; a block has fewer parameters
# and more to compute. To save **memory**, make stages with equally many parameters. To gain **speed**, make
# stages that take equally long, since the slowest stage sets the pace of all.
#
# The task is the same for both weights: cut a list of numbers into consecutive parts, so that the heaviest part
# is as light as possible. Begin with an easier question. If no part may weigh more than `most`, how many parts
# do you need?
#
# **Exercise 12.1: fill.** Cut the layers into consecutive parts. Begin at the left, and make each part as long
# as possible, with a weight of at most `most`. Return a list of ranges: for the weights `[2, 1, 1, 3]` and a
# `most` of 4, return `[range(0, 3), range(3, 4)]`. No single layer weighs more than `most`. Without layers
# there are no parts.
#
# Par: read each weight once.


# %% tags=["exercise"]
def fill(weights, most):
    """Return the parts, as a list of ranges of layers."""
    ...  # about 9 lines


# %%
check(fill)

# %% [markdown]
# No idea how to begin? `hint()` in a cell of its own gives the first of three hints. The next cell takes your
# function if it has passed, and the lesson's own if it has not.

# %%
fill = or_solution(fill)
fill([2, 1, 1, 3], 4)

# %% [markdown]
# Now the best cut is easy to find: take the smallest `most` that needs few enough parts. It is the weight of
# some run of consecutive layers, so there are not many values to try.


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
# The last line is minidist's own cut, by parameters. Often several cuts have the same heaviest part. Of these,
# minidist takes the most even one.
#
# ## One batch, layer by layer
#
# Now put the stages on ranks. Rank 0 runs its stage on the inputs and sends its outputs, the **activations**,
# to rank 1. This goes on up to the last rank, which computes the loss. Then the gradients come back. Each rank
# receives the gradient of its *outputs*, and runs its backward pass, which fills the gradients of its
# parameters. It sends the gradient of its *inputs* to the rank before.
#
# Autograd stops at the process boundary, so you have to bridge it in two places. Going forward, tell autograd
# that the received tensor needs a gradient: `x.requires_grad_()`. After the backward pass, `x.grad` holds that
# gradient. Going backward, start from the received gradient instead of a loss: `y.backward(gradient)`.
#
# **Exercise 12.2: step.** Run one forward and one backward pass through all ranks. Each rank has its own
# `stage`, a module. All ranks get `inputs` and `targets`, but only rank 0 uses `inputs`, and only the last rank
# uses `targets`. All tensors between stages have the shape and dtype of `inputs`. The loss is
# `((y - targets) ** 2).mean()`. The last rank returns it as a number (`loss.item()`; a tensor would keep its
# graph in memory). At the end, each rank's parameters have their gradients, and `inputs`, `targets` and the
# parameters are as they were. If there is only one rank, it is both the first and the last.
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
# float64. A cut changes where the model is computed, and nothing else.

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
# The chart shows when each rank worked. Each rank has a row; a forward pass is blue, and a backward pass red.
# The backward pass is drawn twice as long, which is about right. Where the forward pass multiplies by a weight
# matrix once, the backward pass has two products: one for the gradient of the input, and one for the gradient
# of the weights.

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
# There are four ranks, and only one of them works at any time. The model fits into memory, which was the aim.
# But training is no faster than on one device with enough memory.
#
# ## Micro-batches
#
# The remedy is an old one: an assembly line. Cut the *batch* as well, into **micro-batches**. While rank 1
# works on micro-batch 0, rank 0 can begin with micro-batch 1. The gradients of the micro-batches add up to the
# gradient of the batch, so the result stays the same. This is **GPipe** (Huang et al. 2019): all forward
# passes, then all backward passes.
#
# You can write down what each rank does, as data, before anything runs. A **schedule** has a list of
# instructions for each rank. `Instruction("forward", 3)` is the forward pass of micro-batch 3 through the
# rank's stage, and prints as F3. A schedule leaves the messages out. `with_messages` adds them: a receive
# before each pass that needs one, and a send after it.

# %%
example = [[Instruction("forward", 0), Instruction("backward", 0)]] * 2
for rank, own in enumerate(with_messages(example)):
    print("rank", rank, *own, sep="   ")

# %% [markdown]
# **Exercise 12.3: gpipe.** Return the schedule: a list that holds a list of instructions for each rank. Each
# rank runs all forward passes before all backward passes. Number the micro-batches from 0, and keep them in the
# same order on all ranks.


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
    f"Ranks wait for {found.bubble:.1%} of the time, instead of 75%.",
    alt="The forward passes of eight micro-batches flow through four ranks like a "
    "parallelogram, then the backward passes flow back. A triangle is empty at each corner.",
)

# %% [markdown]
# The empty places are called the **bubble**. They are there because the pipeline has to fill and to drain.
#
# **Exercise 12.4: bubble.** With p ranks and m micro-batches, for what share of the time do the ranks wait? The
# schedule is GPipe, all stages take equally long, and messages take no time. Count in the picture: how long
# does each rank work, and how long does the whole step take?


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
# A paper may count the same bubble in another way. Narayanan et al. 2021 divide the lost time by the time
# *worked*, which gives (p - 1) / m. For 4 ranks and 8 micro-batches they say that a step takes 37.5% longer,
# and you say that 27.3% of the step is lost.
#
# Read down a column: more micro-batches mean less waiting. Read along a row: more ranks mean more waiting. If
# ranks are to wait for less than a fifth of the time, you need about four times as many micro-batches as ranks.
# An example from practice: Llama 3 405B was trained in 16 pipeline stages, on up to 16,384 GPUs (Grattafiori et
# al. 2024, section 3.3). With GPipe and 16 micro-batches, each of these GPUs would wait for nearly half of the
# time.
#
# ## Predict, then measure
#
# The formula assumes four devices, and your machine may have fewer cores. So the layer that you measure here
# does not compute. It *sleeps*, twice as long for twice the rows, as if it ran on a device of its own.
# Everything else is real: four processes, their messages, autograd, and `md.Pipeline`, which runs any schedule,
# and yours too.
#
# The same batch of 32 rows goes through four stages, cut into 1, 2, 4, up to 32 micro-batches. How many times
# as fast is a step with 8 micro-batches as a step with the whole batch? Write down your guess.

# %%
prediction = None  # your guess, such as 5; None draws no guess


# %%
def events_of(schedule, rows=32, seconds=0.002):
    """On a rank, run a batch by the schedule; return what it did, and when."""
    layer, x = SlowLayer(seconds=0), torch.ones(rows, 1)
    pipeline = md.Pipeline(layer, with_messages(schedule), loss=nn.MSELoss())
    pipeline.step(x, x)  # in the first step the ranks also exchange shapes
    layer.seconds = seconds  # for each row forward; backward takes twice that
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
# The formula has the cost of waiting. It leaves out the fixed cost of each pass: its messages, Python, and
# waking up. Measure that as well, with a layer that takes almost no time. Divide the measured time by m + p -
# 1, the number of forward (and of backward) passes that follow one another.

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
    caption=f"With 8 micro-batches a step is {times[0] / times[3]:.1f} times as fast; by "
    f"the bubble alone {formula[0] / formula[3]:.1f} times; {said(prediction)}.",
)

# %% [markdown]
# The first few micro-batches bring nearly all of the gain. After that little is left of the bubble, and each
# further pass adds its fixed cost. If that cost is large, as on a busy machine, the curve turns up again. On a
# GPU there is a second reason to stop: a micro-batch of a few rows does not keep it busy (lesson 00: a small
# product has few operations for each byte). So choose m just large enough.
#
# ## 1F1B: start backward passes early
#
# GPipe has a second cost. The backward pass of a micro-batch needs the activations of its forward pass, so a
# rank **holds** them in between. In GPipe it holds those of *all* micro-batches. It need not: the last rank
# could begin with the backward pass of micro-batch 0 as soon as its forward pass is done, and the rank before
# it could follow at once.
#
# So each rank begins with a few forward passes, just enough to give the ranks after it something to do. Then it
# runs **one forward and one backward pass in turn** (1F1B; Narayanan et al. 2019): each backward pass frees the
# memory that the next forward pass needs. At the end it runs the backward passes that are left.
#
# **Exercise 12.5: one_f_one_b.** Return that schedule. With 3 ranks and 4 micro-batches:
#
# | rank | instructions |
# |---|---|
# | 0 | F0 F1 F2 B0 F3 B1 B2 B3 |
# | 1 | F0 F1 B0 F2 B1 F3 B2 B3 |
# | 2 | F0 B0 F1 B1 F2 B2 F3 B3 |
#
# There may be fewer micro-batches than ranks. Rank r never holds more than p - r micro-batches.
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
# The bubble is exactly the same, since the pipeline fills and drains as before. 1F1B gains memory: rank r holds
# at most p - r micro-batches, however many there are. So you can take more micro-batches, which shrinks the
# bubble, and no rank holds more.
#
# ## Zero bubble: a backward pass has two halves
#
# Look again at a backward pass. It computes two gradients, and each takes about as long as a forward pass:
#
# - that of the stage's **input** (I), for which the rank before waits;
# - that of the stage's **weights** (W), which only the optimizer needs, at the end of the step.
#
# If both are one instruction, the rank before waits for both. Qi et al. 2024 split the instruction in two. They
# send the input's gradient as soon as it is there, and compute W at a time when the rank would wait. The
# instructions are `Instruction("backward_input", i)` and `Instruction("backward_weight", i)`, printed as I and
# W.
#
# **Exercise 12.6: my_schedule.** Write a schedule of your own that is shorter than 1F1B. Use any of the four
# kinds of instruction. F, I and W take 1 unit each, and B takes 2. Any order that works is right: for each
# micro-batch, a rank runs F before I and I before W, and no rank waits for a message that never comes. The
# fewer units, the better.
#
# Par: 3 m + p - 1 units if there are at least as many micro-batches as ranks, while no rank holds more than p
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
    "Green boxes compute gradients of weights. No rank waits for these, so they fill the bubble.",
    alt="Two charts one above the other. In the lower one backward passes are in two parts, "
    "the parts for weights fill the places where ranks waited, and it ends earlier.",
)

# %% [markdown]
# In spite of the name, a small bubble is left, since the pipeline still has to fill. Qi et al. remove that as
# well: they hold more activations, and let the ranks' optimizer steps begin without waiting for each other.
#
# ## Does it run?
#
# A schedule may look right in a picture. Now run it. First, are the gradients right? Cut eight layers that
# really compute over four ranks, and compare with one process.


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
# The differences are only rounding: the 20 rows come in 8 micro-batches (some of 3 rows, some of 2), and so
# they add up in another order.
#
# And is the time right? `timed()` records when each rank began and ended each instruction (all processes of a
# machine read the same clock). Compare it with a simulation of the same schedule, with 8 ms for each pass.

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
# The shape is the same, with thin gaps for messages and Python. One thing differs on purpose. The input of rank
# 0 is the data, and no rank waits for its gradient. So `md.Pipeline` leaves all of rank 0's backward pass to W,
# and its green boxes are twice as long.
#
# Here are all schedules side by side, simulated and measured, now with 4 ms for each row in each pass:

# %%
table = {"one batch": gpipe(4, 1), "GPipe": gpipe(4, 8), "1F1B": one_f_one_b(4, 8)}
table["mine"] = schedule
print(f"{'':10} simulated   measured   a rank holds at most")
for key, each in table.items():
    m = sum(instruction.kind == "forward" for instruction in each[0])
    found = simulate(with_messages(each), dict.fromkeys(passes, 128 / m))
    held = f"{max(found.peak_activations)} of {m} micro-batches"
    ms = median_ms(each, 0.004, rounds=1)
    print(f"{key:10} {found.seconds:6.0f} ms {ms:7.0f} ms   {held}")

# %% [markdown]
# 1F1B is no faster than GPipe, but it holds half the activations. In the simulation, `mine` is the shortest. In
# the measurement it gains less, since it has 1.5 times as many instructions as 1F1B, and each has its fixed
# cost. The longer the passes take, the less that matters.
#
# If the layers computed instead of sleeping, you would see less of this on a machine with fewer cores than
# ranks. A rank that waits leaves its core to another rank, so a bubble costs hardly anything, and four ranks on
# two cores are never four times as fast. A pipeline pays if each rank has a device of its own.
#
# ## What breaks in practice, and how one sees it
#
# - **A deadlock in the messages.** In 1F1B rank 0 sends activations while rank 1 sends it a gradient. If each
#   send waits for its receiver, both wait for ever. Begin the sends without waiting for them, as `md.Pipeline`
#   does. And let `schedules.check` prove that a schedule comes to its end, before anything runs.
# - **One slow stage.** The formula is for equal stages. If one stage is slower, all other ranks wait for it. In
#   the chart of `timed()`, the slow stage is the only row without gaps. Measure the layers, and cut by time.
# - **Layers that look across rows.** Batch normalization over 4 rows gives other results than over 32, so the
#   model trains differently, without any error. Layer normalization looks at each row alone, so its results
#   stay the same.
# - **Weights at both ends.** A GPT may use its token table also as its last matrix. Then two stages hold a
#   copy, and the gradients of the two copies have to be summed. If you forget that, the copies drift apart.
#   `md.Pipeline(tied=...)` sums them, and `md.prepare` finds them by itself.
# - **A mean of means.** A micro-batch of 3 rows must count more than one of 2 rows. Weigh each by its rows, or
#   the gradients are slightly wrong in every step.

# %%
cluster.close()

# %% [markdown]
# ## Further reading
#
# - Huang et al., *GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism*, 2019:
#   micro-batches, the bubble, and recomputing activations (lesson 14) to hold less.
# - Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*, 2021:
#   1F1B at scale, and several smaller stages on each rank, which divide the bubble (here
#   `schedules.interleaved`).
# - Qi et al., *Zero Bubble Pipeline Parallelism*, 2024: the two halves of a backward pass, schedules found by a
#   solver, and a way to remove the rest of the bubble.
#
# ## Where your lines live
#
# Two rungs of [the training ladder](../minidist/plain/__init__.py):
#
# | You wrote | The rung | The engine |
# |---|---|---|
# | `fill` | plain/layer_by_layer.py: [`own_layers`](../minidist/plain/layer_by_layer.py) | parallel/layerwise/layer_by_layer.py: [`cut`](../minidist/parallel/layerwise/layer_by_layer.py) |
# | `step` | plain/layer_by_layer.py: [`train`](../minidist/plain/layer_by_layer.py) | parallel/layerwise/layer_by_layer.py: [`LayerByLayer`](../minidist/parallel/layerwise/layer_by_layer.py) |
# | `gpipe`, `one_f_one_b` | plain/pipeline.py: [`gpipe`](../minidist/plain/pipeline.py), [`one_f_one_b`](../minidist/plain/pipeline.py) | parallel/schedules/gpipe_to_zero_bubble.py: [`gpipe`](../minidist/parallel/schedules/gpipe_to_zero_bubble.py), [`one_f_one_b`](../minidist/parallel/schedules/gpipe_to_zero_bubble.py) |
# | `bubble` | – | parallel/schedules/simulation.py: [`simulate`](../minidist/parallel/schedules/simulation.py) |
# | `my_schedule` | – | parallel/schedules/gpipe_to_zero_bubble.py: [`zero_bubble`](../minidist/parallel/schedules/gpipe_to_zero_bubble.py) |
# | what runs a schedule | plain/pipeline.py: [`run`](../minidist/plain/pipeline.py) | parallel/pipeline/schedule_run.py: [`ScheduleRun.execute`](../minidist/parallel/pipeline/schedule_run.py) |
#
# The rungs send the same messages as your `step`, and their schedules are your lists, with `("F", 3)` for
# `Instruction("forward", 3)`. They cut the layers by number and not by weight. The engine also writes the sends
# and receives into the schedule, so that it can prove a schedule free of deadlock before it runs.
#
# Next: lesson 13 cuts within a layer, so that all ranks work on the same matrix product.
