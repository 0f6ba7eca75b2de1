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
# # 15. All together
#
# **Time:** about 3 hours. **Builds on:** lessons 09, 12, 13 and 14.
#
# You have built all the ways to share a training among ranks. In this lesson you put them together. You
# choose a layout for a model and machines that you do not have, you write a training that survives the death of
# a rank, and you take the same program to several machines.

# %%
import copy
import functools
import inspect
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

import minidist as md
from checks.all_together import check, hint, or_solution
from checks.figures import ladder, said
from checks.pictures.layouts import bytes_figure, lost_figure, mesh_animation
from checks.ranks import in_words
from checks.training import Training
from minidist import comm
from minidist.comm import cost
from minidist.comm.mesh import Mesh
from minidist.model import GPT, GPTConfig, Sampler, config, dataset
from minidist.scale.memory import estimate

ladder(15)

# %% [markdown]
# **The question.** You get 64 GPUs in 8 machines for a month, and a model to train. How do you share the model
# among them? And how much work is lost when one of them dies? (Llama 3 405B was trained on 16,384 GPUs: 8 that
# share each matrix, times 16 stages, times 128 that share the rows; Grattafiori et al. 2024, table 4.)
#
# ## Where each rank stands
#
# A **layout** says how many ranks share each thing: `dp` the rows of a batch (lesson 09), `pp` the layers
# (lesson 12), `tp` each layer's matrices (lesson 13), `cp` the tokens of a very long row (by ring attention,
# Liu et al. 2023, which these lessons leave out). With ZeRO, the ranks of `dp` and `cp` also share what each of
# them would otherwise keep whole (lesson 14). The product of the four sizes is the number of ranks. So the
# ranks form a grid of four dimensions. Ranks that differ in one coordinate alone are a **group**, and share
# that one thing. Step through the groups of eight ranks on two **hosts** (machines):

# %%
mesh_animation()

# %% [markdown]
# The order of the axes has a reason. Ranks with neighbouring numbers are on one host, with fast links between
# them. So neighbours should share the axis that sends most: first tp, then cp, then dp, and last pp, which
# sends least (Narayanan et al. 2021, section 3).
#
# **Exercise 15.1: place.** Return the coordinates `(pp, dp, cp, tp)` of `rank`. Rank 0 has (0, 0, 0, 0). The
# coordinate tp counts fastest: it goes up by one from each rank to the next, up to `layout.tp` - 1, and then
# starts at 0 again while cp goes up by one. After cp come dp and pp. The sizes are `layout.pp`, `layout.dp`,
# `layout.cp` and `layout.tp`.


# %% tags=["exercise"]
def place(rank, layout):
    """The coordinates (pp, dp, cp, tp) of a rank."""
    ...  # about 4 lines


# %%
check(place)

# %% [markdown]
# **Exercise 15.2: group.** The group of a rank along an axis ("pp", "dp", "cp" or "tp") has all ranks with the
# same other three coordinates, the rank itself among them. Return the group as a list of ranks, in order.
# `place` helps.

# %%
place = or_solution(place)
AXES = ("pp", "dp", "cp", "tp")


# %% tags=["exercise"]
def group(rank, axis, layout):
    """The ranks of the group along `axis` that `rank` is in."""
    ...  # about 6 lines


# %%
check(group)

# %% [markdown]
# minidist's `Mesh` makes these groups, and each collective runs in one of them. Your groups and its groups have
# to be the same.

# %%
group = or_solution(group)
cluster = md.Cluster(ranks=2)
two = md.Layout(tp=2)
print("yours:  ", [{axis: group(r, axis, two) for axis in AXES} for r in range(2)])
print("Mesh's: ", cluster.run(lambda: {a: [*Mesh(tp=2).ranks(a)] for a in AXES}))
big = md.Layout(dp=4, tp=8, pp=2)
print("Rank 13 of 64: place", place(13, big), "and dp group", group(13, "dp", big))

# %% [markdown]
# ## Does it fit?
#
# Ask this first about any layout. For each parameter, a training with Adam keeps (lesson 14)
#
# | precision | parameter | gradient | optimizer | together |
# |---|---|---|---|---|
# | fp32 | 4 bytes | 4 | 8 | 16 |
# | bf16 or fp16 | 2 | 2 | 12 | 16 |
#
# **Exercise 15.3: memory.** Return the bytes of all three together on one rank of `layout`, for a model with
# `parameters` parameters. tp and pp cut the model into equal parts. The ranks of dp and cp have the same part.
# With ZeRO (`layout.zero`) each of them keeps an equal share: in stage 1 of the optimizer's bytes, in stage 2
# also of the gradients, and in stage 3 of all three. Do not round. `layout.precision` is "fp32", "bf16" or
# "fp16".


