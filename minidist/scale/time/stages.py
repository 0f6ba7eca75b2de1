"""Seconds of a step of one layout, stage by stage: passes, schedule, gradients and update.

Among ranks with the same task, the one with the most work counts: the last of its tensor-parallel group, with
the most rows. In a pipeline the times of all stages are predicted, since the simulation of the schedule needs
them; the parts of the step are those of the slowest stage.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from minidist.model.configs import TransformerConfig
from minidist.parallel.context import zigzag_order
from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.recompute_policies import WHOLE, share_recomputed
from minidist.parallel.contract.schedule_kinds import SCHEDULES, schedule_kind
from minidist.scale.memory import parameter_sizes
from minidist.scale.memory.estimates import schedule_of
from minidist.scale.memory.parameter_sizes import ModelPart, parts, share
from minidist.scale.memory.state_bytes import BYTES
from minidist.scale.time import pipeline_time
from minidist.scale.time.gradient_exchange import GradientTime
from minidist.scale.time.layer_work import Computation, LayerWork
from minidist.scale.time.rates import Hardware
from minidist.scale.time.traffic import Wires

OVERLAPPED = 7 / 24
"""Share of a block's backward products that can hide an all-reduce: gradients of weights (half of all) of
queries, keys, values and the MLP's first map (7 of 12 parts)."""
SPLIT, SPLIT_CALLS = 0.05, 3
"""Cost of a backward pass in two parts: a share of its time, and calls per operator. On one core three blocks
of byte-small took 1.26, 1.23 and 1.09 times as long in two parts, with 1, 2 and 8 rows."""
OPERATOR = 6
"""Calls of operators per tensor-parallel collective, besides the message itself."""


Simulated = dict[Hashable, Any]
"""A cache of predicted seconds of passes and pipelines, for one model on one machine."""


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
    weights: float = 0.0  # the part of the backward pass that computes gradients of weights

    @property
    def whole_forward(self) -> float:
        """Computation and communication of the forward pass."""
        return self.forward + self.tp_forward + self.cp_forward

    @property
    def whole_backward(self) -> float:
        """Computation, recomputation and communication of the backward pass."""
        return self.backward + self.again + self.tp_backward + self.cp_backward

    @property
    def whole(self) -> float:
        """Both passes."""
        return self.whole_forward + self.whole_backward


