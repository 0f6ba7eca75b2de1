"""Memory and time of a model of your own in a layout, from its sizes and its measured passes (own_model.py).

States, the gradient exchange and the update follow the formulas for transformers. Layouts have dp, ZeRO in
every form, micro-batches and recomputation: tp, pp and cp would need a shape. A dry run takes these too.
"""

from __future__ import annotations

from dataclasses import replace

from minidist._arguments import is_whole
from minidist.model.configs import TransformerConfig
from minidist.parallel.contract.layout import Layout, check_available
from minidist.scale.dry_run.own_model import OwnModel
from minidist.scale.memory.arguments import check, refuse_cut_rows
from minidist.scale.memory.estimates import Estimate, estimate
from minidist.scale.memory.parameter_sizes import share
from minidist.scale.memory.state_bytes import BYTES, held_for
from minidist.scale.time.gradient_exchange import GradientTime
from minidist.scale.time.hardware import hardware as hardware_of
from minidist.scale.time.rates import Hardware
from minidist.scale.time.stages import Simulated
from minidist.scale.time.step_time import (
    HIDDEN,
    StepTime,
    assumptions,
    check_fits,
    check_machine,
    device_peak,
    predict_step,
)
from minidist.scale.time.traffic import Wires


def has_time(model: object, layout: Layout) -> bool:
    """Whether the time of a step can be predicted: a layout that cuts a model of your own has none."""
    return not isinstance(model, OwnModel) or layout.tp * layout.pp * layout.cp == 1


def check_own(model: OwnModel, layout: Layout, rows: int) -> None:
    """ValueError if a layout cuts the model, or a batch has too few rows for it."""
    for axis in ("tp", "pp", "cp"):
        if getattr(layout, axis) > 1:
            raise ValueError(
                f"{axis} is {getattr(layout, axis)} in the layout, and {model.name} is a model of your own, "
                "whose time can be predicted for dp, zero, micro_batches and recompute alone; give "
                f"{axis}=1, or see what a rank holds and sends with minidist dryrun"
            )
    if rows < layout.dp:
        raise ValueError(
            f"the batch has {rows} rows for dp={layout.dp}; give at least a row to each data-parallel rank"
        )


def own_rows(batch: int | tuple[int, int]) -> tuple[int, int]:
    """The rows of a batch, and 0 for the tokens that they may not have. ValueError for anything else."""
    if not is_whole(batch) or batch < 1:
        raise ValueError(
            f"batch is {batch!r} for a model of your own; give rows, at least 1: its data says their shape"
        )
    return batch, 0


def estimate_own(
    model: OwnModel, layout: Layout, rows: int, optimizer: str = "adam", secondary: int = 0
) -> Estimate:
    """Estimate the bytes on the rank with the most rows, as `estimate` does for a transformer."""
    check_own(model, layout, rows)
    precision = layout.precision
    states = held_for(model.sizes, model.units, layout.owners, layout.zero, precision, optimizer, secondary)
    frozen = 0 if layout.zero == 3 else (model.parameters() - sum(model.sizes)) * BYTES[precision]
    kept = round(model.passes(layout, _micro_batches(layout, rows)[0]).activations)
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.module.buffers())
    transient = max(states.gathered, states.update - kept)
    return Estimate(states.parameters + frozen, states.gradients, states.optimizer, kept, buffers, transient)


def predict_own(
    model: OwnModel,
    layout: Layout,
    rows: int,
    hardware: Hardware,
    optimizer: str = "adam",
    secondary: int = 0,
) -> StepTime:
    """Predict the time of a step, as `predict_step` does for a transformer."""
    check_own(model, layout, rows)
    check_machine(layout, hardware)
    crowd = hardware.crowd(min(layout.ranks, hardware.ranks_per_host))
    rates, precision, micro = crowd.rates, layout.precision, _micro_batches(layout, rows)
    plain = replace(layout, recompute=False)
    compute = again = last = 0.0
    for count in micro:
        passes = model.passes(plain, count)
        backward = rates.seconds(passes.backward, precision, backward=True)
        last = rates.seconds(model.passes(layout, count).backward, precision, backward=True)
        compute += rates.seconds(passes.forward, precision) + backward
        again += last - backward
    wires = Wires(hardware, crowd, layout, secondary)
    exchange = GradientTime(model.sizes, model.units, wires, len(micro), optimizer)
    parts = {"compute": compute, "recompute": again, **exchange.parts(last, compute + again)}
    parts["step"] = rates.step
    whole = model.passes(plain, rows)
    return StepTime(
        sum(value for name, value in parts.items() if not name.endswith(HIDDEN)),
        parts,
        [
            *assumptions(None, layout, (rows, 0), hardware, optimizer),
            f"the operations and activations of {model.name} were counted for batches of 2 and 4 rows",
        ],
        rows,
        whole.forward.flops + whole.backward.flops,
        layout.ranks,
        device_peak(hardware, layout),
    )


def estimate_any(
    model: TransformerConfig | OwnModel,
    layout: Layout,
    batch: tuple[int, int],
    optimizer: str = "adam",
    secondary: int = 0,
) -> Estimate:
    """Estimate memory by `estimate` or `estimate_own`."""
    if isinstance(model, OwnModel):
        return estimate_own(model, layout, batch[0], optimizer, secondary)
    return estimate(model, layout, batch=batch, optimizer=optimizer, secondary=secondary)


def predict_any(
    model: TransformerConfig | OwnModel,
    layout: Layout,
    batch: tuple[int, int],
    hardware: str | Hardware,
    optimizer: str = "adam",
    secondary: int = 0,
    simulated: Simulated | None = None,
) -> StepTime:
    """Predict time by `predict_step` or `predict_own`."""
    if isinstance(model, OwnModel):
        return predict_own(model, layout, batch[0], hardware_of(hardware), optimizer, secondary)
    return predict_step(
        model, layout, batch, hardware, optimizer=optimizer, simulated=simulated, secondary=secondary
    )


def check_any(
    model: TransformerConfig | OwnModel, layout: Layout, batch: tuple[int, int], hardware: Hardware
) -> None:
    """ValueError if `prepare` would refuse the layout for its axes, or a step the batch."""
    check_available(layout)
    if isinstance(model, OwnModel):
        check_own(model, layout, batch[0])
        check_machine(layout, hardware)
    else:
        refuse_cut_rows(model, layout)
        check(model, layout, layout.precision, "adam")
        check_fits(model, layout, *batch, hardware)


def _micro_batches(layout: Layout, rows: int) -> list[int]:
    """The rows of each micro-batch of the rank with the most rows."""
    own = share(rows, layout.dp)
    count = min(layout.micro_batches, own)
    return [share(own, count, part) for part in range(count)]
