"""Time strategies over a fast and a slow link: a program for torchrun on both hosts of `two_hosts.py`.

    torchrun ... slow_link_steps.py SOCKET RESULTS ROUNDS

In each round, every form takes a step over the unlimited wire, then over the slow one; rank 0 sets the wire.
Rank 0 writes the seconds of the slowest rank, the bytes that crossed the wire, and a prediction: the sum of
the cost model's times for the calls in the ledger. A sum will do, since a slow wire hides little.
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
from torch import Tensor, nn

import minidist as md
from minidist import comm
from minidist.benchmarks.harness import slow_wire
from minidist.benchmarks.harness.training_steps import ADAMW, Case, plain_loop
from minidist.benchmarks.harness.two_hosts import counter
from minidist.comm import cost
from minidist.comm.cost import LinkProfile
from minidist.comm.cost.links import Link
from minidist.comm.ledgers import Call
from minidist.model.configs import config
from minidist.model.data import dataset

CASE = Case("byte-small", rows=4)
EVERY = 8
"""Steps of local SGD between two averages. They are timed together; the time is divided by their number."""
HOSTS = 2
RATE, DELAY = 1e9, 5e-3
"""Rate in bits per second and delay in seconds of the slow wire."""
FAST, SLOW = "the wire as fast as it goes", "1 Gbit/s, 5 ms"
LINKS: dict[str, dict[str, float]] = {FAST: {}, SLOW: {"rate": RATE, "delay": DELAY}}
PEER, ALONE, INSIDE = "torch DDP", "no communication", "tensor parallel inside a host"
LOCAL = f"local SGD, every {EVERY} steps"
Train = Callable[[Tensor, Tensor], float]


def engine(layout: str, **options: Any) -> Train:
    """Return our engine's step in this layout."""
    return md.prepare(CASE.build(), ADAMW, md.Layout.parse(layout), **options).step


def data_parallel(**options: Any) -> Train:
    """Return our engine's step in a form of data parallelism."""
    return engine(f"dp={md.size()}", data_parallel=options)


def local_sgd() -> Train:
    """Return a plain training step that averages the ranks' parameters every `EVERY` steps."""
    model = md.LocalSGD(CASE.build(), every=EVERY)
    loop = plain_loop(model, ADAMW(model.parameters()))

    def step(inputs: Tensor, targets: Tensor) -> float:
        loss = loop(inputs, targets)
        model.synchronize()
        return loss

    return step


def alone(model: nn.Module) -> Train:
    """Return a plain training step, without our communication."""
    return plain_loop(model, ADAMW(model.parameters()))


FORMS: dict[str, Callable[[], Train]] = {
    "data parallel": data_parallel,
    "hierarchical all-reduce": partial(data_parallel, algorithm="hierarchical"),
    "bfloat16": partial(data_parallel, compression="bfloat16"),
    "top 1%": partial(data_parallel, compression="topk"),
    "PowerSGD, rank 4": partial(data_parallel, compression="powersgd"),
    LOCAL: local_sgd,
    "ZeRO-1": lambda: engine(f"dp={md.size()},zero=1"),
    "ZeRO-3": lambda: engine(f"dp={md.size()},zero=3"),
    INSIDE: lambda: engine("dp=2,tp=2"),
    PEER: lambda: alone(nn.parallel.DistributedDataParallel(CASE.build())),
    ALONE: lambda: alone(CASE.build()),
}


SLOW_PROFILE = LinkProfile(
    SLOW, "as the wire was set", {"messages": Link(DELAY, 8 / RATE)}, cost.PROFILES["25gbe"].gamma
)


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
    programs = {name: make() for name, make in FORMS.items()}
    rows = dataset("bytes", length=config(CASE.model).context, limit=CASE.rows).train
    own, hosts_own = (
        rows[slice(CASE.rows * part // parts, CASE.rows * (part + 1) // parts)]
        for part, parts in ((md.rank(), md.size()), (md.rank() * HOSTS // md.size(), HOSTS))
    )

    def step(name: str) -> float:
        """Return the seconds of a step on this rank."""
        comm.barrier()
        begun = time.perf_counter()
        for _ in range(steps_of(name)):
            programs[name](*(hosts_own if name == INSIDE else own))
        return (time.perf_counter() - begun) / steps_of(name)

    def set_wire(link: str) -> None:
        comm.barrier()
        if md.rank() == 0:
            slow_wire.ask(socket, **LINKS[link])
        comm.barrier()

    seconds: dict[str, dict[str, list[float]]] = {link: {name: [] for name in FORMS} for link in LINKS}
    for turn in range(rounds + 1):
        for link, times in seconds.items():
            set_wire(link)
            for name, measured in times.items():
                took = torch.tensor(step(name), dtype=torch.float64)
                if turn:  # the first one warms up
                    measured.append(float(comm.all_reduce(took, "max")))
    found = {}
    set_wire(FAST)
    for name in FORMS:
        comm.barrier()
        before = counter()
        with comm.ledger() as ledger:
            step(name)
        comm.barrier()
        across = (counter() - before) / steps_of(name)
        calls = sum(predicted(call, SLOW_PROFILE, md.size()) for call in ledger.calls) / steps_of(name)
        found[name] = {"across": across, "sent": ledger.bytes_sent / steps_of(name), "predicted": calls}
    if md.rank() == 0:
        Path(results).write_text(json.dumps({"seconds": seconds, "found": found}))
    md.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