# %% tags=["exercise"]
def memory(parameters, layout):
    """Bytes of parameters, gradients and optimizer on one rank."""
    ...  # about 8 lines


# %%
check(memory)

# %% [markdown]
# minidist's `estimate` counts the same bytes. If it knows the shape of the model, it also counts the
# **activations**, which stay in memory until the backward pass, and the parts that cannot be cut evenly. `peak`
# is the sum at the fullest moment. (`python -m minidist.scale.memory --budget 16GB` prints which models fit.)

# %%
memory = or_solution(memory)
shape = config("gpt3-6.7b")
for text in ("dp=64", "dp=64,zero=1", "dp=64,zero=3", "dp=8,tp=8"):
    layout = md.Layout.parse(text + ",precision=bf16,recompute=True")
    yours = memory(shape.parameters(), layout) / 1e9
    found = estimate(shape, layout, batch=(64, 2048))
    states, peak = found.states / 1e9, found.peak / 1e9
    print(f"{text:13} yours {yours:5.1f}, estimate {states:5.1f}, peak {peak:5.1f} GB")

# %% [markdown]
# The two agree except in stage 3. There minidist sums the gradients in float32, and keeps two buffers for
# gradients on their way. A paper counts what a method needs, and a program needs a little more. The first line
# has a surprise: with plain data parallelism and one row on each rank, the peak is not in the backward pass. It
# is in the optimizer's step, which makes temporary tensors for all parameters at once.
#
# ## What does it send?
#
# Ask this second. Let S be the bytes of this rank's gradients. Let A be the bytes of the **stream**: the tensor
# that goes from one block of the model to the next, for all rows that this rank works on in a step. Then a rank
# sends
#
# - **dp**: an all-reduce of S among dp ranks, 2 (dp - 1) / dp S. Stages 1 and 2 of ZeRO send as much. Stage 3
#   gathers the parameters once more, so it has 3 instead of 2.
# - **tp**: two all-reduces of A forward and two backward in each block, among tp ranks.
# - **pp**: A to the next stage, and the gradient of its own input, which has as many bytes, to the stage
#   before. Count the rank that sends most: one in the middle, if there is one.
#
# **Exercise 15.4: bytes_per_step.** Return a dict with the bytes that this rank sends in a step for "dp", "tp"
# and "pp". The model has `parameters` parameters in `blocks` blocks. pp cuts it into equal parts, so that a
# rank has blocks / pp blocks, and tp cuts each block. `activations` is A. An element of the gradients has 4
# bytes in precision "fp32", else 2. `layout.cp` is 1.


# %% tags=["exercise"]
def bytes_per_step(layout, parameters, blocks, activations):
    """{"dp": bytes, "tp": bytes, "pp": bytes} that one rank sends in a step."""
    ...  # about 8 lines


# %%
check(bytes_per_step)

# %% [markdown]
# ## Predict, then count
#
# Here is a small GPT. It trains on Python's own source text, byte by byte. `md.prepare` takes any layout, and
# the training loop stays the same. A **ledger** counts the bytes that go through `comm` (lesson 08). The count
# is the same on one host and on several, so it also holds for machines that you do not have.

# %%
bytes_per_step = or_solution(bytes_per_step)
SMALL = GPTConfig(context=64, layers=4, heads=4, width=128, tied=False)


def prepared(text, rows):
    data = dataset("bytes", length=64, limit=500)
    make = partial(torch.optim.AdamW, lr=3e-3)
    engine = md.prepare(GPT(SMALL), make, md.Layout.parse(text))
    dealt = {"rank": engine.data_rank, "ranks": engine.data_ranks}
    return engine, data.train, Sampler(len(data.train), rows, **dealt)


def count(text, rows=16):
    engine, data, sampler = prepared(text, rows)
    losses = [engine.step(*data[sampler.share(0)])]
    with comm.ledger() as ledger:
        losses.append(engine.step(*data[sampler.share(1)]))
    return ledger.bytes_sent, engine.memory().states, losses


# %% [markdown]
# A step has 16 rows of 64 bytes of text, on two ranks. How many times as many bytes does a rank send with
# `tp=2` as with `dp=2`? (The model has 0.9 million parameters in 4 blocks of width 128, in float32. Your
# formula can tell.)

# %%
prediction = None  # your guess, such as 0.5; None draws no guess

# %%
texts = ("dp=2", "dp=2,zero=1", "dp=2,zero=3", "tp=2", "pp=2,micro_batches=4")
counted = {text: cluster.run(count, text) for text in texts}
sent = {text: max(rank[0] for rank in ranks) for text, ranks in counted.items()}
model = {}
for text in texts:
    layout = md.Layout.parse(text)
    stream = 16 / layout.dp * 64 * SMALL.width * 4
    parts = bytes_per_step(layout, SMALL.parameters(), SMALL.layers, stream)
    model[text] = sum(parts.values())

