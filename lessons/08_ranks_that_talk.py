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
# # 8. Ranks that talk
#
# **Time:** about 2 hours. **Builds on:** Python alone; you may begin the course here.
#
# So far everything happened in one process. From here on several processes work together. None of them sees the
# others' memory, so they can only send messages. Nearly all parallel training rests on one operation. In this
# lesson you build it from *send* and *receive* alone, and you predict its cost before you measure it.

# %%
import time

import torch

import minidist as md
from checks.figures import curves, ladder, said
from checks.pictures.ring import ring_animation
from checks.ranks import in_words
from checks.ranks_that_talk import check, hint, or_solution
from checks.slow_link import Link
from minidist import comm

ladder(8)

# %% [markdown]
# **The question.** Four processes hold a tensor each. Each of them wants the sum of all four. How can they
# compute it in a time that hardly grows with the number of processes? (Llama 3 405B was trained on up to 16,384
# GPUs, which sum their gradients in every step: Grattafiori and others 2024.)
#
# ## Four processes and a name for each
#
# `md.Cluster` starts processes and keeps them running, so a later cell need not start them again. The processes
# are called **ranks**, and they are numbered from 0. `cluster.run` runs one function on all of them, and
# returns a list of their results. Inside the function, `md.rank()` is the number of this rank, and `md.size()`
# is the number of ranks.

# %%
cluster = md.Cluster(ranks=4)


def hello():
    print("I am one of", md.size())
    return md.rank() ** 2


cluster.run(hello)

# %% [markdown]
# The same function ran four times, at once, in four processes. Each printed line is labelled with its rank.
# That is the style of this whole course: **one program, many ranks**, and each rank finds its part of the work
# by its number (SPMD: single program, multiple data).
#
# ## One message
#
# A message needs two ranks: one calls `comm.send`, the other `comm.recv`. The receiver passes a tensor of the
# same shape, and `comm.recv` writes the message into it.


# %%
def one_message():
    x = torch.full((3,), float(md.rank()))
    if md.rank() == 0:
        comm.send(x, destination=2)
    if md.rank() == 2:
        comm.recv(x, source=0)
    return x


cluster.run(one_message)

# %% [markdown]
# Rank 2 now has zeros: they came from rank 0. The others sent nothing and noticed nothing.
#
# What happens if everybody sends at once? In the next cell each of two ranks sends to the other, and then
# receives. It looks harmless. `check=True` makes these ranks compare their calls, so that they notice when they
# get stuck.


# %%
def after_you():
    x, other = torch.ones(3), 1 - md.rank()
    comm.send(x, other)
    comm.recv(x, other)


with md.Cluster(ranks=2, check=True) as pair:
    try:
        pair.run(after_you)
    except md.RankError as error:
        print(in_words(error))

# %% [markdown]
# This is a **deadlock**: each rank waits until the other one receives, and neither does. `comm.send` may wait
# until the other rank calls `comm.recv`. Whether it waits depends on the size of the message and on the way
# that the message travels. So the same program may run on one machine and hang on another. The remedy is to
# *begin* a send without waiting for it: `work = comm.send(x, other, async_op=True)` returns at once, and
# `work.wait()` waits later.
#
# **Exercise 8.1: shift.** All ranks sit in a ring. Each rank gives its tensor to the next rank, and gets the
# tensor of the rank before. Rank 0 gives to rank 1, and the last rank gives to rank 0. All of them do this at
# the same time. `x` stays as it is; the result is a new tensor. If there is only one rank, it gets a copy of
# its own tensor.
#
# **Par**, here and below, is the cost of the lesson's own answer. An answer that costs up to 1.5 times par
# passes. An answer that costs more fails: it misses an idea, and the check says which.
#
# Par: one message from each rank, in one round. In one round no rank waits for a message before it sends its
# own.


# %% tags=["exercise"]
def shift(x):
    """Give x to the next rank, and return what the rank before gave."""
    r, n = md.rank(), md.size()
    ...  # about 7 lines


# %%
check(shift)

# %% [markdown]
# No idea how to begin? `hint()` in a cell of its own gives the first of three hints. The next cell takes your
# function if it has passed. If not, it takes the lesson's own function, so the rest of the lesson works.

# %%
shift = or_solution(shift)
cluster.run(lambda: shift(torch.full((3,), float(md.rank()))))

