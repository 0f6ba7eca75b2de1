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
# # 14. ZeRO 1, 2, 3
#
# **Time:** about 3 hours. **Builds on:** lessons 08 to 10.
#
# Data parallel ranks (lesson 09) share the rows of a batch, and nothing else. Each rank has the whole model,
# the whole gradient, and the whole state of the optimizer. In this lesson you count the memory that this takes,
# share it among the ranks piece by piece, and find out what each piece costs in messages. The method is called
# ZeRO, for *zero redundancy optimizer*.

# %%
import statistics
import time
from functools import partial

import torch
from torch import nn

import minidist as md
from checks.figures import ladder, said
from checks.pictures.memory_bars import memory_bars
from checks.pictures.segments import segment_curve
from checks.pictures.sharded_layers import sharded_layers
from checks.zero import Live, check, hint, or_solution
from minidist import comm
from minidist.model import GPT, MLP, GPTConfig, Sampler, digits

ladder(14)

# %% [markdown]
# **The question.** A model of 7.5 billion parameters is 15 GB of numbers, at two bytes each. Why can't you
# train it on a GPU with 80 GB, and how can 64 such GPUs train it together?
#
# ## Where the memory goes
#
# A parameter does not come alone. Backward computes a **gradient** for it. And Adam, the optimizer of nearly
# all large models, keeps two more numbers: running means of the gradient and of its square. (AdamW is Adam with
# another form of weight decay.) These two are the **optimizer state**. Count the bytes.

# %%
weight = nn.Parameter(torch.zeros(1_000_000))
weight.grad = torch.ones_like(weight)
adam = torch.optim.AdamW([weight])
adam.step()  # the state is made in the first step

{name: value.nbytes for name, value in adam.state[weight].items()}

# %% [markdown]
# In float32 a parameter takes 4 bytes, its gradient 4, and the state 8: **16 bytes for each parameter**.
#
# Does half precision halve it? In **mixed precision** the model computes with 16-bit parameters and gradients,
# of 2 bytes each. But then the optimizer needs a copy of the parameters in float32, the **master weights** (you
# will see why in a moment). They take 4 bytes, and the state 8. And 2 + 2 + 12 is 16 again (Rajbhandari et al.
# 2020, section 3.1).
#
# Every rank keeps a copy of all this, and all copies are equal: a waste. ZeRO removes the copies in three
# stages. On n ranks, each rank keeps
#
# | stage | parameters | gradients | optimizer: state and master weights |
# |---|---|---|---|
# | 0, data parallel | all | all | all |
# | 1 | all | all | 1/n |
# | 2 | all | 1/n | 1/n |
# | 3 | 1/n | 1/n | 1/n |
#
# **Exercise 14.1: state_bytes.** Return the bytes that one of `ranks` ranks keeps, as three numbers: for
# parameters, gradients and optimizer. Without ZeRO, these are 2, 2 and 12 bytes for each parameter if `mixed`
# is true (mixed precision), else 4, 4 and 8 (float32).


# %% tags=["exercise"]
def state_bytes(parameters, ranks, stage, mixed):
    """Bytes on one rank: (of parameters, of gradients, of the optimizer)."""
    ...  # about 6 lines


# %%
check(state_bytes)

# %%
state_bytes = or_solution(state_bytes)
PARTS = ("parameters", "gradients", "optimizer")
paper = {
    f"stage {stage}": dict(zip(PARTS, state_bytes(7.5e9, 64, stage, mixed=True)))
    for stage in range(4)
}
memory_bars(
    paper,
    limit=(80e9, "a GPU with 80 GB"),
    caption="7.5 billion parameters with Adam in mixed precision on each of 64 ranks, by your formula.",
    alt="Stacked bars: 120 GB in stage 0, 31 in stage 1, 17 in stage 2, 2 in stage 3.",
)

