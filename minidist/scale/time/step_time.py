"""Seconds of a training step, from a model's shape, a layout and a machine, before anything runs.

>>> predict_step("gpt2-xl", Layout(dp=8, zero=2, precision="bf16"), (64, 1024), "h100").seconds

A step is the passes of each micro-batch (`LayerWork`: products at the rate that the device attains, the rest
at that of its memory), with what tensor and context parallelism send in them (`traffic.py`); where layers are
cut, a schedule of these (`schedules.simulate`); the gradients' way over the data-parallel ranks, as much of
it hidden behind the backward pass as the device allows; and the update. It is told part by part, and with
what it assumes.

Sources: Narayanan et al. 2021, section 3 (how the axes go together); Li et al. 2020, section 3.2 (buckets and
overlap); Williams et al. 2009 (roofline).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from minidist.model.configs import TransformerConfig
from minidist.model.configs import config as config_of
from minidist.parallel.contract.layout import Layout
from minidist.scale.memory.arguments import check_types
from minidist.scale.memory.estimates import ModelShape, check
from minidist.scale.memory.state_bytes import OPTIMIZERS
from minidist.scale.time.hardware import hardware as hardware_of
from minidist.scale.time.layer_work import model_flops
from minidist.scale.time.rates import Hardware
from minidist.scale.time.stages import Simulated, StepStages

PARTS = ("compute", "recompute", "bubble", "tp", "cp", "pp", "gradients", "dp", "optimizer", "step")
HIDDEN = " hidden"


@dataclass(frozen=True)
class StepTime:
    """A step's time, predicted.

    Attributes:
        seconds: of a step.
        parts: seconds by what they are for, of the rank that has most to do; they add up to `seconds`, but
            for those whose names end in " hidden", which pass while the device computes.
        assumptions: what this rests on, in sentences.
        rows: of the global batch.
        flops: operations that the batch takes, nothing computed twice.
        ranks, peak: how many, and the operations a second of each one's device, or share of a host's cores.
    """

    seconds: float
    parts: dict[str, float]
    assumptions: list[str] = field(repr=False)
    rows: int = 0
    flops: float = 0.0
    ranks: int = 1
    peak: float = float("nan")

    @property
    def rows_per_second(self) -> float:
        """Of all ranks together."""
        return self.rows / self.seconds if self.seconds else 0.0

    @property
    def flops_per_rank(self) -> float:
        """Operations a second of each rank, nothing counted that is computed twice."""
        return self.flops / self.seconds / self.ranks if self.seconds else 0.0

    @property
    def used(self) -> float:
        """Share of the devices' peak (model FLOPs utilization, MFU)."""
        return self.flops_per_rank / self.peak

    def __str__(self) -> str:
        """The parts, a line each, and the sum."""
        lines = [f"{name:<13} {seconds:>12.6f} s" for name, seconds in self.parts.items() if seconds]
        return "\n".join([*lines, f"{'step':<13} {self.seconds:>12.6f} s"])


def predict_step(
    config: ModelShape,
    layout: Layout | None = None,
    batch: int | tuple[int, int] = 0,
    hardware: str | Hardware = "h100",
    *,
    optimizer: str = "adam",
    simulated: Simulated | None = None,
) -> StepTime:
    """Seconds of a step in which a global batch goes through a layout.

    Args:
        config: a GPTConfig or BERTConfig, or the name of one.
        layout: None for one rank. Its precision counts.
        batch: rows of the global batch and tokens in each; rows alone have the model's context.
        hardware: the name of one of `HARDWARE`, or what `this_machine` measured.
        optimizer: "adam", "momentum" or "sgd".
        simulated: a dict to keep seconds of passes and pipelines in, for who asks for many layouts of one
            model on one machine.

    Raises:
        TypeError, ValueError: as `estimate`; an unknown machine, a precision that it has no rate for, fewer
            rows than data-parallel ranks, or tokens that the layout's ranks cannot share.
    """
    check_types(layout, batch, None)
    layout, machine = layout or Layout(), hardware_of(hardware)
    shape = config_of(config) if isinstance(config, str) else config
    check(shape, layout, layout.precision, optimizer, None, None)
    if not isinstance(shape, TransformerConfig):
        raise TypeError(f"config is {config!r}; give a model's shape, whose layers can be timed")
    rows, tokens = batch if isinstance(batch, tuple) else (batch, shape.context)
    check_fits(shape, layout, rows, tokens, machine)
    assert optimizer in OPTIMIZERS
    parts = StepStages(shape, layout, rows, tokens, machine, optimizer, simulated).parts()
    seconds = sum(value for name, value in parts.items() if not name.endswith(HIDDEN))
    return StepTime(
        seconds,
        parts,
        assumptions(shape, layout, (rows, tokens), machine, optimizer),
        rows,
        model_flops(shape, rows, tokens),
        layout.ranks,
        device_peak(machine, layout),
    )


