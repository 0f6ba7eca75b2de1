"""What the ranks of a machine time, while all of them work: passes, updates, links.

Ranks of one thread are timed by the processor's clock, which stands still while another program has the core:
where there are more ranks than cores they take turns, and a pass takes as many times longer. A rank of
several threads is timed by the wall's.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from minidist import comm
from minidist.comm.cost import fit
from minidist.comm.cost.links import LinkProfile
from minidist.model.configs import GPTConfig
from minidist.model.gpt import GPT
from minidist.model.loss import cross_entropy
from minidist.parallel.engine.prepare import prepare

Case = tuple[int, int, int]
"""Width, tokens and rows of a GPT with two blocks."""
CASES: tuple[Case, ...] = ((64, 64, 2), (64, 64, 16), (128, 64, 4), (256, 128, 1), (256, 128, 4))
"""Some passes are calls mostly, others products."""
ENOUGH = 0.05
"""Seconds for which each is repeated in a round."""
ROUNDS = 7
PATIENCE = 12.0
"""Seconds after which no further round begins, on a machine where others compute."""
PRODUCT = (64, 256, 256)
HALVES = {"bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Measured:
    """On one rank: seconds."""

    passes: list[tuple[float, ...]]  # forward and backward, for each of CASES
    alone: float  # the last of CASES while the other ranks wait
    halves: dict[str, float]  # of a product in half precision, over one in float32
    updates: list[float]  # of Adam, for the parameters of the first and of the last of CASES
    step: float  # of an engine's step, less that of a plain loop
    links: LinkProfile | None


def measure() -> Measured:
    """On each rank; a collective."""
    ranks = comm.size()
    clock = _Clock.of(ranks)
    comm.barrier()
    passes = clock.medians([_passes(case, clock) for case in CASES])
    comm.barrier()
    alone = 0.0
    if comm.rank() == 0:
        alone = sum(clock.medians([_passes(CASES[-1], clock)])[0]) / clock.turns
    comm.barrier()
    m, k, n = PRODUCT
    names = ("float32", *HALVES.values())
    pairs = [[torch.ones(size, dtype=getattr(torch, name)) for size in ((m, k), (k, n))] for name in names]
    product, *in_half = clock.seconds([partial(torch.mm, *pair) for pair in pairs])
    halves = {name: half / product for name, half in zip(HALVES, in_half, strict=True)}
    updates = clock.seconds([_update(case) for case in (CASES[0], CASES[-1])])
    step = _overhead(clock) if ranks == 1 else 0.0
    return Measured(passes, alone, halves, updates, step, fit(rounds=9) if ranks > 1 else None)


def _model(case: Case) -> GPT:
    return GPT(shape_of(case))


def shape_of(case: Case) -> GPTConfig:
    """Its shape."""
    return GPTConfig(context=case[1], layers=2, heads=4, width=case[0])


def _batch(case: Case) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (case[2], case[1]), generator=generator)


@dataclass(frozen=True)
class _Clock:
    """Seconds as a rank sees them."""

    read: Callable[[], float]
    turns: float  # ranks a core, which take turns

    @classmethod
    def of(cls, ranks: int) -> _Clock:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if torch.get_num_threads() > 1:
            return cls(time.perf_counter, 1.0)  # threads that wait for each other take processor time, too
        return cls(time.process_time, max(1.0, ranks / cores))

    def medians(self, parts_of: Sequence[Callable[[], tuple[float, ...]]]) -> list[tuple[float, ...]]:
        """Of the parts of several calls, each the median of ROUNDS means, after a round that warms up.

        The calls take turns, so that a second in which another program computes slows one round of each, and
        not all rounds of one.
        """
        means: list[list[list[float]]] = [[] for _ in parts_of]
        started = time.perf_counter()
        for number in range(ROUNDS + 1):
            for found, run in zip(means, parts_of, strict=True):
                each = self._means(run, ENOUGH if number else ENOUGH / 2)
                if number:
                    found.append(each)
            if number and time.perf_counter() - started > PATIENCE:
                break
        return [tuple(map(statistics.median, zip(*found, strict=True))) for found in means]

    def seconds(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        """Of each call, as `medians`."""

        def timed(call: Callable[[], object]) -> tuple[float]:
            begun = self.read()
            call()
            return (self.read() - begun,)

        return [each for (each,) in self.medians([partial(timed, call) for call in calls])]

    def _means(self, run: Callable[[], tuple[float, ...]], enough: float) -> list[float]:
        found, begun = [run()], self.read()
        while self.read() - begun < enough:
            found.append(run())
        return [self.turns * statistics.fmean(part) for part in zip(*found, strict=True)]


def _passes(case: Case, clock: _Clock) -> Callable[[], tuple[float, float]]:
    """A forward and a backward pass, which return their seconds."""
    model, tokens = _model(case), _batch(case)

    def run() -> tuple[float, float]:
        for parameter in model.parameters():
            parameter.grad = None
        start = clock.read()
        loss = cross_entropy(model(tokens), tokens)
        middle = clock.read()
        loss.backward()  # type: ignore[no-untyped-call]
        return middle - start, clock.read() - middle

    return run


def _update(case: Case) -> Callable[[], object]:
    model = _model(case)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return optimizer.step


def _overhead(clock: _Clock) -> float:
    """Seconds of an engine's step beside what a plain loop does."""
    case = CASES[0]
    tokens, plain = _batch(case), _model(case)
    optimizer = torch.optim.AdamW(plain.parameters())
    engine = prepare(_model(case), torch.optim.AdamW)

    def loop() -> None:
        optimizer.zero_grad()
        loss = cross_entropy(plain(tokens), tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        loss.item()

    whole, bare = clock.seconds([partial(engine.step, tokens, tokens), loop])
    return max(0.0, whole - bare)
