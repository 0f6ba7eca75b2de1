"""This machine, measured: what ranks attain while all of them work, and how fast they talk.

    python -m minidist.scale.time.measure_machine

Ranks of one machine share its cores, caches and memory, so that one alone tells little about eight. For each
number of ranks a cluster of them times the passes of a few small models, all at once; `comm.cost.fit`
measures their links. From the passes follow the rates by least squares: a pass takes its products at one
rate, attention's at another, what it moves at a third, and a moment for each operator.

Source: Williams et al. 2009 for what bounds a device; the passes' work: layer_work.py.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from minidist.comm.cost.links import PROFILES, Link, LinkProfile
from minidist.comm.launching.cluster import Cluster
from minidist.scale.memory import parameter_sizes
from minidist.scale.time.gradient_exchange import ELEMENT_PASSES
from minidist.scale.time.hardware_file import load, save
from minidist.scale.time.layer_work import LayerWork, PassWork
from minidist.scale.time.least_squares import nonnegative
from minidist.scale.time.rank_timing import CASES, HALVES, Case, Measured, measure, shape_of
from minidist.scale.time.rates import Crowd, Hardware, Rates

RANKS = (1, 2, 4, 8)


def this_machine(
    ranks: Sequence[int] = RANKS, path: str | Path | None = None, fresh: bool = False
) -> Hardware:
    """Measure this machine with so many ranks at a time.

    It takes some seconds for each number, more where ranks share cores.

    Args:
        ranks: numbers of ranks on it; other numbers are scaled from the nearest.
        path: a file in which the figures are kept; what it has is not measured again.
        fresh: measure though they are kept.

    Raises:
        ValueError: no numbers of ranks; or the file is none of this function's.
        OSError: the file cannot be written.
    """
    wanted = sorted(set(ranks))
    if not wanted or wanted[0] < 1:
        raise ValueError(f"ranks are {list(ranks)}; give numbers of at least 1, such as (1, 2, 4)")
    kept = load(path) if path is not None and Path(path).exists() and not fresh else None
    crowds = {} if kept is None else dict(kept.crowds)
    missing = [count for count in wanted if count not in crowds]
    if kept is not None and not missing:
        return kept
    crowds |= {count: _crowd(count) for count in missing}
    found = _machine({count: crowds[count] for count in sorted(crowds)})
    if path is not None:
        save(found, path)
    return found


def _crowd(ranks: int) -> Crowd:
    """What so many ranks attain."""
    with Cluster(ranks, timeout=180.0) as cluster:
        everyones: list[Measured] = cluster.run(measure)
    rates = solve(everyones)
    slow = statistics.fmean(sum(each.passes[-1]) for each in everyones)
    return Crowd(ranks, rates, everyones[0].links, min(1.0, everyones[0].alone / slow))


def _machine(crowds: dict[int, Crowd]) -> Hardware:
    from minidist.kernels.measure import roofline  # which imports a compiler, for this function alone

    peaks = roofline.measure()
    links = next((each.links for each in crowds.values() if each.links), None)
    peak = {"fp32": float(peaks.all.peak("float32"))}
    first = next(iter(crowds.values()))
    for name in HALVES:  # no peak of theirs is measured: what all ranks attain together stands for it
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


def _work(case: Case) -> PassWork:
    return LayerWork(shape_of(case), case[2], case[1], case[1]).layers(range(4))


def _work_of_update(case: Case) -> tuple[float, float]:
    """Bytes that Adam moves, and tensors."""
    sizes = [size for layer in parameter_sizes.layers(shape_of(case)) for size in layer]
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


if __name__ == "__main__":
    sys.exit(main())
