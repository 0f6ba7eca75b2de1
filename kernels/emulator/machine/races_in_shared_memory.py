"""Find races in shared memory: barriers order accesses (happens-before), and unordered ones race.

Each warp has a vector clock: for every other agent of its block, the time up to which it knows what that
agent did (Mattern, Virtual Time and Global States of Distributed Systems, 1989; Flanagan and Freund,
FastTrack, 2009). A barrier joins the clocks of the warps that meet there. Each granule of shared memory
remembers its last writer and when it wrote, and when each agent last read. Two accesses by different warps
race if one of them writes and the later one does not know of the earlier one. That holds in whatever order
the emulator ran them.

Each warp counts as two agents: itself, and the asynchronous work that it started and has not waited for, such
as copies (cp.async, TMA) and matrix instructions (wgmma). accesses/race_faults.py words what is found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..ptx.dtypes import Array
from ..ptx.program import PtxInstruction

NUMBER = 20  # bits of an instruction's number, below a time


class Clocks:
    """The clocks of all agents of a machine, and the history of its shared memory.

    Agents are numbered within their cluster, block after block, since blocks of a cluster can wait for each
    other: warp w of the first block is agent w, its asynchronous work is agent `asynchronous + w`. `now` is
    (clusters, agents, agents): row i of a cluster is the vector clock of agent i. Without clusters, each
    block is a cluster of its own.
    """

    def __init__(self, machine: Any) -> None:
        self.machine = machine  # a Machine, whose file imports this one
        self.warps = machine.warps_per_block
        self.asynchronous = self.warps if machine.program.asynchronous else 0  # 0: no such agents
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
        # A barrier of the whole block orders everything after it with everything before. To check this usual
        # case fast there is also one time for the whole machine: `era` moves on with each such barrier.
        self.era = 1
        self.last_write = np.zeros(count, np.int32)  # the era of each granule's last write; 0: nobody wrote
        self.last_read = np.zeros(count, np.int32)
        self.met = np.zeros(machine.blocks * self.of_block, np.int32)  # by agent: it knows all until this era
        self.has_eras = machine.cluster == 1 and not self.asynchronous
        self.atomic = np.zeros(count, np.bool_)  # the last write was an atomic update
        self.pending = np.zeros(count, np.bool_)  # an asynchronous copy will write it some time
        self.any_pending = False  # whether `pending` was ever used
        self.agents_of_lanes: Array = machine.block_of_lane * self.of_block + machine.thread_of_lane // 32

    def granules(self, block: Array, offset: Array, size: int) -> Array:
        """Return the granules of `size` bytes at `offset` of `block`, along a new last axis."""
        first = block * self.per_block + (offset >> self.shift)
        count = -(-size >> self.shift) if size > self.granule else 1
        return first[..., None] if count == 1 else first[..., None] + np.arange(count)

    def read(self, granules: Array, agents: Array, by: Sequence[PtxInstruction] = ()) -> Array:
        """Note reads, and return where they race with another agent's write.

        granules: (..., n). agents: (...,) or broadcast to it, numbered over the machine. by: the instruction
        for each index of granules' first axis, if there are several.
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
        """Return where reads race with another agent's plain write. Later writes do not race with these."""
        return self._after_writes(granules, agents) & ~self.atomic[granules]

    def write(
        self,
        granules: Array,
        agents: Array,
        by: Sequence[PtxInstruction] = (),
        same: Callable[[], Array] | None = None,
    ) -> Array:
        """Note writes unless some race, and return where they race with another agent's access.

        same: tells which writes leave the memory as it is, which is no race. A caller that passes it must
        look for writes of one step that disagree.
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
        # If two agents write in one step, the last one's name stays.
        return np.asarray(self.writer[granules] != inside)

    def update(self, granules: Array, agents: Array, by: Sequence[PtxInstruction] = ()) -> Array:
        """Note atomic updates, and return where they race with another agent's plain access."""
        races = self._after_writes(granules, agents) & ~self.atomic[granules]
        races = self._after_reads(granules, agents, races)
        if not races.any():
            self._note(granules, agents, by)
            self.atomic[granules] = True
        return races

    def _after_writes(self, granules: Array, agents: Array) -> Array:
        """Return where these agents do not know of another agent's write."""
        if self.has_eras and not (self.last_write[granules] > self.met[agents][..., None]).any():
            return np.zeros(granules.shape, np.bool_)
        return self.written[granules] > self._flat[agents[..., None], self.writer[granules]]

    def _after_reads(self, granules: Array, agents: Array, races: Array) -> Array:
        """Return `races`, and where these agents do not know of another agent's read."""
        if self.has_eras and not (self.last_read[granules] > self.met[agents][..., None]).any():
            return races
        # An agent's own last read is never later than its own time, so it is no race.
        return races | (self.read_at[granules] >> NUMBER > self._flat[agents[..., None]]).any(axis=-1)

    def _note(self, granules: Array, agents: Array, by: Sequence[PtxInstruction]) -> Array:
        inside: Array = (agents % self.agents)[..., None]
        self.writer[granules] = inside
        self.written[granules] = self._flat[agents[..., None], inside]
        self.written_by[granules] = self._numbers(by, granules)
        self.last_write[granules] = self.era
        return inside

    def explain(self, races: Array, granules: Array, agents: Array) -> str:
        """Describe the earlier access of the first race, with its source line: shapes are those of `read`."""
        first = int(np.argmax(races))
        granule = int(granules.reshape(-1)[first])
        agent = int(np.broadcast_to(agents, races.shape[:-1]).reshape(-1)[first // races.shape[-1]])
        inside, known = agent % self.agents, self._flat[agent]
        writer = int(self.writer[granule])
        if writer != inside and self.written[granule] > known[writer]:
            return f"that {self._name(writer)} wrote{self._line(int(self.written_by[granule]))}"
        readers = np.flatnonzero(self.read_at[granule] >> NUMBER > known)
        if readers.size and readers[0] != inside:
            number = int(self.read_at[granule, readers[0]]) & ((1 << NUMBER) - 1)
            return f"that {self._name(int(readers[0]))} reads{self._line(number)}"
        return f"that {self._name(writer)} writes at the same time"

    def _name(self, agent: int) -> str:
        rank, inside = divmod(agent, self.of_block)
        block = f" of block {rank} of the cluster" if self.machine.cluster > 1 else ""
        if inside < self.warps:
            return f"warp {inside}{block}"
        return f"a copy or matrix instruction of warp {inside - self.warps}{block}"

    def _line(self, number: int) -> str:
        instructions = self.machine.program.instructions
        location = instructions[number - 1].location if number else None
        return f" at {location}" if location else ""

    def _numbers(self, by: Sequence[PtxInstruction], granules: Array) -> Array | int:
        """Return the numbers of the instructions, shaped to broadcast with granules."""
        if not by:
            return self.machine.instruction.number if self.machine.instruction is not None else 0
        numbers = np.array([instruction.number for instruction in by], np.int32)
        return numbers.reshape(-1, *(1,) * (granules.ndim - 1))

    def own(self, agents: Array) -> Array:
        """Return the time of each agent."""
        return self._flat[agents, agents % self.agents]

    def knows(self, agents: Array, others: Array) -> Array:
        """Return up to when each agent knows what `others` did; these are numbered within its cluster."""
        return self._flat[agents, others]

    def tick(self, agents: Array) -> None:
        """Advance the agents' times: what they do from now on is unknown to all others."""
        self._flat[agents, agents % self.agents] += 1

    def join(self, agents: Array | int, clock: Array) -> None:
        """Let agents know all that `clock` knows."""
        self._flat[agents] = np.maximum(self._flat[agents], clock)

    def meet(self, block: int, warps: Array) -> None:
        """Let these warps of a block, which met at a barrier, know all that any of them knows."""
        agents = block * self.of_block + warps
        self._flat[agents] = self._flat[agents].max(axis=0)
        self.tick(agents)

    def meet_all(self, blocks: Array) -> None:
        """Let all warps of each of these blocks meet."""
        agents = blocks[:, None] * self.of_block + np.arange(self.warps)
        self._flat[agents] = self._flat[agents].max(axis=1, keepdims=True)
        self.tick(agents)
        self.met[agents] = self.era
        self.era += 1
