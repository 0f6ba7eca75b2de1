"""This machine, measured: what ranks attain while all of them work, and how fast they talk.

    python -m minidist.scale.measuring

Ranks of one machine share its cores, caches and memory, so that one alone tells little about eight. For each
number of ranks a cluster of them times the passes of a few small models, all at once; `comm.cost.fit`
measures their links. From the passes follow the rates by least squares: a pass takes its products at one
rate, attention's at another, what it moves at a third, and a moment for each operator.

Source: Williams et al. 2009 for what bounds a device; the passes' work: work.py.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minidist.comm.cost_profiles import PROFILES, Link, Profile
from minidist.scale.hardware_file import load, save
from minidist.scale.rates import Crowd, Hardware, Rates
from minidist.scale.solving import nonnegative
from minidist.scale.work import LayerWork, Passes, Work

RANKS = (1, 2, 4, 8)
CASES = ((64, 64, 2), (64, 64, 16), (128, 64, 4), (256, 128, 1), (256, 128, 4))
"""Width, tokens and rows of GPTs with two blocks: some passes are calls mostly, others products."""
ENOUGH = 0.05
"""Seconds for which each is repeated."""
ROUNDS = 3
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


def this_machine(
    ranks: Sequence[int] = RANKS, path: str | Path | None = None, fresh: bool = False
) -> Hardware:
    """Measure this machine with so many ranks at a time; a few seconds for each number.

    Args:
        ranks: numbers of ranks on it; other numbers are scaled from the nearest.
        path: a file in which the figures are kept, and from which they are read where it has them all.
        fresh: measure though they are kept.

    Raises:
        ValueError: no numbers of ranks; or the file is none of this function's.
        OSError: the file cannot be written.
    """
    wanted = sorted(set(ranks))
    if not wanted or wanted[0] < 1:
        raise ValueError(f"ranks are {list(ranks)}; give numbers of at least 1, such as (1, 2, 4)")
    kept = load(path) if path is not None and Path(path).exists() and not fresh else None
    if kept is not None and set(wanted) <= set(kept.crowds):
        return kept
    found = _machine({count: _crowd(count) for count in wanted})
    if path is not None:
        save(found, path)
    return found


def _crowd(ranks: int) -> Crowd:
    """What so many ranks attain."""
    from minidist.comm.cluster import Cluster

    with Cluster(ranks, timeout=180.0) as cluster:
        everyones: list[Measured] = cluster.run(measure)
    rates = solve(everyones)
    slow = statistics.fmean(sum(each.passes[-1]) for each in everyones)
    return Crowd(ranks, rates, everyones[0].links, min(1.0, everyones[0].alone / slow))


def _machine(crowds: dict[int, Crowd]) -> Hardware:
    from minidist.kernels import roofline

    peaks = roofline.measure()
    links = next((each.links for each in crowds.values() if each.links), None)
    peak = {"fp32": float(peaks.all.peak("float32"))}
    first = next(iter(crowds.values()))
    for name in HALVES:  # no peak of theirs is measured: what they attain stands for it
        peak[name] = max(first.rates.flops[name], 1.0)
    return Hardware(
        "this machine",
        f"measured: {peaks.machine}, {peaks.cores} cores, {peaks.date}",
        peak,
        first.rates.flops["fp32"] / peak["fp32"],
        f"measured in passes of small GPTs, {', '.join(map(str, crowds))} ranks at a time",
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        float(peaks.all.bandwidth),
        max(64, *crowds),
        links or Profile("none", "one rank", {"messages": Link(1e-4, 1e-9)}, 1e-10),
        PROFILES["25gbe"],
        overlaps=False,
        cores=peaks.cores,
        crowds=crowds,
    )


# In the ranks.


def measure() -> Measured:
    """On each rank; a collective."""
    import torch

    from minidist import comm
    from minidist.comm.cost import fit

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


def _model(case: tuple[int, int, int]) -> Any:
    from minidist.model.gpt import GPT

    return GPT(_shape(case))


def _shape(case: tuple[int, int, int]) -> Any:
    from minidist.model.configs import GPTConfig

    return GPTConfig(context=case[1], layers=2, heads=4, width=case[0])


def _batch(case: tuple[int, int, int]) -> Any:
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (case[2], case[1]), generator=generator)


@dataclass(frozen=True)
class _Clock:
    """Seconds as a rank sees them."""

    read: Callable[[], float]
    turns: float  # ranks a core, which take turns

    @classmethod
    def of(cls, ranks: int) -> _Clock:
        import torch

        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if torch.get_num_threads() > 1:
            return cls(time.perf_counter, 1.0)  # threads that wait for each other take processor time, too
        return cls(time.process_time, max(1.0, ranks / cores))

    def least(self, run: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
        """Of several parts of a call, the least of ROUNDS means, after a round that warms up."""
        found = []
        for number in range(ROUNDS + 1):
            sums, count, begun = None, 0, self.read()
            while not count or self.read() - begun < (ENOUGH if number else ENOUGH / 2):
                parts = run()
                sums = parts if sums is None else tuple(a + b for a, b in zip(sums, parts, strict=True))
                count += 1
            assert sums is not None
            found.append([self.turns * part / count for part in sums])
        return tuple(min(part) for part in zip(*found[1:], strict=True))


def _passes(case: tuple[int, int, int], clock: _Clock) -> tuple[float, float]:
    """Seconds of a forward and a backward pass, while all ranks run the same."""
    from minidist.model.loss import cross_entropy

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


def _update(case: tuple[int, int, int], clock: _Clock) -> float:
    import torch

    model = _model(case)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return _repeated(clock, optimizer.step)


def _overhead(clock: _Clock) -> float:
    """Seconds of an engine's step beside what a plain loop does."""
    import torch

    from minidist.model.loss import cross_entropy
    from minidist.parallel.prepare import prepare

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


