"""Time passes, updates and links on each rank of a machine while all ranks work.

A rank with one thread is timed by the process clock, which stops while another program has the core. If there
are more ranks than cores, they take turns, so its times are multiplied by the ranks per core. A rank with
several threads is timed by the wall clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from minidist import comm
from minidist.comm.cost import fit
from minidist.comm.cost.links import LinkProfile
from minidist.comm.launching.cores import available_cores
from minidist.model.configs import GPTConfig
from minidist.model.gpt import GPT
from minidist.model.loss import cross_entropy
from minidist.parallel.engine.prepare import prepare

Case = tuple[int, int, int]
"""Width, tokens and rows of a GPT with two blocks."""
CASES: tuple[Case, ...] = ((64, 64, 2), (64, 64, 16), (128, 64, 4), (256, 128, 1), (256, 128, 4))
"""In some cases calls dominate the passes, in others products."""
ENOUGH = 0.05
"""Seconds for which each case is repeated in a round."""
ROUNDS = 7
PATIENCE = 12.0
"""Seconds after which no further round begins, for machines on which other programs compute."""
PRODUCT = (64, 256, 256)
HALVES = {"bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Measured:
    """Seconds on one rank."""

    passes: list[tuple[float, ...]]  # forward and backward, for each of CASES
    alone: float  # the last of CASES while the other ranks wait
    halves: dict[str, float]  # a product in half precision over one in float32
    updates: list[float]  # Adam, for the parameters of the first and the last of CASES
    step: float  # an engine's step, less that of a plain loop
    links: LinkProfile | None


def measure() -> Measured:
    """Time everything on this rank. A collective."""
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


def shape_of(case: Case) -> GPTConfig:
    """The shape of a case's model."""
    return GPTConfig(context=case[1], layers=2, heads=4, width=case[0])


def _batch(case: Case) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (case[2], case[1]), generator=generator)


@dataclass(frozen=True)
class _Clock:
    """The clock that suits a rank."""

    read: Callable[[], float]
    turns: float  # ranks per core, which take turns

    @classmethod
    def of(cls, ranks: int) -> _Clock:
        if torch.get_num_threads() > 1:
            return cls(time.perf_counter, 1.0)  # the process clock would count threads that wait
        return cls(time.process_time, max(1.0, ranks / available_cores()))

    def medians(self, parts_of: Sequence[Callable[[], tuple[float, ...]]]) -> list[tuple[float, ...]]:
        """For each call, the medians over ROUNDS of the mean seconds of its parts, after a warm-up round.

        The calls take turns: if another program computes for a second, that slows one round of each call and
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
        """Median seconds of each call."""

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
    """A function that runs a forward and a backward pass and returns their seconds."""
    model, tokens = GPT(shape_of(case)), _batch(case)

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
    model = GPT(shape_of(case))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return optimizer.step


def _overhead(clock: _Clock) -> float:
    """Seconds that an engine's step takes longer than a plain loop's."""
    case = CASES[0]
    tokens, plain = _batch(case), GPT(shape_of(case))
    optimizer = torch.optim.AdamW(plain.parameters())
    engine = prepare(GPT(shape_of(case)), torch.optim.AdamW)

    def loop() -> None:
        optimizer.zero_grad()
        loss = cross_entropy(plain(tokens), tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        loss.item()

    whole, bare = clock.seconds([partial(engine.step, tokens, tokens), loop])
    return max(0.0, whole - bare)
