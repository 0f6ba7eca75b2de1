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

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .units import Array

if TYPE_CHECKING:
    from .machine import Machine
    from .program import Instruction

ACCESSES = {"ld", "st", "atom", "red", "cp", "ldmatrix", "stmatrix", "wgmma"}
ASYNC = {"cp", "wgmma"}


class Clocks:
    """The clocks of all agents of a machine, and the history of its shared memory.

    Agents are numbered within their cluster, block after block, since blocks of a cluster wait for each
    other: warp w of the first block is w, what it left running is `asynchronous + w`. `now` is (clusters,
    agents, agents): row i of a cluster is the vector clock of agent i. Without clusters, a block is one.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        names = {instruction.opcode[0] for instruction in machine.program.instructions}
        self.warps = machine.warps_per_block
        self.asynchronous = self.warps if names & ASYNC else 0  # 0: there are none
        self.of_block = self.warps + self.asynchronous  # agents
        self.agents = machine.cluster * self.of_block
        self.now = np.zeros((machine.blocks // machine.cluster, self.agents, self.agents), np.int32)
        self.now[:, np.arange(self.agents), np.arange(self.agents)] = 1
        self._flat = self.now.reshape(-1, self.agents)
        self.granule = granule(machine)  # bytes
        self.per_block = machine.shared_pitch // self.granule
        count = machine.blocks * self.per_block if machine.shared_size else 0
        self.writer = np.zeros(count, np.int16)  # the agent, within its block, that wrote last
        self.written = np.zeros(count, np.int32)  # its time then; 0: nobody wrote
        self.read_at = np.zeros((count, self.agents), np.int32)  # when each agent read last
        self.written_by = np.zeros(
            count, np.int32
        )  # the instruction that wrote last, and one that read since
        self.read_by = np.zeros(count, np.int32)
        self.atomic = np.zeros(count, np.bool_)  # the last write was an atomic update
        self.pending = np.zeros(count, np.bool_)  # an asynchronous copy will write it, nobody knows when
        self.any_pending = False  # whether `pending` was ever used
        self._number = {id(one): 1 + i for i, one in enumerate(machine.program.instructions)}
        self._lanes = machine.block_of_lane * self.of_block + machine.thread_of_lane // 32

    def granules(self, block: Array, offset: Array, size: int) -> Array:
        """Return the granules of `size` bytes at `offset` of `block`, in a new last axis."""
        first = block * self.per_block + offset // self.granule
        found: Array = first[..., None] + np.arange(-(-size // self.granule))
        return found

    def read(self, granules: Array, agents: Array, by: Sequence[Instruction] = ()) -> Array:
        """Note reads, and return where another agent wrote unordered.

        granules: (..., n). agents: (...,) numbered over the machine, `block * self.agents + agent`. by: the
        instruction of each of granules' first axis, where there are several.
        """
        own = agents[..., None]
        races: Array = self.written[granules] > self._flat[own, self.writer[granules]]
        inside = agents % self.agents
        self.read_at[granules, inside[..., None]] = self._flat[agents, inside][..., None]
        self.read_by[granules] = self._numbers(by, granules)
        return races

    def write(self, granules: Array, agents: Array, by: Sequence[Instruction] = ()) -> Array:
        """Note writes unless there is a race, and return where another agent read or wrote unordered."""
        races = self.unordered(granules, agents)
        if races.any():
            return races
        inside = self._note(granules, agents, by)
        self.atomic[granules] = False
        # Two agents that write in one step: the last one's name stays.
        return np.asarray(self.writer[granules] != inside)

    def update(self, granules: Array, agents: Array, by: Sequence[Instruction] = ()) -> Array:
        """Note atomic updates, and return where another agent's plain access is unordered."""
        own = agents[..., None]
        races = (self.written[granules] > self._flat[own, self.writer[granules]]) & ~self.atomic[granules]
        races |= (self.read_at[granules] > self._flat[own]).any(axis=-1)
        if not races.any():
            self._note(granules, agents, by)
            self.atomic[granules] = True
        return races

    def _note(self, granules: Array, agents: Array, by: Sequence[Instruction]) -> Array:
        inside: Array = (agents % self.agents)[..., None]
        self.writer[granules] = inside
        self.written[granules] = self._flat[agents[..., None], inside]
        self.written_by[granules] = self._numbers(by, granules)
        return inside

    def unordered(self, granules: Array, agents: Array) -> Array:
        """Return where a write by `agents` would race, without noting it."""
        own = agents[..., None]
        races: Array = self.written[granules] > self._flat[own, self.writer[granules]]
        # Their own last read is no race: it is at their own time at most.
        return races | (self.read_at[granules] > self._flat[own]).any(axis=-1)

    def explain(self, granule: int, agent: int) -> str:
        """Say who used a granule that `agent` races for, and where in the source."""
        inside, known = agent % self.agents, self._flat[agent]
        writer = int(self.writer[granule])
        if writer != inside and self.written[granule] > known[writer]:
            return f"that {self._name(writer)} wrote{self._place(self.written_by[granule])}"
        readers = np.flatnonzero(self.read_at[granule] > known)
        if readers.size and readers[0] != inside:
            return f"that {self._name(int(readers[0]))} reads{self._place(self.read_by[granule])}"
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

    def _numbers(self, by: Sequence[Instruction], granules: Array) -> Array | int:
        """The numbers of instructions in the program, from 1, shaped to go with granules."""
        if not by:
            running = self.machine.instruction
            return self._number.get(id(running), 0)
        numbers = np.array([self._number[id(instruction)] for instruction in by], np.int32)
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


def granule(machine: Machine) -> int:
    """Return the bytes of shared memory that are watched as one: the smallest access of the program."""
    from .batch import size

    smallest = 16
    for instruction in machine.program.instructions:
        if (
            instruction.opcode[0] not in ACCESSES
            or "global" in instruction.opcode[1:2]
            or "param" in instruction.opcode
        ):
            continue
        if instruction.opcode[0] in ("ld", "st", "atom", "red"):
            vector = {"v2": 2, "v4": 4, "v8": 8}
            count = next((vector[word] for word in instruction.opcode if word in vector), 1)
            smallest = min(smallest, size(instruction.opcode[-1]) * count)
        elif instruction.opcode[:2] == ("cp", "async") and "bulk" not in instruction.opcode:
            smallest = 4 if "ca" in instruction.opcode else smallest
    return smallest