# From seconds to rates.


def solve(everyones: Sequence[Measured]) -> Rates:
    """The rates that explain what the ranks measured, each time as a share of itself."""
    rows, seconds = [], []
    for number, case in enumerate(CASES):
        work = _work(case)
        for backward, each in enumerate((work.forward, work.backward)):
            took = statistics.fmean(one.passes[number][backward] for one in everyones)
            calls = (0.0, each.calls) if backward else (each.calls, 0.0)
            rows.append([value / took for value in (each.products, each.attention, each.moved, *calls)])
            seconds.append(1.0)
    product, attention, moved, call, backward_call = nonnegative(rows, seconds)
    small, large = (_work_of_update(case) for case in (CASES[0], CASES[-1]))
    updates = [statistics.fmean(one.updates[i] for one in everyones) for i in range(2)]
    rows = [[value / took for value in work] for work, took in zip((small, large), updates, strict=True)]
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


def _work(case: tuple[int, int, int]) -> Passes:
    return LayerWork(_shape(case), case[2], case[1], case[1]).layers(range(4))


def _work_of_update(case: tuple[int, int, int]) -> tuple[float, float]:
    """Bytes that Adam moves, and tensors."""
    from minidist.scale import tensors
    from minidist.scale.gradients import ELEMENT_PASSES

    sizes = [size for layer in tensors.layers(_shape(case)) for size in layer]
    return 4.0 * ELEMENT_PASSES["adam"] * sum(sizes), float(len(sizes))


def main() -> int:
    """Measure, and print what was found."""
    found = this_machine()
    print(f"{found.source}; {found.peak['fp32'] / 1e9:.0f} GFLOP/s in all")
    for count, crowd in found.crowds.items():
        rates, micro = crowd.rates, 1e6
        print(
            f"{count} ranks: products {rates.flops['fp32'] / 1e9:.1f} GFLOP/s (attention "
            f"{rates.attention:.2f} of that), {rates.moved / 1e9:.1f} GB/s between them, "
            f"{micro * rates.call:.1f} and {micro * rates.backward_call:.1f} us an operator; "
            f"update {rates.memory / 1e9:.1f} GB/s, {micro * rates.tensor:.0f} us a tensor; "
            f"alone {crowd.alone:.2f}; bfloat16 "
            f"{rates.flops['bf16'] / rates.flops['fp32']:.2f}"
        )
    return 0


__all__ = ["RANKS", "Measured", "Work", "measure", "solve", "this_machine"]

if __name__ == "__main__":
    sys.exit(main())
