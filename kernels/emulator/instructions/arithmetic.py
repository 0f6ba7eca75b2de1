"""Instructions of registers alone: arithmetic, moves, conversions of addresses."""

from __future__ import annotations

from functools import cache

import numpy as np

from ..arithmetic.bits import count_ones
from ..arithmetic.operations import Operation, operation
from ..base.addresses import LOCAL_WINDOW, SHARED_WINDOW, active_lanes, word
from ..base.instruction_batch import Batch
from ..base.instruction_registry import InstructionUnit, Run, unit
from ..machine.machine_state import Machine
from ..ptx.dtypes import DTYPES, SIZES, Mask
from ..ptx.program import Vector


@cache
def unit_of(opcode: tuple[str, ...]) -> InstructionUnit | None:
    """Return the unit of an arithmetic instruction, or None."""
    found = operation(opcode)
    if found is None:
        return None
    name, floats = opcode[0], opcode[-1].startswith(("f16", "f32", "f64", "bf16"))
    counted = "other float" if floats else "integer"
    if name in ("cvt", "selp", "setp"):
        counted = "move and compare"
    elif name == "fma":
        counted = "multiply-add"
    if found.reads_carry or found.writes_carry:
        return InstructionUnit("fence", lambda batch: _with_carry(batch, found), counted=counted)
    return InstructionUnit("pure", lambda batch: _arithmetic(batch, found), counted=counted)


def _arithmetic(batch: Batch, found: Operation) -> Run:
    reads = [batch.source(1 + i, kind) for i, kind in enumerate(found.operands)]
    function, write = found.function, batch.target(0, found.result)
    if len(reads) == 1:
        (only,) = reads
        return lambda machine, mask: write(machine, function(only(machine)), mask)
    if len(reads) == 2:
        one, two = reads
        return lambda machine, mask: write(machine, function(one(machine), two(machine)), mask)
    return lambda machine, mask: write(machine, function(*[read(machine) for read in reads]), mask)


class Carry:
    """The carry flag of each lane (CC.CF), which add.cc sets and addc reads."""

    def __init__(self, machine: Machine) -> None:
        self.flag = np.zeros((1, machine.lanes), np.bool_)


def _with_carry(batch: Batch, found: Operation) -> Run:
    named = found.operands[:-1] if found.reads_carry else found.operands
    reads = [batch.source(1 + i, kind) for i, kind in enumerate(named)]
    if found.reads_carry:
        reads.append(lambda machine: machine.state(Carry).flag)
    write = batch.target(0, found.result)

    def run(machine: Machine, mask: Mask) -> None:
        result = found.function(*[read(machine) for read in reads])
        if found.writes_carry:
            result, flag = result
            np.copyto(machine.state(Carry).flag, flag, where=True if mask is None else mask)
        write(machine, result, mask)

    return run


@unit("mov", order="pure", counted="move and compare")
def move(batch: Batch) -> Run:
    """mov d, a. If one side is a vector, its items are the parts of the other side, lowest first."""
    kind = batch.first.opcode[-1]
    to, source = batch.first.operands
    if isinstance(source, Vector):
        return _pack(batch, kind, len(source.items))
    if isinstance(to, Vector):
        return _unpack(batch, kind, len(to.items))
    read, write = batch.source(1, kind), batch.target(0, kind)
    return lambda machine, mask: write(machine, read(machine), mask)


def _pack(batch: Batch, kind: str, parts: int) -> Run:
    part = f"b{8 * SIZES[kind] // parts}"
    read, write = batch.sources(1, part), batch.target(0, kind)

    def run(machine: Machine, mask: Mask) -> None:
        items = np.moveaxis(np.broadcast_to(read(machine), (parts, len(batch), machine.lanes)), 0, -1)
        write(machine, np.ascontiguousarray(items).view(DTYPES[kind])[..., 0], mask)

    return run


def _unpack(batch: Batch, kind: str, parts: int) -> Run:
    part = f"b{8 * SIZES[kind] // parts}"
    read, write = batch.source(1, kind), batch.targets(0, part)

    def run(machine: Machine, mask: Mask) -> None:
        whole = np.ascontiguousarray(np.broadcast_to(read(machine), (len(batch), machine.lanes)))
        write(machine, np.moveaxis(whole[..., None].view(DTYPES[part]), -1, 0), mask)

    return run


@unit("cvta", order="pure", counted="move and compare")
def convert_address(batch: Batch) -> Run:
    """cvta.space generic, offset and cvta.to.space offset, generic: add or subtract the space's window."""
    opcode = batch.first.opcode
    kind = opcode[-1]
    windows = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}
    offset = np.uint64(max(windows.get(word.partition("::")[0], 0) for word in opcode))
    read, write = batch.source(1, kind), batch.target(0, kind)
    if "to" in opcode:
        return lambda machine, mask: write(machine, read(machine) - offset, mask)
    return lambda machine, mask: write(machine, read(machine) + offset, mask)


@unit("activemask", order="pure")
def active_mask(batch: Batch) -> Run:
    """activemask.b32 d: a bit for each lane of the warp that runs this together."""
    write = batch.target(0, "u32")

    def run(machine: Machine, mask: Mask) -> None:
        bits = word(active_lanes(machine, mask).reshape(-1, 32))
        write(machine, np.repeat(bits, 32)[None], mask)

    return run


@unit("elect", order="pure")
def elect(batch: Batch) -> Run:
    """elect.sync d|p, membermask: elect the lowest named lane; p is true there."""
    lane, chosen, members = batch.target(0, "u32"), batch.second_target(0), batch.source(1, "u32")
    assert chosen is not None

    def run(machine: Machine, mask: Mask) -> None:
        bits = np.broadcast_to(members(machine), (len(batch), machine.lanes))
        leader = count_ones((bits & ~(bits - np.uint32(1))) - np.uint32(1))  # the bits below the lowest
        lane(machine, leader.astype(np.uint32), mask)
        chosen(machine, leader == machine.thread_of_lane % 32, mask)

    return run
