"""The result of a dry run as tables and JSON: calls, memory, the predicted time and its assumptions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from minidist.parallel.contract.memory_report import PARTS, size
from minidist.scale.dry_run.calls import AXES as CALL_AXES
from minidist.scale.dry_run.calls import lines
from minidist.scale.dry_run.run import DryRun
from minidist.scale.memory.estimates import AXES
from minidist.scale.time.hardware import Hardware
from minidist.scale.time.step_time import HIDDEN, StepTime

NO_TIME = "The time of a step is not predicted where tp, pp or cp cut a model of your own."


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
    texts, numbers = ("axis", "phase", "collective", "dtype"), ("ranks", "calls", "bytes sent")
    table = _table(f"What {place(found)} sends in a step", texts, numbers)
    axis = None
    for line in found.lines:
        if axis is not None and line.axis != axis:
            table.add_section()
        axis = line.axis
        counts = (f"{line.ranks:,}", f"{line.calls:,}", f"{line.bytes_sent:,}")
        over = "all ranks" if line.axis == "world" else line.axis
        table.add_row(over, line.phase, line.name, line.dtype, *counts)
    table.add_section()
    table.add_row("all", "", "", "", "", f"{sum(x.calls for x in found.lines):,}", f"{found.bytes_sent:,}")
    return table


def memory_table(found: DryRun, hardware: Hardware) -> Table:
    """The bytes of each part, and their sum as a share of the device's memory."""
    title = f"What it holds: {found.parameters:,} parameters"
    table = _table(title, ("for",), ("bytes", "", "share"))
    whole = max(found.memory.total, 1)
    for part in PARTS:
        count = getattr(found.memory, part)
        table.add_row(part, f"{count:,}", size(count), f"{count / whole:.0%}")
    table.add_section()
    table.add_row("total", f"{whole:,}", size(whole), f"{whole / hardware.memory:.0%} of {hardware.name}'s")
    return table


def time_table(time: StepTime, hardware: Hardware) -> Table:
    """The milliseconds of each part of a step."""
    table = _table(f"How long a step takes on {hardware.name}", ("for",), ("ms", "share"))
    for name, seconds in time.parts.items():
        if seconds:
            share = "" if name.endswith(HIDDEN) else f"{seconds / time.seconds:.0%}"
            table.add_row(name, f"{seconds * 1e3:,.3f}", share)
    table.add_section()
    table.add_row("step", f"{time.seconds * 1e3:,.3f}", f"{time.used:.0%} of the peak")
    return table


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
    numbers = ("rank", "alike", *grid, *(f"{axis} bytes" for axis in axes), "bytes sent", "parameters")
    title = "One rank of each kind: the bytes that it sends in a step, and what it holds"
    table = _table(title, (), (*numbers, "activations", "memory"))
    for run, count in found:
        at = [str(run.place[axis]) for axis in grid]
        sent = [f"{run.by_axis.get(axis, 0):,}" for axis in axes]
        held = f"{run.parameters:,}", size(run.memory.activations), size(run.memory.total)
        table.add_row(f"{run.rank}", f"{count:,}", *at, *sent, f"{run.bytes_sent:,}", *held)
    fullest, _ = max(found, key=lambda each: each[0].memory.total)
    share = fullest.memory.total / hardware.memory
    full = f"The fullest is {place(fullest)}: {size(fullest.memory.total)}, {share:.0%} of {hardware.name}'s."
    top = heading(found[0][0]).partition(", run dry")[0]
    return Group(Text(top), table, Text(full), *_timed(time, hardware))


def _timed(time: StepTime | None, hardware: Hardware) -> list[Table | Text]:
    if time is None:
        return [Text(NO_TIME), Text(_assumed([]))]
    return [time_table(time, hardware), Text(_assumed(time.assumptions))]


def _assumed(assumptions: Sequence[str]) -> str:
    held = (
        "memory: tensors after a step, as torch makes them on a CPU; a device's own context, its allocator's "
        "losses and temporaries within an operation come on top"
    )
    return "Assumed:\n" + "\n".join(f"  - {line}" for line in (held, *assumptions))


def values(found: DryRun, alike: int | None = None) -> dict[str, Any]:
    """One rank's dry run as plain values."""
    said = {"alike": alike} if alike is not None else {}
    return {
        "rank": found.rank,
        **said,
        "place": found.place,
        "parameters": found.parameters,
        "memory": {**asdict(found.memory), "total": found.memory.total},
        "bytes_sent": found.bytes_sent,
        "by_axis": found.by_axis,
        "by_phase": found.by_phase,
        "calls": [asdict(line) for line in lines(found.calls)],
        "first_step": [asdict(line) for line in lines(found.first_step)],
        "prepare": [asdict(line) for line in lines(found.prepare)],
        "seconds": found.seconds,
    }


def document(
    found: Sequence[tuple[DryRun, int | None]], hardware: Hardware, time: StepTime | None
) -> dict[str, Any]:
    """The JSON document of dry runs, the predicted time and its assumptions; None for no time."""
    first = found[0][0]
    return {
        "model": first.model,
        "parameters": first.config.parameters(),
        "layout": str(first.layout),
        "ranks": first.layout.ranks,
        "batch": {"rows": first.batch[0], "tokens": first.batch[1]},
        "runs": [values(run, alike) for run, alike in found],
        "time": time
        and {
            "profile": hardware.name,
            "seconds": time.seconds,
            "parts": time.parts,
            "assumptions": time.assumptions,
        },
    }


def _table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    """An empty table with columns of texts and columns of numbers."""
    table = Table(*texts, title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in numbers:
        table.add_column(name, justify="right")
    return table
