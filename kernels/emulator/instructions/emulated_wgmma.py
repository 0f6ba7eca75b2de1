"""wgmma: matrix instructions that four warps begin together and wait for later.

The four warps of a warp group (the first is a multiple of four) run each of them together. A product d (64,
n) = a (64, 16) b (16, n) + d takes a and b, float16 or bfloat16, from shared memory, named by descriptors,
and has its float32 sums in registers.

The product is carried out when the warps wait for it. Until then the accumulators hold NaN, so a kernel that
uses them too early gets NaN. Consecutive products of a warp group that add to the same sums and are due
together are carried out as one longer product. Reads of shared memory are noted when the instruction begins,
so a write there before the wait is a race.

Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..accesses.async_accesses import read_by_engine
from ..accesses.descriptors import CHUNK, chunk_addresses
from ..arithmetic.floats import widen
from ..arithmetic.fragments import wgmma_sums
from ..base.addresses import whole_warps
from ..base.instruction_batch import Batch
from ..base.instruction_registry import Run, unit
from ..machine.machine_state import Machine
from ..ptx.dtypes import Array, Lanes, Mask
from ..ptx.fault import EmulatorError, Fault
from ..ptx.program import Immediate, PtxInstruction, Vector, registers_in
from ..synchronization.async_groups import AsyncGroups, snapshot
from .mma import half_values

GROUP = 128  # threads of a warp group
ROWS, DEPTH = 64, 16  # of a


def operand_addresses(descriptors: Array, mn: int, transposed: bool, size: int) -> Array:
    """Return the addresses (groups, lines, chunks) of the 16-byte chunks that descriptors (groups,) name.

    They are those of `descriptors.chunk_addresses`. `size`: bytes of a block's shared memory. Raises Fault
    for a descriptor that leaves it, or that wgmma does not take.
    """
    addresses = chunk_addresses(descriptors, mn, transposed)
    if int(addresses.max()) + CHUNK > size:
        group = int(np.argmax(addresses.max(axis=(1, 2))))
        raise Fault(
            "out of bounds",
            f"the matrix descriptor {int(descriptors[group]):#018x} reads up to byte "
            f"{int(addresses[group].max()) + CHUNK} of shared memory, and the block has {size}",
        )
    return addresses


def read_operand(shared: Array, blocks: Array, addresses: Array, dtype: str, transposed: bool) -> Array:
    """Return tiles (groups, mn, depth) float32 from shared memory (all blocks, bytes) uint8.

    blocks (groups,): whose memory each group reads. addresses: from `operand_addresses`. The bytes of a block
    are a multiple of 16.
    """
    chunks = shared.reshape(-1).view("V16")
    first = blocks * (shared.shape[1] // CHUNK)
    read = chunks[first[:, None, None] + addresses // CHUNK]
    lines = (half_values if dtype == "f16" else widen)(read.view(np.uint16))
    lines = lines.reshape(*addresses.shape[:-1], -1)
    return lines.swapaxes(1, 2) if transposed else lines


def multiply_add(a: Array, b: Array, accumulators: Array) -> Array:
    """Return the registers of d = a b + d, (n / 2, lanes) float32. `accumulators` are the old ones.

    a is (groups, 64, depth) float32 of any depth, b (groups, n, depth). A group has 128 lanes.
    """
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):  # answers here, as on a GPU
        products = wgmma_sums(b.shape[1]).spread(np.matmul(a, b.swapaxes(1, 2)))
        products += accumulators
    return products


@dataclass(frozen=True)
class ProductForm:
    """The product of one wgmma.mma_async: d = a b (+ d)."""

    n: int
    dtype: str
    transposed_a: bool
    transposed_b: bool


@dataclass(eq=False)
class PendingProduct:
    """A wgmma.mma_async under way, by some warp groups."""

    instruction: PtxInstruction
    form: ProductForm
    groups: Array  # (groups,), numbered over the machine
    a: Array  # addresses in shared memory, (groups, lines, chunks)
    b: Array
    adds: Lanes  # (groups,): whether to add to the old accumulators
    sums: Accumulators
    clocks: Array  # (groups, agents of a block): what a thread knows after waiting


class Accumulators:
    """The sums of products under way; the registers hold NaN meanwhile."""

    def __init__(self, machine: Machine, rows: tuple[int, ...]) -> None:
        registers = machine.views["b32", "<f4"]
        self.registers = registers.reshape(len(registers), -1, GROUP)  # (rows, groups, 128)
        self.rows = np.array(rows)
        groups = self.registers.shape[1]
        self.values = np.zeros((self.rows.size, groups, GROUP), registers.dtype)
        self.under_way = np.zeros(groups, np.int64)  # products, by group

    def take(self, groups: Array) -> None:
        """Begin a product: the first one takes the registers' values and leaves NaN."""
        fresh = groups[self.under_way[groups] == 0]
        if fresh.size:
            index = np.ix_(self.rows, fresh)
            self.values[:, fresh] = self.registers[index]
            self.registers[index] = np.nan
        self.under_way[groups] += 1

    def end(self, groups: Array, count: int) -> None:
        """End products: after the last one the registers get the sums."""
        self.under_way[groups] -= count
        done = groups[self.under_way[groups] == 0]
        if done.size:
            self.registers[np.ix_(self.rows, done)] = self.values[:, done]


