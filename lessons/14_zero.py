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
# Data parallel ranks (lesson 09) share the rows of a batch, and nothing else: each has the whole model, the
# whole gradient, and the whole state of the optimizer. In this lesson you count what that takes, share it out
# piece by piece, and find out what each piece costs in messages. This is ZeRO, the *zero redundancy optimizer*.

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
# **The question.** A model of 7.5 billion parameters is 15 GB of numbers, at two bytes each. Why does it not
# train on a GPU that has 80 GB, and what can 64 such GPUs do about it together?
#
# ## Where the memory goes
#
# A parameter does not come alone. Backward leaves a **gradient** for it. And Adam, the optimizer that nearly
# all large models are trained with, keeps two numbers more: running means of the gradient and of its square
# (AdamW is Adam with another form of weight decay). They are the **optimizer state**. Count the bytes.

# %%
weight = nn.Parameter(torch.zeros(1_000_000))
weight.grad = torch.ones_like(weight)
adam = torch.optim.AdamW([weight])
adam.step()  # the state is made in the first step

{name: value.nbytes for name, value in adam.state[weight].items()}

# %% [markdown]
# In float32 that is 4 bytes for the parameter, 4 for its gradient, and 8 for the state: **16 bytes a
# parameter**.
#
# Does half precision halve it? In **mixed precision** the model computes with 16-bit parameters and gradients,
# 2 bytes each. But the optimizer then needs a copy of the parameters in float32, the **master weights**, for a
# reason that comes in a moment: 4 bytes, and 8 for its state. 2 + 2 + 12 is 16 again (Rajbhandari et al. 2020,
# section 3.1).
#
# All this is the same on all ranks, and that is the waste. ZeRO removes it in three stages. On n ranks each
# rank keeps
#
# | stage | parameters | gradients | optimizer: state and master weights |
# |---|---|---|---|
# | 0, data parallel | all | all | all |
# | 1 | all | all | 1/n |
# | 2 | all | 1/n | 1/n |
# | 3 | 1/n | 1/n | 1/n |
#
# **Exercise 14.1: state_bytes.** The bytes that one of `ranks` ranks keeps, as three numbers: parameters,
# gradients, optimizer. `mixed` says whether it is mixed precision (2, 2, 12) or all float32 (4, 4, 8).


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
# These are the numbers of the paper's first figure. The largest of today's models go further by the same table:
# the state of Llama 3 405B by this count is 405e9 x 16 bytes = 6.5 TB, 81 GPUs of 80 GB for that alone. Most of
# the bytes are the optimizer's, so stage 1 wins most, and the order of the stages is no accident.
#
# ## Why master weights
#
# A step changes a weight by a small part of it. A 16-bit number cannot hold a small change:

# %%
w = torch.tensor(1.0)
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    print(f"{dtype!s:15}  1 + 0.0002 = {float(w.to(dtype) + 0.0002):.4f}")

# %% [markdown]
# In both 16-bit kinds the sum is 1: the neighbours of 1 are too far away. A thousand such steps change nothing
# at all. So updates are added to the master weights, and the model gets their rounded values.
#
# **float16** has a second weakness, its range. What is below 3e-8 becomes 0, and gradients often are that
# small. The remedy (Micikevicius et al. 2018) is **loss scaling**: multiply the loss by a large number, so that
# all gradients are multiplied by it too, and divide it out in float32.

# %%
true_gradient = 1e-8
print("stored as float16:     ", float(torch.tensor(true_gradient).half()))
scaled = torch.tensor(true_gradient * 65536).half()
print("scaled, and divided out:", float(scaled.float() / 65536))
print("too much of it:         ", float(torch.tensor(3.0 * 65536).half()))

