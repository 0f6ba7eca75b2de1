"""A step of one layout, stage by stage: its passes, its schedule, its gradients and its update, in seconds.

Of ranks that do the same the one with most to do counts: the last of its tensor-parallel group, which has the
most of what does not divide evenly, with the most rows. Of a pipeline's stages all are reckoned, since the
schedule has to be simulated with each one's times; what is summed up is then the slowest.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from minidist.model.configs import TransformerConfig
from minidist.parallel.context import zigzag_order
from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.schedule_kinds import SCHEDULES
from minidist.scale.memory import parameter_sizes
from minidist.scale.memory.estimates import schedule_of
from minidist.scale.memory.parameter_sizes import ModelPart, parts, share
from minidist.scale.memory.state_bytes import BYTES
from minidist.scale.time import pipeline_time, shared_cores
from minidist.scale.time.gradient_exchange import GradientTime
from minidist.scale.time.layer_work import Computation, LayerWork
from minidist.scale.time.rates import Crowd, Hardware
from minidist.scale.time.traffic import Wires

OVERLAPPED = 7 / 24
"""Of a block's backward products what an all-reduce can hide behind: the weights' gradients, half of all, of
queries, keys, values and the MLP's first map, 7 of 12 parts."""
SPLIT, SPLIT_CALLS = 0.05, 3
"""What a backward pass in two parts takes longer: a share of it, and calls for each of its operators. On one
core three blocks of byte-small took 1.26, 1.23 and 1.09 of the time in two parts, with 1, 2 and 8 rows."""
OPERATOR = 6
"""Calls of operators that a tensor-parallel collective takes beside the message itself."""


Simulated = dict[Hashable, Any]
"""Seconds of passes and of pipelines that were reckoned before, of one model on one machine."""


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one micro-batch's passes through one part of the model, on one rank."""

    forward: float
    backward: float
    again: float
    tp_forward: float = 0.0
    tp_backward: float = 0.0
    tp_hidden: float = 0.0
    cp_forward: float = 0.0
    cp_backward: float = 0.0
    cp_hidden: float = 0.0
    weights: float = 0.0  # of the backward pass, the weights' gradients

    @property
    def whole_forward(self) -> float:
        """With what is sent."""
        return self.forward + self.tp_forward + self.cp_forward

    @property
    def whole_backward(self) -> float:
        """With what is sent, and what is computed again."""
        return self.backward + self.again + self.tp_backward + self.cp_backward


