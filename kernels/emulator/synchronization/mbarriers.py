"""mbarriers: 8 bytes of shared memory that count arrivals of threads and bytes of copies, phase by phase.

A phase is over after as many arrivals as `init` named and as many bytes as were announced (expect_tx). Then
the next phase begins and expects as many arrivals (PTX ISA, "Parallel Synchronization and Communication
Instructions: mbarrier"). Threads wait for a phase by its parity; the phase before the first has parity 1. An
arrival releases what the thread did before, a wait that ends acquires it, and a copy's bytes bring what the
copy knows.

try_wait parks its lanes until the phase is over, so a loop around it runs once. A GPU also holds the thread
back, but lets it try again after some time. The emulator fills an mbarrier's bytes with a pattern, so that it
notices when something overwrites them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ..base.addresses import groups, in_shared_window, lanes_of, of_lanes, shared_blocks
from ..base.instruction_batch import Batch
from ..base.instruction_registry import Run, unit, unit_of_lanes
from ..machine.machine_state import Machine
from ..ptx.dtypes import Array, Lanes, Mask
from ..ptx.fault import EmulatorError, Fault
from ..ptx.program import PtxInstruction, Special
from .async_groups import snapshot
from .clusters import RemoteAccesses

BYTES = 8  # of an mbarrier, and its alignment
LARGEST = (1 << 20) - 1  # arrivals of a phase, and pending bytes in either direction
_PATTERN = np.frombuffer(b"mbarrier", np.uint8)

Key: TypeAlias = tuple[int, int]  # the block of the machine, and the offset in its shared memory


@dataclass
class Mbarrier:
    """The state of one mbarrier. Its methods raise Fault where the hardware's behaviour is undefined."""

    expected: int  # arrivals of each phase
    joined: Array  # what the arrivals of this phase knew, as a vector clock
    maker: int  # the agent that made it
    made: int  # the maker's time then
    completed: Array  # what the arrivals of the last completed phase knew
    pending: int = 0  # arrivals that this phase still lacks
    bytes: int = 0  # announced and not copied yet
    phase: int = 0
    shown: bool = False  # a fence has shown it to the copy engine and the cluster

    def __post_init__(self) -> None:
        if not 1 <= self.expected <= LARGEST:
            raise Fault("mbarrier", f"an mbarrier is made for {self.expected} arrivals: 1 to {LARGEST}")
        self.pending = self.expected

    def arrive(self, count: int, clock: Array | None) -> bool:
        """Count arrivals that release `clock` (None: relaxed); return whether the phase is over."""
        if count < 1 or count > self.pending:
            raise Fault(
                "mbarrier",
                f"{count} arrivals at an mbarrier whose phase {self.phase} lacks {self.pending} "
                f"of {self.expected}: make it for as many as come, or wait for the phase before",
            )
        self.pending -= count
        if clock is not None:
            self.joined = np.maximum(self.joined, clock)
        return self._step()

    def expect(self, count: int) -> bool:
        """Announce bytes of copies to this phase; return whether it is over."""
        self.bytes += count
        if abs(self.bytes) > LARGEST:
            raise Fault("mbarrier", f"an mbarrier waits for {self.bytes} bytes: it counts to {LARGEST}")
        return self._step()

    def complete(self, count: int, clock: Array) -> bool:
        """Count bytes of a copy, which knows `clock`; return whether the phase is over."""
        self.joined = np.maximum(self.joined, clock)
        return self.expect(-count)

    def over(self, parity: Array) -> Lanes:
        """Whether the phase of each of these parities, the last or the current, is over."""
        return np.asarray(self.phase & 1 != parity)

    def _step(self) -> bool:
        if self.pending or self.bytes:
            return False
        self.phase += 1
        self.pending = self.expected
        self.completed, self.joined = self.joined, np.zeros_like(self.joined)
        return True

    def lacks(self) -> str:
        """Say what the current phase waits for."""
        parts = [f"{self.pending} of {self.expected} arrivals"] if self.pending else []
        parts += [f"{self.bytes} bytes"] if self.bytes > 0 else []
        lacks = f"lacks {' and '.join(parts)}" if parts else ""
        more = f"has {-self.bytes} bytes more than were announced" if self.bytes < 0 else ""
        return " and ".join(part for part in (lacks, more) if part)


