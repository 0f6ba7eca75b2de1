"""The result of a dry run as tables and JSON: calls, memory, the predicted time and its assumptions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from minidist.parallel.contract.memory_report import PARTS, size
from minidist.scale.dryrun.calls import AXES as CALL_AXES
from minidist.scale.dryrun.calls import lines
from minidist.scale.dryrun.one_rank import DryRun
from minidist.scale.memory.training_setup import AXES
from minidist.scale.step_time.hardware import Hardware
from minidist.scale.step_time.prediction import HIDDEN, StepTime

HELD = (
    "memory: tensors after a step, as torch makes them on a CPU; a device's own context, its allocator's "
    "losses and temporaries within an operation come on top"
)
NO_TIME = "No time is predicted for emulated FP8, or where tp, pp or cp cut a model of your own."


def heading(found: DryRun) -> str:
    """The model, the layout and the batch of a dry run."""
    rows, tokens = found.batch
    ranks = "1 rank" if found.layout.ranks == 1 else f"{found.layout.ranks:,} ranks"
    many = "1 row" if rows == 1 else f"{rows:,} rows"
    return (
        f"{found.model}, {found.config.parameters():,} parameters, on {ranks}: {found.layout}\n"
        f"a step of {many}{f' of {tokens:,} tokens' if tokens else ''}, run dry in {found.seconds:.1f} s"
    )


def place(found: DryRun) -> str:
    """A rank with its coordinates in the mesh."""
    at = [f"{axis} {found.place[axis]}" for axis in AXES if getattr(found.layout, axis) > 1]
    return f"rank {found.rank}" + (f" ({', '.join(at)})" if at else "")


def calls_table(found: DryRun) -> Table:
    """A line for each kind of call in a step."""
    sections = [
        [
            (
                "all ranks" if x.axis == "world" else x.axis,
                x.phase,
                x.name,
                x.dtype,
                f"{x.ranks:,}",
                f"{x.calls:,}",
                f"{x.bytes_sent:,}",
            )
            for x in own
        ]
        for _, own in groupby(found.lines, key=lambda line: line.axis)
    ]
    calls = sum(line.calls for line in found.lines)
    total = "all", "", "", "", "", f"{calls:,}", f"{found.bytes_sent:,}"
    texts, numbers = ("axis", "phase", "collective", "dtype"), ("ranks", "calls", "bytes sent")
    return _table(f"What {place(found)} sends in a step", texts, numbers, *sections, [total])


def memory_table(found: DryRun, hardware: Hardware) -> Table:
    """The bytes of each part, and their sum as a share of the device's memory."""
    whole = max(found.memory.total, 1)
    parts = [(part, getattr(found.memory, part)) for part in PARTS]
    rows = [(part, f"{count:,}", size(count), f"{count / whole:.0%}") for part, count in parts]
    total = "total", f"{whole:,}", size(whole), f"{whole / hardware.memory:.0%} of {hardware.name}'s"
    title = f"What it holds: {found.parameters:,} parameters"
    return _table(title, ("for",), ("bytes", "", "share"), rows, [total])


def time_table(time: StepTime, hardware: Hardware) -> Table:
    """The milliseconds of each part of a step."""
    rows = [
        (name, f"{1e3 * part:,.3f}", "" if name.endswith(HIDDEN) else f"{part / time.seconds:.0%}")
        for name, part in time.parts.items()
        if part
    ]
    total = "step", f"{1e3 * time.seconds:,.3f}", f"{time.used:.0%} of the peak"
    return _table(f"How long a step takes on {hardware.name}", ("for",), ("ms", "share"), rows, [total])


def one(found: DryRun, hardware: Hardware, time: StepTime | None) -> Group:
    """All tables of one rank. time: None if it is not predicted."""
    first, before = (sum(c.bytes_sent for c in calls) for calls in (found.first_step, found.prepare))
    also = f"It sends {before:,} bytes so that all ranks start alike, and {first:,} in its first step."
    sent = Text(heading(found)), calls_table(found), Text(also)
    return Group(*sent, memory_table(found, hardware), *_timed(time, hardware))


def many(found: Sequence[tuple[DryRun, int | None]], hardware: Hardware, time: StepTime | None) -> Group:
    """A table with a line for each kind of rank, and the time of a step."""
    axes = [axis for axis in CALL_AXES if any(axis in run.by_axis for run, _ in found)]
    grid = [axis for axis in AXES if getattr(found[0][0].layout, axis) > 1]
    rows = []
    for run, count in found:
        at = [str(run.place[axis]) for axis in grid]
        sent = [f"{run.by_axis.get(axis, 0):,}" for axis in axes]
        held = f"{run.parameters:,}", size(run.memory.activations), size(run.memory.total)
        rows.append((f"{run.rank}", f"{count:,}", *at, *sent, f"{run.bytes_sent:,}", *held))
    numbers = ("rank", "alike", *grid, *(f"{axis} bytes" for axis in axes), "bytes sent", "parameters")
    title = "One rank of each kind: the bytes that it sends in a step, and what it holds"
    table = _table(title, (), (*numbers, "activations", "memory"), rows)
    fullest, _ = max(found, key=lambda each: each[0].memory.total)
    share = fullest.memory.total / hardware.memory
    full = f"The fullest is {place(fullest)}: {size(fullest.memory.total)}, {share:.0%} of {hardware.name}'s."
    top = heading(found[0][0]).partition(", run dry")[0]
    return Group(Text(top), table, Text(full), *_timed(time, hardware))


def _timed(time: StepTime | None, hardware: Hardware) -> list[Table | Text]:
    """The time of a step, if it is predicted, and the assumptions."""
    said = [HELD] if time is None else [HELD, *time.assumptions]
    assumed = Text("\n".join(["Assumed:", *(f"  - {line}" for line in said)]))
    return [Text(NO_TIME) if time is None else time_table(time, hardware), assumed]


def values(found: DryRun, alike: int | None = None) -> dict[str, Any]:
    """One rank's dry run as plain values."""
    names = ("place", "parameters", "bytes_sent", "by_axis", "by_phase", "seconds")
    calls = {"calls": found.calls, "first_step": found.first_step, "prepare": found.prepare}
    return {
        "rank": found.rank,
        **({} if alike is None else {"alike": alike}),
        **{name: getattr(found, name) for name in names},
        "memory": {**asdict(found.memory), "total": found.memory.total},
        **{name: [asdict(line) for line in lines(own)] for name, own in calls.items()},
    }


def document(
    found: Sequence[tuple[DryRun, int | None]], hardware: Hardware, time: StepTime | None
) -> dict[str, Any]:
    """The JSON document of dry runs, the predicted time and its assumptions; None for no time."""
    first = found[0][0]
    timed = time and {name: getattr(time, name) for name in ("seconds", "parts", "assumptions")}
    return {
        "model": first.model,
        "parameters": first.config.parameters(),
        "layout": str(first.layout),
        "ranks": first.layout.ranks,
        "batch": {"rows": first.batch[0], "tokens": first.batch[1]},
        "runs": [values(run, alike) for run, alike in found],
        "time": timed and {"profile": hardware.name, **timed},
    }


def _table(
    title: str, texts: Sequence[str], numbers: Sequence[str], *sections: Sequence[Sequence[str]]
) -> Table:
    """A table with columns of texts, columns of numbers, and lines between its sections."""
    table = Table(*texts, title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in numbers:
        table.add_column(name, justify="right")
    for rows in sections:
        table.add_section()
        for row in rows:
            table.add_row(*row)
    return table
