"""Predict the seconds of a training step from a model's shape, a layout and a machine.

>>> predict_step("gpt2-xl", Layout(dp=8, zero=2, precision="bf16"), (64, 1024), "h100").seconds

A step consists of the passes of each micro-batch (layer_work.py: products at the device's attained rate, the
rest at its memory's), the messages of tensor and context parallelism in them (traffic.py), the schedule of a
pipeline (pipeline_time.py), and the gradient exchange and update (gradient_exchange.py), hidden behind the
backward pass as far as the device allows. step_stages.py puts them together. The result lists each part and
the assumptions.

Among ranks with the same task, the one with the most work counts: the last of its tensor-parallel group, with
the most rows. The simulation of a pipeline's schedule needs the times of all stages; the parts of the step
are those of the slowest stage.

Sources: Narayanan et al. 2021, section 3 (how the axes go together); Li et al. 2020, section 3.2 (buckets and
overlap); Williams et al. 2009 (roofline).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from minidist.model.configs import TransformerConfig
from minidist.model.configs import config as config_of
from minidist.parallel.contract.fp8_recipes import FP8_RECIPES
from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.recompute_policies import EVERY_LAYER
from minidist.scale.memory.estimates import ModelShape
from minidist.scale.memory.training_setup import (
    BatchSize,
    TrainingSetup,
    check_divisible,
    check_sharing,
    check_types,
)
from minidist.scale.step_time.hardware import Hardware
from minidist.scale.step_time.hardware import hardware as hardware_of
from minidist.scale.step_time.layer_work import model_flops
from minidist.scale.step_time.step_stages import Simulated, StepStages

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
    secondary: int = 0,
) -> StepTime:
    """Predict the time in which a layout trains on one global batch.

    Args:
        config: a GPTConfig or BERTConfig, or the name of one.
        layout: ranks and precision; None for one rank.
        batch: rows of the global batch, or (rows, tokens in each row); by default the model's context.
        hardware: a name in `HARDWARE`, or what `this_machine` measured.
        optimizer: "adam", "muon", "momentum" or "sgd".
        secondary: see `estimate`.

    Raises:
        TypeError, ValueError: as `estimate`; or the machine is unknown or has no rate for the precision, the
            batch has fewer rows than data-parallel ranks, or the ranks cannot share its tokens.
    """
    check_types(layout, batch, None)
    machine, shape = hardware_of(hardware), config_of(config) if isinstance(config, str) else config
    rows, tokens = batch if isinstance(batch, tuple) else (batch, getattr(shape, "context", 0))
    setup = TrainingSetup(layout or Layout(), rows, tokens, optimizer, secondary)
    return predict_setup(shape, setup, machine)


def predict_setup(
    shape: TransformerConfig | int | float,
    setup: TrainingSetup,
    machine: Hardware,
    simulated: Simulated | None = None,
    bound: bool = False,
) -> StepTime:
    """Do what `predict_step` does, which documents the arguments and the errors.

    `simulated` keeps seconds of passes and pipelines, to share between many layouts of one model and machine.
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