# %%
bytes_figure(
    sent,
    model,
    guess=prediction and ("tp=2", sent["dp=2"] * prediction),
    caption=f"tp=2 sends {sent['tp=2'] / sent['dp=2']:.2f} times what dp=2 sends; "
    f"{said(prediction)}.",
)

# %% [markdown]
# The formulas are right, except for what they leave out. With **dp** a few more numbers travel with the
# gradients, such as the loss. With **tp** each end of the model has one more all-reduce, and the loss needs a
# few numbers. The two all-reduces add an eighth to the 16 of these 4 blocks, and would add little to the 160 of
# 40 blocks.
#
# But do not conclude that one layout always sends less. With dp, the bytes grow with the **model**; with tp and
# pp, they grow with the **rows**. Take twice the rows:

# %%
for text in ("dp=2", "tp=2", "pp=2,micro_batches=4"):
    twice = max(rank[0] for rank in cluster.run(count, text, 32))
    print(f"{text:22} 16 rows {sent[text]:>12,} bytes, 32 rows {twice:>12,}")

# %% [markdown]
# The same runs also counted their memory. Compare your formula, minidist's estimate, and the count:

# %%
for text, ranks in counted.items():
    layout = md.Layout.parse(text)
    yours = memory(SMALL.parameters(), layout) / 1e6
    reckoned = estimate(SMALL, layout, batch=(16, 64)).states / 1e6
    there = max(rank[1] for rank in ranks) / 1e6
    print(
        f"{text:22} yours {yours:5.2f}  estimate {reckoned:5.2f}  counted {there:5.2f} MB"
    )

# %% [markdown]
# Your formula is meant for models of billions of parameters, and is coarse for this one. The buffers of stage 3
# are as large as a block, which is a fourth of this model, and pp=2 gives one rank a bit more than half. The
# estimate counts both.
#
# And it is **the same training** in every layout. All start from the same weights and take the same rows. So
# their losses agree, except for the last digits, since they add up in different orders:

# %%
for text, ranks in counted.items():
    print(f"{text:22}", *(f"{loss:.6f}" for loss in ranks[0][2]))

# %% [markdown]
# Equal losses may still hide a small mistake in one layer. `md.compare` runs the same batch through two
# layouts, and compares the outputs and gradients of every layer. It names the first layer that differs by more
# than rounding. Do this before you rent 64 GPUs.


# %%
def same(a, b):
    engines = [prepared(text, rows=8)[0] for text in (a, b)]
    tokens = torch.randint(256, (8, 33), generator=torch.Generator().manual_seed(0))
    return str(md.compare(*engines, [(tokens[:, :-1], tokens[:, 1:])]))


print(cluster.run(same, "dp=2", "tp=2")[0])

# %% [markdown]
# ## Choose
#
# The most useful advice on layouts is one sentence: **if plain data parallelism fits, take it.** It is the
# simplest, and its messages hide behind the backward pass (lesson 10). Compare other layouts only if it does
# not fit.
#
# **Exercise 15.5: choose.** `layouts` is a list. `need(layout)` gives the bytes that a rank needs, and
# `seconds(layout)` a prediction of a step's time. A layout fits if it needs at most `budget` bytes. Return the
# first layout in the list that is plain data parallelism (tp, pp and cp of 1, zero of 0) and fits. If there is
# none, return the layout that fits with the fewest seconds; of several, the first. If no layout fits, return
# `None`. Leave the list as it is.
#
# Par: call `seconds` only for layouts that fit, once for each, and not at all if the plain one fits.


# %% tags=["exercise"]
def choose(layouts, budget, need, seconds):
    """The layout to take, or None."""
    ...  # about 5 lines


# %%
check(choose)

# %% [markdown]
# Now choose a layout for the 64 GPUs. There are 8 hosts with 8 GPUs each, NVLink (a fast link) between the GPUs
# of a host, and a network card for each GPU. A few lines predict the time of a step:
#
# - The arithmetic takes 6 operations for each parameter and token, and 8 if activations are computed again. A
#   GPU is assumed to do 400 TFLOP/s, which is optimistic.
# - The bubble of a pipeline adds (pp - 1) / micro-batches of that time (lesson 12).
# - The bytes of a group go over NVLink if the group fits into a host, and else over the network.
# - The bytes of dp hide behind the backward pass, which is at least two thirds of the arithmetic.

# %%
choose = or_solution(choose)


def link(layout, network):
    spans = {"tp": layout.tp, "dp": layout.tp * layout.dp, "pp": layout.ranks}
    names = {axis: "nvlink4" if n <= 8 else network for axis, n in spans.items()}
    return {axis: cost.PROFILES[n].links["messages"].beta for axis, n in names.items()}


