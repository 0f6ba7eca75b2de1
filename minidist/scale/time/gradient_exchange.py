"""Seconds of the gradient exchange between data-parallel ranks, and of the optimizer's update.

| ZeRO | In each micro-batch | In each step |
|---|---|---|
| 0 | | an all-reduce of each bucket |
| 1 | | a reduce-scatter and an all-gather of each bucket |
| 2 | a reduce-scatter of each bucket | an all-gather of each bucket |
| 3 | two all-gathers and a reduce-scatter of each unit | |

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
from functools import cached_property, partial

from minidist.scale.memory.parameter_sizes import share
from minidist.scale.memory.state_bytes import BUCKET, BYTES, TAIL, cut
from minidist.scale.time.layer_work import Computation
from minidist.scale.time.traffic import Wires

ELEMENT_PASSES = {"adam": 20, "momentum": 5, "sgd": 3}
"""Tensors that an update reads and writes per parameter. Adam's, as torch runs it operator by operator on
CPUs: decay 2, first moment 3, second moment 2 + 3, root 2, division 2, epsilon 2, update 4."""
FUSED_PASSES = 7
"""The same for Adam in one kernel, as on GPUs with `fused=True`: it reads four tensors and writes three."""
HOOK = 3
"""Time of the hook that moves a gradient to its bucket, in operators."""
UNIT = 40
"""Time that a unit of stage 3 takes in a pass for its hooks, views and buffer, in operators."""


class GradientTime:
    """Seconds of exchange and update on a rank.

    sizes: elements of each of its parameters. units: of each unit of ZeRO's stage 3, the root first. tied: of
    a matrix that a pipeline's first and last stage share.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        units: Sequence[int],
        wires: Wires,
        micro_batches: int,
        optimizer: str,
        tied: int = 0,
    ) -> None:
        self.sizes, self.units, self.tied_elements, self.wires = sizes, units, tied, wires
        self.micro_batches, self.optimizer = micro_batches, optimizer
        self.layout, self.rates = wires.layout, wires.crowd.rates
        self.element = BYTES[self.layout.precision]
        self.updated = max(self.element, 4)
        self.ranks, self.owners = wires.size("dp"), wires.size("shares")

    @cached_property
    def buckets(self) -> list[int]:
        """Elements of each bucket, in the order in which gradients arrive."""
        return cut(reversed(self.sizes), BUCKET // self.element)

    def parts(self, last_backward: float, passes: float) -> dict[str, float]:
        """Seconds by purpose.

        `last_backward` is the seconds of the last backward pass, which may hide messages; `passes` of all
        passes.
        """
        sent, may_hide = self._sent(last_backward, passes)
        hidden = min(may_hide, sent) if self.wires.hardware.overlaps else 0.0
        return {
            "gradients": self._handling,
            "dp": sent - hidden,
            "dp hidden": hidden,
            "optimizer": self._update,
        }

    def _sent(self, last_backward: float, passes: float) -> tuple[float, float]:
        """Seconds of messages between data-parallel ranks, and how many of them computation may hide."""
        layout, micro = self.layout, self.micro_batches
        if self.ranks == 1:
            return 0.0, 0.0
        collective = partial(self.wires.collective, axis="dp")
        tail = collective("all_reduce", (len(self.sizes) + TAIL) * 8.0)
        if not layout.zero:
            reduced = [collective("all_reduce", float(size * self.element)) for size in self.buckets]
            late = layout.pp > 1 and layout.chunks > 1  # sent only once the schedule is done
            return sum(reduced) + tail, 0.0 if late else min(sum(reduced[:-1]), last_backward)
        if layout.zero == 3:
            units = [float(unit * self.element) for unit in self.units]
            first, again = (self._gathers(units, axis) for axis in ("shares", "secondary"))
            reduced = self._reductions(units)
            sent = sum(first) - sum(again) + micro * (2 * sum(again) - again[0] + sum(reduced))
            # Nothing runs at the same time as a pass's first gathers and its last reduction.
            bare = sum(first[:2]) + (micro - 1) * sum(again[:2]) + micro * reduced[0]
            return sent + tail, min(max(0.0, sent - bare), passes)
        buckets = [float(size * self.element) for size in self.buckets]
        reduced, gathered = self._reductions(buckets), sum(self._gathers(buckets, "shares"))
        rounds = micro if layout.zero == 2 else 1
        hidden = rounds * min(sum(reduced[:-1]), last_backward)
        if layout.pp > 1 and (layout.chunks > 1 or self.tied_elements):
            hidden = 0.0  # sent only once the schedule is done
        return rounds * sum(reduced) + tail * rounds + gathered, hidden

    def _gathers(self, sizes: list[float], axis: str) -> list[float]:
        """Seconds of an all-gather of each flat tensor of so many bytes."""
        return [self.wires.collective("all_gather", size / self.wires.size(axis), axis) for size in sizes]

    def _reductions(self, sizes: list[float]) -> list[float]:
        """Seconds of bringing each rank its share of the sums."""
        over = self.wires.collective
        return [
            over("reduce_scatter", size, "shares") + over("all_reduce", size / self.owners, "copies")
            for size in sizes
        ]

    @cached_property
    def _handling(self) -> float:
        """Seconds of adding gradients up over micro-batches, and of copying them to their buckets."""
        elements, micro = sum(self.sizes), self.micro_batches
        added = (micro - 1) * (3 if self.layout.zero < 2 else 0) * elements * self.element
        if self.ranks == 1:
            return added / self.rates.memory
        rounds = micro if self.layout.zero >= 2 else 1
        moved = added + rounds * 2 * elements * self.element
        calls = rounds * HOOK * len(self.sizes)
        if self.layout.zero == 3:
            calls = micro * 2 * UNIT * len(self.units)
        return moved / self.rates.memory + self.rates.seconds(Computation(calls=calls), self.layout.precision)

    @cached_property
    def tied(self) -> float:
        """Seconds in which a pipeline's first and last stage sum the gradient of a tied matrix."""
        if self.layout.pp == 1 or not self.tied_elements:
            return 0.0
        return 2 * self.wires.message(float(self.tied_elements * self.element), "pp")

    @cached_property
    def _update(self) -> float:
        """Seconds of the optimizer's step on this rank's share."""
        zero, elements = self.layout.zero, sum(self.sizes)
        own = share(elements, self.owners) if zero else elements
        pieces = {0: len(self.sizes), 3: 1}.get(zero, len(self.buckets))
        passes = min(ELEMENT_PASSES[self.optimizer], FUSED_PASSES if self.rates.asynchronous else 99)
        moved = passes * own * self.updated
        if self.element != self.updated:
            moved += 12 * own  # cast gradients to the masters' precision and parameters from it
        return moved / self.rates.memory + pieces * self.rates.tensor