# %% [markdown]
# The last line shows the limit: the largest float16 is 65504, and what is larger becomes infinite. Where that
# happens, the step is left out, and the next one takes half the scale. (**bfloat16** has the range of float32
# and needs no scaling; it pays with even fewer digits.)
#
# **Exercise 14.2: scaled_step.** One step of plain gradient descent in mixed precision. `weight` is float16,
# `master` its float32 copy, and `gradient` (float16) was computed for `scale` times the loss. Where all
# elements of `gradient` are finite: move `master` by -`lr` times the true gradient, give `weight` its rounded
# values, and return `scale`. Otherwise change neither, and return half of `scale`. Both tensors are changed in
# place.


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
# The scale was too large at first, fell in a few skipped steps, and stayed. The weight arrives near 0.95,
# though not one of the steps could have changed it alone.
#
# ## Stage 1: share the optimizer
#
# All ranks have the same gradient after an all-reduce, and each does the same update with it. Let rank r update
# part r of the parameters only, and then hand it round. It then needs the state of its part, and the gradient
# of its part. You know both halves from lesson 08: a **reduce-scatter** leaves each rank with its part of the
# sum, and an **all-gather** brings everybody's parts to all. Together they *are* an all-reduce.
#
# To cut a model into parts of equal length, lay its parameters one after the other in one flat tensor.


# %%
def flatten(model, ranks):
    """One tensor with all parameters and one with all gradients, padded so that ranks divide them."""
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
# Backward now writes into `gradient`, and whatever is written to `flat` changes the model. Part r of it is
# `flat.view(n, -1)[r]`, a view as well.
#
# Two calls are all that you need: `comm.reduce_scatter(x, "mean")` returns this rank's part of the mean of all
# ranks' `x`, and `comm.all_gather(part, out=x)` fills `x` with all ranks' parts.
#
# **Exercise 14.3: zero_1_step.** `flat` has the parameters, the same on all ranks. `own` is this rank's part of
# it, a view, and `optimizer` a torch optimizer that was made for `[own]`. `gradient` is the gradient of this
# rank's rows. Make a step with the mean of all ranks' gradients, so that all ranks have all new parameters in
# `flat`. (An optimizer takes the gradient from `own.grad`.)
#
# Par: 2 (n - 1) / n times the bytes of `flat`, as much as an all-reduce.


# %% tags=["exercise"]
def zero_1_step(flat, own, optimizer, gradient):
    """Update flat in place, each rank its own part."""
    ...  # about 4 lines


# %%
check(zero_1_step)

# %% [markdown]
# Now train with it: a network that reads handwritten digits, on 4 ranks, and beside it the same in one process
# with a plain optimizer. It is done in float64, so that rounding hides nothing.

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
# The same weights, a quarter of the state, and not one byte more. That is why stage 1 should be your default.
#
# ## Stage 2: let go of gradients
#
# A rank needs the sum of its own part of the gradients; the rest is only passing through. Backward computes
# gradients from the last layer to the first. As soon as some are there they can be reduced to their owners and
# freed, while backward goes on. One message for each small gradient would be all alpha (lesson 08), so they are
# collected in **buckets**.
#
# **Exercise 14.4: reduce_in_buckets.** `gradients` is an iterator that computes them one by one, tensors of one
# dimension, as backward does. Collect them in order, by the rule of exercise 10.1: neighbours share a bucket as
# long as they have at most `bucket` elements together, and one that alone has more gets a bucket of its own. When
# the next gradient does not fit, lay those of the bucket one after the other, pad with zeros so that n divides
# the length, reduce-scatter the mean, keep this rank's part, and let go of all else. The last bucket goes at the
# end, if there are gradients at all. Return the list of parts.
#
# Par: (n - 1) / n times the bytes of the padded buckets; in memory at the most the parts, the gradient that did
# not fit, and one bucket twice: as it came, and flat.


# %% tags=["exercise"]
def reduce_in_buckets(gradients, bucket):
    """The list of this rank's parts, one for each bucket."""
    ...  # about 15 lines; a function inside may reduce a full bucket


# %%
check(reduce_in_buckets)

