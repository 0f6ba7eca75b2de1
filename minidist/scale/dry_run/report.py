"""What a dry run found, to be read: tables of calls and memory, the time of a step and what it assumes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from minidist.parallel.contract.memory_report import PARTS, size
from minidist.scale.dry_run.arguments import SIZES
from minidist.scale.dry_run.calls import AXES, as_json
from minidist.scale.dry_run.run import DryRun
from minidist.scale.time.hardware import Hardware
from minidist.scale.time.step_time import HIDDEN, StepTime

NAMES = {"dp": "data", "tp": "tensor", "pp": "pipeline", "cp": "context", "world": "all ranks"}


def heading(found: DryRun) -> str:
    """What was run dry."""
    rows, tokens = found.batch
    ranks = "1 rank" if found.layout.ranks == 1 else f"{found.layout.ranks:,} ranks"
    many = "1 row" if rows == 1 else f"{rows:,} rows"
    return (
        f"{found.model}, {found.config.parameters():,} parameters, on {ranks}: {found.layout}\n"
        f"a step of {many} of {tokens:,} tokens, run dry in {found.seconds:.1f} s"
    )


def place(found: DryRun) -> str:
    """Where the rank stands."""
    at = [f"{axis} {found.place[axis]}" for axis in SIZES if getattr(found.layout, axis) > 1]
    return f"rank {found.rank}" + (f" ({', '.join(at)})" if at else "")


def calls_table(found: DryRun) -> Table:
    """A line for each kind of call in a step."""
    table = _table(f"What {place(found)} sends in a step", "axis", "phase", "collective", "dtype")
    for name in ("ranks", "calls", "bytes sent"):
        table.add_column(name, justify="right")
    axis = None
    for line in found.lines:
        if axis is not None and line.axis != axis:
            table.add_section()
        axis = line.axis
        numbers = (f"{line.ranks:,}", f"{line.calls:,}", f"{line.bytes_sent:,}")
        table.add_row(NAMES[line.axis], line.phase, line.name, line.dtype, *numbers)
    table.add_section()
    table.add_row("all", "", "", "", "", f"{sum(x.calls for x in found.lines):,}", f"{found.bytes_sent:,}")
    return table


def memory_table(found: DryRun, hardware: Hardware) -> Table:
    """Bytes of each part, and of all beside what the device has."""
    table = _table(f"What it holds: {found.parameters:,} parameters", "for")
    for name in ("bytes", "", "share"):
        table.add_column(name, justify="right")
    whole = max(found.memory.total, 1)
    for part in PARTS:
        count = getattr(found.memory, part)
        table.add_row(part, f"{count:,}", size(count), f"{count / whole:.0%}")
    table.add_section()
    table.add_row("total", f"{whole:,}", size(whole), f"{whole / hardware.memory:.0%} of {hardware.name}'s")
    return table


def time_table(time: StepTime, hardware: Hardware) -> Table:
    """Seconds of each part."""
    table = _table(f"How long a step takes on {hardware.name}", "for")
    for name in ("ms", "share"):
        table.add_column(name, justify="right")
    for name, seconds in time.parts.items():
        if seconds:
            share = "" if name.endswith(HIDDEN) else f"{seconds / time.seconds:.0%}"
            table.add_row(name, f"{seconds * 1e3:,.3f}", share)
    table.add_section()
    table.add_row("step", f"{time.seconds * 1e3:,.3f}", f"{time.used:.0%} of the peak")
    return table


def one(found: DryRun, hardware: Hardware, time: StepTime) -> Group:
    """All of one rank's."""
    first, before = (sum(c.bytes_sent for c in calls) for calls in (found.first_step, found.prepare))
    also = f"In its first step it sends {first:,} bytes, and before that, to begin alike, {before:,}."
    sent = Text(heading(found)), calls_table(found), Text(also)
    return Group(*sent, memory_table(found, hardware), time_table(time, hardware), Text(_assumed(time)))


def many(found: Sequence[tuple[DryRun, int]], hardware: Hardware, time: StepTime) -> Group:
    """A line for each kind of rank."""
    axes = [axis for axis in AXES if any(axis in run.by_axis for run, _ in found)]
    table = _table("Ranks of each kind: bytes that one sends in a step, and what it holds")
    for name in ("rank", "alike", *(axis for axis in SIZES if getattr(found[0][0].layout, axis) > 1)):
        table.add_column(name, justify="right")
    for name in (*(f"{axis} bytes" for axis in axes), "bytes sent", "parameters", "activations", "memory"):
        table.add_column(name, justify="right")
    for run, count in found:
        at = [str(run.place[axis]) for axis in SIZES if getattr(run.layout, axis) > 1]
        sent = [f"{run.by_axis.get(axis, 0):,}" for axis in axes]
        held = f"{run.parameters:,}", size(run.memory.activations), size(run.memory.total)
        table.add_row(f"{run.rank}", f"{count:,}", *at, *sent, f"{run.bytes_sent:,}", *held)
    fullest, _ = max(found, key=lambda each: each[0].memory.total)
    share = fullest.memory.total / hardware.memory
    full = f"The fullest is {place(fullest)}: {size(fullest.memory.total)}, {share:.0%} of {hardware.name}'s."
    top = heading(found[0][0]).partition(", run dry")[0]
    return Group(Text(top), table, Text(full), time_table(time, hardware), Text(_assumed(time)))


def _assumed(time: StepTime) -> str:
    held = (
        "memory: tensors after a step, as torch makes them on a CPU; a device's own context, what its "
        "allocator loses and what lives within an operation come on top"
    )
    return "Assumed:\n" + "\n".join(f"  - {line}" for line in (held, *time.assumptions))


def values(found: DryRun, alike: int | None = None) -> dict[str, Any]:
    """One rank's, as plain values."""
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
        "calls": as_json(found.calls),
        "first_step": as_json(found.first_step),
        "prepare": as_json(found.prepare),
        "seconds": found.seconds,
    }


def document(
    found: Sequence[tuple[DryRun, int | None]], hardware: Hardware, time: StepTime
) -> dict[str, Any]:
    """What a program may read."""
    first = found[0][0]
    return {
        "model": first.model,
        "parameters": first.config.parameters(),
        "layout": str(first.layout),
        "ranks": first.layout.ranks,
        "batch": {"rows": first.batch[0], "tokens": first.batch[1]},
        "runs": [values(run, alike) for run, alike in found],
        "time": {
            "profile": hardware.name,
            "seconds": time.seconds,
            "parts": time.parts,
            "assumptions": time.assumptions,
        },
    }


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name)
    return table
