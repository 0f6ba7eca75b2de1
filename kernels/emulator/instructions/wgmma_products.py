"""The products of wgmma.mma_async: d (64, n) = a (64, depth) b (depth, n) + d, for many warp groups at once.

A warp group is four warps. b is in shared memory and named by a descriptor, a likewise or in registers, and
the sums are in registers (PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions").
Sums are float32, as in `mma`. Consecutive products of a warp group that add to the same sums and are due
together are carried out as one longer product.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..arithmetic.fragments import WGMMA_A, wgmma_sums
from ..arithmetic.half_precision import widen
from ..base.batch import LaneRows
from ..machine.machine import Machine
from ..memory.descriptors import chunk_addresses, decode_descriptors
from ..memory.swizzles import CHUNK
from ..ptx.dtypes import Array, Lanes
from ..ptx.fault import EmulatorError, Fault
from ..ptx.program import PtxInstruction
from ..synchronization.async_groups import AsyncGroups
from .mma import BITS, decode, encode, half_values

GROUP = 128  # threads of a warp group
ROWS = 64  # of a and d


def operand_addresses(descriptors: Array, mn: int, dtype: str, transposed: bool, size: int) -> Array:
    """Return the addresses (groups, lines, chunks) of the 16-byte chunks that descriptors (groups,) name.

    They are those of `descriptors.chunk_addresses`. `size`: bytes of a block's shared memory. Raises Fault
    for a descriptor that leaves it, or that wgmma does not take.
    """
    addresses = chunk_addresses(decode_descriptors(descriptors), mn, BITS[dtype], transposed)
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
    if dtype == "tf32":
        lines = decode(read.view(np.uint32), dtype)
    else:
        lines = (half_values if dtype == "f16" else widen)(read.view(np.uint16))
    lines = lines.reshape(*addresses.shape[:-1], -1)
    return lines.swapaxes(1, 2) if transposed else lines


def register_operand(registers: Array, dtype: str) -> Array:
    """Return tiles of a, (groups, 64, depth) float32, from registers (4, lanes) uint32."""
    return WGMMA_A[BITS[dtype]].tile(decode(registers, dtype))


def multiply_add(a: Array, b: Array, accumulators: Array | None, sums: str = "f32") -> Array:
    """Return the registers of d = a b + d. `accumulators` are the old registers of d; None stands for 0.

    a is (groups, 64, depth) float32 of any depth, b (groups, n, depth). Registers are (n / 2, lanes) float32,
    or for sums "f16" (n / 4, lanes) uint32 of two float16 each. A group has 128 lanes.
    """
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):  # answers here, as on a GPU
        products = wgmma_sums(b.shape[1]).spread(np.matmul(a, b.swapaxes(1, 2)))
        if accumulators is not None:
            products += decode(accumulators, sums)
    return encode(products, sums)


@dataclass(frozen=True)
class ProductForm:
    """The product of one wgmma.mma_async: d = (scale_a a) (scale_b b) (+ d)."""

    n: int
    dtype: str
    sums: str
    scale_a: int
    scale_b: int
    transposed_a: bool
    transposed_b: bool


@dataclass(eq=False)
class PendingProduct:
    """A wgmma.mma_async under way, by some warp groups."""

    instruction: PtxInstruction
    form: ProductForm
    groups: Array  # (groups,), numbered over the machine
    a: Array  # (groups, lines, chunks) addresses in shared memory; tiles in float32 if a is in registers
    b: Array  # (groups, lines, chunks)
    adds: Lanes  # (groups,): whether to add to the old accumulators
    sums: Accumulators
    clocks: Array  # (groups, agents of a block): what a thread knows after waiting


class Accumulators:
    """The sums of products under way; the registers hold NaN meanwhile."""

    def __init__(self, machine: Machine, rows: LaneRows, kind: str) -> None:
        registers = machine.views["b32", "<f4" if kind == "f32" else "<u4"]
        self.registers = registers.reshape(len(registers), -1, GROUP)  # (rows, groups, 128)
        self.rows = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        groups = self.registers.shape[1]
        self.values = np.zeros((self.rows.size, groups, GROUP), registers.dtype)
        self.under_way = np.zeros(groups, np.int64)  # products, by group

    def take(self, groups: Array) -> None:
        """Begin a product: the first one takes the registers' values and leaves NaN."""
        fresh = groups[self.under_way[groups] == 0]
        if fresh.size:
            index = np.ix_(self.rows, fresh)
            self.values[:, fresh] = self.registers[index]
            self.registers[index] = np.uint32(0xFFFFFFFF).view(self.registers.dtype)
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
        self._sums: dict[tuple[tuple[int, ...], str], Accumulators] = {}

    def accumulators(self, rows: LaneRows, kind: str) -> Accumulators:
        """Return the accumulators in these rows of the registers."""
        key = (tuple(range(rows.start, rows.stop)) if isinstance(rows, slice) else tuple(rows.tolist()), kind)
        if key not in self._sums:
            self._sums[key] = Accumulators(self.machine, rows, kind)
        return self._sums[key]

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
            and product.form.sums == "f32"
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
        new = multiply_add(a, b, old.reshape(len(old), -1), first.form.sums)
        sums.values[:, groups] = new.reshape(old.shape)
        sums.end(groups, len(run))

    def _tiles(self, product: PendingProduct, which: Array) -> tuple[Array, Array]:
        """Return the tiles of a and of b of some groups, scaled."""
        form, shared = product.form, self.machine.shared
        blocks = self.machine.block_of_lane[product.groups[which] * GROUP]
        a, b = product.a[which], product.b[which]
        if a.dtype != np.float32:
            a = read_operand(shared, blocks, a, form.dtype, form.transposed_a)
        b = read_operand(shared, blocks, b, form.dtype, form.transposed_b)
        return (a if form.scale_a == 1 else -a), (b if form.scale_b == 1 else -b)
