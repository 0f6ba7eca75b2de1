"""The findings: short sentences about one machine, computed from its results, for a reader in a hurry.

Each subject makes a finding, or None if the results lack the figures for it. No sentence has more than
`LONGEST` words, and none names a class or a function. A finding says so if the spread leaves it open.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from minidist.benchmarks.harness import columns, formats, results
from minidist.benchmarks.harness import describe_machine as machine
from minidist.benchmarks.harness.columns import Entry
from minidist.benchmarks.harness.results import Results
from minidist.benchmarks.report import decided_comparisons as verdicts
from minidist.benchmarks.report import ladders
from minidist.benchmarks.report.chapters import chapter_of
from minidist.benchmarks.report.pieces import Finding, Number, Word

LONGEST = 20
MOST = 8


def findings(slug: str, found: Results, most: int = MOST) -> list[Finding]:
    """Return at most `most` findings from a machine's results; another machine's say whose they are."""
    entries, info = results.newest(found), found["machine_info"]
    made = [each for subject in SUBJECTS if (each := subject(entries, found)) is not None]
    title = machine.title(info) if info.get("another") else ""
    return [replace(each, slug=slug, machine=title) for each in made[:most]]


def finding(chapter: str, *words: Word, rests_on: Sequence[Entry] = ()) -> Finding:
    """Make a finding that rests on the results of its numbers and on those in `rests_on`."""
    named = [word.entry for word in words if isinstance(word, Number)]
    others = [entry for entry in rests_on if not any(entry is each for each in named)]
    return Finding(words, (*named, *others), chapter)


def cpu_ladder(entries: list[Entry], found: Results) -> Finding | None:
    """Compare the first rung with the last on one core, and the last with BLAS."""
    everything = ladders.climbed(entries)
    rungs = [rung for rung in everything if not rung.all_cores]
    if len(rungs) < 2:
        return None
    first, last = rungs[0].entry, rungs[-1].entry
    extra = last["extra_info"]
    words: list[Word] = [
        "On one core, matrix products climb from ",
        Number(f"{formats.number(rungs[0].gflops)} GFLOP/s", first),
        f" at rung {rungs[0].number} to ",
        Number(f"{formats.number(rungs[-1].gflops)} GFLOP/s", last),
        f" at rung {rungs[-1].number}. ",
    ]
    if columns.verdict(last) == "undecided":
        words.append("The last rung and NumPy show no difference beyond the spread. ")
    elif "percent_of_peer" in extra:
        share = Number(f"{formats.number(extra['percent_of_peer'])}%", last)
        words += ["That is ", share, " of NumPy's speed. "]
    if "percent_of_peak" in extra:
        share = Number(f"{formats.number(extra['percent_of_peak'])}%", last)
        words += ["The core's peak is used to ", share, "."]
    for rung in everything:
        if rung.number == ladders.MATRIX_UNIT:
            rate = Number(f"{formats.number(rung.gflops)} GFLOP/s", rung.entry)
            words += [" The matrix unit reaches ", rate, " in bf16."]
    return finding("ladders", *words)


def cuda_ladder(entries: list[Entry], found: Results) -> Finding | None:
    """Find the rung that comes nearest to the vendor's product, in each arithmetic."""
    climbed = ladders.cuda_ladder("", found)
    best: dict[str, tuple[float, Entry, str]] = {}
    for row in climbed.rows if climbed else ():
        for size, entry in row.entries.items():
            percent = row.percent(size)
            if percent is not None and percent > best.get(str(row.dtype), (0.0,))[0]:
                best[str(row.dtype)] = percent, entry, formats.kind_name(str(row.dtype))
    if not best:
        return None
    words: list[Word] = ["The CUDA ladder, written in Python, reaches "]
    for index, (percent, entry, kind) in enumerate(sorted(best.values(), key=lambda each: -each[0])[:3]):
        words += [", " if index else "", Number(f"{formats.number(percent)}%", entry), f" in {kind}"]
    return finding("ladders", *words, " of torch's speed.")


