"""Give values to this rank's part of a model on the meta device, which may fit on no rank whole.

The model is partitioned without memory, like any other. Then rank 0 initializes one module after the other,
in the order in which one process would, and sends each to all ranks, which keep their parts of it. No rank
ever holds more than its part and one module.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.parallel.contract.training_state import parameter_like
from minidist.parallel.flat.joined_messages import broadcast_together
from minidist.parallel.flat.ranges import narrowed
from minidist.parallel.sharding.units.meta_units import MetaInitializer, ParameterSlot, device_for
from minidist.parallel.tensor_parallel.cuts import Cut

Initialize = Callable[[nn.Module], object]


class Skeleton:
    """A copy of the whole model without memory, from before it was partitioned.

    Parameters that are not on the meta device are shared, not copied. initialize: gives a submodule's own
    parameters their first values; None for the model's method `initialize_part`, or each submodule's
    `reset_parameters`.
    """

    def __init__(self, model: nn.Module, initialize: Initialize | None) -> None:
        real = [tensor for tensor in [*model.parameters(), *model.buffers()] if not tensor.is_meta]
        self.device = device_for("model", model)
        # A copy, because the function that fills a module may look at the model around it.
        self._whole = copy.deepcopy(model, {id(tensor): tensor for tensor in real})
        self._initialize = initialize or getattr(self._whole, "initialize_part", None)

    def fill(self, part: nn.Module, cuts: Mapping[str, Cut]) -> None:
        """Give the meta tensors of this rank's `part` of the model their values; a collective of all ranks.

        Sends as many bytes as `comm.broadcast` of the whole model's meta tensors. `cuts` says which box of a
        whole parameter this rank has. Raises ValueError if nothing says how to initialize a module.
        """
        names: dict[int, list[str]] = {}  # all names of each parameter, and what holds it
        slots: dict[int, list[ParameterSlot]] = {}
        for name, each in self._whole.named_parameters(remove_duplicate=False):
            owner, _, attribute = name.rpartition(".")
            names.setdefault(id(each), []).append(name)
            slots.setdefault(id(each), []).append((self._whole.get_submodule(owner), attribute))
        entries = [(names[id(p)][0], p, slots[id(p)]) for p in self._whole.parameters()]
        initializer = MetaInitializer(entries, self.device, self._initialize, draws=comm.rank() == 0)
        buffers = [name for name, buffer in self._whole.named_buffers() if buffer.is_meta]
        done: set[nn.Module] = set()
        for _, parameter, ((module, _), *_) in entries:
            if not parameter.is_meta or module in done:
                continue
            done.add(module)
            initializer.fill([parameter])
            own = [each for each in entries if each[1].is_meta and each[2][0][0] is module]
            broadcast_together([_value(where) for _, _, where in own], None)
            for _, meta, where in own:
                _install(part, names[id(meta)], _value(where), cuts)
                for holder, attribute in where:  # free its memory
                    holder._parameters[attribute] = meta
        initializer.fill_buffers(self._whole)
        filled = dict(self._whole.named_buffers())
        broadcast_together([filled[name] for name in buffers], None)
        here = dict(part.named_buffers(remove_duplicate=False))
        for name in (name for name in buffers if name in here):
            owner, _, attribute = name.rpartition(".")
            part.get_submodule(owner)._buffers[attribute] = filled[name]


def _value(slots: list[ParameterSlot]) -> Tensor:
    """The tensor that a module holds now."""
    module, attribute = slots[0]
    parameter = module._parameters[attribute]
    assert parameter is not None
    return parameter.detach()


def _install(part: nn.Module, names: list[str], whole: Tensor, cuts: Mapping[str, Cut]) -> None:
    """Replace a meta parameter by this rank's part of the whole one, under each of its names."""
    own = dict(part.named_parameters(remove_duplicate=False))
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name in (name for name in names if name in own):
        meta = own[name]
        if meta not in made:
            made[meta] = parameter_like(meta, _own_part(meta, whole, cuts.get(name)))
        owner, _, attribute = name.rpartition(".")
        part.get_submodule(owner)._parameters[attribute] = made[meta]


def _own_part(meta: Tensor, whole: Tensor, cut: Cut | None) -> Tensor:
    if cut is None:
        return whole
    part = torch.zeros(meta.shape, dtype=whole.dtype, device=whole.device)
    own = cut.take(whole)
    narrowed(part, (0,) * part.dim(), own.shape).copy_(own)
    return part
