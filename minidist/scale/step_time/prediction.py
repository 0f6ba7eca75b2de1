"""Predict the seconds of a training step from a model's shape, a layout and a machine.

>>> predict_step("gpt2-xl", Layout(dp=8, zero=2, precision="bf16"), (64, 1024), "h100").seconds

A step consists of the passes of each micro-batch (layer_work.py: products at the device's attained rate, the
rest at its memory's), the messages of tensor and context parallelism in them (traffic.py), the schedule of a
pipeline (pipeline_time.py), and the gradient exchange and update (gradient_exchange.py), hidden behind the
backward pass as far as the device allows. The result lists each part and the assumptions.

Among ranks with the same task, the one with the most work counts: the last of its tensor-parallel group, with
the most rows. The simulation of a pipeline's schedule needs the times of all stages; the parts of the step
are those of the slowest stage.

Sources: Narayanan et al. 2021, section 3 (how the axes go together); Li et al. 2020, section 3.2 (buckets and
overlap); Williams et al. 2009 (roofline).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from minidist.model.configs import TransformerConfig
from minidist.model.configs import config as config_of
from minidist.parallel.contract.fp8_recipes import FP8_RECIPES
from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.recompute_policies import EVERY_LAYER, WHOLE, share_recomputed
from minidist.parallel.contract.schedule_kinds import SCHEDULES, schedule_kind
from minidist.scale.memory.estimates import ModelShape
from minidist.scale.memory.parameter_sizes import ModelPart, alike, on_rank, parts
from minidist.scale.memory.training_setup import (
    BatchSize,
    TrainingSetup,
    check_divisible,
    check_sharing,
    check_types,
)
from minidist.scale.step_time import pipeline_time
from minidist.scale.step_time.gradient_exchange import GradientTime
from minidist.scale.step_time.hardware import Hardware
from minidist.scale.step_time.hardware import hardware as hardware_of
from minidist.scale.step_time.layer_work import Computation, LayerWork, model_flops
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


PARTS = ("compute", "recompute", "bubble", "tp", "cp", "ep", "pp", "gradients", "dp", "optimizer", "step")
HIDDEN = " hidden"


@dataclass(frozen=True)
class StepTime:
    """The predicted time of a step."""

    seconds: float
    # Seconds by purpose, on the rank with the most work. They add up to `seconds`, without those whose names
    # end in " hidden", which pass while the device computes.
    parts: dict[str, float]
    assumptions: list[str] = field(repr=False)  # sentences
    rows: int = 0  # of the global batch
    flops: float = 0.0  # operations for the batch, without recomputation
    ranks: int = 1
    peak: float = float("nan")  # operations per second of a rank's device, or of its share of a host's cores

    @property
    def rows_per_second(self) -> float:
        """Rows per second of all ranks together."""
        return self.rows / self.seconds if self.seconds else 0.0

    @property
    def flops_per_rank(self) -> float:
        """Operations per second of each rank, without recomputation."""
        return self.flops / self.seconds / self.ranks if self.seconds else 0.0

    @property
    def used(self) -> float:
        """Share of the devices' peak (model FLOPs utilization, MFU)."""
        return self.flops_per_rank / self.peak

    def __str__(self) -> str:
        """A line for each part, and the sum."""
        lines = [f"{name:<13} {seconds:>12.6f} s" for name, seconds in self.parts.items() if seconds]
        return "\n".join([*lines, f"{'step':<13} {self.seconds:>12.6f} s"])


def predict_step(
    config: ModelShape,
    layout: Layout | None = None,
    batch: BatchSize = 0,
    hardware: str | Hardware = "h100",
    *,
    optimizer: str = "adam",
    simulated: Simulated | None = None,
    secondary: int = 0,
) -> StepTime:
    """Predict the time in which a layout trains on one global batch.

    Args:
        config: a GPTConfig or BERTConfig, or the name of one.
        layout: ranks and precision; None for one rank.
        batch: rows of the global batch, or (rows, tokens in each row); by default the model's context.
        hardware: a name in `HARDWARE`, or what `this_machine` measured.
        optimizer: "adam", "muon", "momentum" or "sgd".
        simulated: a dict that keeps seconds of passes and pipelines, to share between many layouts of one
            model on one machine.
        secondary: see `estimate`.

    Raises:
        TypeError, ValueError: as `estimate`; or the machine is unknown or has no rate for the precision, the
            batch has fewer rows than data-parallel ranks, or the ranks cannot share its tokens.
    """
    check_types(layout, batch, None)
    machine, shape = hardware_of(hardware), config_of(config) if isinstance(config, str) else config
    rows, tokens = batch if isinstance(batch, tuple) else (batch, getattr(shape, "context", 0))
    setup = TrainingSetup(layout or Layout(), rows, tokens, optimizer, secondary)
    return predict_setup(shape, setup, machine, simulated)


def predict_setup(
    shape: TransformerConfig | int | float,
    setup: TrainingSetup,
    machine: Hardware,
    simulated: Simulated | None = None,
    bound: bool = False,
) -> StepTime:
    """Do what `predict_step` does, which documents the arguments and the errors.

    With `bound` the step takes at least the time that is returned, and no pipeline is simulated.
    """
    check_divisible(shape, setup.layout)
    check_sharing(setup)
    if not isinstance(shape, TransformerConfig):
        raise TypeError(f"config is {shape!r}; give a model's shape, whose layers can be timed")
    check_fits(shape, setup, machine)
    parts = StepStages(shape, setup, machine, simulated).parts(bound)
    flops = model_flops(shape, setup.rows, setup.tokens)
    said = [] if bound else assumptions(setup, machine, shape)
    return step_from_parts(parts, setup, machine, flops, said)


