"""The findings: up to five sentences, computed from the results, for a reader in a hurry.

Each subject makes a sentence from one machine's results, or None if they lack the figures for it. A sentence
says so if the spread leaves a comparison open.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from minidist.benchmarks.harness import columns, formats, machine, results
from minidist.benchmarks.harness.columns import Entry
from minidist.benchmarks.harness.results import Results
from minidist.benchmarks.report import ladders, verdicts
from minidist.benchmarks.report.chapters import chapter_of
from minidist.benchmarks.report.pieces import Finding, Number, Word

MOST = 5


def findings(machines: Mapping[str, Results], most: int = MOST) -> list[Finding]:
    """Return at most `most` findings, each from the first machine that has it."""
    entries = {slug: results.newest(found) for slug, found in machines.items()}
    made = []
    for alternatives in SUBJECTS:
        for subject, slug in ((s, m) for s in alternatives for m in machines):
            finding = subject(entries[slug], machines[slug])
            if finding is not None:
                info = machines[slug]["machine_info"]
                named = machine.title(info) if len(machines) > 1 or info.get("another") else ""
                made.append(replace(finding, slug=slug, machine=named))
                break
    return made[:most]


def finding(chapter: str, *words: Word, rests_on: Sequence[Entry] = ()) -> Finding:
    """Make a finding that rests on the results of its numbers and on those in `rests_on`."""
    named = [word.entry for word in words if isinstance(word, Number)]
    others = [entry for entry in rests_on if not any(entry is each for each in named)]
    return Finding(words, (*named, *others), chapter)


def strategies(entries: list[Entry], found: Results) -> Finding | None:
    """Count the strategies that are faster than another library, and name the two extremes."""
    counted = verdicts.tally(verdicts.strategies(entries))
    many = len(counted.entries)
    if not many:
        return None
    words: list[Word] = [
        f"{many} training steps ran in turns with another library's on the same batch: "
        f"{len(counted.faster)} took less time, {len(counted.slower)} took more, and "
        f"{len(counted.undecided)} showed {verdicts.UNDECIDED}"
    ]
    ends = [entry for entry in (counted.best, counted.worst) if entry is not None]
    for index, entry in enumerate(ends):
        words += [
            " and " if index else "; the extremes are " if len(ends) > 1 else "; the extreme is ",
            f"{verdicts.name(entry)} with ",
            Number(formats.times(verdicts.ratio(entry)), entry),
            f" times the time of {entry['extra_info']['peer']}",
        ]
    return finding("strategies", *words, ".", rests_on=counted.entries)


def zero(entries: list[Entry], found: Results) -> Finding | None:
    """Compare memory and sent bytes of the highest ZeRO stage with plain data parallelism."""
    several = verdicts.zero_stages(entries)
    pairs = [(stages, key) for key, stages in several.items() if 0 in stages and len(stages) > 1]
    if not pairs:
        return None
    stages, (model, ranks) = max(pairs, key=lambda pair: (len(pair[0]), pair[1][1]))
    plain, sharded = stages[0], stages[max(stages)]
    before, after = (columns.memory_of(entry) or 0 for entry in (plain, sharded))
    words: list[Word] = [
        f"ZeRO-{max(stages)} trains {model} on {ranks} ranks in ",
        Number(formats.size(after), sharded),
        " per rank, where plain data parallelism takes ",
        Number(formats.size(before), plain),
        f" ({100 * after / before:.0f}%)",
    ]
    sent = [entry["extra_info"].get("bytes_per_step") for entry in (sharded, plain)]
    if all(sent):
        words += [
            ", and sends ",
            Number(formats.size(sent[0]), sharded),
            " per step instead of ",
            Number(formats.size(sent[1]), plain),
        ]
    return finding("zero", *words, ".")


def scaling(entries: list[Entry], found: Results) -> Finding | None:
    """Name the best and the worst strong scaling on at most as many ranks as there are cores."""
    cores = found["machine_info"]["cores"]
    strong = [
        entry
        for entry in entries
        if entry["extra_info"].get("scaling") == "strong"
        and "efficiency" in entry["extra_info"]
        and entry["extra_info"]["size"] > 1
    ]
    fitting = [entry for entry in strong if entry["extra_info"]["size"] <= cores] or strong
    if not fitting:
        return None
    size = max(entry["extra_info"]["size"] for entry in fitting)
    ranked = sorted(
        (entry for entry in fitting if entry["extra_info"]["size"] == size),
        key=lambda entry: -entry["extra_info"]["efficiency"],
    )
    where = f", which share {cores} core{'s' if cores > 1 else ''}," if size > cores else ""
    words: list[Word] = [f"On {size} ranks{where} one batch trains "]
    for index, entry in enumerate(ranked[:1] + ranked[1:][-1:]):
        share = entry["extra_info"]["efficiency"]
        words += [
            " and " if index else "",
            Number(f"{share * size:.2f} times", entry),
            f" as fast as on one with {entry['extra_info']['series']} ({100 * share:.0f}% of the ideal)",
        ]
    return finding("scaling", *words, ".", rests_on=ranked)


def pipelines(entries: list[Entry], found: Results) -> Finding | None:
    """Compare how long ranks wait under each schedule, measured and simulated."""
    bubbles = {
        verdicts.schedule_name(entry): entry
        for entry in entries
        if {"bubble", "schedule"} <= entry["extra_info"].keys()
        and {"simulated", "measured"} <= entry["extra_info"]["bubble"].keys()
    }
    told: list[tuple[Number, str]] = []
    for name, entry in bubbles.items():
        share = entry["extra_info"]["bubble"]
        simulated = f" of a step under {name} (simulated: {100 * share['simulated']:.1f}%)"
        told.append((Number(f"{100 * share['measured']:.1f}%", entry), simulated))
    if not bubbles:  # results from before timelines were kept
        for entry in entries:
            if entry["extra_info"].get("peer") == "the simulation":
                name = verdicts.TITLES.get(columns.label(entry), columns.label(entry))
                number = Number(formats.times(verdicts.ratio(entry)), entry)
                told.append((number, f" times as long as simulated under {name}"))
    if not told:
        return None
    words: list[Word] = [f"A pipeline's ranks wait {'for ' if bubbles else ''}"]
    for index, pair in enumerate(told):
        words += ["" if index == 0 else " and " if index == len(told) - 1 else ", ", *pair]
    return finding("pipelines", *words, ".")


def recompute(entries: list[Entry], found: Results) -> Finding | None:
    """Report what recomputing activations costs in time."""
    whole = [
        entry for entry in entries if entry["suite"] == "bench_recompute" and "ratio" in entry["extra_info"]
    ]
    if not whole:
        return None
    entry = max(whole, key=verdicts.ratio)
    extra = entry["extra_info"]
    words: list[Word] = [f"Steps with and without recomputed activations show {verdicts.UNDECIDED}"]
    if not columns.undecided(entry):
        words = [
            "A step that recomputes its activations takes ",
            Number(formats.times(extra["ratio"]), entry),
            " times as long as one that keeps them",
        ]
    return finding("zero", *words, f": {extra['note']}" if "note" in extra else "", ".")


def goals(entries: list[Entry], found: Results) -> Finding | None:
    """Count the goals of this project that are met, and name the one that is missed by most."""
    judged = [(entry, judgement) for entry in entries if (judgement := columns.goal(entry))]
    if not judged:
        return None
    met = sum(kept for _, (_, _, kept) in judged)
    words: list[Word] = [f"This project meets {met} of the {len(judged)} goals that it set itself"]
    missed = [(entry, value / limit) for entry, (value, limit, kept) in judged if not kept]
    if missed:
        entry, times = max(missed, key=lambda each: each[1])
        words += [f"; {columns.label(entry)} misses by most, at "]
        words.append(Number(f"{formats.times(times)} times its limit", entry))
    first = entry if missed else judged[0][0]
    return finding(chapter_of(first), *words, ".", rests_on=[entry for entry, _ in judged])


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
    words: list[Word] = [
        "On one core the ladder of matrix products climbs from ",
        Number(f"{formats.number(first['extra_info']['gflops'])} GFLOP/s", first),
        f" ({_rung(first)}) to ",
        Number(f"{formats.number(extra['gflops'])} GFLOP/s", last),
        f" ({_rung(last)}, n = {extra['size']:,})",
    ]
    if columns.verdict(last) == "undecided":
        words.append(f", with {verdicts.UNDECIDED} against {peer}")
    elif "percent_of_peer" in extra:
        share = Number(f"{formats.number(extra['percent_of_peer'])}%", last)
        words += [", which is ", share, f" of {peer}'s speed"]
    if "percent_of_peak" in extra:
        share = Number(f"{formats.number(extra['percent_of_peak'])}%", last)
        words += [" and ", share, " of the core's peak"]
    return finding("ladders", *words, ".")


def _rung(entry: Entry) -> str:
    number, _, idea = str(entry["extra_info"]["series"]).partition(" ")
    return f"rung {number}, {idea}"


def cuda_ladder(entries: list[Entry], found: Results) -> Finding | None:
    """Find the rung that comes nearest to the vendor's product, in each arithmetic."""
    climbed = ladders.cuda_ladder("", found)
    if climbed is None:
        return None
    best: dict[str, tuple[float, Entry, str]] = {}
    for row in climbed.rows:
        for size, entry in row.entries.items():
            percent = row.percent(size)
            if percent is not None and percent > best.get(str(row.dtype), (0.0,))[0]:
                best[str(row.dtype)] = percent, entry, f"{row.name}, n = {size:,}"
    if not best:
        return None
    words: list[Word] = ["The CUDA ladder, written in Python, reaches "]
    for index, (percent, entry, rung) in enumerate(sorted(best.values(), key=lambda each: -each[0])[:3]):
        words += [", " if index else "", Number(f"{formats.number(percent)}%", entry), f" ({rung})"]
    return finding("ladders", *words, " of torch.matmul's speed in the same arithmetic.")