def strategies(entries: list[Entry], found: Results) -> Finding | None:
    """Count the training steps that are faster than another library's, and name the two extremes."""
    counted = verdicts.tally(verdicts.strategies(entries))
    many = len(counted.entries)
    if not many:
        return None
    words: list[Word] = [
        f"Of {many} training steps beside another library's, {len(counted.faster)} are faster, "
        f"{len(counted.slower)} slower and {len(counted.undecided)} undecided."
    ]
    for entry in (counted.best, counted.worst):
        if entry is not None:
            words += [
                f" {verdicts.name(entry)[0].upper()}{verdicts.name(entry)[1:]} takes ",
                Number(formats.times(verdicts.ratio(entry)), entry),
                f" of {verdicts.library(entry)}'s time.",
            ]
    return finding("strategies", *words, rests_on=counted.entries)


def zero(entries: list[Entry], found: Results) -> Finding | None:
    """Compare memory and sent bytes of the highest ZeRO stage with plain data parallelism."""
    several = verdicts.zero_stages(entries)
    pairs = [(stages, key) for key, stages in several.items() if 0 in stages and len(stages) > 1]
    if not pairs:
        return None
    stages, (_, ranks) = max(pairs, key=lambda pair: (len(pair[0]), pair[1][1]))
    plain, sharded = stages[0], stages[max(stages)]
    both = (sharded, plain)
    after, before = (Number(formats.size(columns.memory_of(entry) or 0), entry) for entry in both)
    words: list[Word] = [f"On {ranks} ranks ZeRO-{max(stages)} holds ", after]
    words += [" a rank, plain data parallelism ", before, "."]
    if all(entry["extra_info"].get("bytes_per_step") for entry in both):
        less, more = (Number(formats.size(entry["extra_info"]["bytes_per_step"]), entry) for entry in both)
        words += [" A step of it sends ", less, " instead of ", more, "."]
    return finding("zero", *words)


def scaling(entries: list[Entry], found: Results) -> Finding | None:
    """Name the best and the worst strong scaling on at most as many ranks as there are cores."""
    cores = found["machine_info"]["cores"]
    known = [entry for entry in entries if {"efficiency", "scaling"} <= entry["extra_info"].keys()]
    strong = [e for e in known if e["extra_info"]["scaling"] == "strong" and e["extra_info"]["size"] > 1]
    fitting = [entry for entry in strong if entry["extra_info"]["size"] <= cores] or strong
    if not fitting:
        return None
    size = max(entry["extra_info"]["size"] for entry in fitting)
    largest = [entry for entry in fitting if entry["extra_info"]["size"] == size]
    ranked = sorted(largest, key=lambda entry: -entry["extra_info"]["efficiency"])
    where = f" on {cores} core{'s' if cores > 1 else ''}" if size > cores else ""
    words: list[Word] = [f"With one thread a rank, {size} ranks{where} train "]
    for index, entry in enumerate(ranked[:1] + ranked[1:][-1:]):
        rate = Number(f"{entry['extra_info']['efficiency'] * size:.2f} times", entry)
        words += [" and " if index else "", rate, f" ({entry['extra_info']['series']})"]
    words.append(" as fast as one. ")
    if cores > 1:
        words.append("The tables of strategies compare with one process on all cores, so they gain less.")
    return finding("scaling", *words, rests_on=ranked)


def pipelines(entries: list[Entry], found: Results) -> Finding | None:
    """Compare how long ranks wait under each schedule, measured and simulated."""
    words: list[Word] = []
    for entry in entries:
        extra = entry["extra_info"]
        if {"simulated", "measured"} <= extra.get("bubble", {}).keys() and "schedule" in extra:
            waits = Number(f"{100 * extra['bubble']['measured']:.1f}%", entry)
            simulated = f"{100 * extra['bubble']['simulated']:.1f}%"
            name = verdicts.schedule_name(entry)
            words.append(f"{' ' if words else ''}{name[0].upper()}{name[1:]}'s")
            words += [" ranks wait for ", waits, f" of a step; the simulation says {simulated}."]
    return finding("pipelines", *words) if words else None


