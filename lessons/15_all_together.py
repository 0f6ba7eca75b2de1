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
# You have built all the ways of sharing a training among ranks. In this last lesson you put them together: you
# choose a layout for a model and machines that you do not have, you make a training that survives the death of
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
# **The question.** Somebody gives you 64 GPUs in 8 machines, for a month, and a model to train. How do you
# share it among them? And what is left of the work when one of them dies? (Llama 3 405B was trained on 16,384
# GPUs: 8 that share each matrix, times 16 stages, times 128 that share the rows; Grattafiori et al. 2024, table
# 4.)
#
# ## Where each rank stands
#
# A **layout** says how many ranks share each thing: `dp` the rows of a batch (lesson 09), `pp` the layers
# (lesson 12), `tp` each layer's matrices (lesson 13), `cp` the tokens of a row, for rows that are very long (by
# ring attention, Liu et al. 2023, which these lessons leave out). With ZeRO the ranks of `dp` and `cp` share
# what they would all keep (lesson 14). The product of the four is the number of ranks. Ranks then stand in a
# grid of four dimensions, and those that differ in one coordinate alone are a **group**, which shares that one
# thing. Step through the groups of eight ranks on two **hosts** (machines):

# %%
mesh_animation()

# %% [markdown]
# The order is no accident. Neighbours in rank are on one host, with fast links between them. So the axis that
# talks most counts fastest: tp, then cp, dp, and pp, which sends least (Narayanan et al. 2021, section 3).
#
# **Exercise 15.1: place.** Give the coordinates `(pp, dp, cp, tp)` of `rank`. Rank 0 has (0, 0, 0, 0), and tp
# counts fastest: rank 1 differs from rank 0 in tp, where `layout.tp` is more than 1; then come cp, dp and pp.
# The sizes are `layout.pp`, `layout.dp`, `layout.cp` and `layout.tp`.


# %% tags=["exercise"]
def place(rank, layout):
    """The coordinates (pp, dp, cp, tp) of a rank."""
    ...  # about 4 lines


# %%
check(place)

# %% [markdown]
# **Exercise 15.2: group.** A rank's group along an axis ("pp", "dp", "cp" or "tp") is all ranks whose other
# three coordinates are the same as its own. Return them as a list, in order. `place` helps.

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
# minidist's `Mesh` makes the groups in which the collectives of an axis run. It has to agree.

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
# The first question about a layout. For each parameter, Adam's training keeps (lesson 14)
#
# | precision | parameter | gradient | optimizer | together |
# |---|---|---|---|---|
# | fp32 | 4 bytes | 4 | 8 | 16 |
# | bf16 or fp16 | 2 | 2 | 12 | 16 |
#
# **Exercise 15.3: memory.** The bytes of these three on one rank of `layout`, for a model of `parameters`. Take
# it that tp and pp cut the model into equal parts. The ranks of dp and cp have the same part, and by ZeRO
# (`layout.zero`) each keeps an equal share: in stage 1 of the optimizer's bytes, in stage 2 of the gradients
# too, in stage 3 of all. No rounding. `layout.precision` is "fp32", "bf16" or "fp16".


# %% tags=["exercise"]
def memory(parameters, layout):
    """Bytes of parameters, gradients and optimizer on one rank."""
    ...  # about 8 lines


# %%
check(memory)

# %% [markdown]
# For a number of parameters minidist reckons the same: `estimate`. For a model whose shape is known it also
# counts the **activations**, which are kept for the backward pass, and what cannot be cut into equal parts.
# `peak` is all of it, at the fullest moment. (`python -m minidist.scale.memory --budget 16GB` prints which
# models fit, and what makes them.)

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
# The two agree but for stage 3, where minidist sums gradients in float32 and keeps two buffers for those that
# are on their way: papers count what a method needs, programs need a little more. And the peak of plain data
# parallelism, with a row on each rank, is not in the backward pass: the optimizer's step makes temporary tensors
# for all parameters at once.
#
# ## What does it send?
#
# The second question. Let S be the bytes of this rank's gradients, and A the bytes of the **stream**: the tensor
# that goes from one block of the model to the next, for all rows that this rank works on in a step. Then a
# rank sends
#
# - **dp**: an all-reduce of S among dp ranks, 2 (dp - 1) / dp S. Stages 1 and 2 of ZeRO send as much; stage 3
#   gathers the parameters once more: 3 in place of the 2.
# - **tp**: in each block two all-reduces of A forward, and two backward, among tp ranks.
# - **pp**: A to the next stage, and the gradient of its own input, as many bytes, to the one before. Take the
#   rank that sends most: in the middle, where there is one.
#
# **Exercise 15.4: bytes_per_step.** A dict with the bytes that this rank sends in a step for "dp", "tp" and
# "pp". The model has `parameters` in `blocks` blocks; pp cuts it into equal parts, so that a rank has blocks /
# pp of them, and tp cuts each block. `activations` is A. An element of the gradients has 4 bytes in precision
# "fp32", else 2. `layout.cp` is 1.


