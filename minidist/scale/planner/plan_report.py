"""A plan in words: which layout to use and why, a table of the best layouts, and what does not fit."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from rich import box
from rich.table import Table

from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.memory_report import PARTS as KINDS
from minidist.parallel.contract.memory_report import size
from minidist.parallel.contract.residency import zero_name
from minidist.scale.memory.estimates import Estimate
from minidist.scale.planner.candidates import Candidate
from minidist.scale.planner.ranking import MEANINGFUL, Plan, family_of, seconds

BEST = 12  # layouts in the table
UNCUT = " A model of your own is not cut here; ask minidist dryrun what a rank holds with tp=2 or pp=2."
NAMES = {
    "plain": "plain data parallelism",
    "sharded": "sharding (ZeRO)",
    "pipeline": "a pipeline",
    "tensor": "tensor parallelism",
    "context": "context parallelism",
    "experts": "expert parallelism",
    "mixed": "several axes together",
}
WAITS = {
    "bubble": "waiting in the pipeline",
    "tp": "the all-reduces in each layer",
    "cp": "sending keys and values",
    "ep": "sending tokens to their experts",
    "dp": "sending gradients and parameters",
    "recompute": "recomputing activations",
    "gradients": "adding and copying gradients",
    "optimizer": "the update",
}
"""The parts of a step besides forward and backward passes, in words."""


def answer(plan: Plan) -> str:
    """Say in one sentence which layout to use."""
    question, chosen = plan.question, plan.answer
    many = "1 rank" if question.ranks == 1 else f"{question.ranks} ranks"
    where = f"{many} of {size(question.memory)}"
    if chosen is None or chosen.step is None:
        if not plan.too_large:
            return f"No layout of {many} can train {question.name} with this batch."
        least = plan.too_large[0]
        return (
            f"{question.name} does not fit on {where}: the smallest layout, {written(least)}, takes "
            f"{size(least.memory.peak)} ({largest_parts(least.memory)}).{'' if question.tokens else UNCUT}"
        )
    first = {
        "plain": "Plain data parallelism is enough",
        "sharded": f"Shard with {zero_name(chosen.layout.zero)}",
        "pipeline": "Cut the layers: a pipeline",
        "tensor": "Cut the matrices: tensor parallelism",
        "context": "Cut the rows: context parallelism",
        "experts": "Share the experts: expert parallelism",
        "mixed": "Combine several axes",
    }[family_of(chosen.layout)]
    first, step = "One rank is enough" if question.ranks == 1 else first, chosen.step
    return (
        f"{first}: {written(chosen)} trains {question.name} on {where} in {duration(step.seconds)} a "
        f"step of {question.rows} rows ({rows_a_second(step.rows_per_second)} rows/s, {step.used:.0%} of the "
        f"peak) and takes {size(chosen.memory.peak)} per rank."
    )


def reasons(plan: Plan) -> list[str]:
    """Say when each family of layouts earns its keep, in a sentence each."""
    chosen = plan.answer
    if chosen is None or plan.question.ranks == 1:
        return []
    own, fastest = family_of(chosen.layout), plan.fastest
    found = ["No other layout is predicted to be faster."]
    if fastest is not chosen:
        found = [
            f"The fastest, {written(fastest)}, would save {1 - seconds(fastest) / seconds(chosen):.1%} of "
            f"the time, which is less than a prediction can tell ({MEANINGFUL:.0%})."
        ]
    plain, least = plan.best("plain"), plan.least("plain")
    if own != "plain" and plain is not None:
        longer = seconds(plain) / seconds(chosen)
        found.append(f"Plain data parallelism fits, {written(plain)}, but takes {longer:.2f} times as long.")
    elif own != "plain" and least is not None:
        found.append(
            f"Plain data parallelism does not fit: at the least, {written(least[0])}, it takes "
            f"{size(least[1].peak)} ({largest_parts(least[1])})."
        )
    families = [family for family in ("sharded", "pipeline", "tensor", "experts") if family != own]
    return found + [each for family in families if (each := _earns(plan, chosen, family))]


def _earns(plan: Plan, chosen: Candidate, family: str) -> str:
    """Say what a family would cost or save, and below which memory it is needed."""
    best, least = plan.best(family), plan.least(family)
    if least is None:
        return ""
    name = NAMES[family][0].upper() + NAMES[family][1:]
    if best is None:
        return f"{name} does not fit: at the least, {written(least[0])}, {size(least[1].peak)} per rank."
    assert best.step is not None
    parts, ratio = best.step.parts, seconds(best) / seconds(chosen)
    largest = max(WAITS, key=lambda part: parts.get(part, 0.0))  # besides forward and backward passes
    share = parts.get(largest, 0.0) / best.step.seconds
    costs = f": {share:.0%} of it is {WAITS[largest]}" if share >= 0.02 else ""
    compared = f"takes {ratio:.2f} times as long" if ratio >= 1 else f"would save {1 - ratio:.1%} of the time"
    text = f"{name} {compared}, {written(best)}{costs}"
    simpler = ("plain",) if family == "sharded" else ("plain", "sharded")
    before = plan.least(*simpler)
    if before is None:
        return text + "."
    if before[1].peak <= least[1].peak:
        return f"{text}; it never needs less memory than {NAMES[simpler[-1]]} does."
    return (
        f"{text}; it earns its keep below {size(before[1].peak)} a rank, where {NAMES[simpler[-1]]} alone no "
        "longer fits."
    )


def table(plan: Plan, measured: dict[str, float] | None = None) -> Table:
    """A table of the best layouts, the answer first."""
    question, tokens = plan.question, plan.question.tokens
    drawn = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title=f"{question.name}, {question.rows} rows{f' of {tokens} tokens' if tokens else ''}, "
        f"{question.precision}, on {question.ranks} x {question.hardware.name}",
        title_justify="left",
    )
    drawn.add_column("layout", overflow="fold")
    for heading in ("step", *(["measured"] if measured else []), "rows/s", "memory", "of peak"):
        drawn.add_column(heading, justify="right", no_wrap=True)
    drawn.add_column("of the step")
    for each in plan.fitting[:BEST]:
        step, name = each.step, str(each)
        assert step is not None
        shares = [
            f"{part} {value / step.seconds:.0%}"
            for part, value in step.parts.items()
            if not part.endswith("hidden") and value >= 0.005 * step.seconds
        ]
        took = [duration(measured[name]) if name in measured else ""] if measured else []
        speed, peak = rows_a_second(step.rows_per_second), size(each.memory.peak)
        row = written(each), duration(step.seconds), *took, speed, peak, f"{step.used:.0%}"
        drawn.add_row(*row, ", ".join(shares))
    return drawn


def unfit(plan: Plan) -> list[str]:
    """Say why other layouts do not fit, with a line for each kind of reason."""
    kinds: dict[str, list[Candidate]] = defaultdict(list)
    for each in plan.too_large:
        zero = zero_name(each.layout.zero)
        kinds[NAMES[family_of(each.layout)] + (zero and f" with {zero}")].append(each)
    refused: dict[str, list[str]] = defaultdict(list)  # reasons that differ only in numbers are one kind
    for other in plan.refused:
        refused[re.sub(r"\d+", "N", other.reason.split(";")[0])].append(other.reason)
    found = []
    for name, group in kinds.items():
        least = min(group, key=lambda each: each.memory.peak)
        found.append(
            f"{_many(len(group))} of {name}: at the least, {written(least)}, "
            f"{size(least.memory.peak)} ({largest_parts(least.memory)})"
        )
    return found + [f"{_many(len(each))} that prepare refuses: {each[0]}" for each in refused.values()]


def _many(count: int) -> str:
    return "1 layout" if count == 1 else f"{count} layouts"


def largest_parts(memory: Estimate) -> str:
    """The parts that take a tenth or more of the memory."""
    kinds = {**{kind: getattr(memory, kind) for kind in KINDS}, "temporary": memory.transient}
    return ", ".join(f"{kind} {size(n)}" for kind, n in kinds.items() if n >= 0.1 * memory.peak)


def written(layout: Layout | Candidate) -> str:
    """A layout as `--layout` takes it, without the precision, which all layouts share."""
    return re.sub(r"(^|,)precision=\w+", "", str(layout)).lstrip(",") or "dp=1"


def duration(value: float) -> str:
    """A duration with three digits, in s or ms."""
    return f"{value:.3g} s" if value >= 0.9995 else f"{1e3 * value:.3g} ms"


def rows_a_second(number: float) -> str:
    """A rate with at least three digits: "0.123", "4.56", "1,230"."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def as_json(plan: Plan, measured: dict[str, float] | None = None) -> dict[str, Any]:
    """The whole plan as plain values."""
    question, chosen = plan.question, plan.answer
    names = ("ranks", "memory", "precision", "optimizer")
    return {
        "model": question.name,
        **{name: getattr(question, name) for name in names},
        "profile": question.hardware.name,
        "batch": [*question.batch],
        "answer": None if chosen is None else str(chosen.layout),
        "sentence": answer(plan),
        "reasons": reasons(plan),
        "fitting": [_entry(each, measured or {}) for each in plan.fitting],
        "too_large": [_entry(each, {}) for each in plan.too_large],
        "refused": [{"layout": each.fields, "reason": each.reason} for each in plan.refused],
        "why_not": unfit(plan),
        "assumptions": [] if chosen is None or chosen.step is None else chosen.step.assumptions,
    }


def _entry(each: Candidate, measured: dict[str, float]) -> dict[str, Any]:
    kinds = {kind: getattr(each.memory, kind) for kind in (*KINDS, "transient", "peak")}
    entry: dict[str, Any] = {"layout": str(each.layout), "family": family_of(each.layout), "memory": kinds}
    entry |= {"secondary": each.secondary} if each.secondary else {}
    if each.step is not None:
        step = each.step
        entry |= {"seconds": step.seconds, "rows_per_second": step.rows_per_second}
        entry |= {"of_peak": step.used, "parts": step.parts}
    return entry | ({"measured": measured[str(each)]} if str(each) in measured else {})
