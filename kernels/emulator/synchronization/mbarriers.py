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

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ..base.addresses import in_shared_window, lanes_of, of_lanes, shared_blocks
from ..base.instruction_batch import Batch
from ..base.instruction_registry import Run, unit, unit_of_lanes
from ..machine.machine_state import Machine
from ..ptx.dtypes import Array, Lanes, Mask
from ..ptx.fault import EmulatorError, Fault
from ..ptx.program import Address, PtxInstruction
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

    def over(self, parity: int) -> bool:
        """Whether the phase of this parity, the last or the current, is over."""
        return self.phase & 1 != parity

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
        self.looks: dict[Key, int] = {}  # failed test_waits, which do not wait
        self.waits: dict[Key, PtxInstruction | None] = {}  # the last instruction that began to wait
        self.bring: Callable[[Iterable[Key]], bool] = lambda keys: False  # completes copies to mbarriers
        machine.late.append(self._explain)

    def keys(self, addresses: Array, lanes: Array) -> tuple[Array, Array]:
        """Return (block, offset) of mbarriers at some lanes' shared or generic addresses. Raises Fault."""
        machine = self.machine
        block, offset = shared_blocks(machine, in_shared_window(machine, addresses, lanes), lanes)
        if (bad := offset % BYTES != 0).any():
            at, lane = int(offset[np.argmax(bad)]), lanes[np.argmax(bad)]
            text = f"uses an mbarrier at byte {at} of shared memory, no multiple of {BYTES}"
            machine.fault_at("misaligned", text, int(lane))
        if (bad := (offset < 0) | (offset + BYTES > machine.shared_size)).any():
            at, lane = int(offset[np.argmax(bad)]), lanes[np.argmax(bad)]
            text = f"uses an mbarrier at byte {at} of shared memory, of which the block has"
            machine.fault_at("out of bounds", f"{text} {machine.shared_size}", int(lane))
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
        block, offset = self.keys(addresses, lanes)
        code = block * (1 << 32) + offset
        for one in np.unique(code):
            yield (int(one) >> 32, int(one) & 0xFFFFFFFF), np.flatnonzero(code == one)

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


# Copies complete when no lane can run. A loop around test_wait can always run: its copies complete after
# this many failed tests.
PATIENCE = 64


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
    """mbarrier.arrive{.sem.scope}{.space}.b64 {state or _,} [addr]{, count}, and .expect_tx with its bytes.

    Each thread arrives once, or `count` times; expect_tx announces bytes first.
    """
    opcode, operands = batch.first.opcode, batch.first.operands
    if "noComplete" in opcode:
        raise EmulatorError(f"this form of mbarrier.arrive is not emulated: {batch.first.text}")
    at = next(i for i, operand in enumerate(operands) if isinstance(operand, Address))
    address, write = batch.address(at), batch.target(0, "b64") if at else None
    amount = batch.source(at + 1, "u32") if batch.has(at + 1) else None
    announces, relaxed = "expect_tx" in opcode, "relaxed" in opcode

    def run(machine: Machine, mask: Mask) -> None:
        lanes, mbarriers, clocks = lanes_of(machine, mask), machine.state(Mbarriers), machine.clocks
        amounts = (
            np.ones(lanes.size, np.int64) if amount is None else of_lanes(amount(machine), machine, lanes)
        )
        agents = clocks.agents_of_lanes[lanes]
        states = np.zeros((1, machine.lanes), np.uint64)
        for key, which in mbarriers.by_key(of_lanes(address(machine), machine, lanes), lanes):
            first = int(lanes[which[0]])
            mbarrier = mbarriers.at(key, lanes[which])
            states[0, lanes[which]] = mbarrier.phase
            machine.state(RemoteAccesses).note(key[0], agents[which])
            # Bytes are announced before anything arrives, since the last arrival ends the phase.
            clock = None if relaxed else snapshot(clocks, np.unique(agents[which])).max(axis=0)
            count = which.size if announces else int(amounts[which].sum())
            with machine.located(first):
                if announces:
                    mbarrier.expect(int(amounts[which].sum()))
                machine.events += mbarrier.arrive(count, clock)
        clocks.tick(np.unique(agents))
        if write is not None:
            write(machine, states, mask)

    return run


@unit_of_lanes(
    *("mbarrier.expect_tx", "mbarrier.complete_tx"),
    order="fence",
    operands=("address", "u32"),
    counted="barrier",
)
def announce(machine: Machine, lanes: Array, addresses: Array, amounts: Array) -> None:
    """mbarrier.expect_tx{.sem.scope}{.space}.b64 [addr], bytes: announce them, without an arrival.

    mbarrier.complete_tx counts them, without a copy.
    """
    assert machine.instruction is not None
    sign = 1 if machine.instruction.opcode[1] == "expect_tx" else -1
    mbarriers = machine.state(Mbarriers)
    for key, which in mbarriers.by_key(addresses, lanes):
        mbarrier = mbarriers.at(key, lanes[which])
        with machine.located(int(lanes[which[0]])):
            machine.events += mbarrier.expect(sign * int(amounts[which].sum()))


@unit("mbarrier.try_wait", order="barrier", counted="barrier")
@unit("mbarrier.test_wait", order="fence", counted="barrier")
def look(batch: Batch) -> Run:
    """mbarrier.try_wait{.parity}{.sem.scope}{.space}.b64 p, [addr], state or parity{, time}: wait.

    mbarrier.test_wait only tests. Lanes that find their phase over learn what the arrivals released.
    """
    opcode = batch.first.opcode
    waits, by_state = opcode[1] == "try_wait", "parity" not in opcode
    write, address = batch.target(0, "pred"), batch.address(1)
    phase = batch.source(2, "b64" if by_state else "u32")

    def run(machine: Machine, mask: Mask) -> Lanes | None:
        lanes, mbarriers, clocks = lanes_of(machine, mask), machine.state(Mbarriers), machine.clocks
        wanted = of_lanes(phase(machine), machine, lanes)
        over = np.zeros(machine.lanes, np.bool_)
        for key, which in mbarriers.by_key(of_lanes(address(machine), machine, lanes), lanes):
            mbarrier = mbarriers.at(key, lanes[which])
            for one in np.unique(wanted[which]):
                those = lanes[which[wanted[which] == one]]
                waiting = mbarriers.awaited.setdefault(key, set())
                if mbarrier.phase > int(one) if by_state else mbarrier.over(int(one) & 1):
                    over[those] = True
                    clocks.join(np.unique(clocks.agents_of_lanes[those]), mbarrier.completed)
                    waiting.difference_update(those.tolist())
                elif waits:
                    waiting.update(those.tolist())
                    mbarriers.waits[key] = machine.instruction
                else:
                    mbarriers.looks[key] = mbarriers.looks.get(key, 0) + 1
                    if mbarriers.looks[key] % PATIENCE == 0:
                        mbarriers.bring([key])
        write(machine, over[None], over if waits else mask)
        # Lanes that the guard leaves out pass without a result.
        return None if not waits else over if mask is None else over | ~mask

    return run
