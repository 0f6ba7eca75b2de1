"""What can be seen in a program before it runs: where its pointers go, and what its atomics are for.

All of it errs on the side of silence: what cannot be told is taken for what raises no false alarm.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from .operands import Address, Operand, Pair, Register, Symbol, Vector
from .program import Program, PtxInstruction

ENDS = ("bra", "ret", "exit", "trap")
_Key = tuple[str, int] | str  # a register, or what one state space holds


class Flow:
    """The facts about one program."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._symbols = self._moved_symbols()
        reads = {key for instruction in program.instructions for key in _sources(instruction)}
        # Atomics whose old value somebody wants: with them threads learn what others have done.
        learning = [
            instruction
            for instruction in program.instructions
            if instruction.opcode[0] == "atom" and {*registers_of(instruction.operands[0])} & reads
        ]
        self.learns = bool(learning)
        self.learns_of_blocks = any("shared" not in " ".join(one.opcode) for one in learning)
        self.stored = self._stored()
        compared = {self._place(one) for one in program.instructions if "cas" in one.opcode}
        loads = [one for one in program.instructions if one.opcode[0] == "ld"]
        # A load before a loop around a compare-and-swap, which finds out if the value is no longer true.
        self.guesses = frozenset(id(one) for one in loads if self._place(one) in compared)
        self.settles = self._settles(loads)
        # Stores to what is also updated by atomics: they may release a lock.
        updated = {self._place(one) for one in program.instructions if one.opcode[0] in ("atom", "red")}
        stores = [one for one in program.instructions if one.opcode[0] == "st"]
        self.releases = frozenset(id(one) for one in stores if self.learns and self._place(one) in updated)

    def _moved_symbols(self) -> dict[tuple[str, int], Symbol]:
        """The variables whose addresses registers hold all the time."""
        found: dict[tuple[str, int], Symbol] = {}
        written: set[tuple[str, int]] = set()
        for one in self._program.instructions:
            results = (
                [] if one.opcode[0] == "st" else [*registers_of(one.operands[0])] if one.operands else []
            )
            for key in results:
                if one.opcode[0] == "mov" and isinstance(one.operands[1], Symbol) and key not in written:
                    found[key] = one.operands[1]
                else:
                    found.pop(key, None)
                written.add(key)
        return found

    def _place(self, instruction: PtxInstruction) -> tuple[object, ...]:
        """The address of a load, a store or an atomic, as it is written."""
        address = next((one for one in instruction.operands if isinstance(one, Address)), None)
        if address is None:
            return ("none", id(instruction))
        base: object = address.base
        if isinstance(base, Register):
            base = self._symbols.get((base.file, base.row), (base.file, base.row))
        return base, address.offset

    def _settles(self, loads: list[PtxInstruction]) -> frozenset[int]:
        """Stores that a look at the same element decides about, as `if x[i] < 0: x[i] = 1` does.

        What is stored does not depend on what was there, so that others who look may see it or not yet.
        """
        block_of = self._blocks()
        stores = [one for one in self._program.instructions if one.opcode[:2] == ("st", "global")]
        pairs = [
            (load, store)
            for store in stores
            for load in loads
            if self._place(load) == self._place(store) and block_of[id(load)] != block_of[id(store)]
        ]
        if not pairs:
            return frozenset()
        bits = {id(load): 1 << i for i, (load, _) in enumerate(pairs)}
        held = self._spread(bits, everywhere=True)
        branches = [one.guard for one in self._program.instructions if one.opcode[0] == "bra" and one.guard]
        decides = functools.reduce(int.__or__, (held.get((one.file, one.row), 0) for one in branches), 0)
        return frozenset(
            id(store)
            for load, store in pairs
            if bits[id(load)] & decides
            and not any(held.get(key, 0) & bits[id(load)] for key in registers_of(store.operands[1]))
        )

    def _blocks(self) -> dict[int, int]:
        """The basic block of each instruction."""
        starts = {*self._program.labels.values()}
        found, block = {}, 0
        for i, instruction in enumerate(self._program.instructions):
            block += i in starts
            found[id(instruction)] = block
            block += instruction.opcode[0] in ENDS
        return found

    def _stored(self) -> frozenset[str] | None:
        """The parameters whose values may be part of an address that is stored to; None is any.

        Atomics are no stores: what only they write is in no race with plain reads, or not one to speak of.
        """
        bits = {name: 1 << i for i, name in enumerate(self._program.parameters)}
        seeds = {
            id(one): sum(bits[name] for name in _parameters(one))
            for one in self._program.instructions
            if one.opcode[0] == "ld"
        }
        held = self._spread(seeds, everywhere=False)
        stored = 0
        for one in self._program.instructions:
            if one.opcode[0] == "st" and not {"shared", "local", "param"} & {*one.opcode}:
                address = next(operand for operand in one.operands if isinstance(operand, Address))
                parts = functools.reduce(int.__or__, (held.get(key, 0) for key in registers_of(address)), 0)
                if not parts:
                    return None
                stored |= parts
        return frozenset(name for name, bit in bits.items() if stored & bit)

    def _spread(self, seeds: dict[int, int], everywhere: bool) -> dict[_Key, int]:
        """Where the bits go that some instructions' results begin with; `everywhere`: into predicates too."""
        held: dict[_Key, int] = {}
        steps = []
        for one in self._program.instructions:
            own, values = seeds.get(id(one), 0), list(_values(one, everywhere))
            if values or own:
                steps.append((own, values, list(_results(one))))
        changed = True
        while changed:
            changed = False
            for flowing, values, results in steps:
                for key in values:
                    flowing |= held.get(key, 0)
                for key in results:
                    before = held.get(key, 0)
                    if flowing & ~before:
                        held[key] = before | flowing
                        changed = True
        return held