def step_seconds(layout, shape, rows, network):
    tokens = rows * shape.context
    compute = 8 * shape.parameters() * tokens / layout.ranks / 400e12
    bubble = compute * (layout.pp - 1) / layout.micro_batches
    stream = tokens / layout.dp * shape.width * 2  # bytes, in bf16
    sent = bytes_per_step(layout, shape.parameters(), shape.layers, stream)
    t = {axis: sent[axis] * beta for axis, beta in link(layout, network).items()}
    return compute + bubble + t["tp"] + t["pp"] + max(0, t["dp"] - compute * 2 / 3)


# %% [markdown]
# These are the candidates, the simplest first. With tp or pp, each row is a micro-batch of its own.


# %%
mixed = {"precision": "bf16", "recompute": True}


def candidates(ranks, rows):
    for zero in range(4):
        yield md.Layout(dp=ranks, zero=zero, **mixed)
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 4, 8):
            dp = ranks // tp // pp
            for zero in (0, 1) if dp > 1 else (0,):
                if tp * pp > 1:
                    sizes = {"dp": dp, "tp": tp, "pp": pp, "zero": zero}
                    yield md.Layout(**sizes, micro_batches=rows // dp, **mixed)


# %%
rows = 256
for name in ("gpt2-xl", "gpt3-6.7b", "gpt3-13b", "gpt3-175b"):
    shape = config(name)
    need = functools.cache(lambda layout: estimate(shape, layout, batch=rows).peak)
    for network in ("infiniband_ndr", "25gbe"):
        seconds = partial(step_seconds, shape=shape, rows=rows, network=network)
        best = choose(list(candidates(64, rows)), 80e9, need, seconds)
        plan = str(best).replace(",precision=bf16,recompute=True", "")
        told = f"{need(best) / 1e9:3.0f} GB, {seconds(best):5.1f} s" if best else ""
        print(f"{name:10} {network:15} {plan:36} {told}")

# %% [markdown]
# The small model fits, so it gets plain data parallelism on either network. The others do not fit. On the fast
# network ZeRO is enough, as long as the shared states fit, because its messages hide. On the slow network they
# no longer hide. There it pays to cut the model inside each host: a rank with fewer parameters sends fewer
# gradients. The largest model has to be cut in every way.
#
# The rule is not always the fastest choice. Look again at the small model on the slow network, with 256 rows
# and with more:

# %%
for rows in (256, 1024, 4096, 16384):
    settings = {"shape": config("gpt2-xl"), "rows": rows, "network": "25gbe"}
    seconds = partial(step_seconds, **settings)
    plain, *others = candidates(64, rows)
    best = min(others, key=seconds)
    sizes = f"dp={best.dp}, tp={best.tp}, pp={best.pp}, zero={best.zero}"
    times = f"plain {seconds(plain):5.2f} s, {sizes} {seconds(best):5.2f} s"
    print(f"{rows:6} rows: {times}")

# %% [markdown]
# To send the gradients takes as long for few rows as for many. With few rows, plain data parallelism mostly
# waits for the network. A layout that cuts the model sends fewer gradients from host to host, and is far
# faster. With many rows the messages hide, and nothing beats plain data parallelism. So try it first, **measure
# how long the ranks wait**, and look further only if they wait long.
#
# Do not trust the predicted seconds. Trust the order of the layouts, and if two are close, measure both. The
# model leaves out alpha, stragglers, and that kernels are slower on smaller matrices (a reason against a large
# tp).
#
# ## A rank that dies
#
# On 16 384 GPUs, the training of Llama 3 had 419 unplanned interruptions in 54 days, one every three hours
# (Grattafiori et al. 2024, section 3.3.4). When one rank dies, the whole training stops, since the others wait
# for its messages. So write a **checkpoint** now and then: a copy on disk of everything that the next steps
# depend on. But what is everything? Here is a training in one process (with 48 rows, batches of 8, and a
# learning rate that rises in the first 20 steps):

# %%
print(inspect.getsource(Training))

# %% [markdown]
# **Exercise 15.6: Checkpoint.** `save(run)` returns a dict of tensors, numbers, text, lists and dicts. The
# check writes it to a file. `load(run, saved)` gets a new `run`, made in a new process with another seed, and
# `saved`, the dict that was read from the file. After `load`, the new run has to make exactly the steps that
# the old one would have made, **to the bit**. The file is all that is left of the old process. Further steps of
# the old run must not change what `save` returned.
#
# Par: the bytes of the tensors that the next steps need, and no more.


# %% tags=["exercise"]
class Checkpoint:
    """All that the next steps of a training depend on."""

    def save(self, run):
        """A copy of it, as a dict."""
        ...  # about 7 lines

    def load(self, run, saved):
        """Make `run` go on where the saved one was."""
        ...  # about 4 lines


# %%
check(Checkpoint)

# %%
Checkpoint = or_solution(Checkpoint)
old = Training(seed=1)
for _ in range(9):
    old.step()
saved = Checkpoint().save(old)
goes_on = [old.step() for _ in range(3)]
new = Training(seed=2)
Checkpoint().load(new, saved)
print("nobody killed it:", goes_on)
print("resumed:         ", [new.step() for _ in range(3)])

# %% [markdown]
# Why to the bit? Because then any difference is a bug. "Nearly the same" may hide a forgotten average, or a
# batch that was read twice. You would find out weeks later, from a small step in the loss curve.
#
# With many ranks, a checkpoint has a part from each. `md.save` writes what your `save` returns, from all ranks,
# under any layout. The step is enough to find the position in the data, since a `Sampler` computes the rows of
# any step. `md.save` writes into a new folder and renames it at the end, so if a rank dies in between, the
# checkpoint before is still there. Now kill a rank, as the system does when memory runs out.


# %%
def train(folder, text, dies_at=None):
    engine, data, sampler = prepared(text, rows=16)
    first, losses = 0, []
    if any(folder.iterdir()):
        loaded = md.load(engine, folder, latest=True, sampler=sampler)
        first, losses = loaded.step, loaded.extra
    for step in range(first, 12):
        if step == dies_at and md.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        losses.append(engine.step(*data[sampler.share(step)]))
        if (step + 1) % 5 == 0:
            md.save(engine, folder, step=step + 1, sampler=sampler, extra=losses)
    return first, losses, engine.full_state_dict()


# %%
scratch = Path(tempfile.mkdtemp())
for name in ("whole", "killed"):
    (scratch / name).mkdir()
_, losses, weights = cluster.run(train, scratch / "whole", "dp=2")[0]
try:
    with md.Cluster(ranks=2) as doomed:
        doomed.run(train, scratch / "killed", "dp=2", dies_at=8)
except md.RankDied as death:
    print(in_words(death))
print(sorted(path.name for path in (scratch / "killed").iterdir()))

# %% [markdown]
# The error names the rank that died **first**, and how it died. The other rank failed because of it. The
# training was saved after step 5, so three more steps are lost. Now go on from the same folder, first in the
# same layout, and then in two other layouts, as you would on other machines.

# %%
print(f"{'nobody killed it':24} loss {losses[-1]:.7f}")
for text in ("dp=2", "tp=2", "pp=2,micro_batches=4"):
    copied = Path(shutil.copytree(scratch / "killed", scratch / text))
    first, again, theirs = cluster.run(train, copied, text)[0]
    apart = max(
        (theirs[name] - value).abs().max().item() for name, value in weights.items()
    )
    print(
        f"{text:24} loss {again[-1]:.7f}, from step {first}, weights differ by {apart:.1g}"
    )

# %% [markdown]
# In the same layout the weights differ by 0: they have the same bits. (This is so on a CPU. On a GPU, some sums
# are added up in an order that changes from run to run, unless you call
# `torch.use_deterministic_algorithms(True)`.) In another layout the weights differ by rounding, because the
# sums are added up in another order. `minidist train --save FOLDER` does all this. Give the same command again,
# and it goes on from the newest complete checkpoint. It names a damaged checkpoint and skips it.
#
# ## How often to save
#
# A save takes time, and after a death some steps have to be trained again. Say that a save takes `save`
# seconds, that one begins every `interval` seconds, and that a rank dies every `between` seconds on average.
# The saves take a share of save / interval of the time. Each death costs half an interval on average, a share
# of interval / (2 between). The sum of both is smallest at **interval = sqrt(2 save between)** (Young 1974).
# The chart is for saves of 60 seconds and a death every 3 hours. Its dots are a simulated year with deaths at
# random.


# %%
def model_of(interval, save, between):
    return save / interval + interval / (2 * between)


def simulated(interval, save, between, horizon=365 * 86400):
    chance, clock, useful = random.Random(14), 0.0, 0.0
    while clock < horizon:
        lives = chance.expovariate(1 / between)
        useful += lives // interval * (interval - save)  # training that was saved
        clock += lives
    return 1 - useful / clock


# %%
save, between = 60, 3 * 3600
minutes = [3, 5, 10, 20, 40, 80]
young = (2 * save * between) ** 0.5 / 60
lost_figure(
    minutes,
    [simulated(60 * m, save, between) for m in minutes],
    [model_of(60 * m, save, between) for m in minutes],
    young,
    caption=f"The time lost with a save of a minute and a death every three hours. "
    f"Young's interval is {young:.0f} minutes.",
)

# %% [markdown]
# The curve is flat around its lowest point: an interval twice as long hardly matters. Far to the right the
# model predicts a little too much loss, because many runs die before they reach the second half of a long
# interval. To lose less, make the save shorter: `md.save(..., asynchronous=True)` copies the state, and writes
# the copy while training goes on.
#
# ## Beyond one machine
#
# To run on several hosts, you need little in the program, and more around it:
#
# | | one host | several |
# |---|---|---|
# | the program | | the same |
# | what starts the ranks | `md.launch` | a launcher on each host: `torchrun` |
# | how they find each other | they are told | **rendezvous**: an address and port that all reach |
# | how messages travel | shared memory | network cards, which somebody has to name |
# | layout | any | tp inside of a host |
# | checkpoints | a folder | a folder that all hosts see |
# | versions, files, clocks | one of each | as many as hosts |
#
# A launcher starts the processes of its host and gives each a few environment variables: `RANK`, `WORLD_SIZE`,
# `LOCAL_RANK` (its number on this host), `MASTER_ADDR` and `MASTER_PORT`. Under torchrun, `md.launch` starts no
# process: it runs the function as the rank that these variables name. So one script works both ways. Here is
# the whole script:

# %%
program = """
import os
from functools import partial
import torch
import minidist as md
from minidist import comm
from minidist.model import MLP, Sampler, accuracy, digits

def train():
    data, make = digits(), partial(torch.optim.AdamW, lr=3e-3)
    model = MLP((64, 128, 10), device=comm.device())  # this rank's GPU, if it has one
    engine = md.prepare(model, make, md.Layout(dp=md.size()))
    sampler = Sampler(len(data.train), 64, rank=engine.data_rank, ranks=engine.data_ranks)
    for step in range(100):
        loss = engine.step(*data.train[sampler.share(step)])
    return loss, engine.evaluate(*data.test[md.rank() :: md.size()], accuracy)

results = md.launch(train, ranks=int(os.environ.get("WORLD_SIZE", 2)))
if os.environ.get("RANK", "0") == "0":  # one rank prints
    print("started by", "torchrun" if "RANK" in os.environ else "md.launch", results[0])
"""


# %% [markdown]
# Run it both ways: by itself, and under `torchrun`, which is `python -m torch.distributed.run`. `--standalone`
# means that this host is the only one. The cell stops each run after two minutes at the latest.


# %%
def run(*command, limit=120):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    settings = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, command)]
    with subprocess.Popen(command, env=settings, **pipes) as process:
        try:
            out, errors = process.communicate(timeout=limit)
            print(out.strip() or errors[-1000:])
        except subprocess.TimeoutExpired:
            process.terminate()  # with it torchrun and md.launch end their ranks
            print(f"stopped after {limit} s:", *process.communicate())


