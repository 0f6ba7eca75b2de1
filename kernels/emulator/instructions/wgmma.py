"""wgmma: matrix instructions that four warps begin together and wait for later.

The four warps of a warp group (the first is a multiple of four) run each of them together. The product is
carried out when they wait for it (`wgmma_products`). Until then the accumulators hold NaN, so a kernel that
uses them too early gets NaN. Reads of shared memory are noted when the instruction begins, so a write there
before the wait is a race. An operand a in registers is read when the instruction begins (PTX ISA,
"Asynchronous Warpgroup Level Matrix Instructions").
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from ..base.addresses import whole_warps
from ..base.batch import Batch
from ..base.instruction_registry import Run, unit
from ..machine.machine import Machine
from ..memory import races
from ..memory.async_accesses import fault_for_missing_data, fault_for_missing_fence
from ..ptx.dtypes import Array, Lanes, Mask
from ..ptx.fault import EmulatorError
from ..ptx.operands import Immediate, Register, Vector
from ..synchronization.async_groups import snapshot
from .mma import DEPTH
from .wgmma_products import (
    GROUP,
    ROWS,
    PendingProduct,
    ProductForm,
    WarpGroups,
    operand_addresses,
    register_operand,
)

SHAPE = re.compile(r"m64n(\d+)k(\d+)")


def _together(machine: Machine, mask: Mask) -> tuple[Array, Lanes]:
    """Return the warp groups whose four warps are all here, and the lanes that need not wait."""
    whole_warps(machine, mask)
    here = np.ones(machine.lanes, np.bool_) if mask is None else mask
    machine.state(WarpGroups)
    complete = here.reshape(-1, GROUP).all(axis=1)
    return np.flatnonzero(complete), np.repeat(complete, GROUP) | ~here


def _when_together(act: Callable[[WarpGroups, Array], None]) -> Run:
    """Return a function that acts on the warp groups whose four warps are all here; the others wait."""

    def run(machine: Machine, mask: Mask) -> Lanes:
        groups, passed = _together(machine, mask)
        act(machine.state(WarpGroups), groups)
        return passed

    return run


@unit("wgmma.fence", order="sync", results=0)
def fence(batch: Batch) -> Run:
    """wgmma.fence.sync.aligned: later products see earlier writes to registers."""
    return _when_together(lambda state, groups: np.put(state.fenced, groups, True))


@unit("wgmma.commit_group", order="sync", results=0)
def commit_group(batch: Batch) -> Run:
    """wgmma.commit_group.sync.aligned: close the group of products begun since the last."""
    return _when_together(lambda state, groups: state.products.commit(groups))


@unit("wgmma.wait_group", order="sync", results=0)
def wait_group(batch: Batch) -> Run:
    """wgmma.wait_group.sync.aligned n: wait until at most the last n groups are under way."""
    allowed = batch.constant(0)
    return _when_together(lambda state, groups: state.wait(groups, allowed))


@unit("wgmma.mma_async", order="sync")
def mma_async(batch: Batch) -> Run:
    """wgmma.mma_async.sync.aligned.shape.d.a.b d, a, b, scale-d, imm-scale-a, imm-scale-b{, imm-trans...}."""
    form = _form(batch)
    d, a = batch.first.operands[:2]
    assert isinstance(d, Vector)
    _, rows = batch.rows([item for item in d.items if isinstance(item, Register)], collapse=False)
    from_registers = isinstance(a, Vector)
    left = batch.sources(1, "b32") if from_registers else batch.source(1, "b64")
    right, adds = batch.source(2, "b64"), batch.source(3, "pred")

    def run(machine: Machine, mask: Mask) -> Lanes:
        groups, passed = _together(machine, mask)
        if not groups.size:
            return passed
        state, lanes = machine.state(WarpGroups), groups[:, None] * GROUP + np.arange(GROUP)
        if not state.fenced[groups].all():
            lane = int(lanes[np.argmin(state.fenced[groups]), 0])
            machine.fault_at("missing fence", "begins wgmma with no wgmma.fence before the first", lane)

        def same(read: Array, what: str) -> Array:
            """Return the groups' values of an operand that all their threads must share."""
            values: Array = np.broadcast_to(read, (1, machine.lanes))[0][lanes]
            if (values != values[:, :1]).any():
                bad = np.flatnonzero((values != values[:, :1]).any(axis=1))[0]
                text = f"and others of its warp group pass different values of {what}"
                machine.fault_at("wgmma", text, int(lanes[bad, 0]))
            return values[:, 0]

        b = _operand(
            machine, lanes, same(right(machine), "the descriptor of b"), form.n, form.dtype, form.transposed_b
        )
        if from_registers:
            held = np.broadcast_to(left(machine), (4, 1, machine.lanes))[:, 0, lanes.reshape(-1)]
            tiles, read = register_operand(held, form.dtype), [b]
        else:
            words = same(left(machine), "the descriptor of a")
            tiles = _operand(machine, lanes, words, ROWS, form.dtype, form.transposed_a)
            read = [tiles, b]
        clocks = _note(machine, lanes, read)
        sums = state.accumulators(rows, form.sums)
        sums.take(groups)
        added = same(adds(machine), "scale-d").astype(np.bool_)
        state.products.begin(PendingProduct(batch.first, form, groups, tiles, b, added, sums, clocks), groups)
        if machine.counts is not None:
            flops = 2 * ROWS * form.n * DEPTH[form.dtype]
            machine.counts.matrix(batch.first, groups.size, flops)
        return passed

    return run


