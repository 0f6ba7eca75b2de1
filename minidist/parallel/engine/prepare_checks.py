"""Checks before `prepare` touches the model, and how it restores the model after a later error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from minidist.parallel.contract.layout import Layout
from minidist.parallel.guards.ownership import release
from minidist.parallel.guards.refusals import refuse_meta, require_trained
from minidist.parallel.training.precision import LossScale


def check_types(loss: object, data_parallel: object, fully_shard: object, loss_scale: object) -> None:
    """TypeError if an argument of `prepare` has the wrong type."""
    if not callable(loss):
        raise TypeError(
            f"loss is {loss!r}; give a function from outputs and targets to the mean over their rows, such "
            "as torch.nn.functional.cross_entropy"
        )
    for name, options, example in (
        ("data_parallel", data_parallel, {"bucket_mb": 25}),
        ("fully_shard", fully_shard, {"offload": "cpu"}),
    ):
        if options is not None and not isinstance(options, Mapping):
            raise TypeError(f"{name} is {options!r}; give a dict of options, such as {example}, or None")
    if loss_scale is not None and not isinstance(loss_scale, LossScale):
        raise TypeError(
            f"loss_scale is {loss_scale!r}; give a LossScale, such as LossScale(start=1024), or None"
        )


def check_model(model: nn.Module, layout: Layout) -> None:
    """ValueError if there is nothing to train, or a rank would need the whole of a model without memory."""
    require_trained("model", model.parameters())
    if layout.zero < 3 and layout.tp * layout.pp == 1:
        refuse_meta("model", [*model.named_parameters(), *model.named_buffers()])


REPLACED = ("forward", "attend", "positions")
"""The attributes that recomputation, tensor and context parallelism override on a module."""


@contextmanager
def put_back_on_error(model: nn.Module, converts: bool) -> Iterator[None]:
    """After an error inside, give the model its submodules, parameters and buffers back, and remove hooks.

    Values that rank 0 has sent stay. If the precision `converts` parameters, their old memory is kept until
    the end of the block.
    """
    parts = [*model.modules()]
    own = [(part.__dict__, {n: part.__dict__[n] for n in REPLACED if n in part.__dict__}) for part in parts]
    children = [(part._modules, dict(part._modules)) for part in parts]
    buffers = [(part._buffers, dict(part._buffers)) for part in parts]
    meta = [
        (p._parameters, {n: v for n, v in p._parameters.items() if v is not None and v.is_meta})
        for p in parts
    ]
    values = [(p, p.data, p.grad) for p in model.parameters()] if converts else []
    try:
        yield
    except BaseException:
        for attributes, had in own:
            for name in REPLACED:
                attributes.pop(name, None)
            attributes.update(had)
        for now, before in buffers:
            now.update(before)
        for parameters, before_memory in meta:
            parameters.update(before_memory)
        for parts_now, parts_before in children:
            parts_now.update(parts_before)
        for parameter, data, grad in values:
            parameter.data, parameter.grad = data, grad
        release(parameter for parameter in model.parameters() if parameter.requires_grad)
        raise