class StepStages:
    """Predicts the parts of a step; `predict_step` documents the arguments."""

    def __init__(
        self,
        shape: TransformerConfig,
        layout: Layout,
        rows: int,
        tokens: int,
        hardware: Hardware,
        optimizer: str,
        simulated: Simulated | None = None,
        secondary: int = 0,
    ) -> None:
        self.simulated = {} if simulated is None else simulated
        self.shape, self.layout, self.hardware, self.optimizer = shape, layout, hardware, optimizer
        self.length = tokens
        self.own_tokens = max(zigzag_order.size(tokens, layout.cp, rank) for rank in range(layout.cp))
        own = share(rows, layout.dp)
        count = min(layout.micro_batches, own)
        self.micro_rows = [share(own, count, part) for part in range(count)]
        self.element = BYTES[layout.precision]
        self.crowd = hardware.crowd(min(layout.ranks, hardware.ranks_per_host))
        self.rates = self.crowd.rates
        self.wires = Wires(hardware, self.crowd, layout, secondary)
        self.chunks = parts(shape, layout.pp, layout.chunks)
        self.placement = schedule_kind(layout.schedule).placement(layout.pp, layout.chunks)
        self._form = replace(layout, zero=0, shard=0), tokens  # passes and pipelines do not depend on ZeRO
        self._times: dict[tuple[int, int], StageTimes] = self.simulated.setdefault(self._form, {})

    def parts(self) -> dict[str, float]:
        """Seconds by purpose."""
        layout = self.layout
        stage = max(range(layout.pp), key=lambda stage: sum(each.whole for each in self._on(stage)))
        done = self._on(stage)
        passes = sum(each.whole for each in done)
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
            key = *self._form, tuple(self.micro_rows)
            if key not in self.simulated:
                self.simulated[key] = self._pipeline()
            whole = float(self.simulated[key])
            # Where ranks share cores, passes run faster while other ranks wait, so whole may be below passes.
            faster = min(1.0, whole / passes)
            for name in ("compute", "recompute", "tp", "cp"):
                found[name] *= faster
            waits = whole - faster * passes
            found["pp"] = min(waits, 2 * (layout.pp - 1) * self._message)  # to fill and drain the pipeline
            found["bubble"] = waits - found["pp"]
        fullest = max(range(layout.pp), key=self._parameters)
        shape, part, ranks = self.shape, self.part(fullest), self.placement.ranks
        tied = shape.shares_matrix and ranks[0] != ranks[-1]
        gradients = GradientTime(
            [size for layer in parameter_sizes.layers(shape, part) for size in layer],
            parameter_sizes.units(shape, part),
            self.wires,
            len(self.micro_rows),
            self.optimizer,
            part.own(shape.vocabulary) * shape.width if tied else 0,
        )
        found |= gradients.parts(done[-1].whole_backward, passes)
        found["pp"] += gradients.tied
        found["step"] = self.rates.step
        return found

    def _parameters(self, stage: int) -> int:
        return sum(map(sum, parameter_sizes.layers(self.shape, self.part(stage))))

    def part(self, stage: int = 0) -> ModelPart:
        """The part of the model of the rank that has the most work on a stage."""
        layout = self.layout
        return ModelPart(layout.tp, layout.pp, layout.chunks, layout.tp - 1, stage, layout.schedule)

    def _on(self, stage: int) -> list[StageTimes]:
        """Times of each micro-batch through each chunk of a stage's rank."""
        own = self.placement.stages[stage]
        return [self.times(chunk, rows) for rows in self.micro_rows for chunk in own]

    def work(self, rows: int) -> LayerWork:
        """The work of the layers for a micro-batch of so many rows."""
        tokens, cut = (self.own_tokens, self.length), self.layout.sequence_parallel
        return LayerWork(self.shape, rows, *tokens, self.element, self.part(), cut)

    def times(self, chunk: int, rows: int) -> StageTimes:
        """Times of a micro-batch of so many rows through a part of the model."""
        if (chunk, rows) not in self._times:
            self._times[chunk, rows] = self._predict(self.chunks[chunk], rows)
        return self._times[chunk, rows]

    def _predict(self, layers: range, rows: int) -> StageTimes:
        layout, precision, rates = self.layout, self.layout.precision, self.rates
        of = self.work(rows)
        passes = of.layers(layers)
        blocks = len([i for i in layers if 1 <= i <= self.shape.layers])
        tp_forward, tp_backward = self._tensor_parallel(of, layers, blocks)
        again = rates.seconds(of.again(layers, layout.recompute), precision)
        whole, attention = (
            share_recomputed(layout.recompute, self.shape.layers, layers, part)
            for part in (WHOLE, "attention")
        )
        backward = rates.seconds(passes.backward, precision, backward=True)
        if SCHEDULES[layout.schedule].splits_backward:
            backward *= 1 + SPLIT
            backward += 0.0 if rates.asynchronous else SPLIT_CALLS * passes.backward.calls * rates.call
        hidden = 0.0
        if self.hardware.overlaps:
            products = passes.backward.products / rates.flops[precision]
            hidden = min(tp_backward, OVERLAPPED * products)
        # Attention alone repeats no all-reduce, but one of four collectives with sequence parallelism.
        tp_backward += (whole + (attention - whole) / 4 * layout.sequence_parallel) * tp_forward
        keys = of.stream * of.part.own(self.shape.heads) / self.shape.heads
        cp_forward, cp_backward = (blocks * each for each in self.wires.ring(keys, self.element))
        cp_hidden = [0.0, 0.0]
        if self.hardware.overlaps and layout.cp > 1:
            attended = passes.forward.attention / (rates.flops[precision] * rates.attention)
            cp_hidden = [min(cp_forward, attended), min(cp_backward, 2.5 * attended)]
        cp_backward += attention * cp_forward
        cp_hidden[1] += attention * cp_hidden[0]
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

    @cached_property
    def _message(self) -> float:
        """Seconds of a message from one stage to the next."""
        return self.wires.message(self.work(self.micro_rows[0]).outside, "pp")

    def _pipeline(self) -> float:
        """Seconds of the schedule."""
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
        together = layout.ranks // layout.pp  # ranks of a stage, in all pipelines
        return pipeline_time.seconds_on_shared_cores(
            schedule_of(*form), seconds, message, lambda working: self.crowd.pace(working * together, cores)
        )
