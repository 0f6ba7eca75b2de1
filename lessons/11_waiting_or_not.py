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
# # 11. Waiting or not
#
# **Time:** about 2 hours. **Builds on:** lessons 08 and 09.
#
# In data parallelism, all ranks wait in every step until the slowest has finished. In this lesson you build a
# training in which no rank waits, you find out what that costs, and you try the ways between the two.

# %%
import math
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

import minidist as md
from checks.figures import ladder, said
from checks.pictures.delays import bounds_chart, learning, trajectories
from checks.pictures.workers import (
    gradients_a_second,
    race,
    server_animation,
    slack_chart,
    workers_chart,
)
from checks.waiting_or_not import check, hint, or_solution
from minidist import comm
from minidist.model import MLP, Sampler, cross_entropy, digits

ladder(11)

# %% [markdown]
# **The question.** One of your ranks is slow. If all wait for it, all are slow. If none waits, its gradients
# come late: they were computed for parameters that have changed since. Which is better?
#
# ## What a straggler costs
#
# A rank that is slower than the others is called a **straggler**. Another program may run on its machine, its
# processor may be too hot, or its disk may be slow. Among a thousand machines there is always one. (The
# training of Llama 3 405B on up to 16,384 GPUs had 419 unplanned interruptions in 54 days: Grattafiori et al.
# 2024.) Training is **synchronous** if all ranks finish a step before any rank begins the next one, as with an
# all-reduce. It is **asynchronous** if each rank goes on as soon as it can.
#
# **Exercise 11.1: rates.** Worker i needs `seconds[i]` for a step, in which it computes one gradient. Messages
# take no time. Return two numbers: how many gradients all workers together compute in a second if they wait for
# each other in every step, and how many if no worker waits.


# %% tags=["exercise"]
def rates(seconds):
    """Return gradients a second: waiting, not waiting."""
    ...  # about 3 lines


# %%
check(rates)

# %% [markdown]
# No idea how to begin? `hint()` in a cell of its own gives the first of three hints. The next cell takes your
# function if it has passed, and the lesson's own if it has not.

# %%
rates = or_solution(rates)
for times_slower in (1, 2, 10, 100):
    waiting, not_waiting = rates([1, 1, 1, times_slower])
    print(
        f"one of four is {times_slower:3} times slower: "
        f"waiting {waiting:4.2f} gradients a second, not waiting {not_waiting:4.2f}"
    )

# %% [markdown]
# If workers wait, the slowest sets the pace: the *maximum* of the times decides. If they do not wait, they lose
# at worst the straggler's own gradients. The chart shows three workers over time. The third takes four times as
# long for a step as the first.


# %%
def together(clocks, worker):
    return clocks[worker] == min(clocks)  # steps that each has finished


def whenever(clocks, worker):
    return True


seconds = [lambda: 1.0, lambda: 1.2, lambda: 4.0]
free = race(seconds, whenever, until=12)
workers_chart(
    {"waiting": race(seconds, together, until=12), "not waiting": free},
    until=12,
    caption="A box is a step. The numbers say how many updates by others were made "
    "between the beginning of a step and its end.",
    alt="Above, two workers wait most of the time for the third. Below nobody waits; the "
    "slow worker's steps have numbers several times as large as the others'.",
)

# %% [markdown]
# ## A server for parameters
#
# An all-reduce needs all ranks at the same time, so it cannot work without waiting. A **parameter server** can
# (Dean et al. 2012, Li et al. 2014). One rank, the server, holds the parameters. The other ranks are
# **workers**, and in each step a worker
#
# 1. **pulls**: it gets the newest parameters from the server;
# 2. computes a gradient with them, on its own rows;
# 3. **pushes**: it sends the gradient to the server, which updates the parameters at once.
#
# Follow a few pushes, and watch the versions of the parameters.

# %%
server_animation(free)

# %% [markdown]
# A worker's part is a loop. You write it first.
#
# **Exercise 11.2: work.** Rank 0 is the server. Make `steps` steps. In each, receive the parameters from rank 0
# into `x`, and send `gradient(x)`, a tensor like `x`, to rank 0. Return nothing.
#
# Par: one gradient for each step.


