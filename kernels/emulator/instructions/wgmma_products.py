"""The products that wgmma began: what they multiply, where their sums are meanwhile, and when they are done.

Products of a warp group that add to the same sums and are due together are carried out as one longer product.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..base.batch import LaneRows
from ..machine.machine import Machine
from ..ptx.dtypes import Array
from ..ptx.fault import EmulatorError
from ..ptx.program import PtxInstruction
from ..synchronization.async_groups import AsyncGroups
from .wgmma_arithmetic import multiply_add, read_operand

GROUP = 128  # threads of a warp group


@dataclass(frozen=True)
class ProductForm:
    """What one wgmma.mma_async instruction computes: d = scale_a a scale_b b (+ d)."""

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
    a: Array  # (groups, lines, chunks) addresses in shared memory; of a in registers the tiles, float32
    b: Array  # (groups, lines, chunks)
    adds: NDArray[np.bool_]  # (groups,): whether the old accumulators count
    sums: Accumulators
    clocks: Array  # (groups, agents of a block): what those know who wait


class Accumulators:
    """Registers of sums, taken out of the register file while products are under way."""

    def __init__(self, machine: Machine, rows: LaneRows, kind: str) -> None:
        registers = machine.views["b32", "<f4" if kind == "f32" else "<u4"]
        self.registers = registers.reshape(len(registers), -1, GROUP)  # (rows, groups, 128)
        self.rows = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        groups = self.registers.shape[1]
        self.values = np.zeros((self.rows.size, groups, GROUP), registers.dtype)
        self.under_way = np.zeros(groups, np.int64)  # products, by group

    def take(self, groups: Array) -> None:
        """Begin a product: the first takes the registers' values and leaves NaN."""
        fresh = groups[self.under_way[groups] == 0]
        if fresh.size:
            place = np.ix_(self.rows, fresh)
            self.values[:, fresh] = self.registers[place]
            self.registers[place] = np.uint32(0xFFFFFFFF).view(self.registers.dtype)
        self.under_way[groups] += 1

    def end(self, groups: Array, count: int) -> None:
        """End products; after the last the registers have the sums."""
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
        """Return the accumulators in these rows of the register file."""
        key = (tuple(range(rows.start, rows.stop)) if isinstance(rows, slice) else tuple(rows.tolist()), kind)
        if key not in self._sums:
            self._sums[key] = Accumulators(self.machine, rows, kind)
        return self._sums[key]

    def wait(self, groups: Array, allowed: int) -> None:
        """Complete products so that at most `allowed` groups of each warp group's are under way."""
        clocks = self.machine.clocks
        run: list[tuple[PendingProduct, Array]] = []  # products that are one longer product
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
        """At the end of the kernel: Fault for products that nobody waited for."""
        if self.products.pending:
            product, groups, _ = self.products.pending[0]
            self.machine.instruction = product.instruction
            text = (
                "begins wgmma and does not wait for it (wgmma.wait_group), before the sums are used or at all"
            )
            self.machine.fault_at("wgmma not waited for", text, int(groups[0]) * GROUP)

    def _warps(self, groups: Array) -> Array:
        """The agents of the groups' warps."""
        lanes = groups[:, None] * GROUP + 32 * np.arange(4)
        return self.machine.clocks.agents_of_lanes()[lanes.reshape(-1)]

    @staticmethod
    def _continues(last: tuple[PendingProduct, Array], product: PendingProduct, which: Array) -> bool:
        """Whether a product adds to the same sums as the last, so that both can be one."""
        before, those = last
        return (
            product.sums is before.sums
            and product.form.sums == "f32"
            and np.array_equal(product.groups[which], before.groups[those])
            and bool(product.adds[which].all())
        )

    def _multiply(self, run: list[tuple[PendingProduct, Array]]) -> None:
        """Carry out products one after another: along one longer depth."""
        first, which = run[0]
        groups = first.groups[which]
        a = np.concatenate([self._a(product, those) for product, those in run], axis=2)
        b = np.concatenate([self._b(product, those) for product, those in run], axis=2)
        sums = first.sums
        old = sums.values[:, groups]
        old[:, ~first.adds[which]] = 0
        new = multiply_add(a, b, old.reshape(len(old), -1), first.form.sums)
        sums.values[:, groups] = new.reshape(old.shape)
        sums.end(groups, len(run))

    def _a(self, product: PendingProduct, which: Array) -> Array:
        form = product.form
        tile = product.a[which]
        if tile.dtype != np.float32:
            tile = self._read(product.groups[which], tile, form.dtype, form.transposed_a)
        return tile if form.scale_a == 1 else -tile

    def _b(self, product: PendingProduct, which: Array) -> Array:
        form = product.form
        tile = self._read(product.groups[which], product.b[which], form.dtype, form.transposed_b)
        return tile if form.scale_b == 1 else -tile

    def _read(self, groups: Array, addresses: Array, dtype: str, transposed: bool) -> Array:
        blocks = self.machine.block_of_lane[groups * GROUP]
        return read_operand(self.machine.shared, blocks, addresses, dtype, transposed)
