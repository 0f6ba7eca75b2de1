"""The order in which the lanes of a machine run, and what becomes of those that have to wait.

Lanes that stand at the same step run together, whatever warp or block they belong to: a *front*. The front at
the lowest instruction goes first, so that threads that took different branches meet again. Where that one
goes round a loop, it may wait for what others write, so now and then who stood longest gets a turn.

Any step may hold lanes back (a barrier does, and a shuffle whose lanes are not all there). They are parked
there, in the middle of a block, and try again with lanes of their warp that come to it, and when nobody else
can run. When nobody gets on at all, that is a deadlock, and so it is when all go in circles (`circles`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..memory.undefined_values import EXCHANGES
from ..ptx.fault import Fault
from ..synchronization.barriers import Barriers
from .livelock import Circles

if TYPE_CHECKING:
    from ..base.instruction_registry import Mask
    from .machine import Machine
    from .schedule import BasicBlock

Lanes: TypeAlias = NDArray[np.bool_]
ProgramPoint: TypeAlias = tuple[int, int]  # the first instruction of a basic block, and a step in it

# After so many turns of the lowest front another gets one, then after half as many, and so on. A turn in a
# block that looks whether something has changed (an atomic, say) counts as many.
PATIENCE, IMPATIENCE, LOOK = 2048, 16, 128
KINDS = dict.fromkeys(("bar", "barrier", "call"), "barrier not reached by all threads")
KINDS |= dict.fromkeys(("shfl", "vote", "match", "redux"), "warp diverged")


class Fronts:
    """Where the lanes of a machine stand: `running` and `parked`, by place."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.running: dict[ProgramPoint, Lanes] = {(0, 0): machine.alive.copy()}
        self.parked: dict[ProgramPoint, Lanes] = {}
        self.turns, self.patience = 0, PATIENCE
        self.woken = 0  # the machine's events when parked lanes last tried
        self.circles = Circles(machine)
        self.verdict: Fault | None = None  # what is wrong where nobody can go on

    def run(self) -> bool:
        """Run all lanes to their end, or until none can go on; return whether they ended.

        Call again when others have written memory; `verdict` is the fault where nobody will. Raises Fault.
        """
        self.verdict = None
        while self.running or self.parked:
            if not self.running:
                if not self._wake() and not self._late():
                    return False
                continue
            place = self._next()
            if self.circles.closed(place, self.running) and not (self._wake() or self._late()):
                self.verdict = self.verdict or self._spinning(place)
                return False
            self._run(place, self.running.pop(place))
        return True

    def _next(self) -> ProgramPoint:
        """The place whose front gets a turn."""
        if len(self.running) == 1 and not self.parked:
            self.turns, self.patience = 0, PATIENCE
            return next(iter(self.running))
        if self.turns < self.patience:
            return min(self.running)
        self.turns, self.patience = 0, max(self.patience // 2, IMPATIENCE)
        if self.parked and self.machine.events != self.woken:
            self._wake()
        return next(iter(self.running))  # it has stood there longest

    def _wake(self) -> bool:
        """Let parked lanes try again; return whether anything has changed."""
        events = self.woken = self.machine.events
        before = dict(self.parked)
        for place in sorted(before):
            if (lanes := self.parked.pop(place, None)) is not None:  # else they went on with others
                self._run(place, lanes)
        if events != self.machine.events or before.keys() != self.parked.keys():
            return True
        return any((lanes != self.parked[place]).any() for place, lanes in before.items())

    def _late(self) -> bool:
        """Complete one pending operation that somebody waits for; return whether there was one."""
        try:
            if any(complete() for complete in self.machine.late):
                return True
        except Fault as fault:
            self.verdict = fault
            return False
        if self.parked and not self.running:
            self.verdict = self._deadlock()
        return False

    def _run(self, place: ProgramPoint, lanes: Lanes) -> None:
        """Run lanes from a step of a block to its end."""
        machine, (start, first) = self.machine, place
        block = machine.code.blocks.get(start)
        if block is None:  # past the last instruction
            machine.end(lanes)
            return
        self.turns += LOOK if block.looks else 1
        mask: Mask = None if machine.full and lanes.all() else lanes
        for i in range(first, len(block.steps)):
            step = block.steps[i]
            if self.parked and (start, i) in self.parked:
                lanes = self._joined((start, i), lanes)
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
            if machine.undefined is not None and step.instructions[0].opcode[0] not in EXCHANGES:
                machine.undefined.follow(step.batch, active)
            passed = step.run(machine, active)
            held = None if passed is None else lanes & ~passed if active is None else active & ~passed
            if held is not None and held.any():
                self.parked[start, i] = self.parked.get((start, i), False) | held
                active = mask = lanes = lanes & ~held
                if not lanes.any():
                    return
            if machine.counts is not None:
                machine.counts.step(machine, step.instructions, active)
        self._leave(block, lanes)

    def _joined(self, place: ProgramPoint, lanes: Lanes) -> Lanes:
        """Add to lanes those of their warps that are parked at a place."""
        parked = self.parked.pop(place)
        with_them: Lanes = parked & np.repeat(lanes.reshape(-1, 32).any(axis=1), 32)
        if (others := parked & ~with_them).any():
            self.parked[place] = others
        joined: Lanes = lanes | with_them
        return joined

    def _leave(self, block: BasicBlock, lanes: Lanes) -> None:
        """Go where the end of a block leads."""
        machine = self.machine
        if block.control is None:
            self._join(block.next, lanes)
            return
        taken = lanes
        if block.guard is not None:
            taken = lanes & block.guard(machine)
            if machine.undefined is not None and block.batch is not None and block.control.guard is not None:
                machine.undefined.use(block.batch, (block.control.guard,), lanes, block.control)
        if machine.counts is not None:
            machine.counts.control(machine, block.control, lanes)
        if block.control.opcode[0] == "bra":
            if taken.any():
                self._join(block.target, taken)
        elif block.control.opcode[0] == "trap":
            if taken.any():
                machine.instruction = block.control
                machine.fault("trap", "the kernel stops itself", lanes=taken)
        elif taken.any():
            machine.end(taken)
        if block.guard is not None and (rest := lanes & ~taken).any():
            self._join(block.next, rest)

    def _join(self, start: int, lanes: Lanes) -> None:
        there = self.running.get((start, 0))
        self.running[start, 0] = lanes if there is None else there | lanes

    def _deadlock(self) -> Fault:
        """Say who waits where, for the first block in which anybody does."""
        machine = self.machine
        block = min(int(machine.block_of_lane[lanes].min()) for lanes in self.parked.values())
        mine = machine.block_of_lane == block
        waits, first = [], None
        for start, step in sorted(self.parked):
            count = int((self.parked[start, step] & mine).sum())
            if count:
                instruction = machine.code.blocks[start].steps[step].instructions[0]
                first = first or instruction
                place = str(instruction.location or "an unknown line")
                waits.append(f"{count} wait{'s' if count == 1 else ''} at {place} [{instruction.text}]")
        ended = machine.threads - int((machine.alive & mine).sum())
        if ended:
            waits.append(f"{ended} {'has' if ended == 1 else 'have'} ended")
        text = f"of {machine.threads} threads of {machine.block_name(block)}, {', '.join(waits)}"
        if (earlier := machine.state(Barriers).first_mixed(block)) is not None:
            text += f", and before, only some of them came to {earlier.location or 'an earlier barrier'}"
            first = earlier
        assert first is not None
        kind, remedy = KINDS.get(first.opcode[0], "deadlock"), ""
        if first.opcode[0] in ("bar", "barrier"):
            remedy = "; let all threads of the block come to the same cuda.syncthreads()"
        return machine.make_fault(kind, f"{text}: none can ever go on{remedy}", first)

    def _spinning(self, place: ProgramPoint) -> Fault:
        """Say who goes round in a loop, for the lowest of those places."""
        machine, lanes = self.machine, self.running[place]
        block = machine.code.blocks[place[0]]
        all_of_it = [one for step in block.steps for one in step.instructions]
        looks = [one for one in all_of_it if one.opcode[0] in ("atom", "ld", "call")] or all_of_it
        others = int(lanes.sum()) - 1
        who = machine.thread_name(int(np.argmax(lanes))) + (f" (and {others} more)" if others else "")
        text = (
            f"{who} goes round a loop for ever, as what it looks at can change no more: "
            "a lock that is not released, a flag that is not set, or that is read by no atomic"
        )
        return machine.make_fault("deadlock", text, looks[-1] if looks else block.control)