# %% tags=["exercise"]
def bytes_per_step(layout, parameters, blocks, activations):
    """{"dp": bytes, "tp": bytes, "pp": bytes} that one rank sends in a step."""
    ...  # about 8 lines


# %%
check(bytes_per_step)

# %% [markdown]
# ## Predict, then count
#
# Here is a small GPT, which trains on Python's own source text, byte by byte. `md.prepare` takes any layout, and
# the loop stays the same: that is the point of it. A **ledger** counts the bytes that go through `comm`
# (lesson 08), whether the ranks are on one host or on two: so this holds for machines that you do not have.

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
# Two ranks, 16 rows of 64 bytes of text in a step. How many times as many bytes does a rank send with `tp=2` as
# with `dp=2`? (The model has 0.9 million parameters in 4 blocks of width 128. A small sum will do.)

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
# The formulas hold, and where one misses it shows what it leaves out. With **dp** a few numbers travel with the
# gradients, such as the loss. With **tp** the two ends of the model have an all-reduce each, and the loss some
# numbers more: an eighth on top here, where there are 4 blocks, and little with 40.
#
# Read the order with care: what dp sends grows with the **model**, and what tp and pp send grows with the
# **rows**. Twice the rows:

# %%
for text in ("dp=2", "tp=2", "pp=2,micro_batches=4"):
    twice = max(rank[0] for rank in cluster.run(count, text, 32))
    print(f"{text:22} 16 rows {sent[text]:>12,} bytes, 32 rows {twice:>12,}")

# %% [markdown]
# The same runs counted their memory, too. Your formula, minidist's estimate, and what is there:

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
# A formula for models of billions is coarse for this one: buffers of stage 3 are as large as a block, which is a
# fourth of the model here; and pp=2 gives one rank a bit more than half. The estimate knows it.
#
# And it is **the same training**. All layouts start from the same weights and take the same rows, so their
# losses agree but for the last digits, where sums are made in another order:

# %%
for text, ranks in counted.items():
    print(f"{text:22}", *(f"{loss:.6f}" for loss in ranks[0][2]))

# %% [markdown]
# Losses that agree may still hide a small mistake in one layer. `md.compare` runs the same batch through two
# layouts, looks at every layer's outputs and gradients, and names the first that differs by more than rounding
# explains. Do this before you rent 64 GPUs.


# %%
def same(a, b):
    engines = [prepared(text, rows=8)[0] for text in (a, b)]
    tokens = torch.randint(256, (8, 33), generator=torch.Generator().manual_seed(0))
    return str(md.compare(*engines, [(tokens[:, :-1], tokens[:, 1:])]))


print(cluster.run(same, "dp=2", "tp=2")[0])

# %% [markdown]
# ## Choose
#
# Most advice on layouts is one sentence: **if plain data parallelism fits, take it.** It has the fewest parts,
# and its messages hide behind the backward pass (lesson 10). Only when it does not fit, compare what does.
#
# **Exercise 15.5: choose.** `layouts` is a list. `need(layout)` gives the bytes that a rank needs, and
# `seconds(layout)` a prediction of a step's time. A layout fits if it needs at most `budget` bytes. Return the
# first layout in the list that is plain data parallelism (tp, pp and cp of 1, zero of 0) and fits. If there is
# none, return the layout that fits with the fewest seconds; of several, the first. If no layout fits, return
# `None`. Leave the list as it is.
#
# Par: ask for the seconds of no layout that does not fit, and of none at all if the plain one does.


