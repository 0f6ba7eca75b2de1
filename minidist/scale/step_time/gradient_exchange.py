"""Seconds of the gradient exchange between data-parallel ranks, and of the optimizer's update.

| What ranks keep whole | In each micro-batch | In each step |
|---|---|---|
| everything (data parallelism) | | an all-reduce of each bucket |
| parameters, gradients (ZeRO 1) | | a reduce-scatter and an all-gather of each bucket |
| parameters (ZeRO 2) | a reduce-scatter of each bucket | an all-gather of each bucket |
| nothing (ZeRO 3) | two all-gathers and a reduce-scatter of each unit | |

With hybrid sharding these go over the ranks that share one copy of the state, and an all-reduce of the share
over the ranks that own the same follows each reduce-scatter. With secondary shares all but a step's first
all-gathers go over the ranks that share the second copy.

Reductions that run during the backward pass are hidden behind it, except for the last bucket, which is
complete only when the pass ends.

Sources: Li et al. 2020, section 3.2; Rajbhandari et al. 2020, section 7; Zhao et al. 2023, "PyTorch FSDP",
sections 3.2.2 and 3.3; Wang et al. 2023, "ZeRO++", section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from minidist.scale.memory.parameter_sizes import RankParameters, fullest, share
from minidist.scale.memory.state_bytes import TAIL
from minidist.scale.step_time.layer_work import Computation
from minidist.scale.step_time.traffic import Wires

MATRIX_PASSES = 11
"""Tensors that Muon's update of a matrix reads and writes: momentum 3, Nesterov 3, decay 2, update 3."""
PRODUCTS = 2 * 5
"""Operations for each unit of `matrix_work`: a product and a sum in each of five iterations."""
UPDATED = {4: "fp32", 8: "fp64"}
"""Precisions of an update by their bytes."""
HOOK = 3
"""Time of the hook that moves a gradient to its bucket, in operators."""
UNIT = 40
"""Time that a gathered unit takes in a pass for its hooks, views and buffer, in operators."""


