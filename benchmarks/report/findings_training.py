"""Findings on training: strategies, ZeRO's memory, scaling, pipelines, recomputing, and our own goals."""

from __future__ import annotations

from typing import Any

from minidist.benchmarks.harness import columns, formats
from minidist.benchmarks.harness.columns import Entry
from minidist.benchmarks.harness.results import Results
from minidist.benchmarks.report import verdicts
from minidist.benchmarks.report.chapters import chapter_of
from minidist.benchmarks.report.finding import Finding, Number, finding
from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.schedule_kinds import SCHEDULES

SHOWN = {name: kind.title for name, kind in SCHEDULES.items()}


def strategies(entries: list[Entry], found: Results) -> Finding | None:
    """Count the strategies that are faster than another library, and name the two extremes."""
    counted = verdicts.tally(verdicts.strategies(entries))
    many = len(counted.entries)
    if not many:
        return None
    words: list[str | Number] = [
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
    pairs = [(stages, key) for key, stages in zero_stages(entries).items() if 0 in stages and len(stages) > 1]
    if not pairs:
        return None
    stages, (model, ranks) = max(pairs, key=lambda pair: (len(pair[0]), pair[1][1]))
    plain, sharded = stages[0], stages[max(stages)]
    before, after = columns.memory_of(plain), columns.memory_of(sharded)
    assert before is not None
    assert after is not None
    words: list[str | Number] = [
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


def zero_stages(entries: list[Entry]) -> dict[tuple[str, int], dict[int, Entry]]:
    """Return, by model and ranks, the plainest result with counted memory of each ZeRO stage.

    Stage 0 is plain data parallelism.
    """
    found: dict[tuple[str, int], dict[int, Entry]] = {}
    for entry in sorted(entries, key=lambda entry: _frills(entry["extra_info"])):
        extra = entry["extra_info"]
        if {"strategy", "memory", "layout", "model", "ranks"} <= extra.keys():
            stage = _zero_stage(extra["layout"])
            if stage is not None:
                found.setdefault((extra["model"], extra["ranks"]), {}).setdefault(stage, entry)
    return found


def _frills(extra: dict[str, Any]) -> tuple[bool, int]:
    """Return a sort key that puts overlap, data parallelism's default, and then plain forms first."""
    strategy = str(extra.get("strategy", ""))
    return strategy != "data parallel, overlap", strategy.count(",")


def _zero_stage(layout: str) -> int | None:
    """Return the ZeRO stage of a layout with only data parallelism, in full precision; None for any other."""
    try:
        parsed = Layout.parse(layout)
    except ValueError:
        return None
    alone = Layout(dp=parsed.dp, zero=parsed.zero) == parsed and parsed.dp > 1
    return parsed.zero if alone else None


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
    best, worst = ranked[0], ranked[-1]
    where = f", which share {cores} core{'s' if cores > 1 else ''}," if size > cores else ""
    words: list[str | Number] = [f"On {size} ranks{where} one batch trains "]
    for index, entry in enumerate([best] if worst is best else [best, worst]):
        share = entry["extra_info"]["efficiency"]
        words += [
            " and " if index else "",
            Number(f"{share * size:.2f} times", entry),
            f" as fast as on one with {entry['extra_info']['series']} ({100 * share:.0f}% of the ideal)",
        ]
    return finding("scaling", *words, ".", rests_on=tuple(ranked))


def pipelines(entries: list[Entry], found: Results) -> Finding | None:
    """Compare how long ranks wait under each schedule, measured and simulated."""
    bubbles = {
        schedule_name(entry): entry
        for entry in entries
        if {"bubble", "schedule"} <= entry["extra_info"].keys()
        and {"simulated", "measured"} <= entry["extra_info"]["bubble"].keys()
    }
    if bubbles:
        words: list[str | Number] = ["A pipeline's ranks wait for "]
        for index, (name, entry) in enumerate(bubbles.items()):
            share = entry["extra_info"]["bubble"]
            words += [
                _joint(index, len(bubbles)),
                Number(f"{100 * share['measured']:.1f}%", entry),
                f" of a step under {name} (simulated: {100 * share['simulated']:.1f}%)",
            ]
        return finding("pipelines", *words, ".")
    waits = [entry for entry in entries if entry["extra_info"].get("peer") == "the simulation"]
    if not waits:
        return None
    words = ["A pipeline's ranks wait "]
    for index, entry in enumerate(waits):
        label = columns.label(entry)
        words += [
            _joint(index, len(waits)),
            Number(formats.times(verdicts.ratio(entry)), entry),
            f" times as long as simulated under {SHOWN.get(label, label)}",
        ]
    return finding("pipelines", *words, ".")


def schedule_name(entry: Entry) -> str:
    """Return a schedule's name as in the papers."""
    schedule = str(entry["extra_info"]["schedule"])
    return SHOWN.get(schedule, schedule)


def recompute(entries: list[Entry], found: Results) -> Finding | None:
    """Report what recomputing activations costs in time."""
    whole = [
        entry for entry in entries if entry["suite"] == "bench_recompute" and "ratio" in entry["extra_info"]
    ]
    if not whole:
        return None
    entry = max(whole, key=verdicts.ratio)
    extra = entry["extra_info"]
    note = f": {extra['note']}" if "note" in extra else ""
    if columns.undecided(entry):
        words: list[str | Number] = [
            f"Steps with and without recomputed activations show {verdicts.UNDECIDED}{note}"
        ]
    else:
        words = [
            "A step that recomputes its activations takes ",
            Number(formats.times(extra["ratio"]), entry),
            f" times as long as one that keeps them{note}",
        ]
    return finding("zero", *words, ".")


def goals(entries: list[Entry], found: Results) -> Finding | None:
    """Count the goals of this project that are met, and name the one that is missed by most."""
    judged = [(entry, judgement) for entry in entries if (judgement := columns.goal(entry))]
    if not judged:
        return None
    met = sum(kept for _, (_, _, kept) in judged)
    words: list[str | Number] = [f"This project meets {met} of the {len(judged)} goals that it set itself"]
    missed = [(entry, value / limit) for entry, (value, limit, kept) in judged if not kept]
    if missed:
        entry, times = max(missed, key=lambda each: each[1])
        words += [f"; {columns.label(entry)} misses by most, at "]
        words.append(Number(f"{formats.times(times)} times its limit", entry))
    first = entry if missed else judged[0][0]
    return finding(chapter_of(first), *words, ".", rests_on=tuple(entry for entry, _ in judged))


def _joint(index: int, many: int) -> str:
    """Return the separator before an item of a list."""
    return "" if index == 0 else " and " if index == many - 1 else ", "
