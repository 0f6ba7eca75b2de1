"""The parts of a step on the ranks of each pipeline stage: passes, messages in them, and the schedule.

A layout's passes are those of its chunks of layers, and many chunks are alike, as are the passes of layouts
that differ in ZeRO or in the pipeline alone: `Simulated` keeps what a planner has predicted before.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Any

from minidist.model.configs import TransformerConfig
from minidist.parallel.contract.recompute_policies import WHOLE, share_recomputed
from minidist.parallel.contract.schedule_kinds import SCHEDULES, schedule_kind
from minidist.scale.memory.parameter_sizes import ModelPart, alike, on_rank, parts
from minidist.scale.memory.training_setup import TrainingSetup
from minidist.scale.step_time import pipeline_time
from minidist.scale.step_time.gradient_exchange import GradientTime
from minidist.scale.step_time.hardware import Hardware
from minidist.scale.step_time.layer_work import Computation, LayerWork
from minidist.scale.step_time.pipeline_time import StageTimes
from minidist.scale.step_time.traffic import Wires

OVERLAPPED = 7 / 24
"""Share of a block's backward products that can hide an all-reduce: gradients of weights (half of all) of
queries, keys, values and the MLP's first map (7 of 12 parts)."""
OVERLAPPED_ATTENTION = 3 / 8
"""The same without the MLP, which tensor parallelism leaves whole if it has experts: 3 of 4 parts."""
SPLIT, SPLIT_CALLS = 0.05, 3
"""Cost of a backward pass in two parts: a share of its time, and calls per operator. On one core three blocks
of byte-small took 1.26, 1.23 and 1.09 times as long in two parts, with 1, 2 and 8 rows."""
OPERATOR = 6
"""Calls of operators per tensor-parallel collective, besides the message itself."""

