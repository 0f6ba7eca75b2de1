"""Time strategies over a fast and a slow link: a program for torchrun on both hosts of `two_hosts.py`.

    torchrun ... slow_link_steps.py SOCKET RESULTS ROUNDS

In each round, every form takes a step over each wire; rank 0 sets the wire. Over the slowest one only the
sharded forms do, with two to compare with. Rank 0 writes the seconds of the slowest rank, the bytes that
crossed the wire, and a prediction for each wire: the sum of the cost model's times for the calls in the
ledger. A sum will do, since a slow wire hides little.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import minidist as md
from minidist import comm
from minidist.benchmarks.harness.slow_link import slow_wire
from minidist.benchmarks.harness.slow_link.two_hosts import counter
from minidist.benchmarks.harness.training.programs import engine, local_sgd, looped
from minidist.benchmarks.harness.training.what_is_trained import Batch, Train, Work
from minidist.comm import cost
from minidist.comm.cost import LinkProfile
from minidist.comm.cost.links import Link
from minidist.comm.ledgers import Call
from minidist.model.configs import config
from minidist.model.data import dataset
from minidist.parallel.engine.training_step import Engine

WORK = Work("byte-small", rows=4, tied=True)
EVERY = 8
"""Steps of local SGD between two averages. They are timed together; the time is divided by their number."""
HOSTS = 2
FAST, SLOW, SLOWEST = "the wire as fast as it goes", "1 Gbit/s, 5 ms", "100 Mbit/s"
LINKS: dict[str, dict[str, float]] = {
    FAST: {},
    SLOW: {"rate": 1e9, "delay": 5e-3},
    SLOWEST: {"rate": 1e8, "delay": 0.0},
}
"""Rate in bits per second and delay in seconds of each wire."""
PEER, ALONE, INSIDE = "torch DDP", "no communication", "tensor parallel inside a host"
LOCAL = f"local SGD, every {EVERY} steps"
SECONDARY = "ZeRO-3, secondary shares"
SHARDED = {
    "hybrid ZeRO-1": "dp=4,zero=1,shard=2",
    "ZeRO-1": "dp=4,zero=1",
    "hybrid ZeRO-2": "dp=4,zero=2,shard=2",
    "ZeRO-2": "dp=4,zero=2",
    "hybrid ZeRO-3": "dp=4,zero=3,shard=2",
    "ZeRO-3": "dp=4,zero=3",
    SECONDARY: "dp=4,zero=3",
}
"""Layouts of two ranks on each host. The hybrid ones shard the state inside a host; each host has a copy."""


def sharded(form: str) -> Engine:
    """Return our engine in a form of `SHARDED`."""
    options = {"secondary": md.size() // HOSTS} if form == SECONDARY else None
    return engine(SHARDED[form], WORK, fully_shard=options).engine


def data_parallel(**options: Any) -> Train:
    """Return our engine's step in a form of data parallelism."""
    return engine(f"dp={md.size()}", WORK, data_parallel=options).train


FORMS: dict[str, Callable[[], Train]] = {
    "data parallel": data_parallel,
    "hierarchical all-reduce": partial(data_parallel, algorithm="hierarchical"),
    "bfloat16": partial(data_parallel, compression="bfloat16"),
    "top 1%": partial(data_parallel, compression="topk"),
    "PowerSGD, rank 4": partial(data_parallel, compression="powersgd"),
    LOCAL: lambda: local_sgd(WORK, EVERY).train,
    INSIDE: lambda: engine("dp=2,tp=2", WORK).train,
    PEER: lambda: looped(nn.parallel.DistributedDataParallel(WORK.build())).train,
    ALONE: lambda: looped(WORK.build()).train,
}
MEASURED = {FAST: [*SHARDED, *FORMS], SLOW: [*SHARDED, *FORMS], SLOWEST: [*SHARDED, PEER, ALONE]}
"""The forms that take steps over each wire, in turns in this order."""
PROFILES = {
    name: LinkProfile(
        name,
        "as the wire was set",
        {"messages": Link(link["delay"], 8 / link["rate"])},
        cost.PROFILES["25gbe"].gamma,
    )
    for name, link in LINKS.items()
    if link
}


