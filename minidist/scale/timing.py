"""What the ranks of a machine time, while all of them work: passes, updates, links.

Ranks of one thread are timed by the processor's clock, which stands still while another program has the core:
where there are more ranks than cores they take turns, and a pass takes as many times longer. A rank of
several threads is timed by the wall's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from minidist import comm
from minidist.comm.cost import fit
from minidist.comm.cost_profiles import Profile
from minidist.model.configs import GPTConfig
from minidist.model.gpt import GPT
from minidist.model.loss import cross_entropy
from minidist.parallel.prepare import prepare

Case = tuple[int, int, int]
"""Width, tokens and rows of a GPT with two blocks."""
CASES: tuple[Case, ...] = ((64, 64, 2), (64, 64, 16), (128, 64, 4), (256, 128, 1), (256, 128, 4))
"""Some passes are calls mostly, others products."""
ENOUGH = 0.05
"""Seconds for which each is repeated."""
ROUNDS = 3
PATIENCE = 1.0
"""Seconds after which no further round begins, on a machine where others compute."""
PRODUCT = (64, 256, 256)
HALVES = {"bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Measured:
    """On one rank: seconds."""

    passes: list[tuple[float, float]]  # forward and backward, for each of CASES
    alone: float  # the last of CASES while the other ranks wait
    halves: dict[str, float]  # of a product in half precision, over one in float32
    updates: list[float]  # of Adam, for the parameters of the first and of the last of CASES
    step: float  # of an engine's step, less that of a plain loop
    links: Profile | None


def measure() -> Measured:
    """On each rank; a collective."""
    ranks = comm.size()
    clock = _Clock.of(ranks)
    comm.barrier()
    passes = [_passes(case, clock) for case in CASES]
    comm.barrier()
    alone = sum(_passes(CASES[-1], clock)) / clock.turns if comm.rank() == 0 else 0.0
    comm.barrier()
    m, k, n = PRODUCT
    seconds = {}
    for name in ("float32", *HALVES.values()):
        a, b = (torch.ones(size, dtype=getattr(torch, name)) for size in ((m, k), (k, n)))
        seconds[name] = _repeated(clock, lambda a=a, b=b: a @ b)  # type: ignore[misc]
    halves = {name: seconds[dtype] / seconds["float32"] for name, dtype in HALVES.items()}
    updates = [_update(case, clock) for case in (CASES[0], CASES[-1])]
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

    def least(self, run: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
        """Of several parts of a call, the least of ROUNDS means, after a round that warms up."""
        found, started = [], time.perf_counter()
        for number in range(ROUNDS + 1):
            sums, count, begun = None, 0, self.read()
            while not count or self.read() - begun < (ENOUGH if number else ENOUGH / 2):
                parts = run()
                sums = parts if sums is None else tuple(a + b for a, b in zip(sums, parts, strict=True))
                count += 1
            assert sums is not None
            found.append([self.turns * part / count for part in sums])
            if number and time.perf_counter() - started > PATIENCE:
                break
        return tuple(min(part) for part in zip(*found[1:], strict=True))


def _passes(case: Case, clock: _Clock) -> tuple[float, float]:
    """Seconds of a forward and a backward pass, while all ranks run the same."""
    model, tokens = _model(case), _batch(case)

    def run() -> tuple[float, float]:
        for parameter in model.parameters():
            parameter.grad = None
        start = clock.read()
        loss = cross_entropy(model(tokens), tokens)
        middle = clock.read()
        loss.backward()  # type: ignore[no-untyped-call]
        return middle - start, clock.read() - middle

    forward, backward = clock.least(run)
    return forward, backward


def _update(case: Case, clock: _Clock) -> float:
    model = _model(case)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return _repeated(clock, optimizer.step)


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

    return max(0.0, _repeated(clock, lambda: engine.step(tokens, tokens)) - _repeated(clock, loop))


def _repeated(clock: _Clock, run: Callable[[], object]) -> float:
    """Seconds of a call."""

    def timed() -> tuple[float]:
        begun = clock.read()
        run()
        return (clock.read() - begun,)

    return clock.least(timed)[0]