script = scratch / "train.py"
script.write_text(program)
torchrun = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1")
run(script)
run(*torchrun, "--nproc-per-node", 2, script)

# %% [markdown]
# The loss and the accuracy are the same, to the last digit. From here on, the cells are text. **Nothing below
# runs in this lesson**, because it needs machines that you may not have. (It was checked against torch 2.13,
# Accelerate 1.15 and version 3.27 of SageMaker's SDK. Such interfaces change: if a name no longer works, look
# for the new one.) The repository's folder [deploy/](../deploy/README.md) has complete launch files for one
# program, and says how they are checked.
#
# ### torchrun on several hosts
#
# **By hand.** Give the same command on both hosts, except for the number of the host. `node0` is a name or
# address under which the second host reaches the first:
#
# ```bash
# # on the first host                          # on the second: --node-rank 1
# torchrun --nnodes 2 --node-rank 0 --nproc-per-node 8 \
#     --master-addr node0 --master-port 29500 train.py
# ```
#
# **With restarts.** A rendezvous with the backend `c10d` (a small server on the host of the endpoint) numbers
# the hosts by itself, so the command is the same on all hosts. When a rank dies, torchrun ends all ranks and
# starts them again, up to `--max-restarts` times. Your program then has to go on from a checkpoint.
#
# ```bash
# export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # a fresh store at each start
# torchrun --nnodes 2 --nproc-per-node 8 --max-restarts 20 \
#     --rdzv-id run7 --rdzv-backend c10d --rdzv-endpoint node0:29500 \
#     -m minidist train --data bytes --layout dp=16 --save /shared/runs/7
# ```