# %% tags=["exercise"]
def choose(layouts, budget, need, seconds):
    """The layout to take, or None."""
    ...  # about 5 lines


# %%
check(choose)

# %% [markdown]
# Now for the 64 GPUs: 8 hosts of 8, NVLink (a fast link) between the GPUs of a host, and a network card for
# each GPU. A model of the time in a few lines. The arithmetic is 6 operations for each parameter and token, and
# 8 with activations that are computed again; a pipeline stands still for (pp - 1) / micro-batches of it (lesson
# 12). A group's bytes go over NVLink where it fits into a host, else over the network. What dp sends hides
# behind the backward pass, at least two thirds of the arithmetic. 400 TFLOP/s a GPU is an assumption, and a
# good day.

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
# And the candidates, the simplest first. With tp or pp each row is a micro-batch of its own.


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
# The small model fits, so it gets plain data parallelism, whatever the network. The others do not. With the fast
# network ZeRO is enough as long as a model's states fit when they are shared: its messages hide. With the slow
# one they do not hide any more, and it pays to cut the model inside of each host, because the fewer parameters
# a rank has, the fewer gradients it sends. The largest has to be cut in every way that there is.
#
# The rule has its price. Look again at the small model and the slow network, with 256 rows and with more:

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
# The gradients take as long for few rows as for many. With few, plain data parallelism mostly waits for the
# network, and a layout that cuts the model, so that fewer gradients go from host to host, is far faster. With
# many rows the messages hide, and nothing beats the plain one. So take it first, **measure how long ranks
# wait**, and go on only if that is long.
#
# Do not believe the seconds; believe the order, and where two are close, measure both. What the model leaves
# out: alpha, kernels that are slower for smaller matrices (which speaks against much tp), and stragglers.
#
# ## A rank that dies
#
# With 16 384 GPUs the training of Llama 3 was interrupted 419 times in 54 days, without anybody's plan
# (Grattafiori et al. 2024, section 3.3.4): every three hours. One rank's death is the death of all, since the
# others wait for its messages. What saves the day is a **checkpoint**: a copy on disk of all that the next
# steps depend on. All? Here is a training in one process (with 48 rows, batches of 8, and a learning rate that
# rises in the first 20 steps):

# %%
print(inspect.getsource(Training))

# %% [markdown]
# **Exercise 15.6: Checkpoint.** `save(run)` returns a dict of tensors, numbers, text, lists and dicts, which is
# then written to a file. `load(run, saved)` gets a new `run`, made in a new process with another seed, and what
# was read from the file; afterwards the new run has to take the very steps that the old one would have taken,
# **to the bit**. Further steps of the old run must not change what was saved.
#
# Par: the bytes of tensors that the next steps read, and no more.


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
# Why to the bit? Because then a difference is a bug. "Nearly the same" hides a forgotten average or a batch that
# was read twice, and one finds out weeks later, from a curve with a small step in it.
#
# With many ranks a checkpoint has a part from each. `md.save` writes what your `save` has, from all ranks, under
# any layout; the position in the data is the step, as the `Sampler` gives each step's rows for the asking
# (lesson 09). It writes beside, and renames at the end, so that a death in the middle leaves the checkpoint
# before. Now kill a rank, as the system does when memory runs out.


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
# The error names the rank that died **first** and how; the other failed because of it. After step 5 the training
# was saved, and three steps more are lost. Now the same folder again, in the same layout; and in two others,
# as if the new machines were of another kind.

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
# In the same layout the weights differ by 0: the same bits. (That is so on a processor. On a GPU some sums are
# made in an order that changes from run to run, unless one asks torch for `use_deterministic_algorithms`.) In
# another layout they differ by rounding, since sums are made in another order. `minidist train --save FOLDER`
# does all this: the same command, given again, goes on from the newest whole checkpoint, and a checkpoint whose
# bytes were damaged is named and passed over.
#
# ## How often to save
#
# A save takes time, and so does what is trained twice. Say a save takes `save` seconds and one begins every
# `interval` seconds, and a rank dies every `between` on average. Lost is the share save / interval, and at each
# death half an interval: interval / (2 between). The sum is smallest at **interval = sqrt(2 save between)**
# (Young 1974). Below, 60 seconds a save, and a death every 3 hours. The dots are a simulation of a year, in
# which deaths come at random.