class WarpGroups:
    """The products under way, by warp group."""

    def __init__(self, machine: Machine) -> None:
        if machine.lanes_per_block % GROUP:
            raise EmulatorError(
                f"wgmma in blocks of {machine.threads} threads: make that a multiple of {GROUP}"
            )
        self.machine = machine
        self.products: AsyncGroups[PendingProduct] = AsyncGroups(machine.lanes // GROUP)
        self.fenced = np.zeros(machine.lanes // GROUP, np.bool_)
        self._sums: dict[tuple[int, ...], Accumulators] = {}

    def accumulators(self, rows: tuple[int, ...]) -> Accumulators:
        """Return the accumulators in these rows of the registers."""
        if rows not in self._sums:
            self._sums[rows] = Accumulators(self.machine, rows)
        return self._sums[rows]

    def wait(self, groups: Array, allowed: int) -> None:
        """Complete products so that at most `allowed` groups of each warp group are under way."""
        clocks = self.machine.clocks
        run: list[tuple[PendingProduct, Array]] = []  # together one longer product
        for product, due in self.products.wait(groups, allowed):
            which = np.flatnonzero(due)
            if run and not self._continues(run[-1], product, which):
                self._multiply(run)
                run = []
            run.append((product, which))
            warps = self._warps(product.groups[which])
            clocks.join(warps, np.repeat(product.clocks[which], 4, axis=0))
        if run:
            self._multiply(run)

    def finish(self) -> None:
        """At the end of the kernel, Fault if no thread waited for a product."""
        if self.products.pending:
            product, groups, _ = self.products.pending[0]
            self.machine.instruction = product.instruction
            text = (
                "begins wgmma and does not wait for it (wgmma.wait_group), before the sums are used or at all"
            )
            self.machine.fault_at("wgmma not waited for", text, int(groups[0]) * GROUP)

    def _warps(self, groups: Array) -> Array:
        """Return the agents of the groups' warps."""
        lanes = groups[:, None] * GROUP + 32 * np.arange(4)
        return self.machine.clocks.agents_of_lanes[lanes.reshape(-1)]

    @staticmethod
    def _continues(last: tuple[PendingProduct, Array], product: PendingProduct, which: Array) -> bool:
        """Return whether a product adds to the same sums as the last one, so that both can be one."""
        before, those = last
        return (
            product.sums is before.sums
            and np.array_equal(product.groups[which], before.groups[those])
            and bool(product.adds[which].all())
        )

    def _multiply(self, run: list[tuple[PendingProduct, Array]]) -> None:
        """Carry out these products as one of a longer depth."""
        first, which = run[0]
        groups = first.groups[which]
        tiles = [self._tiles(product, those) for product, those in run]
        a, b = (np.concatenate(parts, axis=2) for parts in zip(*tiles, strict=True))
        sums = first.sums
        old = sums.values[:, groups]
        old[:, ~first.adds[which]] = 0
        new = multiply_add(a, b, old.reshape(len(old), -1))
        sums.values[:, groups] = new.reshape(old.shape)
        sums.end(groups, len(run))

    def _tiles(self, product: PendingProduct, which: Array) -> tuple[Array, Array]:
        """Return the tiles of a and of b of some groups."""
        form, shared = product.form, self.machine.shared
        blocks = self.machine.block_of_lane[product.groups[which] * GROUP]
        a = read_operand(shared, blocks, product.a[which], form.dtype, form.transposed_a)
        return a, read_operand(shared, blocks, product.b[which], form.dtype, form.transposed_b)


FORM = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(f16|bf16)\.\2")


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


@unit("wgmma.fence", order="barrier", results=0, counted="wait")
def fence(batch: Batch) -> Run:
    """wgmma.fence.sync.aligned: later products see earlier writes to registers."""
    return _when_together(lambda state, groups: np.put(state.fenced, groups, True))


@unit("wgmma.commit_group", order="barrier", results=0, counted="wait")
def commit_group(batch: Batch) -> Run:
    """wgmma.commit_group.sync.aligned: close the group of products begun since the last."""
    return _when_together(lambda state, groups: state.products.commit(groups))


@unit("wgmma.wait_group", order="barrier", results=0, counted="wait")
def wait_group(batch: Batch) -> Run:
    """wgmma.wait_group.sync.aligned n: wait until at most the last n groups are under way."""
    allowed = batch.constant(0)
    return _when_together(lambda state, groups: state.wait(groups, allowed))


@unit("wgmma.mma_async", order="barrier", counted="matrix")
def mma_async(batch: Batch) -> Run:
    """wgmma.mma_async.sync.aligned.shape.d.a.b d, a, b, scale-d, imm-scale-a, imm-scale-b{, imm-trans...}."""
    form = _form(batch)
    rows = tuple(batch.layout[key] for key in registers_in(batch.first.operands[0]))
    left, right, adds = batch.source(1, "b64"), batch.source(2, "b64"), batch.source(3, "pred")

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

        words = same(right(machine), "the descriptor of b")
        b = _operand(machine, lanes, words, form.n, form.transposed_b)
        words = same(left(machine), "the descriptor of a")
        a = _operand(machine, lanes, words, ROWS, form.transposed_a)
        clocks = _note(machine, lanes, [a, b])
        sums = state.accumulators(rows)
        sums.take(groups)
        added = same(adds(machine), "scale-d").astype(np.bool_)
        state.products.begin(PendingProduct(batch.first, form, groups, a, b, added, sums, clocks), groups)
        if machine.counts is not None:
            flops = 2 * ROWS * form.n * DEPTH
            machine.counts.matrix(batch.first, groups.size, flops)
        return passed

    return run


def _form(batch: Batch) -> ProductForm:
    operands, known = batch.first.operands, FORM.fullmatch(batch.first.name)
    numbers = [operand.value for operand in operands[4:] if isinstance(operand, Immediate)]
    if known is None or isinstance(operands[1], Vector) or -1 in numbers[:2]:
        raise EmulatorError(f"this form of wgmma is not emulated: {batch.first.text}")
    n, across = int(known[1]), numbers[2:]
    if (
        not 8 <= n <= 256
        or n % 8
        or numbers[:2] != [1, 1]
        or len(across) != 2
        or not {*across} <= {0, 1}
        or len([*registers_in(operands[0])]) != n // 2
    ):
        raise EmulatorError(f"operands that wgmma does not take: {batch.first.text}")
    return ProductForm(n, known[2], bool(across[0]), bool(across[1]))


def _operand(machine: Machine, lanes: Array, words: Array, mn: int, transposed: bool) -> Array:
    with machine.located(int(lanes[0, 0])):
        return operand_addresses(words.astype(np.uint64), mn, transposed, machine.shared_size)


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
    read_by_engine(machine, everything, agents, common, "wgmma read", lanes[:, 0].tolist())
    return result