# %% [markdown]
# `Live` counts the bytes of the tensors that are made inside its `with`, as long as they live. Twenty gradients
# of 40 kB, with small buckets and with one bucket for all:

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
# The whole gradient has 800,000 bytes, and a quarter of it, 200,000, has to stay. With one bucket for all
# nothing is won: it is there twice, as it came and flat. (`minidist` has backward write into the flat bucket,
# which saves one of the two.)
#
# ## Stage 3: let go of parameters
#
# The parameters are left. Each rank keeps a part of each layer. Just before a layer computes, all ranks gather
# its parts; as soon as it has computed, they free all but their own. Backward needs the layer once more: so it
# is gathered once more. Step through it.

# %%
sharded_layers()

# %% [markdown]
# Now in code. So that nothing happens behind your back, here is a layer with its backward written out; its
# weights come as a flat tensor whenever it computes.


# %%
class Layer:
    """y = tanh(x @ w), with w as a flat tensor, perhaps padded."""

    def __init__(self, inputs, outputs):
        self.shape, self.size = (inputs, outputs), inputs * outputs

    def forward(self, weights, x):
        return torch.tanh(x @ weights[: self.size].view(self.shape))

    def backward(self, weights, x, gradient):
        """From the gradient of y: that of x, and that of weights."""
        w = weights[: self.size].view(self.shape)
        inner = gradient * (1 - torch.tanh(x @ w) ** 2)
        of_weights = torch.zeros_like(weights)
        torch.mm(x.T, inner, out=of_weights[: self.size].view(self.shape))
        return inner @ w.T, of_weights


# %% [markdown]
# **Exercise 14.5: zero_3_pass.** `layers` are such layers, and `parts` this rank's part of the weights of each:
# `comm.all_gather(part)` returns all of them. Go forward through the layers from this rank's rows `x`, and keep
# each layer's input. Then go backward, from the gradient `x - target` of the last output. Return a list with
# this rank's part of the mean gradient for each layer, in the order of `layers`.
#
# Par: three times (n - 1) / n of the bytes of all weights; and of whole layers two tensors at a time: the
# weights of one, and their gradient. Mind that a name in Python keeps its tensor until it gets another value:
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
# Twelve layers of 256 x 256, of which every rank keeps a quarter:

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
print(f"live beside the parts {peak:,} bytes at the most")
print(f"  of which it returns {whole // 4:,}: its shares of the gradients")
print(f"sent {sent:,} bytes, {sent / whole:.2f} times the weights")

# %% [markdown]
# Data parallelism sends the weights' bytes 2 (n - 1) / n times, stage 3 sends them 3 (n - 1) / n times: **half
# as much again**. For it a rank needs 1/n of everything, and room for the one layer that computes. Most of the
# live bytes above are of the first kind: the shares of the gradients that your function returns, a quarter of
# twelve layers. The rest are two tensors as large as a layer, its weights and its gradient.
#
# ## Predict, then measure
#
# Now the real thing: a GPT with Adam on 4 ranks. `md.prepare` takes the stage in its layout, and
# `engine.memory()` counts a rank's bytes from its tensors. By the formula stage 3 leaves a quarter of what
# stage 0 takes. How many times smaller will it really be, parameters, gradients and optimizer together? Write
# down your guess.

# %%
prediction = None  # your guess, such as 3.5; None draws no guess

# %%
shape = GPTConfig(vocabulary=256, context=64, layers=12, heads=4, width=128)


def measure(layout, **options):
    engine = md.prepare(GPT(shape), make, layout, **options)
    tokens = torch.randint(256, (2, 65))
    times = []
    for _ in range(7):
        with comm.ledger() as ledger:
            start = time.perf_counter()
            engine.step(tokens[:, :-1], tokens[:, 1:])
            times.append(time.perf_counter() - start)
    return engine.memory(), ledger.bytes_sent, statistics.median(times)


