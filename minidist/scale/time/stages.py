"""Seconds of a step of one layout, stage by stage: passes, schedule, gradients and update.

Among ranks with the same task, the one with the most work counts: the last of its tensor-parallel group, with
the most rows. In a pipeline the times of all stages are predicted, since the simulation of the schedule needs
them; the parts of the step are those of the slowest stage.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from minidist.model.configs import TransformerConfig
from minidist.parallel.contract.recompute_policies import WHOLE, share_recomputed
from minidist.parallel.contract.schedule_kinds import SCHEDULES, schedule_kind
from minidist.scale.memory.parameter_sizes import ModelPart, RankParameters, on_rank, parts
from minidist.scale.memory.training_setup import TrainingSetup
from minidist.scale.time import pipeline_time
from minidist.scale.time.gradient_exchange import GradientTime
from minidist.scale.time.hardware import Hardware
from minidist.scale.time.layer_work import Computation, LayerWork
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


class StageTimes(NamedTuple):
    """Seconds of one micro-batch's passes through one part of the model, on one rank."""

    forward: float  # computation and messages of the forward pass
    backward: float  # the same of the backward pass, with recomputation
    weights: float  # the part of the backward pass that computes gradients of weights
    parts: dict[str, float]  # both passes by purpose

    @property
    def whole(self) -> float:
        """Both passes."""
        return self.forward + self.backward


class StepStages:
    """Predicts the parts of a step; `predict_step` documents the arguments."""

    def __init__(
        self,
        shape: TransformerConfig,
        setup: TrainingSetup,
        hardware: Hardware,
        simulated: Simulated | None = None,
    ) -> None:
        self.shape, self.setup, self.hardware, layout = shape, setup, hardware, setup.layout
        self.layout, self.element, self.micro_rows = layout, setup.sharing.element, setup.micro_rows
        self.own_tokens = max(map(setup.own_tokens, range(layout.cp)))
        self.wires = Wires(hardware, setup)
        self.rates = self.wires.crowd.rates
        self.chunks = parts(shape, layout.pp, layout.chunks)
        self.placement = schedule_kind(layout.schedule).placement(layout.pp, layout.chunks)
        self.simulated = {} if simulated is None else simulated
        # Passes and pipelines do not depend on ZeRO.
        self._form = replace(layout, zero=0, shard=0), setup.tokens
        self._times: dict[tuple[int, int], StageTimes] = self.simulated.setdefault(self._form, {})

    def parts(self) -> dict[str, float]:
        """Seconds by purpose."""
        layout = self.layout
        stage = max(range(layout.pp), key=lambda stage: sum(each.whole for each in self._on(stage)))
        done = self._on(stage)
        passes = sum(each.whole for each in done)
        found = {name: sum(each.parts[name] for each in done) for name in done[0].parts}
        found |= {"pp": 0.0, "bubble": 0.0}
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
        fullest = max(map(self._parameters, range(layout.pp)), key=lambda each: sum(each.sizes))
        gradients = GradientTime(fullest, self.wires)
        found |= gradients.parts(done[-1].backward, passes)
        found["pp"] += gradients.tied
        found["step"] = self.rates.step
        return found

    def _parameters(self, stage: int) -> RankParameters:
        return on_rank(self.shape, self.part(stage))

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
        tokens, cut = (self.own_tokens, self.setup.tokens), self.layout.sequence_parallel
        return LayerWork(self.shape, rows, *tokens, self.element, self.part(), cut)

    def times(self, chunk: int, rows: int) -> StageTimes:
        """Times of a micro-batch of so many rows through a part of the model."""
        if (chunk, rows) not in self._times:
            self._times[chunk, rows] = self._predict(self.chunks[chunk], rows)
        return self._times[chunk, rows]

    def _predict(self, layers: range, rows: int) -> StageTimes:
        layout, precision, rates, overlaps = (
            self.layout,
            self.layout.precision,
            self.rates,
            self.hardware.overlaps,
        )
        of = self.work(rows)
        passes = of.layers(layers)
        blocks = len([i for i in layers if 1 <= i <= self.shape.layers])
        forward = rates.seconds(passes.forward, precision)
        again = rates.seconds(of.again(layers, layout.recompute), precision)
        whole, attention = (
            share_recomputed(layout.recompute, self.shape.layers, layers, part)
            for part in (WHOLE, "attention")
        )
        backward = rates.seconds(passes.backward, precision, backward=True)
        if SCHEDULES[layout.schedule].splits_backward:
            backward *= 1 + SPLIT
            backward += 0.0 if rates.asynchronous else SPLIT_CALLS * passes.backward.calls * rates.call
        products = passes.backward.products / rates.flops[precision]
        tp_forward, tp_backward = self._tensor_parallel(of, layers, blocks)
        tp_hidden = min(tp_backward, OVERLAPPED * products) if overlaps else 0.0
        keys = of.stream * of.part.own(self.shape.heads) / self.shape.heads
        cp_forward, cp_backward = (blocks * each for each in self.wires.ring(keys, self.element))
        cp_hidden = [0.0, 0.0]
        if overlaps and layout.cp > 1:
            attended = passes.forward.attention / (rates.flops[precision] * rates.attention)
            cp_hidden = [min(cp_forward, attended), min(cp_backward, 2.5 * attended)]
        # Attention alone repeats no all-reduce, but one of four collectives with sequence parallelism.
        tp_backward += (whole + (attention - whole) / 4 * layout.sequence_parallel) * tp_forward
        cp_backward += attention * cp_forward
        cp_hidden[1] += attention * cp_hidden[0]
        traded = blocks * self.wires.traded(keys)  # before and after attention, with nothing to compute
        tp_backward -= tp_hidden
        cp_forward = cp_forward - cp_hidden[0] + traded
        cp_backward = cp_backward - cp_hidden[1] + (1 + attention) * traded
        parts = {
            "compute": forward + backward,
            "recompute": again,
            "tp": tp_forward + tp_backward,
            "tp hidden": tp_hidden,
            "cp": cp_forward + cp_backward,
            "cp hidden": sum(cp_hidden),
        }
        whole_backward = backward + again + tp_backward + cp_backward
        return StageTimes(forward + tp_forward + cp_forward, whole_backward, products / 2, parts)

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
            "forward": [[times.forward for times in stage] for stage in each],
            "backward": [[times.backward for times in stage] for stage in each],
            "backward_input": [[times.backward - times.weights for times in stage] for stage in each],
            "backward_weight": [[times.weights for times in stage] for stage in each],
        }
        passes, cores, crowd = pipeline_time.passes_of(*form), self.hardware.cores, self.wires.crowd
        if cores is None:
            return pipeline_time.seconds_of(passes, layout.pp, seconds, message)
        together = layout.ranks // layout.pp  # ranks of a stage, in all pipelines
        return pipeline_time.seconds_on_shared_cores(
            passes, layout.pp, seconds, message, lambda working: crowd.pace(working * together, cores)
        )
