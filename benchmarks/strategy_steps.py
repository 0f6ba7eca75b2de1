"""What a rank of the table of strategies does: makes programs, keeps them, and runs one when told to.

The main process asks in turn, so that programs on one, two and four ranks alternate (`strategy_rounds.py`).
Between two calls a program stays in `HELD`, a process's own.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import minidist as md
from minidist import comm
from minidist.benchmarks.peers import PEERS
from minidist.benchmarks.programs import Batch, EngineProgram, Program, Ran
from minidist.benchmarks.strategies import BATCHES, OFFLOAD, Row, Work, adamw
from minidist.benchmarks.strategy_loops import LOOPS
from minidist.parallel.layout import Layout
from minidist.parallel.memory import Memory

SEEN = 3
"""Steps whose losses tell whether two programs train alike."""


@dataclass(frozen=True)
class Facts:
    """What a rank saw of a program's first steps."""

    losses: list[float | None]  # of the first `SEEN` steps
    seconds: float  # of a step, the first ones left out
    bytes_per_step: int  # that this rank sent
    comm_overlap: float  # share of our communication's time that was hidden
    memory: Memory | None


class Kept:
    """A program, its batches, and how far it is."""

    def __init__(self, program: Program, batches: list[Batch], scratch: TemporaryDirectory[str]) -> None:
        self.program, self.batches, self.scratch = program, batches, scratch
        self.steps = 0

    def run(self, steps: int) -> Ran:
        """Some steps more."""
        chosen = [self.batches[(self.steps + i) % BATCHES] for i in range(steps)]
        self.steps += steps
        return self.program.run(chosen)


HELD: dict[str, Kept] = {}


def hold(name: str, work: Work, row: Row | None, peer: str = "") -> Facts:
    """Make a program, of a row or of a peer, and take its first steps."""
    scratch = TemporaryDirectory(prefix="minidist-bench-")  # goes with what is kept
    program = PEERS[peer](work) if row is None else _ours(row, work, scratch.name)
    kept = HELD[name] = Kept(program, work.batches(), scratch)
    first = kept.run(SEEN)
    period = 1 if row is None else row.period
    if SEEN % period:
        kept.run(period - SEEN % period)  # to the beginning of the next
    with comm.ledger() as ledger:
        counted = kept.run(period)
    return Facts(
        first.losses, counted.seconds, ledger.bytes_sent // period, ledger.comm_overlap, program.memory()
    )


def _ours(row: Row, work: Work, scratch: str) -> Program:
    if row.loop:
        return LOOPS[row.loop](work)
    options: dict[str, Any] = row.options
    if options == OFFLOAD:
        options = {"fully_shard": {"offload": scratch}}
    return EngineProgram(md.prepare(work.build(), adamw, Layout.parse(row.layout), **options))


def turn(name: str, steps: int) -> float:
    """Seconds of a step, of so many."""
    return HELD[name].run(steps).seconds


def drop() -> None:
    """Let go of all programs, and of the folders that they offload to."""
    folders = [kept.scratch for kept in HELD.values()]
    HELD.clear()
    gc.collect()
    for folder in folders:
        folder.cleanup()