small = {"data_parallel": {"bucket_mb": 0.5}}  # buckets; stage 3 has none

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
# The bytes sent are as predicted. (Not quite 1.5 times: the table of tokens serves the first layer and the
# last, and is gathered once for both.) And the bytes kept? Stages 0 and 1 are what the formula says, but for
# some padding. Stages 2 and 3 take a little more: the formula forgets what is only passing through. Gradients
# travel in buckets, and two of them have memory at a time; in stage 3 a layer is a bucket. That does not grow
# with the number of layers: among billions of parameters it is little, in your small GPT you see it. Give stage
# 2 its usual buckets of 25 MB, larger than this model, and it saves nothing:

# %%
memory, _, _ = cluster.run(measure, md.Layout(dp=4, zero=2))[0]
print(memory)

# %% [markdown]
# ## The other memory: activations
#
# That table has a line which no stage of ZeRO makes smaller. Backward needs what forward computed: the
# **activations**. They grow with the rows and the tokens, and soon they are the largest part.
#
# The remedy is **recomputation** (Chen et al. 2016; also called checkpointing): forget most of them, and
# compute them again when backward arrives. Cut a chain of L layers into segments of k. Forward keeps the input
# of each segment, L / k tensors. Backward computes one segment again, which takes k tensors at a time. So at
# the most L / k + k tensors are kept, where L were before, for one more forward pass.
#
# Of 36 layers, how long should a segment be, and how many tensors are then kept?

# %%
best_length = None  # your guess, such as 10; None draws no guess

# %%
from minidist.parallel.training.activation_memory import ActivationCounter
from minidist.parallel.training.recompute import recompute

layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(36)]
x, computed = torch.ones(100, 64), []
for layer in layers:  # notes each time that a layer computes
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
# L / k + k is smallest where both are alike: at k = sqrt(L), and it is 2 sqrt(L) there. 10,000 layers would
# keep 200 tensors. The price is the same at every k: each of the 36 layers is computed twice, 72 in all.
# Backward takes about twice the time of forward, so a step of 3 units becomes one of 4, a third more.
#
# A block of a transformer keeps many tensors, not one, and its input is a small part of them. So segments of
# one block each are what is mostly used: `Layout(recompute=True)`.

# %%
for recompute_too in (False, True):
    layout = md.Layout(dp=4, zero=3, recompute=recompute_too)
    memory, _, seconds = cluster.run(measure, layout)[0]
    print(f"recompute={recompute_too}: a step of {seconds:.2f} s")
    print(memory, "\n")

# %% [markdown]
# The activations are a few times fewer, and the step is longer. Is it more than a third longer? Then the model
# is so small that an operation's own start takes more time than its arithmetic, and recomputation repeats the
# starts.
#
# ## When is it worth it?
#
# Look back at the times of a step that were printed for the four stages. Ranks of one machine share their
# memory, and the messages cost little; over a network, stage 3's half as many bytes again may be what all wait
# for. `comm.cost` (lesson 08) says how long the bytes of a step take, here for 7.5 billion parameters in 16
# bits on 64 ranks:

# %%
from minidist.comm import cost

print(f"{'network':18}{'stages 0 to 2':>16}{'stage 3':>10}")
for network in ("25gbe", "100gbe", "infiniband_ndr", "nvlink4"):
    t = cost.predict("all_reduce", "ring", 2 * 7.5e9, 64, network)
    print(f"{network:18}{t:14.2f} s{1.5 * t:8.2f} s")