# %% tags=["exercise"]
def work(gradient, x, steps):
    """Pull, compute and push, `steps` times."""
    ...  # about 3 lines


# %%
check(work)

# %%
work = or_solution(work)

# %% [markdown]
# The server has to wait for all workers *at the same time*, but a receive waits for one rank only. So the
# server gets a **thread** for each worker: a part of the program that runs beside the other threads, in the
# same memory. While one thread waits for its worker, the others go on. All threads change the same `x`. A
# **lock** makes them do so one at a time: only one thread can be inside `with lock:`, and any other waits there
# until it is free.
#
# **Exercise 11.3: serve.** Write the function of one thread: `steps` times, send the parameters `x` to its
# worker, receive a gradient, and subtract `lr` times the gradient from `x`, in place. (Write `x.sub_(...)`:
# with `x -= ...` Python takes x for a local variable of `serve_one`.) No worker may have to wait for another
# one.


# %% tags=["exercise"]
def serve(x, lr, steps):
    """Serve all workers at once, `steps` times each; return x."""
    lock = threading.Lock()

    def serve_one(worker): ...  # about 7 lines, with a lock where x is read or changed

    with ThreadPoolExecutor(md.size()) as pool:  # a thread for each worker
        list(pool.map(serve_one, range(1, md.size())))
    return x


# %%
check(serve)

# %% [markdown]
# Try it with three workers that look for the x at which (x - 3)² is smallest. Worker 3 sleeps ten times as long
# as the others.

# %%
serve = or_solution(serve)
cluster = md.Cluster(ranks=4)


def late_gradient(x):
    time.sleep(0.05 if md.rank() == 3 else 0.005)
    return 2 * (x - 3)


def all_ranks(steps=20):
    x = torch.zeros(2)
    if md.rank() == 0:
        return serve(x, 0.05, steps)
    begin = time.perf_counter()
    work(late_gradient, x, steps)
    return f"{time.perf_counter() - begin:.2f} seconds"


cluster.run(all_ranks)

# %% [markdown]
# The two fast workers were done long before the slow one. (Is the lock needed at all? Recht et al. 2011 leave
# it out, and call that Hogwild. If each update touches only a few of many parameters, it does no harm that an
# update is lost now and then.)
#
# ## What staleness does
#
# The numbers in the chart's boxes are the price. The **staleness** of a gradient is the number of updates that
# the server has made since the worker pulled. If n workers are equally fast, each of the others makes one step
# while a worker makes one, so the staleness is n - 1. A straggler that takes k times as long as the others
# misses about k (n - 1) updates. The average over all gradients stays about n - 1 at any speeds: the
# straggler's gradients are staler, and the others are fresher.
#
# What harm does an old gradient do? Look at the simplest loss there is, (curvature / 2) x². Its gradient is
# curvature times x, and its minimum is at x = 0.
#
# **Exercise 11.4: delayed_descent.** Start at x = 1, and make `steps` updates. Each update subtracts lr times a
# gradient. Take the gradient not at the newest x, but at the x of `delay` updates earlier. As long as there is
# no x that old, take it at the first x. Return the list of all x, from the first to the last.


# %% tags=["exercise"]
def delayed_descent(curvature, lr, delay, steps):
    """Return [x_0, x_1, ..., x_steps]."""
    x = [1.0]
    ...  # about 4 lines


# %%
check(delayed_descent)

# %%
delayed_descent = or_solution(delayed_descent)
trajectories(
    {f"delay {delay}": delayed_descent(1.0, 0.4, delay, 40) for delay in (0, 2, 5)},
    "The same learning rate, 0.4, with gradients that are 0, 2 and 5 updates late.",
)