class GradientTime:
    """Seconds of exchange and update on a rank with these parameters."""

    def __init__(self, parameters: RankParameters, wires: Wires) -> None:
        self.parameters, self.wires, self.sharing = parameters, wires, wires.setup.sharing
        self.residency, self.element = self.sharing.residency, self.sharing.element
        self.rates, self.ranks = wires.crowd.rates, wires.sizes["dp"]
        self.elements, self.tensors = sum(parameters.sizes), len(parameters.sizes)

    def parts(self, last_backward: float, passes: float, micro_batches: int) -> dict[str, float]:
        """Seconds of a step by purpose.

        last_backward: seconds of the last backward pass, beside which messages may travel. passes: seconds of
        all forward and backward passes. micro_batches: how many the step has.
        """
        sent, may_hide = self._sent(last_backward, passes, micro_batches) if self.ranks > 1 else (0.0, 0.0)
        hidden = min(may_hide, sent) if self.wires.hardware.overlaps else 0.0
        return {
            "gradients": self._handling(micro_batches),
            "dp": sent - hidden,
            "dp hidden": hidden,
            "optimizer": self._update,
        }

    @cached_property
    def buckets(self) -> list[int]:
        """Elements of each bucket, in the order in which gradients arrive."""
        return self.parameters.buckets(self.element, self.sharing.owners)

    def _sent(self, last_backward: float, passes: float, micro_batches: int) -> tuple[float, float]:
        """Seconds of messages between data-parallel ranks, and how many of them computation may hide."""
        reductions = self.residency.reductions(micro_batches)  # of each gradient in a step
        if not self.residency.whole_parameters:
            sent, may_hide = self._sent_in_units(passes, micro_batches)
            return sent + self._tail, may_hide
        layout, whole = self.wires.layout, self.residency.whole_state
        reduced, last = self._reduced
        hidden = reductions * min(reduced - last, last_backward)
        if layout.pp > 1 and (layout.chunks > 1 or (self.parameters.tied and not whole)):
            hidden = 0.0  # sent only once the schedule is done
        return reductions * (reduced + self._tail) + self._gathered, hidden

    def _sent_in_units(self, passes: float, micro: int) -> tuple[float, float]:
        """Do the same, without the tail, where each pass gathers the parameters unit by unit."""
        first, again, reduced = self._in_units
        times = self.residency.reductions(micro)  # that each gradient is reduced
        sent = sum(first) - sum(again) + micro * (2 * sum(again) - again[0]) + times * sum(reduced)
        # Nothing runs at the same time as a pass's first gathers and its last reduction.
        bare = sum(first[:2]) + (micro - 1) * sum(again[:2]) + times * reduced[0]
        return sent, min(max(0.0, sent - bare), passes)

    # These do not depend on the micro-batches, so a planner asks for them once.

    @cached_property
    def _tail(self) -> float:
        return self.wires.collective("all_reduce", (self.tensors + TAIL) * 8.0, "dp")

    @cached_property
    def _reduced(self) -> tuple[float, float]:
        """Seconds to reduce all buckets, and the last one."""
        reduced = self._reductions([float(size * self.element) for size in self.buckets])
        return sum(reduced), reduced[-1] if reduced else 0.0

    @cached_property
    def _gathered(self) -> float:
        sizes = [float(size * self.element) for size in self.buckets]
        return 0.0 if self.residency.whole_state else sum(self._gathers(sizes, "shares"))

    @cached_property
    def _in_units(self) -> tuple[list[float], list[float], list[float]]:
        """Seconds of each unit's first gather, its later ones, and its reduction."""
        units = [float(unit * self.element) for unit in self.parameters.units]
        return self._gathers(units, "shares"), self._gathers(units, "secondary"), self._reductions(units)

    def _gathers(self, sizes: Sequence[float], axis: str) -> list[float]:
        """Seconds of an all-gather of each flat tensor of so many bytes."""
        return [self.wires.collective("all_gather", size / self.wires.sizes[axis], axis) for size in sizes]

    def _reductions(self, sizes: Sequence[float]) -> list[float]:
        """Seconds of bringing the sums to each rank, or to each rank its share of them."""
        over = self.wires.collective
        if self.residency.whole_state:
            return [over("all_reduce", size, "dp") for size in sizes]
        return [
            over("reduce_scatter", size, "shares") + over("all_reduce", size / self.sharing.ranks, "copies")
            for size in sizes
        ]

    def _handling(self, micro: int) -> float:
        """Seconds of adding gradients up over micro-batches, and of copying them to their buckets."""
        added = (micro - 1) * (3 if self.residency.whole_gradients else 0) * self.elements * self.element
        if self.ranks == 1:
            return added / self.rates.memory
        reductions = self.residency.reductions(micro)
        moved = added + reductions * 2 * self.elements * self.element
        calls = reductions * HOOK * self.tensors
        if not self.residency.whole_parameters:
            calls = micro * 2 * UNIT * len(self.parameters.units)
        called = self.rates.seconds(Computation(calls=calls), self.sharing.precision)
        return moved / self.rates.memory + called

    @property
    def tied(self) -> float:
        """Seconds in which a pipeline's first and last stage sum the gradient of a tied matrix."""
        if self.wires.layout.pp == 1 or not self.parameters.tied:
            return 0.0
        return 2 * self.wires.message(float(self.parameters.tied * self.element), "pp")

    @cached_property
    def _update(self) -> float:
        """Seconds of the optimizer's step on this rank's share."""
        residency, updated = self.residency, self.sharing.updated
        own = self.elements if residency.whole_state else share(self.elements, self.sharing.ranks)
        pieces = len(self.buckets) if residency.whole_parameters else 1
        if residency.whole_state:
            pieces = self.tensors
        kind = self.sharing.kind
        passes = min(kind.passes, kind.fused) if self.rates.asynchronous else kind.passes
        moved, more = float(passes * own * updated), 0.0
        if kind.matrices:
            owners = max(1, self.sharing.owners)
            matrices = sum(each.elements for each in self.parameters.hidden) / owners
            moved -= (passes - MATRIX_PASSES) * matrices * updated
            work = fullest([each.work for each in self.parameters.hidden], owners)
            half = self.rates.asynchronous and updated == 4 and "bf16" in self.rates.flops
            precision = "bf16" if half else UPDATED[updated]
            more = self.rates.seconds(Computation(products=PRODUCTS * work), precision)
            more += 2 * self.wires.collective("all_to_all", matrices * updated, "tp")
            if not residency.whole_parameters:
                parts = (
                    self.wires.collective("all_to_all", matrices * x, "shares")
                    for x in (updated, self.element)
                )
                more += sum(parts)
        if self.element != updated:
            moved += 12 * own  # cast gradients to the masters' precision and parameters from it
        return moved / self.rates.memory + pieces * self.rates.tensor + more
