"""The order in which the lanes of a machine run, how lanes wait, deadlocks and livelocks.

Lanes at the same program point run together, whatever warp or block they belong to. The lanes at the lowest
instruction run first, so that threads that took different branches meet again. If those lanes are in a loop,
they may be waiting for what others write. So now and then the lanes that have stood longest run instead.

Any step may hold lanes back: a barrier does, and a shuffle whose lanes are not all there. Such lanes are
parked in the middle of a basic block. They try again when lanes of their warp arrive, and when no other lane
can run. If that changes nothing either, it is a deadlock.

Lanes that loop for ever, on a lock that nobody releases or a flag that nobody sets, are a livelock. A machine
is deterministic. If its registers, the program points of its lanes, and all that it can read are the same as
before, and every group of lanes has run since, then only another machine's write can ever change anything. A
full comparison costs about as much as running a block of instructions. So it is rare, and happens only when
the few things that are cheap to compare are equal.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..accesses.undefined_values import EXCHANGES, UndefinedValues
from ..machine.machine_state import Machine
from ..ptx.dtypes import Lanes, Mask
from ..ptx.fault import Fault
from ..synchronization.block_barriers import MISSED, Barriers
from .schedule import BasicBlock, Code

EVERY = 1024  # runs of a block from one snapshot of the machine to the next
LASTS = 8 * EVERY  # runs for which a snapshot is kept


class LivelockDetector:
    """Takes a snapshot of the machine now and then, and tells when the machine is back in that state."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.runs = 0
        self.point: object = None  # the program point that ran next at the snapshot; None: no snapshot
        self.lanes: dict[tuple[int, int], Lanes] = {}  # by program point
        self.registers: list[NDArray[np.generic]] = []
        self.changes = (0, 0)
        self.not_run: set[tuple[int, int]] = set()  # program points that have not run since the snapshot
        self.returns, self.next = 0, 1  # how often it looked like the snapshot, and when to compare all

    def repeats(self, point: tuple[int, int], running: dict[tuple[int, int], Lanes]) -> bool:
        """Return whether the machine, about to run the lanes at `point`, is back in an earlier state."""
        self.runs += 1
        if self.point is None:
            if self.runs >= EVERY:
                self._take_snapshot(point, running)
            return False
        changes = (self.machine.memory.changes, self.machine.events)
        if changes != self.changes or self.runs > LASTS:
            self.point, self.runs = None, 0
            return False
        back = point == self.point and not self.not_run and self._same(running)
        self.not_run.discard(point)
        if back:
            self.point, self.runs = None, EVERY
        return back

    def _take_snapshot(self, point: tuple[int, int], running: dict[tuple[int, int], Lanes]) -> None:
        machine = self.machine
        self.point, self.runs = point, 0
        self.lanes = dict(running)  # nothing writes to these arrays
        self.registers = [file.copy() for file in machine.files.values()]
        self.changes = (machine.memory.changes, machine.events)
        self.not_run = {*running} - {point}
        self.returns, self.next = 0, 1

    def _same(self, running: dict[tuple[int, int], Lanes]) -> bool:
        if running.keys() != self.lanes.keys():
            return False
        self.returns += 1
        if self.returns < self.next:
            return False
        self.next *= 2
        return all(np.array_equal(running[one], self.lanes[one]) for one in running) and all(
            np.array_equal(file, kept)
            for file, kept in zip(self.machine.files.values(), self.registers, strict=True)
        )


ProgramPoint: TypeAlias = tuple[int, int]  # the first instruction of a basic block, and a step in it

# After PATIENCE runs of the lowest lanes others run once, then after half as many, down to IMPATIENCE. A
# block that looks whether something has changed (an atomic, say) counts as LOOK runs.
PATIENCE, IMPATIENCE, LOOK = 2048, 16, 128


