"""`OneProcess`: a training step as plain torch takes it, on one rank, from the state of an engine.

It keeps a copy of the model as it was before it was cut, without values. For each step that copy gets the
values of the whole model, and the user's function makes an optimizer of its parameters, which gets the whole
state. No strategy, no bucket and no cut layer takes part.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minidist.comm.work import alone
from minidist.parallel.contract.batch import Pair, call, rows_of
from minidist.parallel.contract.kept_attributes import KeptAttributes, cells_of, computed, forwards, unchanged
from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.training_state import (
    names_of,
    optimizer_settings,
    parameter_like,
    put_in_lists,
    whole_chunks,
)
from minidist.parallel.contract.user_functions import Loss, by_parameters, requires_closure
from minidist.parallel.engine.step_executor import Objective, Weight, weighted
from minidist.parallel.guards.ownership import untrained
from minidist.parallel.training.clipping import clip_factor, global_norm
from minidist.parallel.training.master_weights import MasterWeights
from minidist.parallel.training.precision import Precision
from minidist.parallel.training.random_off import RandomOff
from minidist.parallel.training.recompute import recompute_by

Tensors = Mapping[str, Tensor]
Inside = Callable[[nn.Module], AbstractContextManager[Any]]


class TrainingState(NamedTuple):
    """The whole state of a training, by the names that checkpoints use."""

    tensors: dict[str, Tensor]  # "model.NAME", "optimizer.NAME.KEY"
    groups: list[dict[str, Any]]  # of the optimizer, with names of parameters
    numbers: Mapping[str, Mapping[str, Any]]  # in the optimizer's state, by parameter
    trained: Mapping[str, bool]  # whether each parameter gets gradients
    modes: Mapping[str, bool]  # of each module, whether it is in training mode
    of_loss: KeptAttributes  # what the loss keeps
    attributes: Mapping[tuple[str, str], Any]  # of modules, that passes have changed
    elsewhere: Sequence[Tensor]  # the engine's own parameters
    batches: Sequence[Sequence[Pair]]  # of each data rank
    threads: int  # of all ranks on this host, which wait while one works alone


class Outcome(NamedTuple):
    """What a step has computed."""

    loss: float
    norm: float  # of the gradients, before clipping
    tensors: dict[str, Tensor]  # "gradient.NAME", "model.NAME"
    bits: dict[str, float]  # the last bits that gradients were computed with


class OneProcess:
    """A model, an optimizer and a loss in a single process.

    The model may be changed afterwards. Raises whatever copying the model raises.
    """

    def __init__(
        self, model: nn.Module, optimizer: Any, loss: Loss | None, layout: Layout, clip_norm: float | None
    ) -> None:
        self._make, self._loss, self._clip_norm = optimizer, loss, clip_norm
        self._layout = layout
        parameters = {
            id(p): parameter_like(p, torch.empty_like(p, device="meta")) for p in model.parameters()
        }
        copies: dict[int, Any] = {**computed(model), **parameters}
        self.model = copy.deepcopy(model, copies)
        # A loss that reads the model as a variable of the function around it reads the copy.
        self._cells = [
            (each, copies[id(x)]) for each in cells_of(loss) if id(x := each.cell_contents) in copies
        ]
        self.device = torch.device("cpu")  # of the engine, once the model has values
        self.last_bit = 0.0  # of the least precise type that a step has computed in

    def step(
        self,
        start: TrainingState,
        pieces: Sequence[Pair],
        given: Tensors,
        scale: float = 1.0,
        inside: Inside = nullcontext,
    ) -> Outcome:
        """Take one step on `pieces`, whose losses are averaged by their weights.

        given: the gradients to update with, as in `Outcome.tensors`. With those of a layout, the update is
        the layout's but for rounding, whatever rounding did to its gradients. scale: the factor on the loss
        before its backward pass. inside: makes a context for the passes through a model. The loss starts with
        the attributes that it had before the step, and afterwards has those of now.
        """
        kept = unchanged(self._loss, *forwards(self.model))
        with kept, alone(), untrained():  # the loss may read a model that another engine trains
            start.of_loss.restore()
            return self._step(start, pieces, given, scale, inside)

    def _step(
        self, start: TrainingState, pieces: Sequence[Pair], given: Tensors, scale: float, inside: Inside
    ) -> Outcome:
        precision = Precision(self._layout.precision)
        model = self._filled(start)
        precision.convert(model)
        precision.convert_calls(model)
        recompute_by(model, self._layout.recompute)
        make = by_parameters(self._make, model, {})
        masters: dict[Tensor, Tensor] = {}
        if precision.master is None:
            optimizer: Any = make(model.parameters())
        else:
            with_masters = MasterWeights(model.parameters(), make, precision.master)
            masters = dict(zip(with_masters.parameters, with_masters.masters, strict=True))
            optimizer = with_masters.inner
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(start.trained.get(name, parameter.requires_grad))
        names = {masters.get(p, p): name for p, name in names_of(model).items()}
        self._load(optimizer, names, start)
        for chunk in whole_chunks(model, optimizer, masters):
            if chunk.name in start.tensors:
                chunk.tensor.copy_(start.tensors[chunk.name])

        objective, quiet = Objective(self._loss, model), RandomOff(alone=True, others=start.elsewhere)

        def evaluate() -> Tensor:
            done: list[tuple[Tensor, Weight]] = []
            with torch.enable_grad(), inside(model), quiet:
                for inputs, targets in pieces:
                    if objective.takes_model:
                        result = objective.given(model, inputs)  # type: ignore[misc]
                    else:
                        outputs = call(model, inputs)
                        result = objective.function(outputs, inputs, targets)(outputs, targets)
                    done.append(weighted(result, float(rows_of(inputs))))
                weight = sum(float(each) for _, each in done)
                loss: Any = sum(mean * (float(w) / weight) for mean, w in done)
                (loss * scale).backward()
            return loss.detach()  # type: ignore[no-any-return]

        losses = [evaluate()]

        def closure() -> Tensor:
            if not losses:  # the layout's gradients are those of the first evaluation
                optimizer.zero_grad()
                losses.append(evaluate())
                if self._clip_norm is not None:
                    nn.utils.clip_grad_norm_([*names], self._clip_norm)
            return losses.pop()

        loss = float(losses[0])
        self.last_bit = max(self.last_bit, quiet.last_bit)
        gradients = {name: p.grad for p, name in names_of(model).items() if p.grad is not None}
        norm = global_norm(gradients.values()) / scale
        found = {f"gradient.{name}": _dense(grad) / scale for name, grad in gradients.items()}
        bits = {f"gradient.{name}": torch.finfo(grad.dtype).eps for name, grad in gradients.items()}
        self._update(optimizer, names, gradients, given, closure)
        found |= {c.name: c.tensor for c in whole_chunks(model, optimizer, masters) if c.name[:6] == "model."}
        return Outcome(loss, norm, found, bits)

    def _update(
        self, optimizer: Any, names: Mapping[Tensor, str], own: Tensors, given: Tensors, closure: Any
    ) -> None:
        """Update with the gradients `given`, clipped. Parameters that have none of their `own` get none."""
        # By these names, since a tied parameter's gradient may come under two.
        of_layout = [given[name] for each in own if (name := f"gradient.{each}") in given]
        factor = 1.0 if self._clip_norm is None else clip_factor(global_norm(of_layout), self._clip_norm)
        for parameter, name in names.items():
            parameter.grad = None
            if name in own:
                value = given[of] if (of := f"gradient.{name}") in given else torch.zeros_like(parameter)
                grad = value.sparse_mask(own[name].coalesce()) if own[name].is_sparse else value
                parameter.grad = (grad * factor).to(parameter.dtype)
        with RandomOff(alone=True):
            optimizer.step(closure) if requires_closure(optimizer) else optimizer.step()

    def groups(self) -> list[dict[str, Any]]:
        """The groups that the user's function makes of the model's parameters."""
        optimizer = by_parameters(self._make, self.model, {})(self.model.parameters())
        found: list[dict[str, Any]] = optimizer_settings(optimizer, {**names_of(self.model)})["groups"]
        return found

    def _filled(self, start: TrainingState) -> nn.Module:
        """A copy of the model with the values and modes of the engine's."""
        values = {
            id(p): parameter_like(p, start.tensors[f"model.{name}"].to(self.device, p.dtype, copy=True))
            for name, p in self.model.named_parameters()
        }
        copies: dict[int, Any] = dict(values)
        for name, buffer in self.model.named_buffers():
            if buffer.is_meta and f"model.{name}" in start.tensors:
                copies[id(buffer)] = start.tensors[f"model.{name}"].to(self.device, copy=True)
        model: nn.Module = copy.deepcopy(self.model, copies)
        for cell, part in self._cells:
            cell.cell_contents = copies[id(part)]
        for name, part in model.named_modules():
            part.training = start.modes.get(name, part.training)
            for store in (part._buffers, part.__dict__):
                for attribute in store:
                    if (name, attribute) in start.attributes:
                        value = start.attributes[name, attribute]
                        store[attribute] = value.clone() if isinstance(value, Tensor) else copy.copy(value)
        return model

    def _load(self, optimizer: Any, names: Mapping[Tensor, str], start: TrainingState) -> None:
        """Give the optimizer the groups and the state of the engine's."""
        by_name = {name: parameter for parameter, name in names.items()}
        for group, new in zip(optimizer.param_groups, start.groups, strict=False):
            group.update(copy.deepcopy({key: value for key, value in new.items() if key != "params"}))
            group["params"] = [by_name[name] for name in new["params"] if name in by_name]
        state: dict[str, dict[str, Any]] = defaultdict(dict)
        for full, value in start.tensors.items():
            kind, _, name = full.partition(".")
            if kind == "optimizer":
                name, _, key = name.rpartition(".")
                state[name][key] = value.to(self.device if value.dim() else "cpu", copy=True)
        for name, numbers in start.numbers.items():
            state[name] |= copy.deepcopy(dict(numbers))
        for name, values in state.items():
            if name in by_name:
                optimizer.state[by_name[name]] = put_in_lists(values)


def _dense(x: Tensor) -> Tensor:
    """In 32 bits at least, where gradients without their scale do not underflow."""
    dense = x.to_dense() if x.is_sparse else x.detach()
    return dense.to(torch.promote_types(x.dtype, torch.float32), copy=True)