# %% [markdown]
# ## A sum, the obvious way
#
# Everybody sends to rank 0. Rank 0 adds, and sends the sum to everybody. This is an **all-reduce**: *reduce*
# means that several tensors become one, and *all* means that every rank gets it.


# %%
def naive_all_reduce(x):
    if md.rank() == 0:
        arrived = torch.empty_like(x)
        for other in range(1, md.size()):
            comm.recv(arrived, other)
            x += arrived
        for other in range(1, md.size()):
            comm.send(x, other)
    else:
        comm.send(x, 0)
        comm.recv(x, 0)
    return x


cluster.run(lambda: naive_all_reduce(torch.full((3,), float(md.rank()))))

# %% [markdown]
# It is right: 0 + 1 + 2 + 3 = 6. But which rank does the work? A **ledger** counts the bytes that `comm` sends.


# %%
def bytes_of(all_reduce, size=1_000_000):
    with comm.ledger() as ledger:
        all_reduce(torch.zeros(size // 4))  # float32: 4 bytes each
    return ledger.bytes_sent


cluster.run(bytes_of, naive_all_reduce)

# %% [markdown]
# The tensor has 1 MB. Rank 0 sends 3 MB, and receives 3 MB, while the others wait for it. With 100 ranks, rank
# 0 would send 99 MB and receive 99 MB. **The busiest rank decides** how long an all-reduce takes, and here the
# busiest rank sends the whole tensor n - 1 times.
#
# ## A ring
#
# In the next algorithm no rank has to send more than the others. Cut each tensor into n parts. In each step
# every rank passes *one part* to the next rank, and all ranks do so at the same time. Press Play, or go step by
# step, and follow one colour around. Each block shows whose contributions it holds: `3+0` is the sum of the
# parts of rank 3 and rank 0.

# %%
ring_animation()

# %% [markdown]
# The first three steps are a **reduce-scatter**: afterwards rank r has the sum of part r, and of no other part.
# The last three are an **all-gather**: these sums go around until every rank has all of them. Each is also
# useful alone: ZeRO, in a later lesson, consists of these two. So you write each as a function of its own.
#
# **Exercise 8.2: ring reduce-scatter.** `x` is a tensor of one dimension, the same length on all ranks. Its
# parts are `x.tensor_split(n)`. Their lengths may differ by one, and a part may have length 0. Return part r,
# summed over all ranks. You may overwrite `x`. Use only `comm.send` and `comm.recv`, and let each rank send
# only to its neighbour.
#
# Par: n - 1 messages from each rank, in n - 1 rounds. Together, a rank's messages have all of `x` except one
# part.


# %% tags=["exercise"]
def ring_reduce_scatter(x):
    """Return part r of x, summed over all ranks."""
    r, n = md.rank(), md.size()
    parts = x.tensor_split(n)  # views: what is written to a part is in x
    ...  # about 8 lines


# %%
check(ring_reduce_scatter)

# %%
ring_reduce_scatter = or_solution(ring_reduce_scatter)
cluster.run(lambda: ring_reduce_scatter(torch.arange(8.0)))

# %% [markdown]
# **Exercise 8.3: ring all-gather.** On rank r only part r of `x` is right; the other parts hold old numbers.
# Fill all parts on all ranks, in place, and return `x`. Again, let each rank send only to its neighbour.
#
# Par: n - 1 messages from each rank, in n - 1 rounds. Together, a rank's messages have all of `x` except one
# part.


# %% tags=["exercise"]
def ring_all_gather(x):
    """Fill x with part 0 of rank 0, part 1 of rank 1, and so on; return x."""
    r, n = md.rank(), md.size()
    ...  # about 8 lines


# %%
check(ring_all_gather)

# %%
ring_all_gather = or_solution(ring_all_gather)
cluster.run(lambda: ring_all_gather(torch.full((8,), float(md.rank()))))

# %% [markdown]
# **Exercise 8.4: ring all-reduce.** Sum `x` over all ranks, in place, and return it.
#
# Par: 2 (n - 1) messages from each rank, in as many rounds. Together, a rank's messages have 2 (n - 1) / n
# times the bytes of `x`.


# %% tags=["exercise"]
def ring_all_reduce(x):
    """Sum x over all ranks, in place; return x."""
    ...  # about 2 lines


# %%
check(ring_all_reduce)

# %%
ring_all_reduce = or_solution(ring_all_reduce)
print("naive", cluster.run(bytes_of, naive_all_reduce))
print("ring ", cluster.run(bytes_of, ring_all_reduce))

# %% [markdown]
# For a tensor of 1 MB each rank sends 1.5 MB. With n ranks it sends 2 (n - 1) / n MB: less than 2 MB, even with
# a thousand ranks. No algorithm can send less (Patarasuk and Yuan 2009 prove it), so the ring is called
# **bandwidth-optimal**.
#
# ## What a message costs
#
# Two numbers describe the cost well (Hockney 1994). Even the smallest message takes **alpha** seconds, and each
# byte adds **beta** seconds: b bytes take alpha + beta b. To find both, time a tiny message and a large one.
#
# Ranks on one machine may pass messages through memory. Ranks on different machines send them through
# **sockets**. `comm.using("torch")` makes these ranks use sockets as well. (As in lesson 00, we take the best
# of several rounds: other programs on your machine can only make a message slower.)


# %%
def seconds(call, rounds=7):
    times = []
    for _ in range(rounds):
        comm.barrier()  # all ranks begin together
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def slowest(call, ranks=cluster, rounds=7):
    return max(ranks.run(seconds, call, rounds))


# %%
def there_and_back(x):
    with comm.using("torch"):
        if md.rank() == 0:
            comm.send(x, 1)
            comm.recv(x, 1)
        elif md.rank() == 1:
            comm.recv(x, 0)
            comm.send(x, 0)


t_small, t_large = (
    slowest(lambda size=size: there_and_back(torch.zeros(size // 4))) / 2
    for size in (1_000, 4_000_000)
)
alpha, beta = t_small, (t_large - t_small) / 4_000_000
print(f"alpha {alpha * 1e6:.0f} us, beta {beta * 1e9:.3f} ns a byte")

# %% [markdown]
# **Exercise 8.5: ring_seconds.** Predict the time of your ring all-reduce. Each of `ranks` ranks has a tensor
# of `size` bytes. A message takes `alpha` seconds, and `beta` seconds more for each byte. Leave out the time of
# the additions.


# %% tags=["exercise"]
def ring_seconds(size, ranks, alpha, beta):
    """Seconds that a ring all-reduce takes."""
    ...  # 1 line


# %%
check(ring_seconds)

# %%
ring_seconds = or_solution(ring_seconds)
for size in (1_000, 1_000_000, 16_000_000):
    t = ring_seconds(size, 4, alpha, beta)
    print(f"{size:>12,} bytes on 4 ranks: {t * 1e3:8.2f} ms")

# %% [markdown]
# ## A link for each rank
#
# The formula assumes that each rank has its own machine and its own network card. Your ranks share one machine,
# and its cores copy every message. Eight ranks on two cores would take turns, and you would measure the cores.
# So give each rank its own **link**: a message on it takes alpha + beta b seconds, because its sender and its
# receiver *sleep* that long. A sleeping rank needs no core. Everything else is real: eight processes, their
# messages, and the functions that you wrote.
#
# The link has alpha = 15 ms and 50 ns a byte (20 MB/s). It is so slow that other programs barely change the
# timing.
#
# ## Predict, then measure
#
# The naive way sends 2 (n - 1) whole tensors, one after the other, from or to rank 0. Take 4 MB on 8 ranks. How
# many times as fast as the naive way is the ring? And with the ring, how much longer do 8 ranks take than 2?
# Write down your guess for the first question, and only then run on.

# %%
prediction = None  # your guess, such as 2.5; None draws no guess

# %%
ALPHA, BETA = 15e-3, 50e-9
sizes = [4_000, 62_500, 1_000_000, 4_000_000]


def linked(all_reduce, size):
    with Link(ALPHA, BETA):
        all_reduce(torch.zeros(size // 4))


def measure(all_reduce, ranks, rounds):
    calls = [lambda size=size: linked(all_reduce, size) for size in sizes]
    return [slowest(call, ranks, rounds) * 1e3 for call in calls]


naive, ring = {}, {}
for n in (2, 4, 8):
    with md.Cluster(ranks=n, threads=1) as many:
        # The naive way takes seconds, so once has to be enough.
        naive[n] = measure(naive_all_reduce, many, rounds=1)
        ring[n] = measure(ring_all_reduce, many, rounds=4)

# %%
naive_model, ring_model = {}, {}
for n in (2, 4, 8):
    naive_model[n] = [2 * (n - 1) * (ALPHA + BETA * size) * 1e3 for size in sizes]
    ring_model[n] = [ring_seconds(size, n, ALPHA, BETA) * 1e3 for size in sizes]
    print(
        f"4 MB on {n} ranks: naive {naive[n][-1]:5.0f} ms (model {naive_model[n][-1]:5.0f}), "
        f"ring {ring[n][-1]:4.0f} ms (model {ring_model[n][-1]:4.0f})"
    )

# %%
curves(
    sizes,
    {"naive, 8 ranks": naive[8], "ring, 8 ranks": ring[8], "ring, 2 ranks": ring[2]},
    {
        "naive, 8 ranks": naive_model[8],
        "ring, 8 ranks": ring_model[8],
        "ring, 2 ranks": ring_model[2],
    },
    labels=("bytes of the tensor", "milliseconds"),
    guess=prediction and (sizes[-1], naive[8][-1] / prediction),
    caption="Dots are measured, dashed lines are the model. With 4 MB on 8 ranks the ring is "
    f"{naive[8][-1] / ring[8][-1]:.1f} times as fast; {said(prediction)}.",
    alt="Time of an all-reduce against the size of its tensor: flat for small "
    "tensors, then rising with the bytes; the ring's lines for 2 and 8 ranks come close to each other.",
)

# %% [markdown]
# Read the figure from the left. **Small tensors:** the lines are flat, because only the number of messages
# counts. On 8 ranks both ways take 14 messages one after the other, and the ring gains nothing. **Large
# tensors:** the lines rise with the bytes, and on 8 ranks each of the ring's messages has only an eighth of the
# tensor.
#
# Now compare 2 ranks with 8. With the naive way, 8 ranks take seven times as long as 2, because rank 0 sends
# and receives for all. With the ring, the bytes that a rank sends grow from 1 to 1.75 times the tensor, and can
# never pass 2 times the tensor. The cost of alpha still grows, with 14 messages instead of 2. So here is the
# answer to this lesson's question: **more ranks hardly make a large all-reduce slower**. Only a small
# all-reduce takes longer with every further rank.
#
# What happens without the links? Then your cores copy the messages.

# %%
x = torch.zeros(4_000_000)
with_cores = {
    way.__name__: slowest(lambda way=way: way(x.clone())) * 1e3
    for way in (naive_all_reduce, ring_all_reduce)
}
print({way: f"{ms:.1f} ms" for way, ms in with_cores.items()})

# %% [markdown]
# This was a tensor of 16 MB on 4 ranks of one machine. Both ways copy 96 MB in all, 6 times the tensor, with
# the same cores. The ring can save time only if the naive way leaves cores idle. On a machine with two cores it
# may save nothing. **A model knows only what you put into it**: alpha and beta describe links, and say nothing
# about cores.
#
# ## Machines that you do not have
#
# If you know alpha and beta of a network, you can predict how fast a cluster would be. `minidist.comm.cost`
# works like your `ring_seconds`. It knows several algorithms, counts the additions as well, and takes alpha and
# beta of common networks from their data sheets.

# %%
from minidist.comm import cost

print(f"{'1 GB among 8 ranks':24}{'naive':>12}{'ring':>12}")
for network in ("25gbe", "100gbe", "infiniband_ndr", "nvlink4"):
    times = [
        cost.predict("all_reduce", way, 1e9, 8, network) for way in ("naive", "ring")
    ]
    print(f"{network:24}" + "".join(f"{t * 1e3:9.1f} ms" for t in times))

# %% [markdown]
# What about tiny tensors on many ranks? A ring of 1000 ranks takes 1998 steps for any tensor. In a **tree**,
# pairs of ranks add their tensors, then pairs of these sums are added, and so on; the total goes back the same
# way. A tree takes 20 steps. So libraries choose the algorithm by the size of the tensor.

# %%
for size in (1e3, 1e6, 1e9):
    times = {
        way: cost.predict("all_reduce", way, size, 1000, "100gbe")
        for way in ("ring", "tree")
    }
    print(
        f"{size:>16,.0f} bytes, 1000 ranks: "
        + ", ".join(f"{way} {t * 1e3:9.2f} ms" for way, t in times.items())
    )

# %% [markdown]
# Ranks of one machine have an even better way: memory that all of them see. Then no message is copied through
# the operating system. `comm.all_reduce` chooses this way by itself where it can.

# %%
for way in ("naive", "ring", "tree", "shared_memory"):
    t = slowest(lambda way=way: comm.all_reduce(torch.zeros(4_000_000), algorithm=way))
    print(f"comm.all_reduce of 16 MB, {way:14} {t * 1e3:8.2f} ms")

# %% [markdown]
# ## What breaks in practice, and how one sees it
#
# - **Deadlock.** One rank takes another branch of an `if`, and makes one call fewer than the others. Then all
#   ranks hang, and no error appears. `md.Cluster` stops after its `timeout` and says where each rank is. With
#   `check=True` it says at once which calls do not match.
# - **Mismatch.** Ranks pass tensors of different shapes. Plain gloo then hangs, or returns wrong numbers.
#   `check=True` names both calls and their lines.
# - **A buffer that changes too early.** A send with `async_op=True` may read its tensor until `wait()` returns.
#   If you write to the tensor before that, the other rank sometimes gets nonsense. Does your ring ever
#   overwrite a part that it has sent? (Look at the order of the parts. In the reduce-scatter no part changes
#   after it is sent. The all-gather overwrites the parts that the reduce-scatter has sent, but n - 1 steps
#   later.)
# - **A straggler.** One slow rank makes the whole ring slow. The ledger's `seconds` are long on all ranks
#   *except* the slow one, which never waits.
# - **Sums differ in the last bits.** Each part is summed over the ranks in an order of its own, and in floating
#   point (a + b) + c is not a + (b + c). All ranks still agree with each other, because each part is summed
#   only once.

# %%
cluster.close()

# %% [markdown]
# ## Further reading
#
# - Patarasuk and Yuan, *Bandwidth optimal all-reduce algorithms for clusters of workstations*, 2009: the ring, and
#   the proof that no way sends less. Section 3 is what you wrote.
# - Thakur, Rabenseifner and Gropp, *Optimization of Collective Communication Operations in MPICH*, 2005: alpha
#   and beta applied to trees, rings, and halving and doubling, and when to use which.
# - Sergeev and Del Balso, *Horovod: fast and easy distributed deep learning in TensorFlow*, 2018: how the ring came
#   to deep learning (after Andrew Gibiansky's post of 2017, *Bringing HPC Techniques to Deep Learning*).
#
# ## Where your lines live
#
# The collectives have a ladder of their own,
# [minidist/comm/algorithms/](../minidist/comm/algorithms/__init__.py):
#
# | You wrote | The ladder | The library |
# |---|---|---|
# | `shift`, n - 1 times | plain/ring_attention.py: [`around_the_ring`](../minidist/plain/ring_attention.py) | comm/messages.py: [`send`](../minidist/comm/messages.py), [`recv`](../minidist/comm/messages.py) |
# | `ring_reduce_scatter`, `ring_all_gather` | comm/algorithms/ring.py: [`ring_reduce_scatter`](../minidist/comm/algorithms/ring.py), [`ring_all_gather`](../minidist/comm/algorithms/ring.py) | comm/algorithms/execute.py: [`execute`](../minidist/comm/algorithms/execute.py) |
# | `ring_all_reduce` | comm/algorithms/ring.py: [`ring_all_reduce`](../minidist/comm/algorithms/ring.py) | comm/collectives.py: [`all_reduce`](../minidist/comm/collectives.py) |
# | `ring_seconds` | comm/algorithms/formulas.py: [`formula`](../minidist/comm/algorithms/formulas.py) | comm/cost/model.py: [`predict`](../minidist/comm/cost/model.py) |
#
# The ring there passes the parts in the same order as yours, but it sends nothing: it lists the messages as
# data. So a proof can check the messages of all ranks without starting a process. `execute` sends them, in
# segments that overlap, and `all_reduce` chooses between the algorithms.
#
# Next: lesson 09 puts your all-reduce to work, and trains one model on several ranks.