class Mbarriers:
    """The mbarriers of a machine, and the lanes that wait for each."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.table: dict[Key, Mbarrier] = {}
        self.awaited: dict[Key, set[int]] = {}  # lanes that wait
        self.waits: dict[Key, PtxInstruction | None] = {}  # the last instruction that began to wait
        machine.late.append(self._explain)

    def keys(self, addresses: Array, lanes: Array) -> tuple[Array, Array]:
        """Return (block, offset) of mbarriers at some lanes' shared or generic addresses. Raises Fault."""
        machine = self.machine
        block, offset = shared_blocks(machine, in_shared_window(machine, addresses, lanes), lanes)
        for bad, kind, wrong in (
            (offset % BYTES != 0, "misaligned", f"no multiple of {BYTES}"),
            (
                (offset < 0) | (offset + BYTES > machine.shared_size),
                "out of bounds",
                f"of which the block has {machine.shared_size}",
            ),
        ):
            if bad.any():
                first = np.argmax(bad)
                text = f"uses an mbarrier at byte {int(offset[first])} of shared memory, {wrong}"
                machine.fault_at(kind, text, int(lanes[first]))
        return block, offset

    def make(self, key: Key, count: int, lane: int) -> None:
        """mbarrier.init by a lane."""
        if key in self.table:
            text = "makes an mbarrier where one is: mbarrier.inval has to end that first"
            self.machine.fault_at("mbarrier", text, lane)
        clocks = self.machine.clocks
        agent = clocks.agents_of_lanes[lane]
        nothing = np.zeros(clocks.agents, np.int32)
        time = int(clocks.own(np.array([agent]))[0])
        with self.machine.located(lane):
            self.table[key] = Mbarrier(count, nothing, int(agent), time, nothing)
        self._bytes(key)[:] = _PATTERN

    def at(self, key: Key, lanes: Array) -> Mbarrier:
        """Return the mbarrier that lanes use; Fault if there is none, or its making races with the use."""
        lane = int(lanes[0])
        found = self.table.get(key)
        if found is None:
            text = f"uses an mbarrier at byte {key[1]} of shared memory, where none was made"
            self.machine.fault_at("mbarrier", text, lane)
        if (self._bytes(key) != _PATTERN).any():
            text = f"uses the mbarrier at byte {key[1]}, and something was written over it"
            self.machine.fault_at("mbarrier", text, lane)
        clocks = self.machine.clocks
        agents = clocks.agents_of_lanes[lanes]
        known = clocks.knows(agents, np.array([found.maker % clocks.agents]))
        if (unordered := (agents != found.maker) & (known < found.made)).any():
            text = f"uses the mbarrier at byte {key[1]} that another warp made, with no barrier between them"
            self.machine.fault_at("race", text, int(lanes[np.argmax(unordered)]))
        return found

    def by_key(self, addresses: Array, lanes: Array) -> Iterator[tuple[Key, Array]]:
        """Yield each mbarrier that some of (lanes,) use, and the positions of those lanes. Raises Fault."""
        return groups(*self.keys(addresses, lanes))

    def show(self, agents: Array) -> None:
        """Note a fence by these warps: it shows the mbarriers that they made."""
        for mbarrier in self.table.values():
            mbarrier.shown |= mbarrier.maker in agents

    def _bytes(self, key: Key) -> Array:
        return self.machine.shared[key[0], key[1] : key[1] + BYTES]

    def _explain(self) -> bool:
        """Fault when no lane can go on: name an mbarrier that lanes wait for, and what it lacks."""
        for key, lanes in sorted(self.awaited.items()):
            mbarrier = self.table.get(key)
            if mbarrier is not None and lanes:
                name = self.machine.block_name(key[0])
                self.machine.instruction = self.waits[key]
                self.machine.fault(
                    "deadlock",
                    f"{len(lanes)} threads wait for the mbarrier at byte {key[1]} of the shared memory "
                    f"of {name}, whose phase {mbarrier.phase} {mbarrier.lacks()}, and nobody can go on",
                )
        return False


