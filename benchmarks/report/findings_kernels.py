"""Findings on single operations: the ladders of matrix products beside the vendor's, and the collectives."""

from __future__ import annotations

import statistics

from minidist.benchmarks.harness import columns
from minidist.benchmarks.harness.columns import Entry
from minidist.benchmarks.harness.results import Results
from minidist.benchmarks.report import ladder, verdicts
from minidist.benchmarks.report.finding import Finding, Number, finding


def cpu_ladder(entries: list[Entry], found: Results) -> Finding | None:
    """From the first rung to the last on one core, and where that stands beside BLAS."""
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
        Number(f"{columns.number(first['extra_info']['gflops'])} GFLOP/s", first),
        f" ({_rung(first)}) to ",
        Number(f"{columns.number(extra['gflops'])} GFLOP/s", last),
        f" ({_rung(last)}, n = {extra['size']:,})",
    ]
    if columns.verdict(last) == "undecided":
        words.append(f": beside {peer} {verdicts.UNDECIDED}")
    elif "percent_of_peer" in extra:
        words += [
            ", which is ",
            Number(f"{columns.number(extra['percent_of_peer'])}%", last),
            f" of {peer}'s speed",
        ]
    if "percent_of_peak" in extra:
        words += [
            " and ",
            Number(f"{columns.number(extra['percent_of_peak'])}%", last),
            " of what the core can do",
        ]
    return finding("ladders", *words, ".")


def _rung(entry: Entry) -> str:
    number, _, idea = str(entry["extra_info"]["series"]).partition(" ")
    return f"rung {number}, {idea}"


def cuda_ladder(entries: list[Entry], found: Results) -> Finding | None:
    """The rung that comes nearest to the vendor's product, in each arithmetic."""
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
    words: list[str | Number] = ["The CUDA ladder, written in Python, comes to "]
    for index, (percent, entry, place) in enumerate(sorted(best.values(), key=lambda each: -each[0])[:3]):
        words += [", to " if index else "", Number(f"{columns.number(percent)}%", entry), f" ({place})"]
    return finding("ladders", *words, " of torch.matmul's speed in the same arithmetic.")


def collectives(entries: list[Entry], found: Results) -> Finding | None:
    """The largest tensor beside the peer, and how well the model of cost predicts."""
    beside = [
        entry
        for entry in entries
        if entry["suite"] == "bench_collectives" and {"ratio", "bytes", "ranks"} <= entry["extra_info"].keys()
    ]
    if not beside:
        return None
    fewest = min(entry["extra_info"]["ranks"] for entry in beside)
    most = max(e["extra_info"]["bytes"] for e in beside if e["extra_info"]["ranks"] == fewest)
    same = [e for e in beside if (e["extra_info"]["ranks"], e["extra_info"]["bytes"]) == (fewest, most)]
    counted = verdicts.tally(beside)
    decided = verdicts.tally(same)
    example = decided.best or decided.worst
    words: list[str | Number] = []
    at = f"{columns.binary_size(most)} on {fewest} ranks"
    if example is None:
        words.append(
            f"For {at} there is {verdicts.UNDECIDED} between {same[0]['extra_info']['peer']} and ours"
        )
    else:
        words += [
            f"{columns.label(example).partition(',')[0].capitalize()} of {at} takes ",
            Number(columns.times(example["extra_info"]["ratio"]), example),
            f" of {example['extra_info']['peer']}'s time",
        ]
    words.append(
        f"; of all {len(beside)} comparisons {len(counted.faster)} are faster, {len(counted.slower)} slower "
        f"and {len(counted.undecided)} cannot be told apart"
    )
    predicted = [entry for entry in entries if "predicted" in entry["extra_info"] and _collective(entry)]
    if predicted:
        off = statistics.median(
            abs(entry["extra_info"]["predicted"] / entry["stats"]["median"] - 1) for entry in predicted
        )
        words.append(
            f", and the model of cost is off by {100 * off:.0f}% in the median of {len(predicted)} times"
        )
    return finding("collectives", *words, ".", rests_on=(*beside, *predicted))


def _collective(entry: Entry) -> bool:
    return bool(entry["suite"] == "bench_collectives")
