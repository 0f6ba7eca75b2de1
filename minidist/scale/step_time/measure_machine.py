"""Measure this machine: the rates that ranks attain while all of them work, and the speed of their links.

Ranks of one machine share its cores, caches and memory, so one rank alone says little about eight. For each
number of ranks, a cluster times the passes of a few small models on all ranks at once, and `comm.cost.fit`
measures their links. Least squares then gives the rates: a pass takes its products at one rate, attention's
products at another, the bytes that it moves at a third, and a moment for each operator.

Source: Williams et al. 2009 for what bounds a device; layer_work.py for the work of the passes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minidist import comm
from minidist._files import write_whole
from minidist.comm.cost import fit
from minidist.comm.cost.links import PROFILES, Link, LinkProfile, SharedMemoryCost
from minidist.comm.launching.cluster import Cluster
from minidist.comm.launching.cores import available_cores
from minidist.model.configs import GPTConfig
from minidist.model.gpt import GPT
from minidist.model.loss import cross_entropy
from minidist.parallel.engine.prepare import prepare
from minidist.parallel.training import bf16_on_cpu
from minidist.scale.memory.parameter_sizes import on_rank
from minidist.scale.memory.state_bytes import ADAM
from minidist.scale.step_time.hardware import Crowd, Hardware, Rates
from minidist.scale.step_time.layer_work import LayerWork

RANKS = (1, 2, 4, 8)
FORMAT = 1

Case = tuple[int, int, int]
"""Width, tokens and rows of a GPT with two blocks."""
CASES: tuple[Case, ...] = ((64, 64, 2), (64, 64, 16), (128, 512, 2), (256, 128, 1), (256, 128, 4))
"""In some cases calls dominate the passes, in others products, in one attention."""
ENOUGH = 0.05
"""Seconds for which each case is repeated in a round."""
ROUNDS = 7
PATIENCE = 12.0
"""Seconds after which no further round begins, for machines on which other programs compute."""
PRODUCT = (64, 256, 256)
HALVES = {"bf16": "bfloat16", "fp16": "float16"}

Timed = Callable[[], tuple[float, ...]]
"""A call that returns the seconds of its parts."""


def this_machine(ranks: Sequence[int] = RANKS, path: str | Path | None = None) -> Hardware:
    """Measure this machine with each of these numbers of ranks.

    Each number takes some seconds, more where ranks share cores.

    Args:
        ranks: numbers of ranks; figures for other numbers are scaled from the nearest.
        path: a file that keeps the figures; numbers that it has are not measured again.

    Raises:
        ValueError: there are no numbers of ranks, or the file holds something else.
        OSError: the file cannot be written.
    """
    wanted = sorted(set(ranks))
    if not wanted or wanted[0] < 1:
        raise ValueError(f"ranks are {list(ranks)}; give numbers of at least 1, such as (1, 2, 4)")
    kept = load(path) if path is not None and Path(path).exists() else None
    crowds = {} if kept is None else dict(kept.crowds)
    missing = [count for count in wanted if count not in crowds]
    if kept is not None and not missing:
        return kept
    bf16_on_cpu.avoid()  # the ranks time a product in it
    for count in missing:
        with Cluster(count, timeout=180.0) as cluster:
            everyones: list[Measured] = cluster.run(measure)
        slow = statistics.fmean(sum(each.passes[-1]) for each in everyones)
        alone = min(1.0, everyones[0].alone / slow)
        crowds[count] = Crowd(count, solve(everyones), everyones[0].links, alone)
    found = _machine({count: crowds[count] for count in sorted(crowds)})
    if path is not None:
        save(found, path)
    return found


def _machine(crowds: dict[int, Crowd]) -> Hardware:
    from minidist.kernels.measure import roofline  # imports a compiler, so only here

    peaks = roofline.measure()
    links = next((each.links for each in crowds.values() if each.links), None)
    peak = {"fp32": float(peaks.all.peak("float32"))}
    first = next(iter(crowds.values()))
    for name in HALVES:  # no peak is measured, so what all ranks attain together stands for it
        peak[name] = max(1.0, *(each.ranks * each.rates.flops[name] for each in crowds.values()))
    return Hardware(
        "this machine",
        f"measured: {peaks.machine}, {peaks.cores} cores, {peaks.date}",
        peak,
        first.rates.flops["fp32"] / peak["fp32"],
        f"measured in passes of small GPTs, {', '.join(map(str, crowds))} ranks at a time",
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        float(peaks.all.bandwidth),
        max(64, *crowds),
        links or LinkProfile("none", "one rank", {"messages": Link(1e-4, 1e-9)}, 1e-10),
        PROFILES["25gbe"],
        overlaps=False,
        cores=peaks.cores,
        crowds=crowds,
    )


# On each rank: what passes, updates and products take.


@dataclasses.dataclass(frozen=True)
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
    clock = _Clock(ranks)
    comm.barrier()
    passes = clock.medians([_passes(case, clock) for case in CASES])
    comm.barrier()
    alone = sum(clock.medians([_passes(CASES[-1], clock)])[0]) / clock.turns if comm.rank() == 0 else 0.0
    comm.barrier()
    m, k, n = PRODUCT
    names = ("float32", *HALVES.values())
    pairs = [[torch.ones(size, dtype=getattr(torch, name)) for size in ((m, k), (k, n))] for name in names]
    product, *in_half = clock.seconds([partial(torch.mm, *pair) for pair in pairs])
    halves = {name: half / product for name, half in zip(HALVES, in_half, strict=True)}
    updates = clock.seconds([_update(case) for case in (CASES[0], CASES[-1])])
    step = _overhead(clock) if ranks == 1 else 0.0
    return Measured(passes, alone, halves, updates, step, fit(rounds=9) if ranks > 1 else None)


class _Clock:
    """The clock that suits a rank.

    For a rank with one thread that is the process clock, which stops while another program has the core. If
    there are more ranks than cores, they take turns, so its times are multiplied by the ranks per core. A
    rank with several threads is timed by the wall clock, since the other one would count threads that wait.
    """

    def __init__(self, ranks: int) -> None:
        several = torch.get_num_threads() > 1
        self.read = time.perf_counter if several else time.process_time
        self.turns = 1.0 if several else max(1.0, ranks / available_cores())

    def medians(self, calls: Sequence[Timed]) -> list[tuple[float, ...]]:
        """For each call, the medians over ROUNDS of the mean seconds of its parts, after a warm-up round.

        The calls take turns: if another program computes for a second, that slows one round of each call and
        not all rounds of one.
        """
        rounds, started = list[list[list[float]]](), time.perf_counter()
        for number in range(ROUNDS + 1):
            rounds.append([self._means(call, ENOUGH if number else ENOUGH / 2) for call in calls])
            if number and time.perf_counter() - started > PATIENCE:
                break
        return [
            tuple(map(statistics.median, zip(*own, strict=True))) for own in zip(*rounds[1:], strict=True)
        ]

    def seconds(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        """Median seconds of each call."""

        def timed(call: Callable[[], object]) -> tuple[float]:
            begun = self.read()
            call()
            return (self.read() - begun,)

        return [each for (each,) in self.medians([partial(timed, call) for call in calls])]

    def _means(self, run: Timed, enough: float) -> list[float]:
        found, begun = [run()], self.read()
        while self.read() - begun < enough:
            found.append(run())
        return [self.turns * statistics.fmean(part) for part in zip(*found, strict=True)]


def _shape(case: Case) -> GPTConfig:
    return GPTConfig(context=case[1], layers=2, heads=4, width=case[0])


def _batch(case: Case) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (case[2], case[1]), generator=generator)


def _passes(case: Case, clock: _Clock) -> Timed:
    """A function that runs a forward and a backward pass and returns their seconds."""
    model, tokens = GPT(_shape(case)), _batch(case)

    def run() -> tuple[float, float]:
        model.zero_grad()
        start = clock.read()
        loss = cross_entropy(model(tokens), tokens)
        middle = clock.read()
        loss.backward()  # type: ignore[no-untyped-call]
        return middle - start, clock.read() - middle

    return run


def _update(case: Case) -> Callable[[], object]:
    model = GPT(_shape(case))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return optimizer.step


def _overhead(clock: _Clock) -> float:
    """Seconds that an engine's step takes longer than a plain loop's."""
    case = CASES[0]
    tokens, plain = _batch(case), GPT(_shape(case))
    optimizer = torch.optim.AdamW(plain.parameters())
    engine = prepare(GPT(_shape(case)), torch.optim.AdamW)

    def loop() -> None:
        optimizer.zero_grad()
        loss = cross_entropy(plain(tokens), tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        loss.item()

    whole, bare = clock.seconds([partial(engine.step, tokens, tokens), loop])
    return max(0.0, whole - bare)


# From these seconds to rates.


def solve(everyones: Sequence[Measured]) -> Rates:
    """The rates that explain the measured times with the least relative error."""

    def equations() -> Iterator[list[float]]:
        for number, case in enumerate(CASES):
            work = LayerWork(_shape(case), case[2], case[1], case[1]).layers(range(4))
            for backward, each in enumerate((work.forward, work.backward)):
                took = statistics.fmean(one.passes[number][backward] for one in everyones)
                calls = (0.0, each.calls) if backward else (each.calls, 0.0)
                yield [value / took for value in (each.products, each.attention, each.moved, *calls)]

    product, attention, moved, call, backward_call = nonnegative(list(equations()), [1.0] * 2 * len(CASES))
    rows = []
    for number, case in enumerate((CASES[0], CASES[-1])):
        sizes, took = on_rank(_shape(case)).sizes, statistics.fmean(one.updates[number] for one in everyones)
        rows.append([4.0 * ADAM.passes * sum(sizes) / took, len(sizes) / took])
    memory, tensor = nonnegative(rows, [1.0, 1.0])
    product, moved, memory = max(product, 1e-15), max(moved, 1e-13), max(memory, 1e-13)
    halves = everyones[0].halves
    return Rates(
        {"fp32": 1 / product, **{name: 1 / (product * ratio) for name, ratio in halves.items()}},
        product / attention if attention else 1.0,
        1 / moved,
        1 / memory,
        call,
        backward_call,
        tensor,
        everyones[0].step,
    )


def nonnegative(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Least squares without negative answers: the x >= 0 for which `rows` times x come nearest to `values`.

    A negative rate or latency would predict negative times. With few unknowns every subset can be tried: the
    others are zero, and of the answers without a negative number the one with the least error is taken. The
    algorithm of Lawson and Hanson 1974 ("Solving Least Squares Problems", chapter 23) finds the same.
    """
    matrix, wanted = np.asarray(rows, float), np.asarray(values, float)
    count = matrix.shape[1]
    scale = np.where(norms := np.linalg.norm(matrix, axis=0), norms, 1.0)
    best, least = np.zeros(count), float(wanted @ wanted)
    for size in range(1, count + 1):
        for chosen in map(list, combinations(range(count), size)):
            answer = np.linalg.lstsq(matrix[:, chosen] / scale[chosen], wanted, rcond=None)[0] / scale[chosen]
            error = float(np.sum((matrix[:, chosen] @ answer - wanted) ** 2))
            if (answer >= 0).all() and error < least * (1 - 1e-12):
                best, least = np.zeros(count), error
                best[chosen] = answer
    return [float(value) for value in best]