# %% [markdown]
# These are the numbers of the paper's first figure. Most of the bytes belong to the optimizer. So stage 1 saves
# the most, and that is why it comes first. For Llama 3 405B the same count gives 405e9 x 16 bytes = 6.5 TB,
# which fill 81 GPUs of 80 GB before anything is computed.
#
# ## Why master weights
#
# A step changes a weight by a small fraction. A 16-bit number cannot hold such a small change:

# %%
w = torch.tensor(1.0)
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    print(f"{dtype!s:15}  1 + 0.0002 = {float(w.to(dtype) + 0.0002):.4f}")

# %% [markdown]
# In both 16-bit formats the sum is 1, because the next number after 1 is too far away. A thousand such steps
# change nothing at all. So add the updates to the master weights, and give the model their rounded values.
#
# **float16** has a second weakness, its range. Numbers below 3e-8 become 0, and gradients are often that small.
# The remedy is **loss scaling** (Micikevicius et al. 2018): multiply the loss by a large number, the scale.
# This multiplies all gradients by the scale, and you divide by it later, in float32.

# %%
true_gradient = 1e-8
print("stored as float16:     ", float(torch.tensor(true_gradient).half()))
scaled = torch.tensor(true_gradient * 65536).half()
print("scaled, and divided out:", float(scaled.float() / 65536))
print("too much of it:         ", float(torch.tensor(3.0 * 65536).half()))

# %% [markdown]
# The last line shows the limit: the largest float16 is 65504, and anything larger becomes infinite. If that
# happens, skip the step, and halve the scale for the next one. (**bfloat16** has the range of float32, so it
# needs no scaling, but it has even fewer digits.)
#
# **Exercise 14.2: scaled_step.** Make one step of plain gradient descent in mixed precision. `weight` is
# float16, `master` is its float32 copy, and `gradient` (float16) belongs to `scale` times the loss. If all
# elements of `gradient` are finite, subtract `lr` times the true gradient from `master`, copy the rounded
# values to `weight`, and return `scale`. If not, change neither, and return half of `scale`. Change both
# tensors in place.


# %% tags=["exercise"]
def scaled_step(weight, master, gradient, scale, lr):
    """Change master and weight in place; return the scale for the next step."""
    ...  # about 6 lines


# %%
check(scaled_step)

# %%
scaled_step = or_solution(scaled_step)
weight, scale = torch.ones(1).half(), 2.0**20
master = weight.float()
for _ in range(1000):
    gradient = torch.full((1,), 0.5 * scale).half()  # the true one is 0.5
    scale = scaled_step(weight, master, gradient, scale, lr=1e-4)
print(f"scale {scale:.0f}, master {master.item():.4f}, weight {weight.item():.4f}")

# %% [markdown]
# The scale was too large at first. It fell in a few skipped steps, and then stayed. The weight ends near 0.95,
# although a single step is too small to change a float16 of 1.
#
# ## Stage 1: share the optimizer
#
# After an all-reduce, all ranks have the same gradient, and all make the same update. Instead, let rank r
# update only part r of the parameters, and then send it to the others. Then it needs only the gradient and the
# state of its part. You know the two operations from lesson 08: a **reduce-scatter** leaves each rank with its
# part of the sum, and an **all-gather** gives all ranks all parts. Together they *are* an all-reduce.
#
# To cut a model into parts of equal length, put all its parameters into one flat tensor, one after the other.