def collectives(entries: list[Entry], found: Results) -> Finding | None:
    """Compare the largest tensor with the peer, count all comparisons, and judge the cost model."""
    compared = [entry for entry in entries if verdicts.is_collective(entry)]
    if not compared:
        return None
    fewest = min(entry["extra_info"]["ranks"] for entry in compared)
    most = max(e["extra_info"]["bytes"] for e in compared if e["extra_info"]["ranks"] == fewest)
    same = [e for e in compared if (e["extra_info"]["ranks"], e["extra_info"]["bytes"]) == (fewest, most)]
    counted = verdicts.tally(compared)
    decided = verdicts.tally(same)
    example = decided.best or decided.worst
    peer, at = same[0]["extra_info"]["peer"], f"{formats.binary_size(most)} on {fewest} ranks"
    words: list[Word] = [f"For {at} there is {verdicts.UNDECIDED} between minidist and {peer}"]
    if example is not None:
        words = [
            f"{columns.label(example).partition(',')[0].capitalize()} of {at} takes ",
            Number(formats.times(example["extra_info"]["ratio"]), example),
            f" of {example['extra_info']['peer']}'s time",
        ]
    words.append(
        f"; of all {len(compared)} comparisons minidist wins {len(counted.faster)} and loses "
        f"{len(counted.slower)}, and {len(counted.undecided)} are undecided"
    )
    predicted = [e for e in entries if "predicted" in e["extra_info"] and e["suite"] == "bench_collectives"]
    if predicted:
        off = statistics.median(
            abs(entry["extra_info"]["predicted"] / entry["stats"]["median"] - 1) for entry in predicted
        )
        words.append(f"; the cost model's median error over {len(predicted)} times is {100 * off:.0f}%")
    return finding("collectives", *words, ".", rests_on=[*compared, *predicted])


Subject = Callable[[list[Entry], Results], Finding | None]
# The most asked come first. Of several subjects in one line, the first that has a finding counts.
SUBJECTS: tuple[tuple[Subject, ...], ...] = (
    (strategies,),
    (zero,),
    (cuda_ladder, cpu_ladder),
    (collectives,),
    (scaling,),
    (pipelines,),
    (recompute,),
    (goals,),
)