# %% [markdown]
# ### SLURM
#
# SLURM gives the hosts of a cluster to jobs that wait in a queue. Here each host runs one task, a torchrun.
# Write this into `job.sh`, below a first line of `#!/bin/bash`:
#
# ```bash
# #SBATCH --job-name=minidist
# #SBATCH --nodes=4
# #SBATCH --ntasks-per-node=1        # torchrun, which starts the ranks
# #SBATCH --gpus-per-node=8
# #SBATCH --cpus-per-task=64
# #SBATCH --time=24:00:00
# #SBATCH --signal=TERM@120          # two minutes before the end of the time
# #SBATCH --requeue                  # back into the queue when a host fails
#
# export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 --max-restarts 20 \
#     --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$first:29500" \
#     -m minidist train --data bytes --layout dp=16,tp=2 --save /shared/runs/7
# ```
#
# `sbatch job.sh` submits the job. Before its time ends, SLURM sends SIGTERM to the torchruns. They pass it on
# and give their ranks 30 seconds, in which `minidist train` saves at the end of the step and exits. When the
# job starts again, from the queue or because you submit it again, it finds the folder and goes on.

# %% [markdown]
# ### The same script under Hugging Face Accelerate
#
# Accelerate is two things. The first is a launcher. This file has the settings that torchrun takes as options.
# With `distributed_type: MULTI_GPU` it starts ranks as torchrun does, so `train.py` runs under it unchanged:
#
# ```yaml
# # four.yaml; then on each host: accelerate launch --config_file four.yaml --machine_rank 0 train.py
# compute_environment: LOCAL_MACHINE
# distributed_type: MULTI_GPU
# num_machines: 4
# num_processes: 32                  # in all, and not on each host
# machine_rank: 0                    # 1, 2 and 3 on the others
# main_process_ip: 10.0.0.1
# main_process_port: 29500
# rdzv_backend: static
# mixed_precision: 'no'              # the script's layout has it
# use_cpu: false
# ```
#
# (`MULTI_GPU` also starts them on machines without GPUs; `MULTI_CPU` starts a single process unless MPI is set
# up.) The second thing is a library. It does what `md.prepare` does, for data parallelism, FSDP (ZeRO 3) and
# others:
#
# ```python
# from accelerate import Accelerator
#
# accelerator = Accelerator()
# model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
# for inputs, targets in loader:
#     optimizer.zero_grad()
#     loss = torch.nn.functional.cross_entropy(model(inputs), targets)
#     accelerator.backward(loss)
#     optimizer.step()
# accelerator.save_state("runs/step-100")  # load_state takes it up; the step is yours to keep
# ```
#
# Beware of one difference. In minidist, a `Sampler` has a **global** batch, whatever the number of ranks. In
# Accelerate, the loader's `batch_size` is that of **each process**, unless you ask for `split_batches`. With
# twice the processes you then train with twice the batch, which is a different training.

