"""Happens-before: which accesses to shared memory are ordered by barriers, and which are races.

Each warp has a vector clock: for every other agent of its block, the time up to which it knows what that
agent did (Mattern, Virtual Time and Global States of Distributed Systems, 1989; Flanagan and Freund,
FastTrack, 2009). A barrier joins the clocks of those that meet there. Each granule of shared memory remembers
who wrote it last and when, and when each agent read it last; an access that does not know of an earlier one
by another warp, where one of the two writes, is a race, whatever order the emulator happened to run them in.

Agents of a block are its warps and, beside each, one more for what that warp started and did not wait for:
copies (cp.async, TMA) and matrix instructions (wgmma) that run on their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..base.instruction_registry import Array

if TYPE_CHECKING:
    from ..execution.machine import Machine
    from ..ptx.program import PtxInstruction

NUMBER = 20  # bits of an instruction's number, below a time


class Clocks:
    """The clocks of all agents of a machine, and the history of its shared memory.

    Agents are numbered within their cluster, block after block, since blocks of a cluster wait for each
    other: warp w of the first block is w, what it left running is `asynchronous + w`. `now` is (clusters,
    agents, agents): row i of a cluster is the vector clock of agent i. Without clusters, a block is one.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.warps = machine.warps_per_block
        self.asynchronous = self.warps if machine.program.asynchronous else 0  # 0: there are none
        self.of_block = self.warps + self.asynchronous  # agents
        self.agents = machine.cluster * self.of_block
        self.now = np.zeros((machine.blocks // machine.cluster, self.agents, self.agents), np.int32)
        self.now[:, np.arange(self.agents), np.arange(self.agents)] = 1
        self._flat = self.now.reshape(-1, self.agents)
        self.granule = machine.program.granule  # bytes
        self.shift = self.granule.bit_length() - 1
        self.per_block = machine.shared_pitch // self.granule
        count = machine.blocks * self.per_block if machine.shared_size else 0
        self.writer = np.zeros(count, np.int16)  # the agent, within its block, that wrote last
        self.written = np.zeros(count, np.int32)  # its time then; 0: nobody wrote
        self.written_by = np.zeros(count, np.int32)  # the instruction that wrote last, by its number
        # When each agent read a granule last, above the number of the instruction.
        self.read_at = np.zeros((count, self.agents), np.int64)
        # What comes after a barrier of the whole block is ordered with all before it. So that this, the usual
        # case, is quick to see, there are also times of the whole machine: `era` moves on with each barrier.
        self.era = 1
        self.last_write = np.zeros(count, np.int32)  # the era of each granule's last write; 0: nobody wrote
        self.last_read = np.zeros(count, np.int32)
        self.met = np.zeros(
            machine.blocks * self.of_block, np.int32
        )  # of each agent: the last era it knows all of
        self.has_eras = machine.cluster == 1 and not self.asynchronous
        self.atomic = np.zeros(count, np.bool_)  # the last write was an atomic update
        self.pending = np.zeros(count, np.bool_)  # an asynchronous copy will write it, nobody knows when
        self.any_pending = False  # whether `pending` was ever used
        self._lanes = machine.block_of_lane * self.of_block + machine.thread_of_lane // 32

    def granules(self, block: Array, offset: Array, size: int) -> Array:
        """Return the granules of `size` bytes at `offset` of `block`, in a new last axis."""
        first = block * self.per_block + (offset >> self.shift)
        count = -(-size >> self.shift) if size > self.granule else 1
        found: Array = first[..., None] if count == 1 else first[..., None] + np.arange(count)
        return found

    def read(self, granules: Array, agents: Array, by: Sequence[PtxInstruction] = ()) -> Array:
        """Note reads, and return where another agent wrote unordered.

        granules: (..., n). agents: (...,), or what broadcasts to it, numbered over the machine. by: the
        instruction of each of granules' first axis, where there are several.
        """
        races = self._after_writes(granules, agents)
        inside = agents % self.agents
        time = self._flat[agents, inside].astype(np.int64) << NUMBER
        self.read_at.reshape(-1)[granules * self.agents + inside[..., None]] = time[
            ..., None
        ] | self._numbers(by, granules)
        if self.has_eras:
            self.last_read[granules] = self.era
        return races

    def guess(self, granules: Array, agents: Array, by: Sequence[PtxInstruction] = ()) -> Array:
        """Return where another agent wrote unordered, but for atomics; such a read is in nobody's way."""
        return self._after_writes(granules, agents) & ~self.atomic[granules]

    def write(
        self,
        granules: Array,
        agents: Array,
        by: Sequence[PtxInstruction] = (),
        same: Callable[[], Array] | None = None,
    ) -> Array:
        """Note writes unless there is a race, and return where another agent read or wrote unordered.

        same: says which writes leave the memory as it is, as the writer before did, so that both agree. Who
        passes it also looks for writes of one step that do not agree.
        """
        races = self._after_writes(granules, agents)
        if same is not None and races.any():
            races = races & ~same()
        races = self._after_reads(granules, agents, races)
        if races.any():
            return races
        inside = self._note(granules, agents, by)
        self.atomic[granules] = False
        if same is not None:
            return races
        # Two agents that write in one step: the last one's name stays.
        return np.asarray(self.writer[granules] != inside)

    def update(self, granules: Array, agents: Array, by: Sequence[PtxInstruction] = ()) -> Array:
        """Note atomic updates, and return where another agent's plain access is unordered."""
        races = self._after_writes(granules, agents) & ~self.atomic[granules]
        races = self._after_reads(granules, agents, races)
        if not races.any():
            self._note(granules, agents, by)
            self.atomic[granules] = True
        return races

    def _after_writes(self, granules: Array, agents: Array) -> Array:
        """Where another agent wrote, and these do not know of it."""
        if self.has_eras and not (self.last_write[granules] > self.met[agents][..., None]).any():
            return np.zeros(granules.shape, np.bool_)
        races: Array = self.written[granules] > self._flat[agents[..., None], self.writer[granules]]
        return races

    def _after_reads(self, granules: Array, agents: Array, races: Array) -> Array:
        """Where another agent read, and these do not know of it, beside `races`."""
        if self.has_eras and not (self.last_read[granules] > self.met[agents][..., None]).any():
            return races
        # Their own last read is no race: it is at their own time at most.
        return races | (self.read_at[granules] >> NUMBER > self._flat[agents[..., None]]).any(axis=-1)

    def _note(self, granules: Array, agents: Array, by: Sequence[PtxInstruction]) -> Array:
        inside: Array = (agents % self.agents)[..., None]
        self.writer[granules] = inside
        self.written[granules] = self._flat[agents[..., None], inside]
        self.written_by[granules] = self._numbers(by, granules)
        self.last_write[granules] = self.era
        return inside

    def explain(self, granule: int, agent: int) -> str:
        """Say who used a granule that `agent` races for, and where in the source."""
        inside, known = agent % self.agents, self._flat[agent]
        writer = int(self.writer[granule])
        if writer != inside and self.written[granule] > known[writer]:
            return f"that {self._name(writer)} wrote{self._place(int(self.written_by[granule]))}"
        readers = np.flatnonzero(self.read_at[granule] >> NUMBER > known)
        if readers.size and readers[0] != inside:
            number = int(self.read_at[granule, readers[0]]) & ((1 << NUMBER) - 1)
            return f"that {self._name(int(readers[0]))} reads{self._place(number)}"
        return f"that {self._name(writer)} writes at the same time"

    def _name(self, agent: int) -> str:
        rank, inside = divmod(agent, self.of_block)
        block = f" of block {rank} of the cluster" if self.machine.cluster > 1 else ""
        if inside < self.warps:
            return f"warp {inside}{block}"
        return f"a copy or matrix instruction of warp {inside - self.warps}{block}"

    def _place(self, number: int) -> str:
        instructions = self.machine.program.instructions
        location = instructions[number - 1].location if number else None
        return f" at {location}" if location else ""

    def number(self, instruction: PtxInstruction | None) -> int:
        """Return the number of an instruction in the program, from 1; 0 for none."""
        return self.machine.program.numbers.get(id(instruction), 0)

    def _numbers(self, by: Sequence[PtxInstruction], granules: Array) -> Array | int:
        """The numbers of instructions in the program, from 1, shaped to go with granules."""
        if not by:
            return self.number(self.machine.instruction)
        numbers = np.array([self.machine.program.numbers[id(instruction)] for instruction in by], np.int32)
        return numbers.reshape(-1, *(1,) * (granules.ndim - 1))

    def agents_of_lanes(self, asynchronous: bool = False) -> Array:
        """Return the agent of each lane, numbered over the machine."""
        return self._lanes + self.asynchronous if asynchronous else self._lanes

    def agent(self, block: Array, warp: Array) -> Array:
        """Return the agents, numbered over the machine, of these warps of these blocks."""
        return block * self.of_block + warp

    def own(self, agents: Array) -> Array:
        """Return the time of each agent."""
        time: Array = self._flat[agents, agents % self.agents]
        return time

    def knows(self, agents: Array, others: Array) -> Array:
        """Return up to when each agent knows what `others`, numbered within its block, did."""
        times: Array = self._flat[agents, others]
        return times

    def tick(self, agents: Array) -> None:
        """Move agents on: what they do from now on is later than what anybody knows of them."""
        self._flat[agents, agents % self.agents] += 1

    def clock(self, agent: int) -> NDArray[np.int32]:
        """Return a copy of an agent's vector clock."""
        copied: NDArray[np.int32] = self._flat[agent].copy()
        return copied

    def join(self, agents: Array | int, clock: Array) -> None:
        """Let agents know what `clock` knows."""
        self._flat[agents] = np.maximum(self._flat[agents], clock)

    def meet(self, block: int, warps: Array) -> None:
        """Let these warps of a block know all that any of them knows: they met at a barrier."""
        agents = self.agent(np.array(block), warps)
        self._flat[agents] = self._flat[agents].max(axis=0)
        self.tick(agents)

    def meet_all(self, blocks: Array) -> None:
        """`meet` of all warps, for several blocks."""
        agents = self.agent(blocks[:, None], np.arange(self.warps))
        self._flat[agents] = self._flat[agents].max(axis=1, keepdims=True)
        self.tick(agents)
        self.met[agents] = self.era
        self.era += 1