# %% [markdown]
# An old gradient says "go on" although x has already passed the minimum. So x swings to the other side, and
# turns back too late again. With enough delay, each swing is wider than the one before. A smaller learning rate
# helps, because x then changes less while a gradient is on its way.
#
# ## Predict: how much smaller?
#
# With curvature 1 and no delay, any learning rate below 2 works. What is the largest one that works with a
# delay of 3? Write down your guess.

# %%
largest_with_delay_3 = None  # your guess, such as 1.5; None draws no guess


# %%
def largest_lr(delay):
    """The largest lr with which x stays bounded, found by halving."""
    low, high = 0.0, 4.0
    for _ in range(20):
        middle = (low + high) / 2
        x = delayed_descent(1.0, middle, delay, 1500)
        works = all(abs(each) < 2 for each in x[-4 * delay - 4 :])
        low, high = (middle, high) if works else (low, middle)
    return low


# %%
delays = list(range(9))
found = [largest_lr(delay) for delay in delays]
formula = [2 * math.sin(math.pi / (2 * (2 * delay + 1))) for delay in delays]
bounds_chart(
    delays,
    found,
    formula,
    guess=largest_with_delay_3,
    caption=f"With a delay of 3 it is {found[3]:.3f}; {said(largest_with_delay_3)}.",
)

# %% [markdown]
# The dashed line is the exact formula (Levin and May 1976). Descent is stable as long as
#
# `lr * curvature < 2 * sin(pi / (2 * (2 * delay + 1)))`.
#
# At the largest such lr, x swings for ever, half a swing in 2 delay + 1 updates. For a long delay the right
# side is about pi / (2 delay + 1): **twice the delay, half the learning rate**. A loss of many parameters has
# many curvatures, and the largest one decides. In a real training the staleness varies, and the loss is no
# parabola. But the rule is good enough to use: with more workers, lower the learning rate.
#
# ## Predict, then measure
#
# Now train a real network on the handwritten digits, with `md.ParameterServer`: one server and three workers. A
# step takes 20 ms on two of the workers, and 200 ms on the third. (They sleep most of that time, so it is the
# same on your machine.) How many times as many gradients do the workers compute in a second if they do not
# wait? Your `rates` can tell, but write down your guess first.

# %%
prediction = None  # your guess, such as 2.5; None prints no guess

# %%
pauses = [0.02, 0.02, 0.2]


def worker_loop(server, model, rows, until):
    deal = Sampler(
        len(rows), 96, rank=server.worker, ranks=server.workers, drop_last=True
    )
    step, begin = 0, time.perf_counter()
    while time.perf_counter() < until:
        server.pull()
        inputs, targets = rows[deal.share(step)]  # 32 rows of its own
        cross_entropy(model(inputs), targets).backward()
        time.sleep(pauses[server.worker])
        server.push(rows=len(inputs))
        step += 1
    lasts = (time.perf_counter() - begin) / step
    server.done()
    return lasts  # seconds a step


# %% [markdown]
# `ParameterServer` does what your server does, and three things more. A worker that dies does not stop the
# others. The parameters can be spread over several servers. And `max_staleness` bounds the staleness. With a
# bound of 0 it is synchronous: each update takes one push from every worker. After each update the server also
# records the loss on 256 rows.


# %%
def train(max_staleness, seconds=4.0):
    model, rows = MLP((64, 32, 10), seed=1), digits().train
    make = partial(torch.optim.SGD, lr=0.3)
    server = md.ParameterServer(model, make, max_staleness=max_staleness)
    comm.barrier()
    begin = time.perf_counter()
    if not server.is_server:
        return worker_loop(server, model, rows, begin + seconds)
    curve, (inputs, targets) = [], rows[:256]

    def note(updates):
        with torch.no_grad():
            loss = float(cross_entropy(model(inputs), targets))
        curve.append((updates, time.perf_counter() - begin, loss))

    return curve, server.serve(note)


# %%
runs = {
    "synchronous": cluster.run(train, 0),
    "bound 4": cluster.run(train, 4),
    "asynchronous": cluster.run(train, None),
}
for key, ((curve, report), *_) in runs.items():
    pushes, stale = sum(report.pushes.values()), report.staleness
    mean = sum(s * count for s, count in stale.items()) / pushes
    print(
        f"{key:13} {pushes / curve[-1][1]:5.1f} gradients a second, {report.updates:3} "
        f"updates, staleness {mean:.1f} on average, {max(stale)} at most"
    )

