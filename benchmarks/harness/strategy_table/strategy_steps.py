"""Make, keep and run training programs on a rank, for the table of strategies.

The main process calls one world after the other, so that programs on one, two and four ranks take turns
(`strategy_rounds.py`). Between calls, each process keeps its programs in `HELD`.
"""

from __future__ import annotations

import gc
import tempfile
from dataclasses import dataclass
from typing import Any

import minidist as md
from minidist import comm
from minidist.benchmarks.harness.steps.training_steps import ADAMW
from minidist.benchmarks.harness.strategy_table.peers import PEERS
from minidist.benchmarks.harness.strategy_table.programs import Batch, EngineProgram, Program, Ran
from minidist.benchmarks.harness.strategy_table.strategies import BATCHES, OFFLOAD, Row, Work
from minidist.benchmarks.harness.strategy_table.strategy_loops import LOOPS
from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.memory_report import Memory

SEEN = 3
"""Number of steps whose losses are compared, to see whether two programs train alike."""


@dataclass(frozen=True)
class Facts:
    """A rank's measurement of a program's first steps."""

    losses: list[float | None]  # of the first `SEEN` steps
    seconds: float  # of a later step
    bytes_per_step: int  # sent by this rank through `minidist.comm`; 0 for a peer
    comm_overlap: float  # share of our communication's time that was hidden
    memory: Memory | None


class Kept:
    """A program, its batches, and how many steps it has done."""

    def __init__(self, program: Program, batches: list[Batch]) -> None:
        self.program, self.batches = program, batches
        self.steps = 0

    def run(self, steps: int) -> Ran:
        """Run some more steps."""
        chosen = [self.batches[(self.steps + i) % BATCHES] for i in range(steps)]
        self.steps += steps
        return self.program.run(chosen)


HELD: dict[str, Kept] = {}


def hold(
    name: str, scratch: str, work: Work, row: Row | None = None, peer: str = "", period: int = 1
) -> Facts:
    """Make a row's or a peer's program, and run its first steps; scratch: a folder for its files."""
    program = PEERS[peer](work) if row is None else _ours(row, work, tempfile.mkdtemp(dir=scratch))
    return begin(name, program, work.batches(), period, ours=row is not None)


def begin(name: str, program: Program, batches: list[Batch], period: int = 1, *, ours: bool = True) -> Facts:
    """Keep a program, and run its first steps; more of them if it is `ours`, to count its bytes."""
    kept = HELD[name] = Kept(program, batches)
    first = kept.run(SEEN)
    if SEEN % period:
        kept.run(period - SEEN % period)  # up to the start of the next period
    with comm.ledger() as ledger:
        counted = kept.run(period)
    sent = 0
    if ours:  # the difference leaves out what is sent before and after the steps
        with comm.ledger() as longer:
            kept.run(2 * period)
        sent = (longer.bytes_sent - ledger.bytes_sent) // period
    return Facts(first.losses, counted.seconds, sent, ledger.comm_overlap, program.memory())


def _ours(row: Row, work: Work, scratch: str) -> Program:
    if row.loop:
        return LOOPS[row.loop](work)
    options: dict[str, Any] = row.options
    if options == OFFLOAD:
        options = {"fully_shard": {"offload": scratch}}
    return EngineProgram(md.prepare(work.build(), ADAMW, Layout.parse(row.layout), rehearse=False, **options))


def turn(name: str, steps: int) -> float:
    """Run so many steps, and return the seconds of one."""
    return HELD[name].run(steps).seconds


def drop() -> None:
    """Delete all programs."""
    HELD.clear()
    gc.collect()
