"""Analyse a program before it runs: where its pointers go, and what its atomics are for.

The race detectors use this to avoid false alarms. Where the analysis cannot tell which buffers are stored to,
all are watched.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TypeAlias

from .program import Address, DataFlow, Program, PtxInstruction, Register, RegisterKey, Symbol, registers_in

_Key: TypeAlias = RegisterKey | str  # a register, or "memory": all of shared and local memory


def analyse(program: Program) -> DataFlow:
    """Return what the race detectors need to know about a program."""
    return _Analysis(program).result()


class _Analysis:
    """The instructions of one program, and the variables whose addresses registers hold."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._symbols = self._moved_symbols()

    def result(self) -> DataFlow:
        instructions = self._program.instructions
        reads = {key for instruction in instructions for key in _sources(instruction)}
        learning = [
            one
            for one in instructions
            if one.opcode[0] == "atom" and {*registers_in(one.operands[0])} & reads
        ]
        learns = bool(learning)
        loads = [one for one in instructions if one.opcode[0] == "ld"]
        stores = [one for one in instructions if one.opcode[0] == "st"]
        compared = {self._address(one) for one in instructions if "cas" in one.opcode}
        updated = {self._address(one) for one in instructions if one.opcode[0] in ("atom", "red")}
        return DataFlow(
            atomic_results_used=learns,
            global_atomic_results_used=any("shared" not in " ".join(one.opcode) for one in learning),
            stored=self._stored(),
            # A load before a loop around a compare-and-swap. The swap finds out if the value is stale.
            loads_checked_by_cas=frozenset(one.number for one in loads if self._address(one) in compared),
            stores_decided_by_loads=self._decided_by(loads),
            # A store to what atomics also update may release a lock.
            releases=frozenset(one.number for one in stores if learns and self._address(one) in updated),
        )

    def _moved_symbols(self) -> dict[RegisterKey, Symbol]:
        """Return the registers that always hold the address of one variable, with that variable."""
        found: dict[RegisterKey, Symbol] = {}
        written: set[RegisterKey] = set()
        for one in self._program.instructions:
            for key in registers_in(*one.operands[:1]) if one.opcode[0] != "st" else ():
                if one.opcode[0] == "mov" and isinstance(one.operands[1], Symbol) and key not in written:
                    found[key] = one.operands[1]
                else:
                    found.pop(key, None)
                written.add(key)
        return found

    def _address(self, instruction: PtxInstruction) -> tuple[object, ...]:
        """Return the address of a load, a store or an atomic, as the text writes it."""
        address = next((one for one in instruction.operands if isinstance(one, Address)), None)
        if address is None:
            return ("none", instruction.number)
        base: object = address.base
        if isinstance(base, Register):
            base = self._symbols.get((base.file, base.row), (base.file, base.row))
        return base, address.offset

    def _decided_by(self, loads: list[PtxInstruction]) -> frozenset[int]:
        """Return the stores of `if x[i] < 0: x[i] = 1`: a load of the same element decides about them.

        The stored value does not depend on the old one, so other threads may see the store or miss it.
        """
        bounds = self._program.basic_blocks
        block_of = {i + 1: start for start, end in bounds for i in range(start, end)}
        stores = [one for one in self._program.instructions if one.opcode[:2] == ("st", "global")]
        pairs = [
            (load, store)
            for store in stores
            for load in loads
            if self._address(load) == self._address(store) and block_of[load.number] != block_of[store.number]
        ]
        if not pairs:
            return frozenset()
        bits = {load.number: 1 << i for i, (load, _) in enumerate(pairs)}
        held = self._spread(bits, everywhere=True)
        branches = [one.guard for one in self._program.instructions if one.opcode[0] == "bra" and one.guard]
        decides = functools.reduce(int.__or__, (held.get((one.file, one.row), 0) for one in branches), 0)
        return frozenset(
            store.number
            for load, store in pairs
            if bits[load.number] & decides
            and not any(held.get(key, 0) & bits[load.number] for key in registers_in(store.operands[1]))
        )

    def _stored(self) -> frozenset[str] | None:
        """Return the parameters that may be part of the address of a store; None if any may.

        Atomics do not count as stores: plain reads beside them are not reported as races.
        """
        bits = {name: 1 << i for i, name in enumerate(self._program.parameters)}
        seeds = {
            one.number: sum(bits[name] for name in _parameters(one))
            for one in self._program.instructions
            if one.opcode[0] == "ld"
        }
        held = self._spread(seeds, everywhere=False)
        stored = 0
        for one in self._program.instructions:
            if one.opcode[0] == "st" and not {"shared", "local", "param"} & {*one.opcode}:
                address = next(operand for operand in one.operands if isinstance(operand, Address))
                parts = functools.reduce(int.__or__, (held.get(key, 0) for key in registers_in(address)), 0)
                if not parts:
                    return None
                stored |= parts
        return frozenset(name for name, bit in bits.items() if stored & bit)

    def _spread(self, seeds: dict[int, int], everywhere: bool) -> dict[_Key, int]:
        """Follow bits from the results of `seeds`; through atomics and predicates, too, if `everywhere`."""
        held: dict[_Key, int] = {}
        steps = []
        for one in self._program.instructions:
            own, values = seeds.get(one.number, 0), list(_values(one, everywhere))
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


def _sources(instruction: PtxInstruction) -> Iterator[RegisterKey]:
    """Yield the registers that an instruction reads."""
    operands, writes = instruction.operands, instruction.opcode[0] not in ("st", "red", "bra", "call", "bar")
    if operands and writes and not isinstance(operands[0], Address):
        operands = operands[1:]
    return registers_in(*operands, instruction.guard)


def _values(instruction: PtxInstruction, everywhere: bool) -> Iterator[_Key]:
    """Yield the sources of the value that an instruction passes on."""
    if instruction.opcode[0] == "ld":
        if "global" not in instruction.opcode:
            yield "memory"
    elif everywhere or instruction.opcode[0] not in ("atom", "setp"):
        yield from _sources(instruction)


def _results(instruction: PtxInstruction) -> Iterator[_Key]:
    """Yield where that value goes."""
    if instruction.opcode[0] == "st":
        if "global" not in instruction.opcode:
            yield "memory"
    elif instruction.operands and not isinstance(instruction.operands[0], Address):
        yield from registers_in(instruction.operands[0])


def _parameters(instruction: PtxInstruction) -> Iterator[str]:
    """Yield the kernel's parameters that an instruction loads."""
    for operand in instruction.operands:
        if (
            isinstance(operand, Address)
            and isinstance(operand.base, Symbol)
            and operand.base.space == "param"
        ):
            yield operand.base.name