def recompute(entries: list[Entry], found: Results) -> Finding | None:
    """Name the price of recomputing activations."""
    whole = [e for e in entries if e["suite"] == "bench_recompute" and "ratio" in e["extra_info"]]
    if not whole:
        return None
    entry = max(whole, key=verdicts.ratio)
    if columns.undecided(entry):
        words: list[Word] = [f"Steps with and without recomputed activations show {verdicts.UNDECIDED}."]
        return finding("zero", *words, rests_on=[entry])
    times = Number(formats.times(verdicts.ratio(entry)), entry)
    return finding("zero", "A step that recomputes its activations takes ", times, " times as long.")


def goals(entries: list[Entry], found: Results) -> Finding | None:
    """Count the goals of this project that are met, and name the one that is missed by most."""
    judged = [(entry, judgement) for entry in entries if (judgement := columns.goal(entry))]
    if not judged:
        return None
    met = sum(kept for _, (_, _, kept) in judged)
    words: list[Word] = [f"Here the project meets {met} of the {len(judged)} goals that it set itself."]
    missed = [(entry, value / limit) for entry, (value, limit, kept) in judged if not kept]
    if missed:
        entry, times = max(missed, key=lambda each: each[1])
        words += [
            f" Farthest: {columns.label(entry).replace('_', ' ')}, at ",
            Number(f"{formats.times(times)} times its limit", entry),
            ".",
        ]
    first = entry if missed else judged[0][0]
    return finding(chapter_of(first), *words, rests_on=[entry for entry, _ in judged])


def collectives(entries: list[Entry], found: Results) -> Finding | None:
    """Compare the largest tensor with the peer, count all comparisons, and judge the cost model."""
    compared = [entry for entry in entries if verdicts.is_collective(entry)]
    if not compared:
        return None
    fewest = min(entry["extra_info"]["ranks"] for entry in compared)
    most = max(e["extra_info"]["bytes"] for e in compared if e["extra_info"]["ranks"] == fewest)
    same = [e for e in compared if (e["extra_info"]["ranks"], e["extra_info"]["bytes"]) == (fewest, most)]
    counted, decided = verdicts.tally(compared), verdicts.tally(same)
    example = decided.best or decided.worst
    at = f"{formats.binary_size(most)} on {fewest} ranks"
    words: list[Word] = [
        f"For {at} there is {verdicts.UNDECIDED} between minidist and {verdicts.library(same[0])}."
    ]
    if example is not None:
        words = [
            f"{columns.label(example).partition(',')[0].capitalize()} of {at} takes ",
            Number(formats.times(example["extra_info"]["ratio"]), example),
            f" of {verdicts.library(example)}'s time.",
        ]
    words.append(
        f" Of {len(compared)} collectives, {len(counted.faster)} are faster, {len(counted.slower)} slower "
        f"and {len(counted.undecided)} undecided."
    )
    predicted = [e for e in entries if "predicted" in e["extra_info"] and e["suite"] == "bench_collectives"]
    if predicted:
        off = statistics.median(
            abs(e["extra_info"]["predicted"] / e["stats"]["median"] - 1) for e in predicted
        )
        words.append(f" The cost model's predictions are off by {100 * off:.0f}% in the median.")
    return finding("collectives", *words, rests_on=[*compared, *predicted])


Subject = Callable[[list[Entry], Results], Finding | None]
SUBJECTS: tuple[Subject, ...] = (
    *(cpu_ladder, cuda_ladder, collectives, strategies),
    *(scaling, zero, pipelines, recompute, goals),
)
"""In the order of the lessons, as a reader meets them."""