# %%
def model_of(interval, save, between):
    return save / interval + interval / (2 * between)


def simulated(interval, save, between, horizon=365 * 86400):
    chance, clock, useful = random.Random(14), 0.0, 0.0
    while clock < horizon:
        lives = chance.expovariate(1 / between)
        useful += lives // interval * (interval - save)  # what was saved
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
# Around its lowest point the curve is flat: a factor of two hardly matters. Far to the right the model is a
# little too dark: deaths at random hit the first half of a long interval more often than the second, which many
# runs do not live to see. To lose less, make the save shorter: `md.save(..., asynchronous=True)` copies the
# state, and writes while training goes on.
#
# ## Beyond one machine
#
# What does it take to run on several hosts? Little of it is in the program:
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
# `LOCAL_RANK` (its number on this host), `MASTER_ADDR` and `MASTER_PORT`. Under torchrun `md.launch` starts
# nothing, and runs the function as the rank that these name. So one script serves both. Here it is, in full:

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
# means that this host is the only one. Each run is stopped after two minutes, come what may.


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
# The same loss and the same accuracy, to the last digit. From here on, cells are text: **what follows is not
# run in this lesson**, because it needs what you may not have. (It was checked against torch 2.13, Accelerate
# 1.15 and version 3.27 of SageMaker's SDK. Such things change: where one does not work, look for its newest
# name.) The folder [deploy/](../deploy/README.md) of the repository has whole launch files, all with one program,
# and says how they are checked.
#
# ### torchrun on several hosts
#
# **By hand.** The same command on both, but for the number of the host. `node0` is a name or address of the
# first one, as the second one sees it:
#
# ```bash
# # on the first host                          # on the second: --node-rank 1
# torchrun --nnodes 2 --node-rank 0 --nproc-per-node 8 \
#     --master-addr node0 --master-port 29500 train.py
# ```
#
# **With restarts.** A rendezvous with the backend `c10d` (a small server on the host of the endpoint) numbers
# the hosts by itself, so the command is the same on all. When a rank dies, all ranks are ended and started
# again, up to `--max-restarts` times. What they do then is your affair: go on from a checkpoint.
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
# SLURM gives out the hosts of a cluster to jobs that wait in a queue. One task a host, which is a torchrun. In
# `job.sh`, after `#!/bin/bash` in its first line:
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
# `sbatch job.sh` hands it in. SIGTERM goes to the torchruns, which pass it on and give their ranks 30 seconds;
# `minidist train` saves at the end of the step and leaves. A job that goes back into the queue, or that you hand
# in again, finds the folder and goes on.

# %% [markdown]
# ### The same script under Hugging Face Accelerate
#
# Accelerate is two things. The first is a launcher. This file says what torchrun's options say; with
# `distributed_type: MULTI_GPU` it starts torchrun's ranks, so `train.py` runs under it unchanged:
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
# (`MULTI_GPU` starts them where there are no GPUs, too; `MULTI_CPU` starts one process alone, unless MPI is set
# up.) The second is a library that does what `md.prepare` does, for data parallelism, FSDP (ZeRO 3) and others:
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
# One thing changes without a word. A `Sampler` here has a **global** batch, whatever the number of ranks; the
# loader's `batch_size` there is that of **each process**, unless you ask for `split_batches`. With twice the
# processes you then train with twice the batch, and it is another training.

