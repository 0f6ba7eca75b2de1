"""After the backward pass: gradients to the ranks that update with them, and the update, in seconds.

| ZeRO | Each micro-batch | Each step |
|---|---|---|
| 0 | | an all-reduce of each bucket |
| 1 | | a reduce-scatter of each bucket; an all-gather of each |
| 2 | a reduce-scatter of each bucket | an all-gather of each |
| 3 | two all-gathers of each unit, a reduce-scatter | |

What a reduction sends while the backward pass goes on is hidden, but for the last bucket, which is complete
only when that ends.

Sources: Li et al. 2020, section 3.2; Rajbhandari et al. 2020, section 7; Zhao et al. 2023, "PyTorch FSDP",
section 3.3.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from minidist.scale.memory import parameter_sizes
from minidist.scale.memory.parameter_sizes import share
from minidist.scale.memory.state_bytes import BUCKET, TAIL, cut
from minidist.scale.time.layer_work import Computation

if TYPE_CHECKING:
    from minidist.scale.time.stages import StepStages

ELEMENT_PASSES = {"adam": 20, "momentum": 5, "sgd": 3}
"""Tensors that an update reads and writes for each parameter. Adam's, operator by operator as torch makes it
on processors: decay 2, first moment 3, second 2 + 3, root 2, division 2, epsilon 2, update 4."""
FUSED_PASSES = 7
"""The same of Adam in one kernel, as on GPUs with `fused=True`: four tensors are read and three written."""
HOOK = 3
"""Operators' worth of time that a gradient's hook takes, which moves it to its bucket."""
UNIT = 40
"""The same for a unit of stage 3 in a pass: hooks, views, its buffer."""


class GradientTime:
    """Of the rank with the most parameters, which are those of `stage`."""

    def __init__(self, step: StepStages, stage: int) -> None:
        self.step, self.layout, self.rates = step, step.layout, step.rates
        self.element, self.updated = step.element, max(step.element, 4)
        self.place = step.place(stage)
        self.sizes = [size for layer in parameter_sizes.layers(step.shape, self.place) for size in layer]
        self.ranks = step.wires.size("dp")

    @cached_property
    def buckets(self) -> list[int]:
        """Elements of each, as gradients come."""
        return cut(reversed(self.sizes), BUCKET // self.element)

    def parts(self, last_backward: float, passes: float) -> dict[str, float]:
        """Seconds by what they are for.

        last_backward: seconds of the last backward pass, behind which messages may hide. passes: of all.
        """
        sent, may_hide = self._sent(last_backward, passes)
        hidden = min(may_hide, sent) if self.step.hardware.overlaps else 0.0
        return {
            "gradients": self._handling,
            "dp": sent - hidden,
            "dp hidden": hidden,
            "optimizer": self._update,
        }

    def _sent(self, last_backward: float, passes: float) -> tuple[float, float]:
        """Seconds of messages between data-parallel ranks, and how many of them may pass meanwhile."""
        layout, micro = self.layout, len(self.step.micro_rows)
        if self.ranks == 1:
            return 0.0, 0.0
        tail = self._collective("all_reduce", (len(self.sizes) + TAIL) * 8.0)
        if not layout.zero:
            reduced = [self._collective("all_reduce", float(size * self.element)) for size in self.buckets]
            late = layout.pp > 1 and layout.chunks > 1  # gradients are sent once the schedule is done
            return sum(reduced) + tail, 0.0 if late else min(sum(reduced[:-1]), last_backward)
        if layout.zero == 3:
            units = [
                float(unit * self.element) for unit in parameter_sizes.units(self.step.shape, self.place)
            ]
            gathers = [self._collective("all_gather", unit / self.ranks) for unit in units]
            reduced = [self._collective("reduce_scatter", unit) for unit in units]
            sent = micro * (2 * sum(gathers) - gathers[0] + sum(reduced))
            # The first gathers and the last reduction have nothing beside them.
            bare = micro * (sum(gathers[:2]) + reduced[0])
            return sent + tail, min(max(0.0, sent - bare), passes)
        reduced = [self._collective("reduce_scatter", float(size * self.element)) for size in self.buckets]
        gathered = sum(
            self._collective("all_gather", size * self.element / self.ranks) for size in self.buckets
        )
        rounds = micro if layout.zero == 2 else 1
        hidden = rounds * min(sum(reduced[:-1]), last_backward)
        tied = layout.pp > 1 and self.step.shape.shares_matrix
        if layout.pp > 1 and (layout.chunks > 1 or tied):
            hidden = 0.0  # gradients are sent once the schedule is done
        return rounds * sum(reduced) + tail * rounds + gathered, hidden

    def _collective(self, operation: str, bytes_: float) -> float:
        return self.step.wires.collective(operation, bytes_, "dp")

    @cached_property
    def _handling(self) -> float:
        """Gradients added up over micro-batches, and moved to where they are sent from."""
        elements, micro = sum(self.sizes), len(self.step.micro_rows)
        added = (micro - 1) * (3 if self.layout.zero < 2 else 0) * elements * self.element
        if self.ranks == 1:
            return added / self.rates.memory
        rounds = micro if self.layout.zero >= 2 else 1
        moved = added + rounds * 2 * elements * self.element
        calls = rounds * HOOK * len(self.sizes)
        if self.layout.zero == 3:
            units = len(parameter_sizes.units(self.step.shape, self.place))
            calls = micro * 2 * UNIT * units
        return moved / self.rates.memory + self.rates.seconds(Computation(calls=calls), self.layout.precision)

    @cached_property
    def tied(self) -> float:
        """Where the two ends of a pipeline have copies of one matrix, they sum its gradient."""
        if self.layout.pp == 1 or not self.step.shape.shares_matrix:
            return 0.0
        rows = self.place.part(self.step.shape.vocabulary)
        return 2 * self.step.wires.message(float(rows * self.step.shape.width * self.element), "pp")

    @cached_property
    def _update(self) -> float:
        """The optimizer's step on this rank's share."""
        zero, elements = self.layout.zero, sum(self.sizes)
        own = share(elements, self.ranks) if zero else elements
        pieces = {0: len(self.sizes), 3: 1}.get(zero, len(self.buckets))
        passes = min(ELEMENT_PASSES[self.step.optimizer], FUSED_PASSES if self.rates.asynchronous else 99)
        moved = passes * own * self.updated
        if self.element != self.updated:
            moved += 12 * own  # gradients to the masters' precision, parameters from it
        return moved / self.rates.memory + pieces * self.rates.tensor