def registers_of(operand: Operand) -> Iterator[tuple[str, int]]:
    """The registers in an operand: (file, row in the program)."""
    if isinstance(operand, Register):
        yield operand.file, operand.row
    elif isinstance(operand, Vector):
        for item in operand.items:
            yield from registers_of(item)
    elif isinstance(operand, Pair):
        yield from registers_of(operand.first)
        yield from registers_of(operand.second)
    elif isinstance(operand, Address):
        yield from registers_of(operand.base)
        for item in operand.more:
            yield from registers_of(item)


def _sources(instruction: PtxInstruction) -> Iterator[tuple[str, int]]:
    """The registers that an instruction reads."""
    first = instruction.operands[:1]
    for operand in instruction.operands[1:]:
        yield from registers_of(operand)
    if first and (
        instruction.opcode[0] in ("st", "red", "bra", "call", "bar") or isinstance(first[0], Address)
    ):
        yield from registers_of(first[0])
    if instruction.guard is not None:
        yield instruction.guard.file, instruction.guard.row


def _values(instruction: PtxInstruction, everywhere: bool) -> Iterator[_Key]:
    """Where the value that an instruction passes on may come from."""
    if instruction.opcode[0] == "ld":
        if "global" not in instruction.opcode:
            yield "memory"
    elif everywhere or instruction.opcode[0] not in ("atom", "setp"):
        yield from _sources(instruction)


def _results(instruction: PtxInstruction) -> Iterator[_Key]:
    """Where it goes."""
    if instruction.opcode[0] == "st":
        if "global" not in instruction.opcode:
            yield "memory"
    elif instruction.operands and not isinstance(instruction.operands[0], Address):
        yield from registers_of(instruction.operands[0])


def _parameters(instruction: PtxInstruction) -> Iterator[str]:
    """The kernel's parameters that an instruction loads."""
    for operand in instruction.operands:
        if (
            isinstance(operand, Address)
            and isinstance(operand.base, Symbol)
            and operand.base.space == "param"
        ):
            yield operand.base.name