# %% [markdown]
# ### A SageMaker job
#
# SageMaker rents hosts for the time of one job, and starts torchrun on each. With version 3 of Amazon's SDK:
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
# In `src` lie minidist itself and [deploy/train.py](../deploy/train.py), which is `minidist train`; what minidist
# needs beside torch stands in requirements.txt. The job's command is
# `torchrun --nnodes=4 --nproc_per_node=8 ... train.py --data bytes ...`, as above. A channel of the job's input
# is a folder in `/opt/ml/input/data`, and this one is the same disk on all hosts: there several hosts save. What
# lies elsewhere under `/opt/ml` is each host's own, `/opt/ml/checkpoints` too, which a
# `checkpoint_config=CheckpointConfig(s3_uri=...)` copies to a bucket and, when the job is started anew, back: a
# folder to save in **with one host**. `md.save` with several refuses a folder that they do not share.
#
# In version 2 of the SDK the same is
# `sagemaker.pytorch.PyTorch(entry_point="train.py", ..., distribution={"torch_distributed": {"enabled": True}})`,
# with `FileSystemInput` for the disk, and `.fit()`. Accelerate 1.15 fails on its own settings where it is to hand
# in a job (`compute_environment: AMAZON_SAGEMAKER` in its file); inside of one it starts the ranks as above.
# [deploy/sagemaker.yaml](../deploy/sagemaker.yaml) does that: it is the request itself, for AWS's command line.
#
# ## What breaks in practice, and how one sees it
#
# - **The wrong network card.** A host has several, and one named `docker0` or a slow one may be taken: ranks
#   wait at the start, or are ten times too slow. Name it: `GLOO_SOCKET_IFNAME=eth0`, `NCCL_SOCKET_IFNAME=eth0`;
#   `NCCL_DEBUG=INFO` prints which one NCCL took. `ip -br addr` lists them.
# - **A firewall.** The rendezvous works, and then nothing: the port 29500 is open, but ranks talk to each other
#   on ports that the system gives out. Between the hosts of a job all ports have to be open. `nc -vz node0
#   29500` tries one.
# - **Different versions, or different data.** One host has another torch, another tokenizer, or a file more. It
#   runs, and learns something else. Compare a hash at the start (`dataset(...).fingerprint()`; `minidist train`
#   does), and `md.assert_in_sync` now and then.
# - **A straggler.** One GPU is hot, one disk slow, and all are as slow as it. All ranks show long waits in the
#   ledger's `seconds` **but** the slow one (lesson 08). A host that is often the slow one is sent home.
# - **File systems.** A folder that is local on each host makes half checkpoints; a network file system may show
#   a new file seconds late. Write, sync, rename, and check sums when reading. And thousands of ranks that open
#   the same small files at the start take minutes: copy data to each host first.
# - **Clocks.** Hosts' clocks differ by milliseconds to seconds, so lines in two logs are not in the order of
#   their times. Put the step and the rank into each line; measure durations with one host's clock alone.

# %%
cluster.close()
shutil.rmtree(scratch)

# %% [markdown]
# ## Further reading
#
# - Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*, 2021:
#   how tp, pp and dp go together, and what to choose; section 3 has the order of the axes.
# - Grattafiori et al., *The Llama 3 Herd of Models*, 2024: section 3.3 is 16 384 GPUs from inside: the layout,
#   the network, and a table of what died and why.
# - Young, *A first order approximation to the optimum checkpoint interval*, 1974: two pages, and still the rule.
#
# ## Where your lines live
#
# What you wrote here is about layouts, so its plain form is your own:
#
# | You wrote | The library |
# |---|---|
# | `place`, `group` | comm/mesh.py: [`Mesh.ranks`](../minidist/comm/mesh.py) |
# | `memory` | scale/memory/estimates.py: [`estimate`](../minidist/scale/memory/estimates.py) |
# | `bytes_per_step` | scale/time/step_time.py: [`predict_step`](../minidist/scale/time/step_time.py) |
# | `choose` | scale/planning/planner.py: [`plan`](../minidist/scale/planning/planner.py) |
# | `Checkpoint` | checkpoint/saving.py: [`save`](../minidist/checkpoint/saving.py); checkpoint/loading.py: [`load`](../minidist/checkpoint/loading.py) |
#
# They count as you do. They also add what you left out: activations and buffers, the time of each link, layers
# that do not divide evenly, and a checkpoint that other numbers of ranks can read.
#
# Two rungs of [the training ladder](../minidist/plain/__init__.py) are left to read, for what no lesson builds:
#
# - [`RingSoftmax`](../minidist/plain/ring_attention.py): a row too long for one rank, shared along its tokens. Keys and
#   values travel in lesson 8's ring. The engine's form is [`ring_attention`](../minidist/parallel/context/ring_attention.py).
# - [`Experts`](../minidist/plain/experts.py): each rank holds some experts, and every token travels to its own. The engine has no form of
#   it.
#
# Next: a model of your own. You know what each part costs, and how to see it break.
