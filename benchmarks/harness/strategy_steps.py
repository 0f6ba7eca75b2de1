"""What a rank of the table of strategies does: makes programs, keeps them, and runs one when told to.

The main process asks in turn, so that programs on one, two and four ranks alternate (`strategy_rounds.py`).
Between two calls a program stays in `HELD`, a process's own.
"""

from __future__ import annotations

import gc
import tempfile
from dataclasses import dataclass
from typing import Any

import minidist as md
from minidist import comm
from minidist.benchmarks.harness.peers import PEERS
from minidist.benchmarks.harness.programs import Batch, EngineProgram, Program, Ran
from minidist.benchmarks.harness.strategies import BATCHES, OFFLOAD, Row, Work
from minidist.benchmarks.harness.strategy_loops import LOOPS
from minidist.benchmarks.harness.training_steps import ADAMW
from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.memory_report import Memory

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

    def __init__(self, program: Program, batches: list[Batch]) -> None:
        self.program, self.batches = program, batches
        self.steps = 0

    def run(self, steps: int) -> Ran:
        """Some steps more."""
        chosen = [self.batches[(self.steps + i) % BATCHES] for i in range(steps)]
        self.steps += steps
        return self.program.run(chosen)


HELD: dict[str, Kept] = {}


def hold(
    name: str, scratch: str, work: Work, row: Row | None = None, peer: str = "", period: int = 1
) -> Facts:
    """Make a program, of a row or of a peer, and take its first steps; scratch: a folder for its files."""
    program = PEERS[peer](work) if row is None else _ours(row, work, tempfile.mkdtemp(dir=scratch))
    kept = HELD[name] = Kept(program, work.batches())
    first = kept.run(SEEN)
    if SEEN % period:
        kept.run(period - SEEN % period)  # to the beginning of the next
    with comm.ledger() as ledger:
        counted = kept.run(period)
    with comm.ledger() as longer:  # what is sent before the first step and after the last is no step's
        kept.run(2 * period)
    return Facts(
        first.losses,
        counted.seconds,
        (longer.bytes_sent - ledger.bytes_sent) // period,
        ledger.comm_overlap,
        program.memory(),
    )


def _ours(row: Row, work: Work, scratch: str) -> Program:
    if row.loop:
        return LOOPS[row.loop](work)
    options: dict[str, Any] = row.options
    if options == OFFLOAD:
        options = {"fully_shard": {"offload": scratch}}
    return EngineProgram(md.prepare(work.build(), ADAMW, Layout.parse(row.layout), **options))


def turn(name: str, steps: int) -> float:
    """Seconds of a step, of so many."""
    return HELD[name].run(steps).seconds


def drop() -> None:
    """Let go of all programs."""
    HELD.clear()
    gc.collect()