class LaneScheduler:
    """Runs the lanes of one machine: those that can run and those that are parked, by program point."""

    def __init__(self, machine: Machine, code: Code) -> None:
        self.machine, self.code = machine, code
        self.running: dict[ProgramPoint, Lanes] = {(0, 0): machine.alive.copy()}
        self.parked: dict[ProgramPoint, Lanes] = {}
        self.runs, self.patience = 0, PATIENCE
        self.woken = 0  # the machine's events when parked lanes last tried
        self.livelock = LivelockDetector(machine)
        self.verdict: Fault | None = None  # what is wrong if no lane ever goes on
        self.seen_changes = -1  # the memory's changes when this machine last ran

    def run(self) -> bool:
        """Run all lanes until they end or none can go on; return whether they ended. Raises Fault.

        If they have not ended, call again when other blocks have written memory: a lane may wait for that.
        If no block will, `verdict` is the fault.
        """
        ended = self._run_lanes()
        self.seen_changes = self.machine.memory.changes
        if ended:
            for state in list(self.machine.states.values()):
                if finish := getattr(state, "finish", None):
                    finish()
            self.machine.launch.give_back(self.machine.registers)
        return ended

    def _run_lanes(self) -> bool:
        self.verdict = None
        while self.running or self.parked:
            if not self.running:
                if not self._wake() and not self._complete_late():
                    return False
                continue
            point = self._next()
            if self.livelock.repeats(point, self.running) and not (self._wake() or self._complete_late()):
                self.verdict = self.verdict or self._livelock_fault(point)
                return False
            self._run(point, self.running.pop(point))
        return True

    def _next(self) -> ProgramPoint:
        """Choose the program point whose lanes run next."""
        if len(self.running) == 1 and not self.parked:
            self.runs, self.patience = 0, PATIENCE
            return next(iter(self.running))
        if self.runs < self.patience:
            return min(self.running)
        self.runs, self.patience = 0, max(self.patience // 2, IMPATIENCE)
        if self.parked and self.machine.events != self.woken:
            self._wake()
        return next(iter(self.running))  # the first in the dict has stood there longest

    def _wake(self) -> bool:
        """Let parked lanes try again; return whether anything has changed."""
        events = self.woken = self.machine.events
        before = dict(self.parked)
        for point in sorted(before):
            if (lanes := self.parked.pop(point, None)) is not None:  # else they went on with others
                self._run(point, lanes)
        if events != self.machine.events or before.keys() != self.parked.keys():
            return True
        return any((lanes != self.parked[point]).any() for point, lanes in before.items())

    def _complete_late(self) -> bool:
        """Complete one pending operation that a lane waits for; return whether there was one."""
        try:
            if any(complete() for complete in self.machine.late):
                return True
        except Fault as fault:
            self.verdict = fault
            return False
        if self.parked and not self.running:
            self.verdict = self._deadlock_fault()
        return False

    def _run(self, point: ProgramPoint, lanes: Lanes) -> None:
        """Run lanes from a step of a basic block to the block's end."""
        machine, (start, first) = self.machine, point
        block = self.code.blocks.get(start)
        if block is None:  # past the last instruction
            machine.end(lanes)
            return
        self.runs += LOOK if block.looks else 1
        mask: Mask = None if machine.full and lanes.all() else lanes
        for i in range(first, len(block.steps)):
            step = block.steps[i]
            if self.parked and (start, i) in self.parked:
                lanes = self._take_parked((start, i), lanes)
                mask = None if machine.full and lanes.all() else lanes
            active = mask
            if step.guard is not None:
                guard = step.guard(machine)
                active = guard if mask is None else guard & mask
                if not active.any():
                    continue
                if active.all():
                    active = None
            machine.instruction = step.instructions[0]
            if machine.has_undefined and step.instructions[0].opcode[0] not in EXCHANGES:
                machine.state(UndefinedValues).follow(step.batch, step.unit, active)
            passed = step.run(machine, active)
            held = None if passed is None else lanes & ~passed if active is None else active & ~passed
            if held is not None and held.any():
                self.parked[start, i] = self.parked.get((start, i), False) | held
                active = mask = lanes = lanes & ~held
                if not lanes.any():
                    return
            if machine.counts is not None:
                machine.counts.step(machine.shape, step.instructions, active, step.counted)
        self._leave(block, lanes)

    def _take_parked(self, point: ProgramPoint, lanes: Lanes) -> Lanes:
        """Return the lanes together with the lanes of their warps that are parked at this point."""
        parked = self.parked.pop(point)
        with_them: Lanes = parked & np.repeat(lanes.reshape(-1, 32).any(axis=1), 32)
        if (others := parked & ~with_them).any():
            self.parked[point] = others
        return lanes | with_them

    def _leave(self, block: BasicBlock, lanes: Lanes) -> None:
        """Send lanes where the end of the block leads."""
        machine = self.machine
        if block.control is None:
            self._add(block.next, lanes)
            return
        control, taken = block.control.first, lanes
        if block.guard is not None:
            taken = lanes & block.guard(machine)
            if machine.has_undefined:
                machine.state(UndefinedValues).use(block.control, (control.guard,), lanes, control)
        if machine.counts is not None:
            machine.counts.step(machine.shape, (control,), lanes, "branch")
        if taken.any():
            if control.opcode[0] == "bra":
                self._add(block.target, taken)
            elif control.opcode[0] == "trap":
                machine.fault("trap", "the kernel stops itself", control, taken)
            else:
                machine.end(taken)
        if block.guard is not None and (rest := lanes & ~taken).any():
            self._add(block.next, rest)

    def _add(self, start: int, lanes: Lanes) -> None:
        there = self.running.get((start, 0))
        self.running[start, 0] = lanes if there is None else there | lanes

    def _deadlock_fault(self) -> Fault:
        """Report which threads wait at which line, for the first block with a waiting thread."""
        machine = self.machine
        block = min(int(machine.block_of_lane[lanes].min()) for lanes in self.parked.values())
        mine = machine.block_of_lane == block
        waits, steps = [], []
        for start, i in sorted(self.parked):
            count = int((self.parked[start, i] & mine).sum())
            if count:
                steps.append(self.code.blocks[start].steps[i])
                instruction = steps[-1].instructions[0]
                line = str(instruction.location or "an unknown line")
                waits.append(f"{count} wait{'s' if count == 1 else ''} at {line} [{instruction.text}]")
        ended = machine.threads - int((machine.alive & mine).sum())
        if ended:
            waits.append(f"{ended} {'has' if ended == 1 else 'have'} ended")
        text = f"of {machine.threads} threads of {machine.block_name(block)}, {', '.join(waits)}"
        kind, first, remedy = steps[0].unit.missed, steps[0].instructions[0], ""
        if (earlier := machine.state(Barriers).first_mixed(block)) is not None:
            text += f", and before, only some of them came to {earlier.location or 'an earlier barrier'}"
            kind, first = MISSED, earlier
        if first.opcode[0] in ("bar", "barrier"):
            remedy = "; let all threads of the block come to the same cuda.syncthreads()"
        return machine.make_fault(kind, f"{text}: none can ever go on{remedy}", first)

    def _livelock_fault(self, point: ProgramPoint) -> Fault:
        """Report which threads loop for ever, for those at this program point."""
        machine, lanes = self.machine, self.running[point]
        block = self.code.blocks[point[0]]
        every = [one for step in block.steps for one in step.instructions]
        every = every or [machine.program.instructions[point[0]]]  # a block of one branch
        looks = [one for one in every if one.opcode[0] in ("atom", "ld", "call")] or every
        others = int(lanes.sum()) - 1
        who = machine.thread_name(int(np.argmax(lanes))) + (f" (and {others} more)" if others else "")
        text = (
            f"{who} goes round a loop for ever, as what it looks at can change no more: "
            "a lock that is not released, a flag that is not set, or that is read by no atomic"
        )
        return machine.make_fault("deadlock", text, looks[-1])
