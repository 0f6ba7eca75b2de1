"""A model of your own, as the planner and the dry run see it: its parameters, and one small batch measured.

minidist's transformers are known by their shapes, and formulas give their memory and work. Of any other
module two things are measured: what the passes of two small batches keep for the backward pass, and the
operations that they call. Both grow with the rows, so two batches give every other. The passes run on tensors
without data, so a model that fits nowhere can be measured; one whose operations depend on values runs for
real. Formulas of ZeRO and of the gradient exchange take the sizes of the parameters, as for the transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from minidist.model.configs import TransformerConfig
from minidist.model.loss import cross_entropy
from minidist.parallel.contract.batch import rows_of
from minidist.parallel.contract.engine import Loss
from minidist.parallel.contract.layout import Layout
from minidist.parallel.engine.rank_model import weighted
from minidist.parallel.sharding.cut_into_units import divide, modules_of
from minidist.parallel.sharding.units import Unit
from minidist.parallel.training.activation_memory import ActivationCounter
from minidist.parallel.training.precision import Precision
from minidist.parallel.training.recompute import recompute_by
from minidist.scale.dry_run.fake_tensors import DryTensors
from minidist.scale.dry_run.operations import OperationKind, tensors_in
from minidist.scale.memory.arguments import named_shape
from minidist.scale.time.layer_work import Computation

SMALL = (2, 4)
"""Rows of the two batches that are measured."""


@dataclass(frozen=True)
class Passes:
    """The memory and work of a batch's passes; both grow linearly with the rows."""

    activations: float  # bytes at their peak
    forward: Computation
    backward: Computation

    def __sub__(self, other: Passes) -> Passes:
        return self + other * -1

    def __add__(self, other: Passes) -> Passes:
        both = self.forward + other.forward, self.backward + other.backward
        return Passes(self.activations + other.activations, *both)

    def __mul__(self, factor: float) -> Passes:
        return Passes(self.activations * factor, self.forward * factor, self.backward * factor)


