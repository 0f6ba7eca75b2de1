"""What `prepare` checks before it touches the model, and how it puts the model back after an error."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from minidist._names import unknown
from minidist.parallel.contract.kept_attributes import attributes_of
from minidist.parallel.contract.layout import Layout, check_available, check_secondary
from minidist.parallel.contract.user_functions import Loss, first_argument
from minidist.parallel.guards.claims import release, require_free
from minidist.parallel.guards.refusals import refuse_meta, refuse_renormed, require_model, require_trained
from minidist.parallel.training import bf16_on_cpu
from minidist.parallel.training.clipping import check_max_norm
from minidist.parallel.training.precision import LossScale

DATA_PARALLEL_OPTIONS = {"bucket_mb", "overlap", "compression", "algorithm", "broadcast_buffers"}
"""The options of `DataParallel` that `prepare` passes on. The layout gives the group."""
FULLY_SHARD_OPTIONS = {"offload", "units", "initialize", "prefetch", "secondary"}
"""The options of `FullyShard` that `prepare` passes on. The precision decides about master weights."""


def check_prepare_arguments(
    model: nn.Module,
    optimizer: object,
    layout: object,
    loss: object,
    data_parallel: object,
    fully_shard: object,
    loss_scale: object,
    clip_norm: float | None,
    batch_norm: str | None,
    rehearse: bool | str | None,
) -> None:
    """TypeError or ValueError if an argument of `prepare` is wrong, or conflicts with layout or model."""
    require_model(model, optimizer)
    if not isinstance(layout, Layout):
        raise TypeError(f"layout is {layout!r}; give a Layout, such as md.Layout(dp=2)")
    check_available(layout)
    if loss is not None and not callable(loss):
        raise TypeError(
            f"loss is {loss!r}; give a function from outputs and targets to the mean over their rows, such "
            "as torch.nn.functional.cross_entropy, or None for the model's own"
        )
    if loss is not None:
        _require_two_arguments(loss)
        if layout.pp > 1 and first_argument(loss) == "model":
            raise ValueError(
                f"the loss takes the model, and the layout has pp={layout.pp}, where no rank can call the "
                "whole model; give a loss of outputs and targets, and call engine.step(inputs, targets); or "
                "pp=1"
            )
    for name, options, known, example in (
        ("data_parallel", data_parallel, DATA_PARALLEL_OPTIONS, {"bucket_mb": 25}),
        ("fully_shard", fully_shard, FULLY_SHARD_OPTIONS, {"offload": "cpu"}),
    ):
        if options is not None and not isinstance(options, Mapping):
            raise TypeError(f"{name} is {options!r}; give a dict of options, such as {example}, or None")
        others = set(options or {}) - known
        if others:
            raise unknown(f"option of {name}", min(others), sorted(known))
    if loss_scale is not None and not isinstance(loss_scale, LossScale):
        raise TypeError(
            f"loss_scale is {loss_scale!r}; give a LossScale, such as LossScale(start=1024), or None"
        )
    require_trained("model", model.parameters())
    if layout.residency.whole_parameters and layout.tp * layout.pp == 1:
        refuse_meta("model", [*model.named_parameters(), *model.named_buffers()])
    require_free(model.named_parameters())
    if layout.ranks > 1 or not layout.residency.whole_parameters or layout.precision != "fp32":
        refuse_renormed(model)
    if layout.precision == "bf16":
        bf16_on_cpu.require_products(model)
    if fully_shard and layout.residency.whole_parameters:
        raise ValueError(
            f"fully_shard is {fully_shard} and the layout has zero={layout.zero}; its options are for zero=3"
        )
    if (secondary := (fully_shard or {}).get("secondary")) is not None:  # type: ignore[attr-defined]
        check_secondary(layout, secondary)
    if data_parallel and not layout.residency.whole_parameters:
        raise ValueError(
            f"data_parallel is {data_parallel} and the layout has zero={layout.zero}, which has none of its "
            "options; leave it out"
        )
    if clip_norm is not None:
        check_max_norm("clip_norm", clip_norm)
    if rehearse not in (None, True, False, "first"):
        raise ValueError(
            f"rehearse is {rehearse!r}; give True, False, 'first', or None to rehearse where memory allows"
        )
    if batch_norm not in (None, "synchronized"):
        raise ValueError(
            f"batch_norm is {batch_norm!r}; give 'synchronized', or None for each rank's own rows"
        )
    if batch_norm is not None and (layout.micro_batches > 1 or layout.pp > 1):
        raise ValueError(
            f"batch_norm is 'synchronized' and the layout has micro_batches={layout.micro_batches} and "
            f"pp={layout.pp}, where a BatchNorm never sees a whole batch; give micro_batches=1 and pp=1"
        )


def _require_two_arguments(loss: Loss) -> None:
    """TypeError if a loss cannot be called with outputs and targets alone."""
    try:
        signature = inspect.signature(loss)
    except (TypeError, ValueError):
        return  # a function that does not say
    try:
        signature.bind(None, None)
    except TypeError as error:
        name = getattr(loss, "__name__", type(loss).__name__)
        raise TypeError(
            f"the loss is {name}{signature}, and is called with two arguments, outputs and targets: {error}. "
            "Give one that takes two: pack further targets into a tuple or a dict, and bind other arguments "
            "with functools.partial"
        ) from None


@contextmanager
def put_back_on_error(model: nn.Module, converts: bool) -> Iterator[None]:
    """After an error inside, give the model its submodules, parameters and buffers back, and remove hooks.

    Values that rank 0 has sent stay. If the precision `converts` parameters, their old memory is kept until
    the end of the block.
    """
    put_back = attributes_of(model)
    values = [(p, p.data, p.grad) for p in model.parameters()] if converts else []
    try:
        yield
    except BaseException:
        put_back()
        for parameter, data, grad in values:
            parameter.data, parameter.grad = data, grad
        release(parameter for parameter in model.parameters() if parameter.requires_grad)
        raise