# %% [markdown]
# ### A SageMaker job
#
# SageMaker rents hosts for the duration of one job, and starts torchrun on each. With version 3 of Amazon's
# SDK:
#
# ```python
# from sagemaker.core.training.configs import (
#     Compute, FileSystemDataSource, InputData, Networking, SourceCode
# )
# from sagemaker.train import ModelTrainer
# from sagemaker.train.distributed import Torchrun
#
# disk = FileSystemDataSource(  # one that all hosts have in common
#     file_system_type="FSxLustre", file_system_id="fs-0123456789abcdef0",
#     directory_path="/fsx/runs", file_system_access_mode="rw",
# )
# trainer = ModelTrainer(
#     training_image="...",  # one of AWS's PyTorch training containers, or yours
#     source_code=SourceCode(
#         source_dir="src", entry_script="train.py", requirements="requirements.txt"
#     ),
#     compute=Compute(instance_type="ml.p4d.24xlarge", instance_count=4),
#     distributed=Torchrun(process_count_per_node=8),
#     input_data_config=[InputData(channel_name="runs", data_source=disk)],
#     networking=Networking(  # where that disk is
#         subnets=["subnet-0123456789abcdef0"], security_group_ids=["sg-0123456789abcdef0"]
#     ),
#     hyperparameters={  # what stands after train.py: --data bytes ...
#         "data": "bytes", "layout": "dp=8,tp=4", "save": "/opt/ml/input/data/runs/7"
#     },
# )
# trainer.train()
# ```
#
# The folder `src` holds minidist itself and [deploy/train.py](../deploy/train.py), which is `minidist train`.
# The packages that minidist needs besides torch are in requirements.txt. The job runs `torchrun --nnodes=4
# --nproc_per_node=8 ... train.py --data bytes ...`, as above. A channel of the job's input is a folder in
# `/opt/ml/input/data`. This one is the same disk on all hosts, so several hosts can save there. Everything else
# under `/opt/ml` belongs to one host, `/opt/ml/checkpoints` too. With
# `checkpoint_config=CheckpointConfig(s3_uri=...)`, that folder is copied to a bucket, and back when the job
# starts again, so it is a place to save **with one host**. With several hosts, `md.save` refuses a folder that
# they do not share.
#
# In version 2 of the SDK, make a `sagemaker.pytorch.PyTorch(entry_point="train.py", ...)`, with
# `distribution={"torch_distributed": {"enabled": True}}` and a `FileSystemInput` for the disk, and call its
# `fit()`. Accelerate 1.15 cannot submit a job (`compute_environment: AMAZON_SAGEMAKER` in its file): it fails
# on its own settings. Inside a job it starts the ranks as above.
# [deploy/sagemaker.yaml](../deploy/sagemaker.yaml) uses Accelerate in this way, and is the complete request for
# AWS's command line.
#
# ## What breaks in practice, and how one sees it
#
# - **The wrong network card.** A host has several, and the ranks may pick `docker0` or a slow one. Then they
#   wait at the start, or are ten times too slow. Name the right one: `GLOO_SOCKET_IFNAME=eth0`,
#   `NCCL_SOCKET_IFNAME=eth0`. `NCCL_DEBUG=INFO` prints NCCL's choice, and `ip -br addr` lists all cards.
# - **A firewall.** The rendezvous works, and then nothing happens. Port 29500 is open, but the ranks connect to
#   each other on ports that the system chooses. Open all ports between the hosts of a job. `nc -vz node0 29500`
#   tries one.
# - **Different versions, or different data.** One host has another version of torch, another tokenizer, or one
#   more file. The training runs, and learns something else. Compare a hash at the start
#   (`dataset(...).fingerprint()`; `minidist train` does), and call `md.assert_in_sync` now and then.
# - **A straggler.** One GPU is too hot, or one disk is slow, and it slows all ranks down. In the ledger's
#   `seconds`, all ranks show long waits **except** the slow one (lesson 08). Replace a host that is often the
#   slow one.
# - **File systems.** If the folder is local to each host, every host has only half a checkpoint. A network file
#   system may show a new file seconds late. So write, sync and rename, and compare checksums when you read. If
#   thousands of ranks open the same small files at the start, that takes minutes: copy the data to each host
#   first.
# - **Clocks.** The clocks of two hosts differ by milliseconds or even seconds, so times in their logs do not
#   tell which came first. Put the step and the rank into each line, and measure a duration with the clock of
#   one host.