Simulated = dict[Hashable, Any]
"""A cache of predicted seconds of passes and pipelines, for one model on one machine."""


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
        self.own_tokens = setup.own_tokens(setup.context_rank)
        self.wires = Wires(hardware, setup)
        self.rates = self.wires.crowd.rates
        self.chunks = parts(shape, layout.pp, layout.chunks)
        self.alike = alike(shape, layout.pp, layout.chunks, layout.recompute)
        self.simulated = {} if simulated is None else simulated
        # Passes and pipelines do not depend on ZeRO, and passes of the same layers not on the pipeline.
        kind = schedule_kind(layout.schedule)
        self.placement = kind.placement(layout.pp, layout.chunks)
        axes = layout.ranks, layout.tp, layout.cp, layout.ep, layout.trading, layout.sequence_parallel
        passes = *axes, layout.precision, layout.recompute, setup.tokens
        self._form = *passes, layout.pp, layout.schedule, layout.chunks, layout.micro_batches
        self._times: dict[tuple[range, int], StageTimes] = self._once(
            "passes", *passes, kind.splits_backward, make=dict
        )

    def _once(self, what: str, *key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` returns, made once for all layouts with the same key."""
        found = self.simulated.setdefault(what, {})
        if key not in found:
            found[key] = make()
        return found[key]

    def parts(self, bound: bool = False) -> dict[str, float]:
        """Seconds by purpose. With `bound`, a pipeline takes the least that it may, without a simulation."""
        layout, setup = self.layout, self.setup
        busy = self._busy("whole")
        passes = max(busy)
        stages = self.placement.stages[busy.index(passes)]
        done = [(count, self.times(i, rows)) for rows, count in self.micro_rows.items() for i in stages]
        found = {name: sum(count * each.parts[name] for count, each in done) for name in done[0][1].parts}
        found |= {"pp": 0.0, "bubble": 0.0}
        if layout.pp > 1:
            simulated = self._pipeline if not bound or self.hardware.cores else self._least
            whole = float(self._once(simulated.__name__, *self._form, setup.own_rows(), make=simulated))
            # Where ranks share cores, passes run faster while other ranks wait, so whole may be below passes.
            faster = min(1.0, whole / passes)
            for name in ("compute", "recompute", "tp", "cp", "ep"):
                found[name] *= faster
            waits = whole - faster * passes
            found["pp"] = min(waits, 2 * (layout.pp - 1) * self._message)  # to fill and drain the pipeline
            found["bubble"] = waits - found["pp"]
        axes = layout.dp, layout.tp, layout.pp, layout.cp, layout.ep, layout.zero, layout.shard
        key = *axes, layout.schedule, layout.chunks, setup.secondary, setup.optimizer, setup.precision
        hidden = 0.0  # behind the passes
        for gradients in self._once("gradients", *key, make=self._gradients):
            own = gradients.parts(done[-1][1].backward - hidden, passes - hidden, setup.micro_batches)
            for name, value in own.items():
                found[name] = found.get(name, 0.0) + value
            hidden = found["dp hidden"]
            found["pp"] += gradients.tied
        found["step"] = self.rates.step
        return found

    def _gradients(self) -> list[GradientTime]:
        """The exchange and update of each set of parameters, on the rank with the most."""
        each = (on_rank(self.shape, self.part(stage)) for stage in range(self.layout.pp))
        fullest = max(each, key=lambda rank: sum(sum(own.sizes) for own in rank.sets))
        return [
            GradientTime(own, self.wires if setup is self.setup else Wires(self.hardware, setup))
            for own, setup in zip(fullest.sets, self.setup.sets, strict=True)
        ]

    def part(self, stage: int = 0) -> ModelPart:
        """The part of the model of the rank that has the most work on a stage."""
        layout = self.layout
        own = layout.tp - 1, stage
        return ModelPart(layout.tp, layout.pp, layout.chunks, *own, layout.schedule, layout.ep)

    def _busy(self, what: str) -> list[float]:
        """For each rank of the pipeline, seconds of all its passes, or of a part of them."""
        kinds = {
            i: sum(count * getattr(self.times(i, rows), what) for rows, count in self.micro_rows.items())
            for i in {*self.alike}
        }
        return [sum(kinds[self.alike[stage]] for stage in own) for own in self.placement.stages]

    def work(self, rows: int) -> LayerWork:
        """The work of the layers for a micro-batch of so many rows."""
        layout = self.layout
        part = ModelPart(layout.tp, tp_rank=layout.tp - 1, ep=layout.ep)
        of = rows, self.own_tokens, self.setup.tokens, self.element, part
        forms = layout.sequence_parallel, layout.trading
        found: LayerWork = self._once("work", *of, *forms, make=lambda: LayerWork(self.shape, *of, *forms))
        return found

    def times(self, chunk: int, rows: int) -> StageTimes:
        """Times of a micro-batch of so many rows through a part of the model."""
        key = self.chunks[self.alike[chunk]], rows
        if key not in self._times:
            self._times[key] = self._predict(*key)
        return self._times[key]

    def _predict(self, layers: range, rows: int) -> StageTimes:
        layout, rates, overlaps = self.layout, self.rates, self.hardware.overlaps
        precision = layout.precision
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
        behind = OVERLAPPED * products
        if self.shape.experts:
            maps = passes.backward.products - blocks * of.mlp.backward.products
            behind = OVERLAPPED_ATTENTION * maps / rates.flops[precision]
        tp_hidden = min(tp_backward, behind) if overlaps else 0.0
        keys = of.stream * of.part.own(self.shape.heads) / self.shape.heads
        cp_forward, cp_backward = (blocks * each for each in self.wires.ring(keys, self.element))
        cp_hidden = [0.0, 0.0]
        if overlaps and layout.cp > 1:
            attended = passes.forward.attention / (rates.flops[precision] * rates.attention)
            cp_hidden = [min(cp_forward, attended), min(cp_backward, 2.5 * attended)]
        # Attention alone repeats no all-reduce, but with sequence parallelism one of its two collectives.
        gathers = (attention - whole) / (2 if self.shape.experts else 4) * layout.sequence_parallel
        tp_backward += (whole + gathers) * tp_forward
        cp_backward += attention * cp_forward
        cp_hidden[1] += attention * cp_hidden[0]
        traded = blocks * self.wires.traded(keys)  # before and after attention, with nothing to compute
        sent = float(self.element * of.mlp_rows * self.shape.width)
        ep_forward, ep_backward = (blocks * each for each in self.wires.routed(sent, self.shape.experts))
        ep_backward += share_recomputed(layout.recompute, self.shape.layers, layers, "mlp") * ep_forward
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
            "ep": ep_forward + ep_backward,
        }
        whole_backward = backward + again + tp_backward + cp_backward + ep_backward
        return StageTimes(forward + tp_forward + cp_forward + ep_forward, whole_backward, products / 2, parts)

    def _tensor_parallel(self, of: LayerWork, layers: range, blocks: int) -> tuple[float, float]:
        if self.layout.tp == 1:
            return 0.0, 0.0
        vector = float(self.shape.width * self.element)
        experts = float(self.element * of.expert_elements)
        forward, backward = (blocks * each for each in self.wires.tensor_parallel(of.stream, vector, experts))
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
        return self.wires.message(self.work(max(self.micro_rows)).outside, "pp")

    def _pipeline(self) -> float:
        """Seconds of the schedule."""
        layout, message = self.layout, self._message
        form = layout.schedule, layout.pp, self.setup.micro_batches, layout.chunks
        each = [
            [times for rows, count in self.micro_rows.items() for times in [self.times(chunk, rows)] * count]
            for chunk in range(len(self.chunks))
        ]
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

    def _least(self) -> float:
        """Seconds that the schedule takes at the least."""
        layout = self.layout
        form = layout.schedule, layout.pp, self.setup.micro_batches, layout.chunks
        least = {}
        for i in {*self.alike}:
            kinds = [self.times(i, rows) for rows in self.micro_rows]
            forward, weights = min(each.forward for each in kinds), min(each.weights for each in kinds)
            inputs = min(each.backward - each.weights for each in kinds)
            least[i] = StageTimes(forward, inputs + weights, weights, {})
        busy = self._busy("whole"), self._busy("weights")
        return pipeline_time.least_seconds(form, [least[i] for i in self.alike], *busy, self._message)
