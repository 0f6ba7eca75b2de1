"""Measure this machine: the rates that ranks attain while all of them work, and the speed of their links.

    python -m minidist.scale.time.measure_machine

Ranks of one machine share its cores, caches and memory, so one rank alone says little about eight. For each
number of ranks, a cluster times the passes of a few small models on all ranks at once (rank_timing.py), and
`comm.cost.fit` measures their links. Least squares then gives the rates: a pass takes its products at one
rate, attention's products at another, the bytes that it moves at a third, and a moment for each operator.

Source: Williams et al. 2009 for what bounds a device; layer_work.py for the work of the passes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from minidist.comm.cost.links import PROFILES, Link, LinkProfile, SharedMemoryCost
from minidist.comm.launching.cluster import Cluster
from minidist.parallel.training import bf16_on_cpu
from minidist.scale.memory import parameter_sizes
from minidist.scale.time.gradient_exchange import ELEMENT_PASSES
from minidist.scale.time.layer_work import LayerWork, PassWork
from minidist.scale.time.rank_timing import CASES, HALVES, Case, Measured, measure, shape_of
from minidist.scale.time.rates import Crowd, Hardware, Rates

RANKS = (1, 2, 4, 8)
FORMAT = 1


def this_machine(
    ranks: Sequence[int] = RANKS, path: str | Path | None = None, fresh: bool = False
) -> Hardware:
    """Measure this machine with each of these numbers of ranks.

    Each number takes some seconds, more where ranks share cores.

    Args:
        ranks: numbers of ranks; figures for other numbers are scaled from the nearest.
        path: a file that keeps the figures; numbers that it has are not measured again.
        fresh: measure again although the file has them.

    Raises:
        ValueError: there are no numbers of ranks, or the file holds something else.
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
    crowds |= {count: _measure_crowd(count) for count in missing}
    found = _machine({count: crowds[count] for count in sorted(crowds)})
    if path is not None:
        save(found, path)
    return found


def _measure_crowd(ranks: int) -> Crowd:
    """Measure what so many ranks attain."""
    bf16_on_cpu.avoid()  # the ranks time a product in it
    with Cluster(ranks, timeout=180.0) as cluster:
        everyones: list[Measured] = cluster.run(measure)
    rates = solve(everyones)
    slow = statistics.fmean(sum(each.passes[-1]) for each in everyones)
    return Crowd(ranks, rates, everyones[0].links, min(1.0, everyones[0].alone / slow))


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


def solve(everyones: Sequence[Measured]) -> Rates:
    """The rates that explain the measured times with the least relative error."""
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


def _work(case: Case) -> PassWork:
    return LayerWork(shape_of(case), case[2], case[1], case[1]).layers(range(4))


def _work_of_update(case: Case) -> tuple[float, float]:
    """The bytes that Adam moves, and the number of tensors."""
    sizes = [size for layer in parameter_sizes.layers(shape_of(case)) for size in layer]
    return 4.0 * ELEMENT_PASSES["adam"] * sum(sizes), float(len(sizes))


def save(hardware: Hardware, path: str | Path) -> None:
    """Write a machine's figures to a file, atomically."""
    file = Path(path)
    text = json.dumps({"format": FORMAT, "hardware": dataclasses.asdict(hardware)}, indent=1)
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(file)


def load(path: str | Path) -> Hardware:
    """Read a machine that `save` wrote; ValueError if the file holds something else."""
    text = Path(path).read_text(encoding="utf-8")
    try:
        kept = json.loads(text)
        if kept["format"] != FORMAT:
            raise ValueError
        return _hardware(kept["hardware"])
    except (ValueError, TypeError, LookupError, AttributeError):
        raise ValueError(
            f"{path} does not hold a machine's figures of this version; give another file, or remove it"
        ) from None


def _hardware(fields: dict[str, Any]) -> Hardware:
    crowds = {int(ranks): _crowd(each) for ranks, each in fields["crowds"].items()}
    rates = None if fields["rates"] is None else Rates(**fields["rates"])
    links = {name: _profile(fields[name]) for name in ("inside", "between")}
    return Hardware(**{**fields, **links, "crowds": crowds, "rates": rates})


def _crowd(fields: dict[str, Any]) -> Crowd:
    links = None if fields["links"] is None else _profile(fields["links"])
    return Crowd(**{**fields, "rates": Rates(**fields["rates"]), "links": links})


def _profile(fields: dict[str, Any]) -> LinkProfile:
    links = {name: Link(**each) for name, each in fields["links"].items()}
    memory = None if fields["memory"] is None else SharedMemoryCost(**fields["memory"])
    return LinkProfile(**{**fields, "links": links, "memory": memory})


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure this machine and print the figures."""
    argparse.ArgumentParser(
        prog="python -m minidist.scale.time.measure_machine",
        description="Measure what 1, 2, 4 and 8 ranks of this machine attain while all of them work.",
    ).parse_args(arguments)
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