# %% [markdown]
# Compute takes time too, and hides the messages where it takes longer: the more rows a rank has, the more there
# is to hide behind. So: stage 1 always; stage 2 where gradients do not fit; stage 3 where parameters do not;
# and a model that fits is faster without stage 3.
#
# ## What breaks in practice, and how one sees it
#
# - **Out of memory in the second step.** The optimizer's state is made in the first `step()`. What fits until
#   then need not fit afterwards: count all 16 bytes before you start (`python -m minidist.scale.memory --budget
#   16GB`).
# - **Overflow.** In float16 the loss scale falls and falls, and steps are skipped (`engine.loss_scale`,
#   `engine.skipped`). A few are normal. Many mean that the gradients themselves explode: look at
#   `engine.grad_norm`, or take bfloat16.
# - **Fragmentation.** A GPU reports that it is out of memory, and says in the same line that gigabytes are
#   reserved and free. They lie in pieces that are too small, which tensors of many sizes that come and go leave
#   behind. Compare `torch.cuda.memory_reserved()` with `memory_allocated()`; buffers of one size, made once,
#   prevent it.
# - **Offload.** Master weights and state may lie in the memory of the CPU, or on disk (ZeRO-Offload, Ren et al.
#   2021). It fits, and then every step waits for a link that is many times slower than the GPU's memory. Bytes
#   moved over the link's rate is the time that it adds; only large batches hide it.
# - **Small models.** Where a layer is small, its gathering is all alpha: hundreds of tiny messages a step. The
#   ledger shows many calls with few bytes each. Take stage 1.
# - **Rank 0 saves the model**, and the others go on: with stage 3 it has an n-th of it, and gathering the rest
#   takes all ranks. `engine.full_state_dict()` called by one rank alone hangs.

# %%
cluster.close()

# %% [markdown]
# ## Further reading
#
# - Rajbhandari, Rasley, Ruwase and He, *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*,
#   2020: the three stages, with the bytes counted in section 3 and the messages in section 7.
# - Micikevicius and others, *Mixed Precision Training*, 2018: master weights and loss scaling, and what happens
#   without.
# - Chen, Xu, Zhang and Guestrin, *Training Deep Nets with Sublinear Memory Cost*, 2016: recomputation and the
#   square root, and how more forward passes bring it down to a logarithm.
#
# ## Where your lines live
#
# One rung of [the training ladder](../minidist/plain/__init__.py).
# Data parallelism and the three stages are four rows of its table:
#
# | You wrote | The rung | The engine |
# |---|---|---|
# | `state_bytes` | plain/sharded.py: [`TABLE`](../minidist/plain/sharded.py) | scale/memory/estimates.py: [`estimate`](../minidist/scale/memory/estimates.py) |
# | `zero_1_step` | plain/sharded.py: [`Unit.reduce`](../minidist/plain/sharded.py), [`Unit.gather`](../minidist/plain/sharded.py) | parallel/sharding/optimizer_slices.py: [`OptimizerSlices.step`](../minidist/parallel/sharding/optimizer_slices.py) |
# | `reduce_in_buckets` | plain/sharded.py: [`Unit.gradient_arrived`](../minidist/plain/sharded.py) | parallel/sharding/reduce_to_owner.py: [`ShardAssignment.moved`](../minidist/parallel/sharding/reduce_to_owner.py) |
# | `zero_3_pass` | plain/sharded.py: [`Unit.gather`](../minidist/plain/sharded.py), [`Unit.forward_done`](../minidist/plain/sharded.py) | parallel/sharding/unit_runtime.py: [`UnitRuntime.begin`](../minidist/parallel/sharding/unit_runtime.py), [`UnitRuntime.need`](../minidist/parallel/sharding/unit_runtime.py) |
# | `scaled_step` | – | parallel/training/precision.py: [`Precision.skips`](../minidist/parallel/training/precision.py); parallel/training/master_weights.py: [`MasterWeights.copy_back`](../minidist/parallel/training/master_weights.py) |
#
# The rung makes your calls: a reduce-scatter to the owners, the optimizer on what a rank owns, an all-gather.
# Hooks make them where your loops did, a layer is a bucket, and gradients are summed, because each rank's loss
# is already weighed by its rows. The engine gathers the next unit while one computes, and takes any optimizer,
# precision and checkpoint.
#
# Next: lesson 15 puts all of this together, and chooses.
