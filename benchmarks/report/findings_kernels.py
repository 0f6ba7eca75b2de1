"""Findings on single operations: the ladders of matrix products, and the collectives."""

from __future__ import annotations

import statistics

from minidist.benchmarks.harness import columns, formats
from minidist.benchmarks.harness.columns import Entry
from minidist.benchmarks.harness.results import Results
from minidist.benchmarks.report import ladder, verdicts
from minidist.benchmarks.report.finding import Finding, Number, finding


def cpu_ladder(entries: list[Entry], found: Results) -> Finding | None:
    """Compare the first rung with the last on one core, and the last with BLAS."""
    rungs = [
        entry
        for entry in entries
        if entry["suite"] == "bench_cpu_matmul" and {"series", "size"} <= entry["extra_info"].keys()
    ]
    largest: dict[str, Entry] = {}
    for entry in sorted(rungs, key=lambda entry: entry["extra_info"]["size"]):
        largest[entry["extra_info"]["series"]] = entry
    if len(largest) < 2:
        return None
    first, last = largest[min(largest)], largest[max(largest)]
    extra, peer = last["extra_info"], last["extra_info"].get("peer", "the library")
    words: list[str | Number] = [
        "On one core the ladder of matrix products climbs from ",
        Number(f"{formats.number(first['extra_info']['gflops'])} GFLOP/s", first),
        f" ({_rung(first)}) to ",
        Number(f"{formats.number(extra['gflops'])} GFLOP/s", last),
        f" ({_rung(last)}, n = {extra['size']:,})",
    ]
    if columns.verdict(last) == "undecided":
        words.append(f", with {verdicts.UNDECIDED} against {peer}")
    elif "percent_of_peer" in extra:
        words += [
            ", which is ",
            Number(f"{formats.number(extra['percent_of_peer'])}%", last),
            f" of {peer}'s speed",
        ]
    if "percent_of_peak" in extra:
        words += [
            " and ",
            Number(f"{formats.number(extra['percent_of_peak'])}%", last),
            " of the core's peak",
        ]
    return finding("ladders", *words, ".")


def _rung(entry: Entry) -> str:
    number, _, idea = str(entry["extra_info"]["series"]).partition(" ")
    return f"rung {number}, {idea}"


def cuda_ladder(entries: list[Entry], found: Results) -> Finding | None:
    """Find the rung that comes nearest to the vendor's product, in each arithmetic."""
    climbed = ladder.of("", found)
    if climbed is None:
        return None
    best: dict[str, tuple[float, Entry, str]] = {}
    for row in climbed.rows:
        for size in row.entries:
            percent = row.percent(size)
            if percent is not None and percent > best.get(str(row.dtype), (0.0,))[0]:
                best[str(row.dtype)] = percent, row.entries[size], f"{row.name}, n = {size:,}"
    if not best:
        return None
    words: list[str | Number] = ["The CUDA ladder, written in Python, reaches "]
    for index, (percent, entry, rung) in enumerate(sorted(best.values(), key=lambda each: -each[0])[:3]):
        words += [", " if index else "", Number(f"{formats.number(percent)}%", entry), f" ({rung})"]
    return finding("ladders", *words, " of torch.matmul's speed in the same arithmetic.")


def collectives(entries: list[Entry], found: Results) -> Finding | None:
    """Compare the largest tensor with the peer, count all comparisons, and judge the cost model."""
    compared = [
        entry
        for entry in entries
        if entry["suite"] == "bench_collectives" and {"ratio", "bytes", "ranks"} <= entry["extra_info"].keys()
    ]
    if not compared:
        return None
    fewest = min(entry["extra_info"]["ranks"] for entry in compared)
    most = max(e["extra_info"]["bytes"] for e in compared if e["extra_info"]["ranks"] == fewest)
    same = [e for e in compared if (e["extra_info"]["ranks"], e["extra_info"]["bytes"]) == (fewest, most)]
    counted = verdicts.tally(compared)
    decided = verdicts.tally(same)
    example = decided.best or decided.worst
    words: list[str | Number] = []
    at = f"{formats.binary_size(most)} on {fewest} ranks"
    if example is None:
        words.append(
            f"For {at} there is {verdicts.UNDECIDED} between minidist and {same[0]['extra_info']['peer']}"
        )
    else:
        words += [
            f"{columns.label(example).partition(',')[0].capitalize()} of {at} takes ",
            Number(formats.times(example["extra_info"]["ratio"]), example),
            f" of {example['extra_info']['peer']}'s time",
        ]
    words.append(
        f"; of all {len(compared)} comparisons minidist wins {len(counted.faster)} and loses "
        f"{len(counted.slower)}, and {len(counted.undecided)} are undecided"
    )
    predicted = [entry for entry in entries if "predicted" in entry["extra_info"] and _collective(entry)]
    if predicted:
        off = statistics.median(
            abs(entry["extra_info"]["predicted"] / entry["stats"]["median"] - 1) for entry in predicted
        )
        words.append(f"; the cost model's median error over {len(predicted)} times is {100 * off:.0f}%")
    return finding("collectives", *words, ".", rests_on=(*compared, *predicted))


def _collective(entry: Entry) -> bool:
    return bool(entry["suite"] == "bench_collectives")