def step_from_parts(
    parts: dict[str, float], setup: TrainingSetup, machine: Hardware, flops: float, said: list[str]
) -> StepTime:
    """The time of a step from its parts, the operations of its batch and the assumptions."""
    seconds = sum(value for name, value in parts.items() if not name.endswith(HIDDEN))
    ranks, peak = setup.layout.ranks, device_peak(machine, setup.layout)
    return StepTime(seconds, parts, said, setup.rows, flops, ranks, peak)


def check_fits(shape: TransformerConfig, setup: TrainingSetup, hardware: Hardware) -> None:
    """ValueError if the layout cannot train on the batch, or the machine lacks its precision."""
    layout, tokens = setup.layout, setup.tokens
    check_machine(setup.precision, hardware)
    if not 1 <= tokens <= shape.context:
        raise ValueError(f"the batch has {tokens} tokens a row; give 1 to {shape.context}")
    check_rows(setup)
    if tokens < 2 * layout.cp and layout.cp > 1:
        raise ValueError(
            f"the batch has {tokens} tokens a row for cp={layout.cp}; give at least two to each rank"
        )
    if layout.sequence_parallel and tokens // layout.cp % layout.tp:
        raise ValueError(
            f"the batch has {tokens} tokens a row, which tp={layout.tp} ranks with sequence_parallel cannot "
            "share evenly; give a multiple, or leave sequence_parallel out"
        )


def check_rows(setup: TrainingSetup) -> None:
    """ValueError if the batch has fewer rows than data-parallel ranks."""
    if setup.rows < setup.layout.dp:
        raise ValueError(
            f"the batch has {setup.rows} rows for dp={setup.layout.dp}; give at least a row to each "
            "data-parallel rank"
        )


def check_machine(precision: str, hardware: Hardware) -> None:
    """ValueError if the machine has no rate for a precision."""
    if precision in FP8_RECIPES:
        raise ValueError(
            f"precision is {precision!r}, which is emulated: products are rounded and multiplied in float32, "
            "so it saves no time on any machine; predict fp32 or bf16 instead"
        )
    if precision not in hardware.peak:
        raise ValueError(
            f"precision is {precision!r}, and {hardware.name} has no rate for it; give "
            f"{' or '.join(hardware.peak)}"
        )


def device_peak(hardware: Hardware, layout: Layout) -> float:
    """Operations per second of a rank's device, or of its share of a host's cores."""
    sharing = min(layout.ranks, hardware.ranks_per_host) if hardware.cores else 1
    return hardware.peak[layout.precision] / sharing


def assumptions(setup: TrainingSetup, hardware: Hardware, shape: TransformerConfig | None) -> list[str]:
    """Return the assumptions of a prediction, as sentences. Of a model of your own, the shape is None."""
    layout, precision, rows = setup.layout, setup.precision, setup.own_rows()
    of_tokens = f" of {setup.tokens} tokens" if shape is not None else ""
    micro_batches = min(rows, layout.micro_batches)
    many = "one micro-batch" if micro_batches == 1 else f"{micro_batches} micro-batches"
    rates = hardware.crowd(layout.ranks).rates
    rate = rates.flops[precision]
    share = rate / device_peak(hardware, layout)
    attained = f"{rate / 1e12:.3g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.3g} GFLOP/s"
    found = [
        f"{hardware.name}: {hardware.source}",
        f"products attain {attained} per rank in {precision}, {share:.0%} of the peak: "
        f"{hardware.attained_source}",
        f"each data-parallel rank has {rows} {'row' if rows == 1 else 'rows'}{of_tokens}, in {many}; loading "
        "data takes no time",
    ]
    if hardware.needs:
        found.append(f"minidist does not run on {hardware.name}; to train there takes {hardware.needs}")
    if layout.ranks > 1:
        host = (
            f"ranks share {hardware.cores} cores"
            if hardware.cores
            else f"{hardware.ranks_per_host} ranks a {hardware.domain}"
        )
        found.append(f"{host}; links: {hardware.inside.source}")
    if layout.ranks > hardware.ranks_per_host:
        found.append(f"between {hardware.domain}s {hardware.between.source}")
    if layout.dp * layout.cp > 1:
        found.append(
            "gradients are sent during the last backward pass; ranks wait for what takes longer"
            if hardware.overlaps
            else "a rank does not compute while it sends, since both take the same cores"
        )
    if layout.tp > 1 and hardware.overlaps:
        found.append("backward all-reduces of tensor parallelism hide behind the gradients of the weights")
    if shape is not None and shape.experts:
        found.append("all experts get as many tokens; no rank computes while rows travel to them and back")
    if layout.pp > 1:
        found.append(f"the pipeline is simulated with the {layout.schedule} schedule, stage by stage")
    if layout.recompute:
        name = EVERY_LAYER if layout.recompute is True else layout.recompute
        found.append(f"{name} is recomputed: its forward pass up to its last product")
    kind = setup.sharing.kind
    fused = "Adam's in one fused kernel, which reads four tensors and writes three"
    found.append(f"the update is {fused if rates.asynchronous and kind.fused < kind.passes else kind.says}")
    if shape is not None and not hasattr(shape, "tied"):
        found.append("a BERT's layers are predicted like the GPT's, with attention to all tokens")
    return found
