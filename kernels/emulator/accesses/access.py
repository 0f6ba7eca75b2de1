"""An access to memory: which bytes, by which threads; and the checks of its alignment and bounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NoReturn

import numpy as np

from ..base.addresses import WINDOWS, generic, shared_blocks
from ..base.instruction_batch import Batch
from ..machine.global_memory import Buffer
from ..machine.machine_state import Machine
from ..ptx.dtypes import Array
from ..ptx.fault import of

# guesses and settles: see `DataFlow`; updates: by atomics; copies: asynchronously.
AccessKind = Literal["reads", "guesses", "writes", "settles", "updates", "copies to", "copies from"]
# The verb, and the preposition of the address.
WORDS = {"guesses": ("reads", "at"), "settles": ("writes", "at")}
WORDS |= {"copies to": ("copies", "to"), "copies from": ("copies", "from")}


@dataclass(slots=True)
class Access:
    """The access of like instructions in one step: `width` bytes at each address (instructions, lanes)."""

    machine: Machine
    batch: Batch  # an instruction for each row of addresses
    addresses: Array
    width: int
    lanes: Array  # the thread of each column
    kind: AccessKind

    @property
    def verb(self) -> str:
        """What the threads do, for faults."""
        return WORDS.get(self.kind, (self.kind,))[0]

    @property
    def at(self) -> str:
        """The same with the width, as in "reads 4 bytes at"."""
        verb, preposition = WORDS.get(self.kind, (self.kind, "at"))
        return f"{verb} {of(self.width, 'byte')} {preposition}"

    def part(self, i: int, some: slice | Array = slice(None)) -> Access:
        """Return the access of instruction i alone, by some of the lanes."""
        addresses, lanes = self.addresses[i : i + 1, some], self.lanes[some]
        return Access(self.machine, self.batch.alone(i), addresses, self.width, lanes, self.kind)

    def parts_by_space(self) -> Iterator[tuple[int, Array]]:
        """Yield (instruction, lanes) of generic addresses for each state space that they point to."""
        for i, row in enumerate(self.addresses):
            for low, high in WINDOWS:
                if (some := (row >= low) & (row < high)).any():
                    yield i, some

    def in_space(self, space: str) -> tuple[str, Access]:
        """Return the state space and this access there: of generic addresses, "mixed" for several spaces."""
        if space != "generic":
            return space, self
        space, addresses = generic(self.addresses)
        return space, Access(self.machine, self.batch, addresses, self.width, self.lanes, self.kind)

    def blame(self, bad: Array, kind: str, text: str) -> NoReturn:
        """Fault at the first instruction and thread that `bad`, shaped as the addresses, marks."""
        row, column = divmod(int(np.argmax(bad)), self.lanes.size)
        self.machine.instruction = self.batch.instructions[row]
        self.machine.fault(kind, f"{self.machine.thread_name(int(self.lanes[column]))} {text}")

    def first(self, bad: Array) -> int:
        """Return the first address that `bad` marks."""
        return int(self.addresses.reshape(-1)[np.argmax(bad)])

    def count(self, shared: bool) -> None:
        """Count the access, to shared or to global memory, if a profile is being made."""
        if (counts := self.machine.counts) is not None:
            counts.access(self, shared)

    def check_alignment(self) -> None:
        """Fault unless every address is a multiple of the width."""
        width = self.width
        if width > 1 and int(np.bitwise_or.reduce(self.addresses, axis=None)) & (width - 1):
            odd = (self.addresses & (width - 1)) != 0
            at = self.first(odd)
            text = f"{self.at} an address that is not a multiple of {width}: {at:#x} is {at % width} past one"
            self.blame(odd, "misaligned", text)

    def shared_places(self) -> tuple[Array, Array]:
        """Return (block, offset) of addresses in shared memory; Fault unless all bytes lie inside."""
        machine, width = self.machine, self.width
        block, offset = shared_blocks(machine, self.addresses, self.lanes)
        if int(offset.min()) < 0 or int(offset.max()) + width > machine.shared_size:
            outside = (offset < 0) | (offset + width > machine.shared_size)
            at = int(offset.reshape(-1)[np.argmax(outside)])
            variables = machine.program.variables.values()
            dynamic = any(one.space == "shared" and not one.size for one in variables)
            hint = ": pass shared=, the bytes of cuda.shared.array(0, ...)" if dynamic else ""
            self.blame(
                outside,
                "out of bounds",
                f"{self.at} byte {at} of shared memory, of which the block has {machine.shared_size}{hint}",
            )
        return block, offset

    def local_offsets(self) -> Array:
        """Return offsets in the local memory of all lanes; Fault unless all bytes lie in the lane's own."""
        size = self.machine.program.local
        outside = (self.addresses < 0) | (self.addresses + self.width > size)
        if outside.any():
            text = f"{self.at} byte {self.first(outside)} of local memory"
            self.blame(outside, "out of bounds", f"{text}, of which a thread has {size}")
        return self.lanes * self.machine.local.shape[1] + self.addresses

    def by_buffer(self) -> Iterator[tuple[Buffer, slice | Array, Access]]:
        """Yield the buffers that one instruction accesses, with the lanes of each, and their access.

        Fault for an address outside of all.
        """
        for buffer, where in self.machine.memory.find(self.addresses[0], self.width):
            if buffer is None:
                self.out_of_bounds(where)
            elif where is None:
                yield buffer, slice(None), self
            else:
                yield buffer, where, self.part(0, where)

    def out_of_bounds(self, where: Array | None) -> NoReturn:
        """Fault for addresses outside of all arrays; `where` is of them, None for all."""
        bad = np.broadcast_to(True if where is None else where, self.addresses.shape)
        near = self.machine.memory.near(self.first(bad))
        self.blame(bad, "out of bounds", f"{self.at} {near}")


def rows_of(memory: Array, width: int) -> Array:
    """Return memory as a flat array of items of `width` bytes."""
    return memory.reshape(-1).view(f"V{width}" if width > 8 else f"u{width}")


def gather(memory: Array, offsets: Array, width: int) -> Array:
    """Return the `width` bytes at each offset, a multiple of it: (..., width) uint8."""
    return rows_of(memory, width)[offsets >> (width.bit_length() - 1)][..., None].view(np.uint8)