class OwnModel:
    """A module of your own, with rows to train it on.

    Args:
        name: for people.
        make: returns the module. It is called on the meta device; if it cannot work there, with memory.
        data: returns inputs and targets, two tensors with one entry a row, at least one.
        loss: from outputs and targets to the mean over their rows.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], nn.Module],
        data: Callable[[], tuple[Tensor, Tensor]],
        loss: Loss = cross_entropy,
    ) -> None:
        self.name, self.make, self.data, self.loss = name, make, data, loss
        self._measured: dict[tuple[str, bool | str], tuple[Passes, Passes]] = {}

    @cached_property
    def module(self) -> nn.Module:
        """The module, on the meta device if possible. TypeError if it is none."""
        try:
            with torch.device("meta"):
                made = self.make()
        except Exception:  # it reads values, such as those of a buffer that it computes
            made = self.make()
        return require_module(self.name, made)

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, as `data` returned them."""
        return require_rows(self.name, self.data())

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of each parameter that is trained, each once."""
        return [p.numel() for p in self.module.parameters() if p.requires_grad]

    @cached_property
    def units(self) -> list[int]:
        """Elements of each unit that ZeRO's stage 3 gathers, the root first."""
        made = [Unit(name, part, i) for i, (name, part) in enumerate(modules_of(self.module, None))]
        return [sum(p.numel() for _, p, _ in own) for _, own in divide(self.module, made)]

    def recomputes(self, policy: bool | str) -> bool:
        """Whether it has the parts that a policy recomputes, and they can be."""
        try:
            recompute_by(copy.deepcopy(self.module), policy)
        except ValueError:
            return False
        return True

    def parameters(self) -> int:
        """Elements of all parameters, each once."""
        return sum(p.numel() for p in self.module.parameters())

    def dry(self, tensors: DryTensors) -> nn.Module:
        """A copy of the module whose parameters, and buffers that are on the meta device, hold no data."""
        module = copy.deepcopy(self.module)
        made: dict[int, nn.Parameter] = {}
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    empty = tensors.empty(parameter.shape, parameter.dtype)
                    made.setdefault(id(parameter), nn.Parameter(empty, parameter.requires_grad))
                    part._parameters[name] = made[id(parameter)]
            for name, buffer in part._buffers.items():
                if buffer is not None and buffer.is_meta:
                    part._buffers[name] = tensors.empty(buffer.shape, buffer.dtype)
        return module

    def batch(self, rows: int, tensors: DryTensors | None = None) -> tuple[Tensor, Tensor]:
        """So many rows: without data, or else the first ones, again and again if there are too few."""
        if tensors is not None:
            inputs, targets = (tensors.empty((rows, *x.shape[1:]), x.dtype) for x in self.rows)
        else:
            index = torch.arange(rows) % len(self.rows[0])
            inputs, targets = (x[index] for x in self.rows)
        return inputs, targets

    def passes(self, layout: Layout, rows: int) -> Passes:
        """The memory and work of a micro-batch's passes, from those of two measured batches."""
        key = layout.precision, layout.recompute
        if key not in self._measured:
            try:
                with DryTensors() as tensors:
                    self._measured[key] = self._measure(layout, lambda: self.dry(tensors), tensors)
            except Exception:  # the shapes or the choices of its operations depend on values
                self._measured[key] = self._measure(layout, lambda: require_module(self.name, self.make()))
        few, more = self._measured[key]
        return few + (more - few) * ((rows - SMALL[0]) / (SMALL[1] - SMALL[0]))

    def _measure(
        self, layout: Layout, make: Callable[[], nn.Module], tensors: DryTensors | None = None
    ) -> tuple[Passes, Passes]:
        module, precision = make(), Precision(layout.precision, None)
        precision.convert(module)
        recompute_by(module, layout.recompute)
        few, more = (self._one(module, precision, *self.batch(rows, tensors)) for rows in SMALL)
        return few, more

    def _one(self, module: nn.Module, precision: Precision, inputs: Tensor, targets: Tensor) -> Passes:
        module.zero_grad()
        with ActivationCounter(module, (inputs, targets)) as kept:
            with _Counted() as forward:
                outputs = precision.outputs(module(precision.inputs(inputs)))
                loss, _ = weighted(self.loss(outputs, targets), rows_of(targets))
            with _Counted() as backward:
                loss.backward()  # type: ignore[no-untyped-call]
        return Passes(kept.peak, forward.work, backward.work)


def subject(model: object) -> tuple[TransformerConfig | OwnModel, str]:
    """A transformer's shape, or a model of your own, and its name. TypeError for anything else."""
    return (model, model.name) if isinstance(model, OwnModel) else named_shape(model)


def require_module(name: str, made: object) -> nn.Module:
    """The module that a function of the user returned. TypeError if it is none."""
    if not isinstance(made, nn.Module):
        raise TypeError(f"{name} returned a {type(made).__name__}; let it return a torch.nn.Module")
    return made


def require_rows(name: str, made: object) -> tuple[Tensor, Tensor]:
    """The inputs and targets that a function of the user returned. TypeError or ValueError for others."""
    if not (isinstance(made, tuple) and len(made) == 2 and all(isinstance(x, Tensor) for x in made)):
        raise TypeError(
            f"the data of {name} is a {type(made).__name__}; let its function return two tensors, "
            "(inputs, targets)"
        )
    inputs, targets = made
    if not inputs.dim() or not targets.dim() or not 0 < len(inputs) == len(targets):
        raise ValueError(
            f"the data of {name} has inputs {tuple(inputs.shape)} and targets {tuple(targets.shape)}; give "
            "one entry of each for each row, and at least one row"
        )
    return inputs, targets


class _Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the work of the operations inside: products, bytes moved, and calls."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = Computation()
        self._views: dict[Any, bool] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if func not in self._views:
            self._views[func] = OperationKind(func).is_view
        if not self._views[func]:
            touched = [*tensors_in(args), *tensors_in(kwargs.values()), *tensors_in([made])]
            moved = float(sum(x.numel() * x.element_size() for x in touched))
            count = flop_registry.get(func._overloadpacket)
            if count is None:
                self.work += Computation(moved=moved, calls=1)
            else:
                products = float(count(*args, **kwargs, out_val=made))
                self.work += Computation(products=products, operands=moved, calls=1)
        return made