# The file that keeps a machine's figures.


def save(hardware: Hardware, path: str | Path) -> None:
    """Write a machine's figures to a file, atomically."""
    kept = {"format": FORMAT, "hardware": dataclasses.asdict(hardware)}
    write_whole(Path(path), json.dumps(kept, indent=1))


def load(path: str | Path) -> Hardware:
    """Read a machine that `save` wrote; ValueError if the file holds something else."""
    text = Path(path).read_text(encoding="utf-8")
    try:
        kept = json.loads(text)
        if kept["format"] != FORMAT:
            raise ValueError
        return _hardware(**kept["hardware"])
    except (ValueError, TypeError, LookupError, AttributeError):
        raise ValueError(
            f"{path} does not hold a machine's figures of this version; give another file, or remove it"
        ) from None


def _hardware(rates: Any, inside: Any, between: Any, crowds: Any, **fields: Any) -> Hardware:
    def profile(links: Any, memory: Any, **others: Any) -> LinkProfile:
        each = {name: Link(**link) for name, link in links.items()}
        return LinkProfile(**others, links=each, memory=memory and SharedMemoryCost(**memory))

    def crowd(rates: Any, links: Any, **others: Any) -> Crowd:
        return Crowd(**others, rates=Rates(**rates), links=links and profile(**links))

    return Hardware(
        **fields,
        rates=rates and Rates(**rates),
        inside=profile(**inside),
        between=profile(**between),
        crowds={int(ranks): crowd(**each) for ranks, each in crowds.items()},
    )