@unit_of_lanes("mbarrier.init", order="fence", operands=("address", "u32"), counted="barrier")
def init(machine: Machine, lanes: Array, addresses: Array, counts: Array) -> None:
    """mbarrier.init{.shared}.b64 [addr], count."""
    mbarriers = machine.state(Mbarriers)
    for *key, count, lane in np.stack([*mbarriers.keys(addresses, lanes), counts, lanes], axis=1).tolist():
        mbarriers.make((key[0], key[1]), count, lane)


@unit_of_lanes("mbarrier.inval", order="fence", operands=("address",), counted="barrier")
def inval(machine: Machine, lanes: Array, addresses: Array) -> None:
    """mbarrier.inval{.shared}.b64 [addr]."""
    mbarriers = machine.state(Mbarriers)
    for key, which in mbarriers.by_key(addresses, lanes):
        mbarriers.at(key, lanes[which])
        del mbarriers.table[key]


@unit("mbarrier.arrive", "mbarrier.arrive.expect_tx", order="fence", counted="barrier")
def arrive(batch: Batch) -> Run:
    """mbarrier.arrive{.sem.scope}{.space}.b64 _, [addr]: each thread arrives once.

    mbarrier.arrive.expect_tx with bytes as its last operand announces them first.
    """
    opcode, operands = batch.first.opcode, batch.first.operands
    announces, relaxed = "expect_tx" in opcode, "relaxed" in opcode
    if "noComplete" in opcode or operands[0] != Special("_") or len(operands) != 2 + announces:
        raise EmulatorError(f"this form of mbarrier.arrive is not emulated: {batch.first.text}")
    address, announced = batch.address(1), batch.source(2, "u32") if announces else None

    def run(machine: Machine, mask: Mask) -> None:
        lanes, mbarriers, clocks = lanes_of(machine, mask), machine.state(Mbarriers), machine.clocks
        count = None if announced is None else of_lanes(announced(machine), machine, lanes)
        agents = clocks.agents_of_lanes[lanes]
        for key, which in mbarriers.by_key(of_lanes(address(machine), machine, lanes), lanes):
            mbarrier = mbarriers.at(key, lanes[which])
            machine.state(RemoteAccesses).note(key[0], agents[which])
            clock = None if relaxed else snapshot(clocks, np.unique(agents[which])).max(axis=0)
            with machine.located(int(lanes[which[0]])):
                # Bytes are announced before anything arrives, since the last arrival ends the phase.
                if count is not None:
                    mbarrier.expect(int(count[which].sum()))
                machine.events += mbarrier.arrive(which.size, clock)
        clocks.tick(np.unique(agents))

    return run


@unit("mbarrier.try_wait.parity", order="barrier", counted="barrier")
def wait(batch: Batch) -> Run:
    """mbarrier.try_wait.parity{.sem.scope}{.space}.b64 p, [addr], parity{, time}: wait for a phase's end.

    Lanes that find it over learn what the arrivals released.
    """
    write, address, parity = batch.target(0, "pred"), batch.address(1), batch.source(2, "u32")

    def run(machine: Machine, mask: Mask) -> Lanes:
        lanes, mbarriers, clocks = lanes_of(machine, mask), machine.state(Mbarriers), machine.clocks
        wanted = of_lanes(parity(machine), machine, lanes) & 1
        over = np.zeros(machine.lanes, np.bool_)
        for key, which in mbarriers.by_key(of_lanes(address(machine), machine, lanes), lanes):
            mbarrier, waiting = mbarriers.at(key, lanes[which]), mbarriers.awaited.setdefault(key, set())
            passed = mbarrier.over(wanted[which])
            through, held = lanes[which[passed]], lanes[which[~passed]].tolist()
            over[through] = True
            clocks.join(np.unique(clocks.agents_of_lanes[through]), mbarrier.completed)
            waiting.difference_update(through.tolist())
            waiting.update(held)
            if held:
                mbarriers.waits[key] = machine.instruction
        write(machine, over[None], over)
        # Lanes that the guard leaves out pass without a result.
        return over if mask is None else over | ~mask

    return run