# %%
waiting, not_waiting = rates(pauses)
print(f"expected: waiting {waiting:.0f}, not waiting {not_waiting:.0f} a second")
print(f"that is {not_waiting / waiting:.1f} times as many; {said(prediction)}")

steps = runs["asynchronous"][1:]
print("measured steps:", ", ".join(f"{each * 1e3:.0f} ms" for each in steps))
print(f"expected from these, not waiting: {rates(steps)[1]:.0f} a second")

# %% [markdown]
# With waiting, the result is as expected: the straggler sets the pace, and everything else hides behind its 200
# ms. Without waiting, there are fewer gradients than expected. The formula knew only the pauses, but a step
# also takes messages and arithmetic, and next to 20 ms they show. With the measured times of the steps, the
# formula is right. The staleness is as the chart said: n - 1 on average, and up to 10 times that for the
# straggler.
#
# More gradients do not yet mean that the model learns faster. Look at the loss.

# %%
learning(
    {key: curve for key, ((curve, _), *_) in runs.items()},
    "The same training against time, and against updates.",
)

# %% [markdown]
# These are two pictures of the same runs, and both are true. **Against time**, the run that does not wait wins
# by far. **Against updates**, the synchronous run is ahead, since each of its updates is the mean of three
# fresh gradients. A paper that shows only one of the two pictures has made a choice. You pay for time. But only
# the synchronous run can be repeated: in an asynchronous run the pushes come in a different order every time.
#
# ## Between the two
#
# Ho et al. 2013 bound how far the workers may be apart. They call it **stale synchronous parallel**: a worker
# that is more than `bound` steps ahead of the slowest has to wait. (`max_staleness` counts updates instead of
# steps. The idea is the same.)
#
# **Exercise 11.5: may_begin.** `clocks[i]` is how many steps worker i has finished. May `worker` begin its next
# step? It may if it is at most `bound` steps ahead of the slowest. Return True or False.


# %% tags=["exercise"]
def may_begin(clocks, worker, bound):
    """Return whether the worker may begin its next step."""
    ...  # 1 line


# %%
check(may_begin)

# %% [markdown]
# With a bound of 0 this rule is `together`, and with an infinite bound it is `whenever`. How much does a bound
# between the two gain? Simulate eight workers in two situations. In the first, every worker has a **hiccup**
# now and then: one step in ten takes five times as long. In the second, one worker is **always** five times
# slower.
#
# The chart also shows another way to wait less often, **local SGD** (Stich 2019). Each rank trains a model of
# its own, and every k steps the ranks take the mean of their parameters. They wait only then. Local SGD needs
# no server, and sends k times less.

# %%
may_begin = or_solution(may_begin)


def local_sgd(clocks, worker, every):
    return clocks[worker] // every <= min(clocks) // every


def hiccup(draw):
    return lambda: 5.0 if draw.random() < 0.1 else 1.0


def speed(seconds, rule, slack, until=1500):
    steps = race(seconds, lambda clocks, worker: rule(clocks, worker, slack), until)
    return gradients_a_second(steps, until)


# %%
slack, panels = [0, 1, 2, 4, 8, 16, 24], {}
draw = random.Random(10)
situations = {
    "hiccups on all": [hiccup(draw) for _ in range(8)],
    "one is always slow": [lambda: 1.0] * 7 + [lambda: 5.0],
}
for situation, seconds in situations.items():
    panels[situation] = {
        "bounded": [speed(seconds, may_begin, s) for s in slack],
        "local SGD": [speed(seconds, local_sgd, s + 1) for s in slack],
        "not waiting": [speed(seconds, may_begin, math.inf)],
    }
slack_chart(
    slack,
    panels,
    "Simulated: how much a little slack gains depends on the reason for waiting.",
)

