"""The card that the report opens with: what one reader learns about one machine, in a few large figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minidist.benchmarks.harness import columns, formats, results
from minidist.benchmarks.harness.columns import Entry
from minidist.benchmarks.harness.results import Results
from minidist.benchmarks.report import ladders
from minidist.benchmarks.report.ladders import Climbed

Rate = Callable[[Sequence[Mapping[str, Any]]], float]


def facts(found: Results) -> dict[str, str]:
    """Return what was learned about a machine: names, and figures with their units. "" where not measured."""
    info, entries = found["machine_info"], results.newest(found)
    cores = info["cores"]
    single = [rung for entry in entries if (rung := ladders.rung_of(entry))]
    vector, matrix = (
        [each for each in single if (each.number == ladders.MATRIX_UNIT) == unit] for unit in (False, True)
    )
    return {
        "Cores": str(cores),
        "Caches": "; ".join(f"{name} {size}" for name, size in info["caches"].items() if name != "L1i"),
        "GPU": _gpus(info["gpus"] or []),
        "Vector unit": _per_cores("GFLOP/s", ladders.peak, vector, cores),
        "Matrix unit": _per_cores("bf16 GFLOP/s", ladders.peak, matrix, cores),
        "Memory": _per_cores("GB/s", ladders.bandwidth, vector, cores),
        "All-reduce on 2 ranks": _all_reduce(entries),
        "Fastest layout here": fastest_layout(entries),
    }


def _gpus(gpus: Sequence[dict[str, Any]]) -> str:
    if not gpus:
        return ""
    first, many = gpus[0], f"{len(gpus)} x " if len(gpus) > 1 else ""
    memory = f", {first['memory_bytes'] / 2**30:.0f} GiB" if first["memory_bytes"] else ""
    return f"{many}{first['name']}{memory}, compute capability {first['compute_capability']}"


def _per_cores(unit: str, of: Rate, products: Sequence[Climbed], cores: int) -> str:
    """Say a rate of one core, and of all of them if both were measured."""
    words = {False: "on one core", True: f"on {cores} cores"}
    known = [each for each in products if "percent_of_peak" in each.entry["extra_info"]]
    measured = {which: [e.entry["extra_info"] for e in known if e.all_cores == which] for which in words}
    rates = {words[which]: of(each) for which, each in measured.items() if each}
    return "; ".join(f"{formats.number(rate)} {unit} {which}" for which, rate in rates.items() if rate)


def _all_reduce(entries: Sequence[Entry]) -> str:
    """Say how many microseconds the smallest and the largest all-reduce of two ranks took."""
    timed = {
        entry["extra_info"]["bytes"]: entry["stats"]["median"]
        for entry in entries
        if entry["suite"] in ("bench_headline", "bench_collectives")
        and {"bytes", "ratio"} <= entry["extra_info"].keys()
        and entry["extra_info"].get("ranks") == 2
        and columns.label(entry).startswith(("all-reduce in shared memory", "all-reduce, "))
    }
    ends = sorted(timed)[:1] + sorted(timed)[1:][-1:]
    return "; ".join(f"{1e6 * timed[size]:,.0f} µs for {formats.binary_size(size)}" for size in ends)


def fastest_layout(entries: Sequence[Entry]) -> str:
    """Name the table's fastest layout on several ranks, beside one process in the same rounds."""
    rows = [
        entry
        for entry in entries
        if {"strategy", "over_yardstick", "ranks"} <= entry["extra_info"].keys()
        and entry["extra_info"]["ranks"] > 1
    ]
    if not rows:
        return ""
    best = min(rows, key=lambda entry: float(entry["extra_info"]["over_yardstick"]))
    extra = best["extra_info"]
    ratio = extra["over_yardstick"]
    than = (
        "as fast as one process"
        if columns.undecided(best, "over_yardstick")
        else (f"{formats.times(ratio)} of one process's time")
    )
    time = formats.seconds(best["stats"]["median"])
    return f"{extra['strategy']} on {extra['ranks']} ranks; {time} a step; {than}"