def _form(batch: Batch) -> ProductForm:
    opcode, operands = batch.first.opcode, batch.first.operands
    shape = SHAPE.fullmatch(opcode[4])
    sums, dtype = opcode[5], opcode[6]
    known = shape is not None and dtype in DEPTH and opcode[7] == dtype and len(opcode) == 8
    if not known or sums not in ("f32", "f16") or (sums == "f16" and dtype != "f16"):
        raise EmulatorError(f"this form of wgmma is not emulated: {batch.first.text}")
    assert shape is not None
    n, depth = int(shape[1]), int(shape[2])
    numbers = [operand.value for operand in operands[4:] if isinstance(operand, Immediate)]
    scales, transposes = numbers[:2], numbers[2:]
    from_registers = isinstance(operands[1], Vector)
    wanted = 0 if dtype == "tf32" else 1 if from_registers else 2
    d = operands[0].items if isinstance(operands[0], Vector) else ()
    registers = n // (2 if sums == "f32" else 4)
    if (
        not 8 <= n <= 256
        or n % 8
        or depth != DEPTH[dtype]
        or len(scales) != 2
        or not {*scales} <= {1, -1}
        or len(transposes) != wanted
        or not {*transposes} <= {0, 1}
        or len([item for item in d if isinstance(item, Register)]) != registers
    ):
        raise EmulatorError(f"operands that wgmma does not take: {batch.first.text}")
    across = [False] * (2 - wanted) + [bool(t) for t in transposes]
    return ProductForm(n, dtype, sums, scales[0], scales[1], across[0], across[1])


def _operand(machine: Machine, lanes: Array, words: Array, mn: int, dtype: str, transposed: bool) -> Array:
    with machine.located(int(lanes[0, 0])):
        return operand_addresses(words.astype(np.uint64), mn, dtype, transposed, machine.shared_size)


def _note(machine: Machine, lanes: Array, operands: list[Array]) -> Array:
    """Note what the groups (lanes: (groups, 128)) read; return what a thread knows after waiting for it."""
    clocks = machine.clocks
    warps = clocks.agents_of_lanes[lanes[:, ::32]]  # (groups, 4)
    known = np.stack([snapshot(clocks, warps[:, i]) for i in range(4)])
    block = machine.block_of_lane[lanes[:, 0]]
    granules = [
        clocks.granules(block[:, None], operand.reshape(len(lanes), -1), 16).reshape(len(lanes), -1)
        for operand in operands
    ]
    everything = np.concatenate(granules, axis=1)  # (groups, granules)
    # A read counts as ordered if all four warps know of it: each of them multiplies its own rows.
    common = known.min(axis=0)
    # The reads belong to the last warp's asynchronous agent. The first warp usually begins bulk stores, and
    # waiting for one of the two would count as knowing of the other.
    agents = warps[:, -1] + clocks.asynchronous
    clocks.join(agents, common)
    clocks.tick(warps.reshape(-1))
    result = snapshot(clocks, agents)
    first = lanes[:, 0].tolist()
    for i, lane in enumerate(first):
        fault_for_missing_data(machine, everything[i], "wgmma read", lane)
    found = clocks.read(everything, agents)
    lane = first[int(np.argmax(found.any(axis=1)))]
    races.of_engine(machine, found, everything, agents, "wgmma read", lane)
    for i, lane in enumerate(first):
        fault_for_missing_fence(machine, everything[i], int(warps[i, 0]), common[i], "wgmma read", lane)
    clocks.tick(agents)
    return result