# %%
cluster.close()
shutil.rmtree(scratch)

# %% [markdown]
# ## Further reading
#
# - Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*, 2021:
#   how to combine tp, pp and dp, and which to choose; section 3 has the order of the axes.
# - Grattafiori et al., *The Llama 3 Herd of Models*, 2024: section 3.3 shows a training on 16 384 GPUs from
#   inside: the layout, the network, and a table of all failures and their causes.
# - Young, *A first order approximation to the optimum checkpoint interval*, 1974: two pages, and still in use.
#
# ## Where your lines live
#
# The training ladder has no rung for layouts: your functions are the plain form, and the library has the
# general one.
#
# | You wrote | The library |
# |---|---|
# | `place`, `group` | comm/mesh.py: [`Mesh.ranks`](../minidist/comm/mesh.py) |
# | `memory` | scale/memory/estimates.py: [`estimate`](../minidist/scale/memory/estimates.py) |
# | `bytes_per_step` | scale/step_time/prediction.py: [`predict_step`](../minidist/scale/step_time/prediction.py) |
# | `choose` | scale/planner/ranking.py: [`plan`](../minidist/scale/planner/ranking.py) |
# | `Checkpoint` | checkpoint/saving.py: [`save`](../minidist/checkpoint/saving.py); checkpoint/loading.py: [`load`](../minidist/checkpoint/loading.py) |
#
# The library's functions count as you do. They also handle what you left out: activations and buffers, the time
# of each link, layers that cannot be cut evenly, and checkpoints that any number of ranks can read.
#
# Four rungs of [the training ladder](../minidist/plain/__init__.py) are left to read. No lesson builds them:
#
# - [`RingSoftmax`](../minidist/plain/ring_attention.py): a row that is too long for one rank, shared along its
#   tokens. The keys and values travel in lesson 8's ring. The engine's form is
#   [`ring_attention`](../minidist/parallel/context_parallel/attention_in_a_ring.py).
# - [`UlyssesAttention`](../minidist/plain/ulysses.py): the same row, but ranks trade tokens for heads, and attend
#   to all tokens. The engine's form is [`ulysses_attention`](../minidist/parallel/context_parallel/ulysses.py).
# - [`ExpertBlock`](../minidist/plain/experts.py): a layer of several small networks, the experts, each of which
#   computes only some of the tokens. Each rank holds some experts, and every token travels to its expert. The
#   engine's form is [`share_experts`](../minidist/parallel/experts/expert_parallel.py).
# - [`LowLinear`](../minidist/plain/low_precision.py): products of 8-bit numbers, scaled before they are rounded.
#   The engine's form is [`Fp8`](../minidist/parallel/training/fp8.py).
#
# Next: you know what each part costs. Lesson 16 hands you six parts that are broken, and none of them shows.