# %% [markdown]
# **Hiccups** even out: a worker that is late in one step catches up in the next ones, and a slack of a few
# steps gains most of what there is to gain. Against a worker that is **always** slow, no bound helps. Sooner or
# later all workers reach the bound, and then they go at its pace. Give such a worker less to do, leave it out
# (Chen et al. 2016 start a few more workers than they wait for), or do not wait at all.
#
# Most large models today are trained synchronously. Their devices are equally fast, their networks are quick,
# and it is worth more to be able to repeat a run than to gain the last bit of speed. Local SGD comes back where
# the network is slow, for example between data centres (Douillard et al. 2023). Count what it sends:


# %%
def bytes_per_step(every, steps=8):
    model = md.LocalSGD(MLP((64, 32, 10)), every=every)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with comm.ledger() as ledger:
        for _ in range(steps):
            cross_entropy(model(torch.randn(4, 64)), torch.arange(4)).backward()
            optimizer.step()
            model.synchronize()
    return ledger.bytes_sent / steps


for every in (1, 2, 8):
    sent = max(cluster.run(bytes_per_step, every))
    print(f"average every {every} steps: {sent:8,.0f} bytes a step")

# %% [markdown]
# ## What breaks in practice, and how one sees it
#
# - **It diverges with more workers.** A learning rate that is right for four workers is too large for forty,
#   since the staleness is ten times as high. The loss swings before it explodes. Lower the learning rate, or
#   bound the staleness.
# - **The server is the bottleneck.** All gradients go through it: in each step, n workers send n times the
#   bytes of the parameters to it, and get as many back. Its link is full while the workers' links are idle.
#   Spread the parameters over several servers: `servers=4`.
# - **Two runs differ.** The pushes come in a different order each time, so no bug can be repeated exactly. Look
#   for it with a bound of 0.
# - **Momentum hides staleness.** Late gradients act like extra momentum (Mitliagkas et al. 2016). Together with
#   a momentum of 0.9 that may be too much. Asynchronous training often needs less momentum.
# - **A slow rank in an all-reduce.** All ranks are slow, and there is no error. In the ledger, the straggler is
#   the one rank that spends no time waiting.

# %%
cluster.close()

# %% [markdown]
# ## Further reading
#
# - Dean et al., *Large Scale Distributed Deep Networks*, 2012: DistBelief, with asynchronous parameter servers
#   (Downpour SGD) on thousands of cores.
# - Ho et al., *More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server*, 2013: the
#   bound, and a proof that training converges with it.
# - Recht et al., *Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent*, 2011: why
#   threads may write over each other's updates, and when.
#
# ## Where your lines live
#
# Two rungs of [the training ladder](../minidist/plain/__init__.py):
#
# | You wrote | The rung | The engine |
# |---|---|---|
# | `work` | plain/parameter_server.py: [`work`](../minidist/plain/parameter_server.py) | parallel/averaging/parameter_server.py: [`ParameterServer.pull`](../minidist/parallel/averaging/parameter_server.py), [`ParameterServer.push`](../minidist/parallel/averaging/parameter_server.py) |
# | `serve` | plain/parameter_server.py: [`serve`](../minidist/plain/parameter_server.py) | parallel/averaging/serving.py: [`Serving.run`](../minidist/parallel/averaging/serving.py) |
# | `may_begin` | – | parallel/averaging/staleness.py: [`Updates.next`](../minidist/parallel/averaging/staleness.py) |
# | an average every k steps | plain/local_sgd.py: [`train`](../minidist/plain/local_sgd.py) | parallel/averaging/local_sgd.py: [`LocalSGD.synchronize`](../minidist/parallel/averaging/local_sgd.py) |
#
# The rung's server has your threads and your lock. It calls a torch optimizer instead of `x.sub_(...)`. It
# answers each gradient with the new parameters, so a worker pushes first and then pulls. The engine shares the
# parameters among several servers, bounds the staleness, and goes on when a worker dies.
#
# Next: lesson 12 cuts the model itself over ranks.