# %%
def flatten(model, ranks):
    """All parameters in one tensor, all gradients in another, padded to a multiple of ranks."""
    parameters = list(model.parameters())
    size = sum(p.numel() for p in parameters)
    flat = parameters[0].new_zeros(-(-size // ranks) * ranks).detach()
    gradient, start = torch.zeros_like(flat), 0
    for p in parameters:
        here = slice(start, start + p.numel())
        flat[here] = p.detach().view(-1)
        p.data, p.grad = flat[here].view_as(p), gradient[here].view_as(p)  # views
        start = here.stop
    return flat, gradient


# %% [markdown]
# Now backward writes into `gradient`, and if you change `flat`, you change the model. Part r is
# `flat.view(n, -1)[r]`, which is also a view.
#
# Two calls are all that you need: `comm.reduce_scatter(x, "mean")` returns this rank's part of the mean of all
# ranks' `x`, and `comm.all_gather(part, out=x)` fills `x` with all ranks' parts.
#
# **Exercise 14.3: zero_1_step.** `flat` holds the parameters, the same on all ranks. `own` is this rank's part
# of `flat`, a view, and `optimizer` is a torch optimizer that was made for `[own]`. `gradient` is the gradient
# of this rank's rows. Make a step with the mean of all ranks' gradients. At the end, `flat` holds all new
# parameters on all ranks. (An optimizer takes the gradient from `own.grad`.)
#
# Par: 2 (n - 1) / n times the bytes of `flat`, as much as an all-reduce.


# %% tags=["exercise"]
def zero_1_step(flat, own, optimizer, gradient):
    """Update flat in place, each rank its own part."""
    ...  # about 4 lines


# %%
check(zero_1_step)

# %% [markdown]
# Now use it to train a network for handwritten digits, on 4 ranks and in one process. Both use float64, so that
# rounding hides nothing.

# %%
zero_1_step = or_solution(zero_1_step)
data = digits()
make = partial(torch.optim.AdamW, lr=3e-3)


def train(steps=20):
    n, r = md.size(), md.rank()
    model = MLP((64, 128, 10), dtype=torch.float64)
    flat, gradient = flatten(model, n)
    own = flat.view(n, -1)[r]
    optimizer = make([own])
    sampler = Sampler(len(data.train), 64, rank=r, ranks=n)
    for step in range(steps):
        gradient.zero_()
        inputs, targets = data.train[sampler.share(step)]
        nn.functional.cross_entropy(model(inputs.double()), targets).backward()
        with comm.ledger() as ledger:
            zero_1_step(flat, own, optimizer, gradient)
    state = sum(x.nbytes for x in optimizer.state[own].values())
    return flat, state, ledger.bytes_sent


# %%
cluster = md.Cluster(ranks=4)
(alone, whole_state, _), *_ = md.launch(train, ranks=1)
(together, state, sent), *_ = cluster.run(train)
size = together.numel()
print(f"largest difference    {(together[: alone.numel()] - alone).abs().max():.1e}")
print(f"state on each rank    {state:,} bytes, in one process {whole_state:,}")
print(f"bytes sent in a step  {sent:,}; an all-reduce sends {2 * 3 * size * 8 // 4:,}")

# %% [markdown]
# The weights are the same, each rank keeps a quarter of the state, and it sends not one byte more. So stage 1
# should be your default.
#
# ## Stage 2: let go of gradients
#
# A rank needs the sum of its own part of the gradients, and only passes the rest on. Backward computes the
# gradients from the last layer to the first. As soon as some are there, the ranks can reduce them to their
# owners and free them, while backward goes on. A message for each small gradient would cost mostly alpha
# (lesson 08), so collect them in **buckets**, as in lesson 10.
#
# **Exercise 14.4: reduce_in_buckets.** `gradients` is an iterator. As backward does, it computes the gradients
# one by one; they are tensors of one dimension. Collect them in order, by the rule of exercise 10.1: neighbours
# share a bucket as long as they have at most `bucket` elements together, and a gradient with more gets a bucket
# of its own. When the next gradient does not fit, empty the bucket: put its gradients into one flat tensor, one
# after the other, pad it with zeros so that n divides the length, reduce-scatter the mean, keep this rank's
# part, and let go of all else. At the end empty the last bucket, if there were any gradients. Return the list
# of parts.
#
# Par: send (n - 1) / n times the bytes of the padded buckets. Memory holds at most the parts, the gradient that
# did not fit, and one bucket twice: as separate gradients, and flat.


# %% tags=["exercise"]
def reduce_in_buckets(gradients, bucket):
    """The list of this rank's parts, one for each bucket."""
    ...  # about 15 lines; a function inside may reduce a full bucket


# %%
check(reduce_in_buckets)

# %% [markdown]
# `Live` counts the bytes of all living tensors that were made inside its `with`. Try twenty gradients of 40 kB,
# with small buckets and with one bucket for all:

# %%
reduce_in_buckets = or_solution(reduce_in_buckets)


def peak_with(bucket):
    with Live() as live:
        reduce_in_buckets((torch.ones(10_000) for _ in range(20)), bucket)
    return live.peak


for bucket in (20_000, 200_000):
    peak = cluster.run(peak_with, bucket)[0]
    print(f"buckets of {bucket:7,} elements: at most {peak:,} bytes")

# %% [markdown]
# The whole gradient has 800,000 bytes, and each rank has to keep a quarter of it, 200,000. One bucket for all
# saves nothing: all gradients are in memory twice, separately and flat. (In `minidist` backward writes into the
# flat bucket, which saves one of the two copies.)
#
# ## Stage 3: let go of parameters
#
# Only the parameters are left to share. Each rank keeps a part of each layer. Just before a layer computes, all
# ranks gather its parts. As soon as it has computed, each rank frees all but its own part. Backward needs the
# layer once more, so the ranks gather it once more. Step through it.

# %%
sharded_layers()

# %% [markdown]
# Now write it. So that nothing is hidden from you, here is a layer with its backward written out. It gets its
# weights, as a flat tensor, whenever it computes.


# %%
class Layer:
    """y = tanh(x @ w), with w as a flat tensor, perhaps padded."""

    def __init__(self, inputs, outputs):
        self.shape, self.size = (inputs, outputs), inputs * outputs

    def forward(self, weights, x):
        return torch.tanh(x @ weights[: self.size].view(self.shape))

    def backward(self, weights, x, gradient):
        """Turn the gradient of y into those of x and of weights."""
        w = weights[: self.size].view(self.shape)
        inner = gradient * (1 - torch.tanh(x @ w) ** 2)
        of_weights = torch.zeros_like(weights)
        torch.mm(x.T, inner, out=of_weights[: self.size].view(self.shape))
        return inner @ w.T, of_weights


# %% [markdown]
# **Exercise 14.5: zero_3_pass.** `layers` are such layers, and `parts` has this rank's part of each layer's
# weights: `comm.all_gather(part)` returns all weights of a layer. Go forward through the layers, starting with
# this rank's rows `x`, and keep each layer's input. Then go backward. The gradient of the last output is that
# output minus `target`. Return a list with this rank's part of each layer's mean gradient, in the order of
# `layers`.
#
# Par: send three times (n - 1) / n of the bytes of all weights. Memory holds at most two tensors as large as a
# layer: its weights and their gradient. A name in Python keeps its tensor until it gets another value, so write
# `del weights`.


# %% tags=["exercise"]
def zero_3_pass(layers, parts, x, target):
    """This rank's parts of the gradients, averaged over all ranks."""
    inputs, own = [], []
    ...  # about 14 lines
    return own


# %%
check(zero_3_pass)

# %% [markdown]
# Try it with twelve layers of 256 x 256, of which every rank keeps a quarter:

# %%
zero_3_pass = or_solution(zero_3_pass)
layers = [Layer(256, 256) for _ in range(12)]
whole = 4 * sum(layer.size for layer in layers)


def live_and_sent():
    x, n = torch.ones(4, 256), md.size()
    parts = [torch.full((layer.size // n,), 0.01) for layer in layers]
    with Live() as live, comm.ledger() as ledger:
        zero_3_pass(layers, parts, x, torch.zeros(4, 256))
    return live.peak, ledger.bytes_sent


peak, sent = cluster.run(live_and_sent)[0]
print(f"weights of all layers {whole:,} bytes, and their gradient as much")
print(f"live besides the parts at most {peak:,} bytes")
print(f"  of which it returns {whole // 4:,}: its shares of the gradients")
print(f"sent {sent:,} bytes, {sent / whole:.2f} times the weights")

# %% [markdown]
# Data parallelism sends 2 (n - 1) / n times the bytes of the weights, and stage 3 sends 3 (n - 1) / n times as
# many: **1.5 times as much**. In return, a rank needs memory for 1/n of everything, and for the one layer that
# computes. Most of the live bytes above are the shares of the gradients that your function returns, a quarter
# of twelve layers. The rest are two tensors as large as a layer: its weights and its gradient.
#
# ## Predict, then measure
#
# Now train a GPT with Adam on 4 ranks. `md.prepare` reads the stage from its layout, and `engine.memory()`
# counts the bytes of a rank's tensors. By the formula, stage 3 needs a quarter of the memory of stage 0. How
# many times less will it really be, for parameters, gradients and optimizer together? Write down your guess.

# %%
prediction = None  # your guess, such as 3.5; None draws no guess

# %%
shape = GPTConfig(vocabulary=256, context=64, layers=12, heads=4, width=128)


def measure(layout, **options):
    engine = md.prepare(GPT(shape), make, layout, **options)
    tokens = torch.randint(256, (2, 65))
    times = []
    for _ in range(3):
        with comm.ledger() as ledger:
            start = time.perf_counter()
            engine.step(tokens[:, :-1], tokens[:, 1:])
            times.append(time.perf_counter() - start)
    return engine.memory(), ledger.bytes_sent, statistics.median(times)


small = {"data_parallel": {"bucket_mb": 0.5}}  # for the stages with buckets

# %%
found, predicted, sent = {}, {}, {}
for stage in range(4):
    layout, options = md.Layout(dp=4, zero=stage), small if stage < 3 else {}
    memory, sent[stage], seconds = cluster.run(measure, layout, **options)[0]
    bar = f"stage {stage}"
    found[bar] = {part: getattr(memory, part) for part in PARTS}
    predicted[bar] = sum(state_bytes(shape.parameters(), 4, stage, mixed=False))
    print(f"{bar}: sent {sent[stage]:,} bytes in a step of {seconds:.2f} s")
print(f"stage 3 sends {sent[3] / sent[0]:.2f} times what stage 0 does")

# %%
total = {stage: sum(parts.values()) for stage, parts in found.items()}
memory_bars(
    found,
    predicted=predicted,
    guess=prediction and total["stage 0"] / prediction,
    caption="Measured on each of 4 ranks (bars), and by your formula (dashed). Stage 3 takes "
    f"{total['stage 0'] / total['stage 3']:.1f} times less than stage 0; {said(prediction)}.",
    alt="Stacked bars of parameters, gradients and optimizer state for four stages, each shorter than "
    "the one before, close to the formula; stages 2 and 3 lie a little above it.",
)

# %% [markdown]
# The ranks send as many bytes as predicted. (Stage 3 sends a little less than 1.5 times as much, because the
# first and the last layer share the table of tokens, and one gather serves both.) And how many bytes do they
# keep? Stages 0 and 1 keep what the formula says, plus some padding. Stages 2 and 3 keep a little more, because
# the formula forgets the gradients that a rank only passes on. They travel in buckets, and at any time there is
# memory for two buckets; in stage 3 a layer is a bucket. This memory does not grow with the number of layers.
# Next to billions of parameters it is little, but in your small GPT you can see it. The usual buckets have 25
# MB. They are larger than this model, and with them stage 2 saves nothing:

# %%
memory, _, _ = cluster.run(measure, md.Layout(dp=4, zero=2))[0]
print(memory)

# %% [markdown]
# ## The other memory: activations
#
# The table above has one line that no stage of ZeRO makes smaller. Backward needs the results of forward, the
# **activations**. They grow with the rows of a batch and with the tokens of a row, and soon they are the
# largest part.
#
# The remedy is **recomputation** (Chen et al. 2016; also called checkpointing): forget most activations, and
# compute them again when backward needs them. Cut a chain of L layers into segments of k layers. Forward keeps
# only the input of each segment, L / k tensors. Backward computes one segment at a time again, and keeps its k
# tensors meanwhile. So memory holds at most L / k + k tensors instead of L, at the cost of one more forward
# pass.
#
# With 36 layers, how long should a segment be? And how many tensors does memory then hold?

# %%
best_length = None  # your guess, such as 10; None draws no guess

# %%
from minidist.parallel.training.activation_memory import ActivationCounter
from minidist.parallel.training.recompute import recompute

layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(36)]
x, computed = torch.ones(100, 64), []
for layer in layers:  # count how often a layer computes
    layer.register_forward_pre_hook(lambda *_: computed.append(1))


def kept(length):
    parts = [
        nn.Sequential(*layers[i : i + length]) for i in range(0, len(layers), length)
    ]
    model = nn.Sequential(*parts)
    with ActivationCounter(model) as counter:
        recompute(model)(x).sum().backward()  # recomputes each part of the chain
    return counter.peak / x.nbytes


kept(6)
print(f"a step with segments of 6 computes {len(computed)} layers forward")


# %%
lengths = (1, 2, 3, 4, 6, 9, 12, 18, 36)
segment_curve(
    lengths,
    measured=[kept(k) for k in lengths],
    model=[len(layers) / k + k for k in lengths],
    guess=best_length,
    without=len(layers),
)

# %% [markdown]
# L / k + k is smallest when both terms are equal: at k = sqrt(L), where it is 2 sqrt(L). 10,000 layers would
# keep 200 tensors. The cost is the same for every k: each of the 36 layers is computed twice, so 72 in all.
# Backward takes about twice the time of forward. So a step of 3 units becomes one of 4 units, a third longer.
#
# A block of a transformer keeps many tensors, and its input is a small part of them. So the usual choice is
# segments of one block each: `Layout(recompute=True)`.

# %%
for recompute_too in (False, True):
    layout = md.Layout(dp=4, zero=3, recompute=recompute_too)
    memory, _, seconds = cluster.run(measure, layout)[0]
    print(f"recompute={recompute_too}: a step of {seconds:.2f} s")
    print(memory, "\n")

# %% [markdown]
# The activations take several times less memory, and the step takes longer. Is it more than a third longer?
# Then the model is so small that starting an operation takes longer than its arithmetic. And recomputation
# starts many operations a second time.
#
# ## When is it worth it?
#
# Look back at the printed times of a step in the four stages. The ranks of one machine share their memory, so
# messages cost little. Over a network, all ranks may have to wait for the additional bytes of stage 3.
# `comm.cost` (lesson 08) predicts how long the bytes of a step take, here for 7.5 billion parameters in 16 bits
# on 64 ranks:

# %%
from minidist.comm import cost

print(f"{'network':18}{'stages 0 to 2':>16}{'stage 3':>10}")
for network in ("25gbe", "100gbe", "infiniband_ndr", "nvlink4"):
    t = cost.predict("all_reduce", "ring", 2 * 7.5e9, 64, network)
    print(f"{network:18}{t:14.2f} s{1.5 * t:8.2f} s")

# %% [markdown]
# If computing takes longer than the messages, it hides them; the more rows a rank has, the more it can hide. So
# use stage 1 always, stage 2 if the gradients do not fit, and stage 3 if the parameters do not fit. A model
# that fits is faster without stage 3.
#
# ## What breaks in practice, and how one sees it
#
# - **Out of memory in the second step.** The optimizer makes its state in the first `step()`. A model may fit
#   until then, and not after it. Count all 16 bytes for each parameter before you start (`python -m
#   minidist.scale.memory --budget 16GB`).
# - **Overflow.** In float16 the loss scale keeps falling, and steps are skipped (`engine.loss_scale`,
#   `engine.skipped`). A few skipped steps are normal. Many mean that the gradients themselves explode: look at
#   `engine.grad_norm`, or use bfloat16.
# - **Fragmentation.** A GPU reports that it is out of memory, and in the same line that gigabytes are reserved
#   and free. The free memory is in pieces that are too small, left behind by tensors of many sizes. Compare
#   `torch.cuda.memory_reserved()` with `memory_allocated()`. To prevent it, make buffers of one size, once.
# - **Offload.** Master weights and state may also be kept in the memory of the CPU, or on disk (ZeRO-Offload,
#   Ren et al. 2021). Then the model fits, but every step waits for a link that is many times slower than the
#   GPU's memory. To find the time that this adds, divide the bytes moved by the link's bandwidth. Only large
#   batches hide it.
# - **Small models.** To gather a small layer costs mostly alpha, and a step has hundreds of such messages. The
#   ledger shows many calls with few bytes each. Use stage 1.
# - **Rank 0 alone saves the model.** In stage 3 it has only an n-th of the model, and all ranks have to help
#   gather the rest. If one rank alone calls `engine.full_state_dict()`, it waits for ever.

# %%
cluster.close()

# %% [markdown]
# ## Further reading
#
# - Rajbhandari, Rasley, Ruwase and He, *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*,
#   2020: the three stages, with the bytes counted in section 3 and the messages in section 7.
# - Micikevicius and others, *Mixed Precision Training*, 2018: master weights and loss scaling, and trainings
#   that fail without them.
# - Chen, Xu, Zhang and Guestrin, *Training Deep Nets with Sublinear Memory Cost*, 2016: recomputation and the
#   square root, and how more forward passes reduce that to a logarithm.
#
# ## Where your lines live
#
# One rung of [the training ladder](../minidist/plain/__init__.py).
# Data parallelism and the three stages are four rows of its table:
#
# | You wrote | The rung | The engine |
# |---|---|---|
# | `state_bytes` | plain/sharded.py: [`TABLE`](../minidist/plain/sharded.py) | scale/memory/estimates.py: [`estimate`](../minidist/scale/memory/estimates.py) |
# | `zero_1_step` | plain/sharded.py: [`Unit.reduce`](../minidist/plain/sharded.py), [`Unit.gather`](../minidist/plain/sharded.py) | parallel/sharding/optimizer/optimizer_slices.py: [`OptimizerSlices.step`](../minidist/parallel/sharding/optimizer/optimizer_slices.py) |
# | `reduce_in_buckets` | plain/sharded.py: [`Unit.gradient_arrived`](../minidist/plain/sharded.py) | parallel/flat/gradients.py: [`GradientsInLentMemory.give_back`](../minidist/parallel/flat/gradients.py) |
# | `zero_3_pass` | plain/sharded.py: [`Unit.gather`](../minidist/plain/sharded.py), [`Unit.forward_done`](../minidist/plain/sharded.py) | parallel/sharding/units/unit_runtime.py: [`UnitRuntime.begin`](../minidist/parallel/sharding/units/unit_runtime.py), [`UnitRuntime.before_backward`](../minidist/parallel/sharding/units/unit_runtime.py) |
# | `scaled_step` | – | parallel/training/precision.py: [`Precision.skips`](../minidist/parallel/training/precision.py); parallel/sharding/optimizer/optimizer_slices.py: [`OptimizerSlices.round_masters`](../minidist/parallel/sharding/optimizer/optimizer_slices.py) |
#
# The rung makes your calls: a reduce-scatter to the owners, the optimizer on what a rank owns, an all-gather.
# Hooks make the calls where your loops made them, and a layer is a bucket. The rung sums gradients instead of
# averaging them, because each rank's loss is already weighed by its rows. The engine gathers the next layer
# while one computes, and works with any optimizer, precision and checkpoint.
#
# No lesson builds another rung: [`orthogonalized`](../minidist/plain/muon.py) is the heart of Muon, an optimizer
# that looks at whole matrices, so ranks own whole ones. The engine's form is
# [`Muon`](../minidist/parallel/training/muon.py), in every stage.
#
# Next: lesson 15 puts all of this together, and chooses.