class StepStages:
    """See `predict_step`."""

    def __init__(
        self,
        shape: TransformerConfig,
        layout: Layout,
        rows: int,
        tokens: int,
        hardware: Hardware,
        optimizer: str,
        simulated: Simulated | None = None,
    ) -> None:
        self.simulated = {} if simulated is None else simulated
        self.shape, self.layout, self.hardware, self.optimizer = shape, layout, hardware, optimizer
        self.length = tokens
        self.own_tokens = max(zigzag_order.size(tokens, layout.cp, rank) for rank in range(layout.cp))
        own = share(rows, layout.dp)
        count = min(layout.micro_batches, own)
        self.micro_rows = [share(own, count, part) for part in range(count)]
        self.element = BYTES[layout.precision]
        self.crowd: Crowd = hardware.crowd(min(layout.ranks, hardware.ranks_per_host))
        self.rates = self.crowd.rates
        self.wires = Wires(hardware, self.crowd, layout)
        self.chunks = parts(shape, layout.pp, layout.chunks)
        self._form = replace(layout, zero=0), tokens  # ZeRO's stage is nothing to passes and pipelines
        self._times: dict[tuple[int, int], StageTimes] = self.simulated.setdefault(self._form, {})

    def parts(self) -> dict[str, float]:
        """Seconds by what they are for."""
        layout = self.layout
        stage = max(range(layout.pp), key=lambda stage: sum(map(self._total, self._on(stage))))
        done = self._on(stage)
        passes = sum(map(self._total, done))
        found = {
            "compute": sum(each.forward + each.backward for each in done),
            "recompute": sum(each.again for each in done),
            "tp": sum(each.tp_forward + each.tp_backward for each in done),
            "tp hidden": sum(each.tp_hidden for each in done),
            "cp": sum(each.cp_forward + each.cp_backward for each in done),
            "cp hidden": sum(each.cp_hidden for each in done),
            "pp": 0.0,
            "bubble": 0.0,
        }
        if layout.pp > 1:
            whole = self._pipeline()
            # Where ranks share cores, passes are faster while others wait: then there is less than no bubble.
            faster = min(1.0, whole / passes)
            for name in ("compute", "recompute", "tp", "cp"):
                found[name] *= faster
            waits = whole - faster * passes
            found["pp"] = min(waits, 2 * (layout.pp - 1) * self._message)  # to fill and to drain it
            found["bubble"] = waits - found["pp"]
        gradients = GradientTime(self, max(range(layout.pp), key=self._parameters))
        found |= gradients.parts(done[-1].whole_backward, passes)
        found["pp"] += gradients.tied
        found["step"] = self.rates.step
        return found

    def _parameters(self, stage: int) -> int:
        return sum(map(sum, parameter_sizes.layers(self.shape, self.place(stage))))

    def place(self, stage: int = 0) -> ModelPart:
        """Of the rank that has most to do on a stage."""
        return ModelPart(self.layout.tp, self.layout.pp, self.layout.chunks, self.layout.tp - 1, stage)

    def _on(self, stage: int) -> list[StageTimes]:
        """Of each micro-batch through each chunk of a stage's rank."""
        chunks = range(stage, len(self.chunks), self.layout.pp)
        return [self.times(chunk, rows) for rows in self.micro_rows for chunk in chunks]

    @staticmethod
    def _total(times: StageTimes) -> float:
        return times.whole_forward + times.whole_backward

    # One micro-batch through one part of the model.

    def work(self, rows: int) -> LayerWork:
        """Of the layers for a micro-batch."""
        return LayerWork(
            self.shape,
            rows,
            self.own_tokens,
            self.length,
            self.element,
            self.place(),
            self.layout.sequence_parallel,
        )

    def times(self, chunk: int, rows: int) -> StageTimes:
        """Of a micro-batch of so many rows through a part of the model."""
        if (chunk, rows) not in self._times:
            self._times[chunk, rows] = self._reckon(self.chunks[chunk], rows)
        return self._times[chunk, rows]

    def _reckon(self, layers: range, rows: int) -> StageTimes:
        layout, precision, rates = self.layout, self.layout.precision, self.rates
        of = self.work(rows)
        passes = of.layers(layers)
        blocks = len([i for i in layers if 1 <= i <= self.shape.layers])
        tp_forward, tp_backward = self._tensor_parallel(of, layers, blocks)
        again = rates.seconds(passes.again, precision) if layout.recompute else 0.0
        backward = rates.seconds(passes.backward, precision, backward=True)
        if SCHEDULES[layout.schedule].splits_backward:
            backward *= 1 + SPLIT
            backward += 0.0 if rates.asynchronous else SPLIT_CALLS * passes.backward.calls * rates.call
        hidden = 0.0
        if self.hardware.overlaps:
            products = passes.backward.products / rates.flops[precision]
            hidden = min(tp_backward, OVERLAPPED * products)
        if layout.recompute:
            tp_forward, tp_backward = tp_forward, tp_backward + tp_forward
        keys = of.stream * of.place.part(self.shape.heads) / self.shape.heads
        cp_forward, cp_backward = (blocks * each for each in self.wires.ring(keys, self.element))
        cp_hidden = [0.0, 0.0]
        if self.hardware.overlaps and layout.cp > 1:
            attention = passes.forward.attention / (rates.flops[precision] * rates.attention)
            cp_hidden = [min(cp_forward, attention), min(cp_backward, 2.5 * attention)]
        if layout.recompute:
            cp_backward += cp_forward
            cp_hidden[1] += cp_hidden[0]
        return StageTimes(
            rates.seconds(passes.forward, precision),
            backward,
            again,
            tp_forward,
            tp_backward - hidden,
            hidden,
            cp_forward - cp_hidden[0],
            cp_backward - cp_hidden[1],
            sum(cp_hidden),
            weights=passes.backward.products / rates.flops[precision] / 2,
        )

    def _tensor_parallel(self, of: LayerWork, layers: range, blocks: int) -> tuple[float, float]:
        if self.layout.tp == 1:
            return 0.0, 0.0
        vector = float(self.shape.width * self.element)
        forward, backward = (blocks * each for each in self.wires.tensor_parallel(of.stream, vector))
        collectives = 4 * blocks
        if 0 in layers:
            first = self.wires.first_layer(of.stream, of.tokens * vector)
            forward, backward = forward + first[0], backward + first[1]
            collectives += 1
        if self.shape.layers + 1 in layers and self.shape.generates:
            last = self.wires.last_layer(of.stream, vector, of.rows * of.tokens)
            forward, backward = forward + last[0], backward + last[1]
            collectives += 2
        calls = self.rates.seconds(Computation(calls=OPERATOR * collectives), self.layout.precision) / 2
        return forward + calls, backward + calls

    # All micro-batches through all stages.

    @cached_property
    def _message(self) -> float:
        """Seconds from one stage to the next."""
        return self.wires.message(self.work(self.micro_rows[0]).outside, "pp")

    def _pipeline(self) -> float:
        """Seconds of the schedule."""
        key = *self._form, tuple(self.micro_rows)
        if key not in self.simulated:
            self.simulated[key] = self._simulate()
        return float(self.simulated[key])

    def _simulate(self) -> float:
        layout, message = self.layout, self._message
        form = layout.schedule, layout.pp, len(self.micro_rows), layout.chunks
        each = [[self.times(chunk, rows) for rows in self.micro_rows] for chunk in range(len(self.chunks))]
        seconds = {
            "forward": [[times.whole_forward for times in stage] for stage in each],
            "backward": [[times.whole_backward for times in stage] for stage in each],
            "backward_input": [[times.whole_backward - times.weights for times in stage] for stage in each],
            "backward_weight": [[times.weights for times in stage] for stage in each],
        }
        cores = self.hardware.cores
        if cores is None:
            return pipeline_time.seconds_of(pipeline_time.passes_of(*form), layout.pp, seconds, message)
        together = layout.ranks // layout.pp  # pipelines side by side, and ranks of a stage
        return shared_cores.simulate(
            schedule_of(*form), seconds, message, lambda working: self.crowd.pace(working * together, cores)
        )