def check_fits(shape: TransformerConfig, layout: Layout, rows: int, tokens: int, hardware: Hardware) -> None:
    """ValueError where a batch does not go through a layout, or a machine lacks its precision."""
    if layout.precision not in hardware.peak:
        raise ValueError(
            f"precision is {layout.precision!r}, and {hardware.name} has no rate for it; give "
            f"{' or '.join(hardware.peak)}"
        )
    if not 1 <= tokens <= shape.context:
        raise ValueError(f"the batch has {tokens} tokens a row; give 1 to {shape.context}")
    if rows < layout.dp:
        raise ValueError(
            f"the batch has {rows} rows for dp={layout.dp}; give at least a row to each data-parallel rank"
        )
    if tokens < 2 * layout.cp and layout.cp > 1:
        raise ValueError(
            f"the batch has {tokens} tokens a row for cp={layout.cp}; give at least two to each rank"
        )
    if layout.sequence_parallel and tokens // layout.cp % layout.tp:
        raise ValueError(
            f"the batch has {tokens} tokens a row, which tp={layout.tp} ranks with sequence_parallel cannot "
            "share evenly; give a multiple, or leave sequence_parallel out"
        )


def device_peak(hardware: Hardware, layout: Layout) -> float:
    """Operations a second of a rank's device, or of its share of a host's cores."""
    sharing = min(layout.ranks, hardware.ranks_per_host) if hardware.cores else 1
    return hardware.peak[layout.precision] / sharing


def _micro_batches(count: int) -> str:
    return "one micro-batch" if count == 1 else f"{count} micro-batches"


def assumptions(
    shape: TransformerConfig, layout: Layout, batch: tuple[int, int], hardware: Hardware, optimizer: str
) -> list[str]:
    """What a prediction rests on."""
    precision, rows = layout.precision, -(-batch[0] // layout.dp)
    rates = hardware.crowd(min(layout.ranks, hardware.ranks_per_host)).rates
    rate = rates.flops[precision]
    share = rate / device_peak(hardware, layout)
    attained = f"{rate / 1e12:.3g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.3g} GFLOP/s"
    found = [
        f"{hardware.name}: {hardware.source}",
        f"products attain {attained} a rank in {precision}, {share:.0%} of the peak: "
        f"{hardware.attained_source}",
        f"each data-parallel rank has {rows} {'row' if rows == 1 else 'rows'} of {batch[1]} tokens, in "
        f"{_micro_batches(min(rows, layout.micro_batches))}; data is there when it is needed",
    ]
    if layout.ranks > 1:
        host = (
            f"ranks share {hardware.cores} cores"
            if hardware.cores
            else f"{hardware.ranks_per_host} ranks a host"
        )
        found.append(f"{host}; links: {hardware.inside.source}")
    if layout.ranks > hardware.ranks_per_host:
        found.append(f"between hosts {hardware.between.source}")
    if layout.dp * layout.cp > 1:
        found.append(
            "gradients travel while the last backward pass computes, and what is longer is waited for"
            if hardware.overlaps
            else "ranks that send compute nothing meanwhile, since both take the same cores"
        )
    if layout.tp > 1 and hardware.overlaps:
        found.append("backward all-reduces of tensor parallelism hide behind the gradients of the weights")
    if layout.pp > 1:
        found.append(f"the pipeline is simulated with the {layout.schedule} schedule, stage by stage")
    if layout.recompute:
        found.append("a layer's forward pass is computed again, up to its last product")
    updates = {
        "adam": "Adam's in one fused kernel, which reads four tensors and writes three"
        if rates.asynchronous
        else "Adam's, operator by operator as torch makes it: 20 passes over its elements",
        "momentum": "SGD's with momentum: 5 passes over its elements",
        "sgd": "SGD's: 3 passes over its elements",
    }
    found.append(f"the update is {updates[optimizer]}")
    if not hasattr(shape, "tied"):
        found.append("a BERT's layers are reckoned as the GPT's are, with attention to all tokens")
    return found