def rows_of(form: str) -> Batch:
    """Return this rank's rows of a form's batch."""
    rows = dataset("bytes", length=config(WORK.model).context, limit=WORK.rows).train
    parts = HOSTS if form == INSIDE else md.size()  # ranks of tensor parallelism have the same rows
    part = md.rank() * parts // md.size()
    own: Batch = rows[slice(WORK.rows * part // parts, WORK.rows * (part + 1) // parts)]
    return own


def crossing(form: str, engine: Engine) -> float:
    """Return the bytes that a host's ranks send to the other host in a step of `SHARDED`, by the formula.

    Each of n ranks, s on each of m hosts, has k bytes of a bucket, padding included. A reduce-scatter, which
    is an all-to-all, sends s (n - s) k from host to host, and the ring of an all-gather (n - 1) k. Stage 3
    gathers all units but the root again for the backward pass, unless secondary shares have their values.
    With hybrid shards only all-reduces cross, among the ranks that own the same share: s 2 (m - 1) / m k.
    """
    ranks, each = md.size(), md.size() // HOSTS
    hybrid, twice = engine.layout.shard, not engine.layout.residency.whole_parameters and form != SECONDARY
    sent = 0.0
    for number, bucket in enumerate(engine.strategy.buckets):  # the root unit has the first
        plain = each * (ranks - each) + (1 + (twice and number > 0)) * (ranks - 1)
        times = each * 2 * (HOSTS - 1) / HOSTS if hybrid else plain
        sent += times * bucket.layout.share * bucket.layout.dtype.itemsize
    return sent


def steps_of(name: str) -> int:
    """Return how many steps are timed together."""
    return EVERY if name == LOCAL else 1


def predicted(call: Call, profile: LinkProfile, world: int) -> float:
    """Predict the seconds of a call among `world` ranks; 0 for a call inside a host, which uses memory."""
    ranks, each = len(call.group), world // HOSTS
    if len({rank // each for rank in call.group}) < HOSTS or call.name not in cost.FORMULAS:
        return 0.0
    dtype: torch.dtype = getattr(torch, call.dtype)
    size = math.prod(call.shape) * dtype.itemsize
    link = profile.links["messages"]
    if call.algorithm == "hierarchical":  # a ring of hosts, whose ranks' parts share the wire
        return cost.predict(call.name, "ring", size, HOSTS, profile)
    if call.name in ("reduce_scatter", "all_to_all"):  # every rank sends a part to each on the other host
        return link.alpha + size * ranks / HOSTS**2 * link.beta
    # In a ring of all ranks, one rank per host uses the wire; in groups with a rank per host, all ranks do.
    sharing = 1 if ranks == world else each
    shared = replace(profile, links={"messages": replace(link, beta=sharing * link.beta)})
    return cost.predict(call.name, call.algorithm, size, ranks, shared)


def main(socket: str, results: str, rounds: int) -> None:
    """Measure all forms, and write the results on rank 0."""
    md.init(timeout=300)
    engines = {name: sharded(name) for name in SHARDED}
    programs: dict[str, Train] = {name: each.step for name, each in engines.items()}
    programs |= {name: make() for name, make in FORMS.items()}
    rows = {name: rows_of(name) for name in programs}

    def step(name: str) -> float:
        """Return the seconds of a step on this rank."""
        comm.barrier()
        begun = time.perf_counter()
        for _ in range(steps_of(name)):
            programs[name](*rows[name])
        return (time.perf_counter() - begun) / steps_of(name)

    def set_wire(link: str) -> None:
        comm.barrier()
        if md.rank() == 0:
            slow_wire.ask(socket, **LINKS[link])
        comm.barrier()

    seconds: dict[str, dict[str, list[float]]] = {
        link: {name: [] for name in names} for link, names in MEASURED.items()
    }
    for turn in range(rounds + 1):
        for link, times in seconds.items():
            set_wire(link)
            for name, measured in times.items():
                took = torch.tensor(step(name), dtype=torch.float64)
                if turn:  # the first one warms up
                    measured.append(float(comm.all_reduce(took, "max")))
    found: dict[str, dict[str, Any]] = {}
    set_wire(FAST)
    for name in programs:
        comm.barrier()
        before = counter()
        with comm.ledger() as ledger:
            step(name)
        comm.barrier()
        across = (counter() - before) / steps_of(name)
        found[name] = {
            "across": across,
            "sent": ledger.bytes_sent / steps_of(name),
            "predicted": {
                link: sum(predicted(call, profile, md.size()) for call in ledger.calls) / steps_of(name)
                for link, profile in PROFILES.items()
            },
        }
        if name in engines:
            found[name]["formula"] = crossing(name, engines[name])
    if md.rank() == 0:
        Path(results).write_text(json.dumps({"seconds": seconds, "found": found}))
    md.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
