"""`OneProcess`: a training step as plain torch takes it, on one rank, from the state of an engine.

It keeps a copy of the model as it was before it was cut, without values. For each step that copy gets the
values of the whole model, and the user's function makes an optimizer of its parameters, which gets the whole
state. No strategy, no bucket and no cut layer takes part.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minidist.comm.work import alone
from minidist.parallel.contract.batch import call, rows_of
from minidist.parallel.contract.kept_attributes import KeptAttributes, cells_of, computed, copied, forwards
from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.training_state import (
    by_name_and_key,
    load_groups,
    loadable_tensors,
    names_of,
    parameter_like,
    put_in_lists,
)
from minidist.parallel.contract.user_functions import Loss, by_parameters, requires_closure
from minidist.parallel.engine.step_executor import Objective, Weight, weighted
from minidist.parallel.engine.whole_state import Batch, TrainingState
from minidist.parallel.experts.load_balance import balance_experts, balanced_routers
from minidist.parallel.guards.claims import untrained
from minidist.parallel.training.clipping import clip_factor, global_norm
from minidist.parallel.training.comparable_steps import MARGIN, RandomOff
from minidist.parallel.training.master_weights import optimizer_of_masters
from minidist.parallel.training.precision import Precision
from minidist.parallel.training.recompute import recompute_by

KEPT_BY_MALLOC = 2**25 - 2**16
"""Once a block of this size was freed, glibc keeps up to 64 MB of freed memory. Otherwise it would give most
memory of a small step back to the system and get it again page by page, in 4 of 36 ms."""

Tensors = Mapping[str, Tensor]
Inside = Callable[[nn.Module], AbstractContextManager[Any]]


class Outcome(NamedTuple):
    """What a step has computed."""

    tensors: dict[str, Tensor]  # "loss", "norm" (before clipping), "gradient.NAME", "model.NAME"
    bits: Mapping[str, float]  # the last bits of those that may have been computed in a less precise type


def outcome(loss: float, norm: float, tensors: Tensors, bits: Mapping[str, float] = {}) -> Outcome:
    """What a step has computed, with its loss and the norm of its gradients among the tensors."""
    numbers = [(name, torch.tensor(x, dtype=torch.float64)) for name, x in (("loss", loss), ("norm", norm))]
    return Outcome({**dict(numbers), **tensors}, bits)


class OneProcess:
    """A model, an optimizer and a loss in a single process.

    The model may be changed afterwards. Raises whatever copying the model raises.
    """

    def __init__(
        self, model: nn.Module, optimizer: Any, loss: Loss | None, layout: Layout, clip_norm: float | None
    ) -> None:
        self._make, self._loss, self._clip_norm = optimizer, loss, clip_norm
        self._layout = layout
        copies = computed(model)
        for p in model.parameters():
            copies[id(p)] = parameter_like(p, torch.empty_like(p, device="meta"))
        self.model = copy.deepcopy(model, copies)
        # A loss that reads the model as a variable of the function around it reads the copy.
        cells = [(cell, copies.get(id(cell.cell_contents))) for cell in cells_of(loss)]
        self._cells = [(cell, of_model) for cell, of_model in cells if of_model is not None]
        self.device = torch.device("cpu")  # of the engine, once the model has values
        self.last_bit = 0.0  # of the least precise type that a step has computed in
        torch.empty(KEPT_BY_MALLOC, dtype=torch.uint8)

    def step(
        self,
        start: TrainingState,
        pieces: Sequence[Batch],
        given: Tensors,
        scale: float = 1.0,
        watched: bool = False,
        inside: Inside = nullcontext,
    ) -> Outcome:
        """Take one step on `pieces`, whose losses are averaged by their weights.

        The loss starts with the attributes that it had before the engine's step, and gets today's back.

        Args:
            given: the gradients to update with, as in `Outcome.tensors`. Given the layout's gradients, the
                update equals the layout's to rounding, even if rounding has changed those gradients a lot.
            scale: the factor on the loss before its backward pass.
            watched: keep random numbers off after the forward pass even if it drew none. It takes longer.
            inside: makes a context for the passes through a model.
        """
        with self._without_trace(start):
            precision = Precision(self._layout.precision)
            model = self._filled(start)
            precision.convert(model)
            precision.convert_calls(model)
            recompute_by(model, self._layout.recompute)
            make = by_parameters(self._make, model, {})
            parameters = [*model.parameters()]
            optimizer: Any
            optimizer, updated = optimizer_of_masters(parameters, make, precision.master)
            masters: dict[Tensor, Tensor] = dict(zip(parameters, updated, strict=True))
            trained = {name: value for part in start.parts for name, value in part.trained.items()}
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(trained.get(name, parameter.requires_grad))
            names = {masters.get(p, p): name for p, name in names_of(model).items()}
            numbers = {name: value for part in start.parts for name, value in part.numbers.items()}
            have = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
            load_groups(optimizer.param_groups, have, copy.deepcopy(start.groups))
            saved = by_name_and_key(start.tensors.items())
            optimizer.state.clear()
            for p, name in names.items():
                of_parameter = saved.get(name, {}).items()
                state = {k: x.to(p.device if x.dim() else "cpu", copy=True) for k, x in of_parameter}
                if state := {**copy.deepcopy(numbers.get(name, {})), **state}:
                    optimizer.state[p] = put_in_lists(state)

            def values() -> dict[str, Tensor]:
                named = loadable_tensors(model).items()
                return {f"model.{name}": masters.get(x, x).detach() for name, x in named}

            for name, value in values().items():
                if name in start.tensors:
                    value.copy_(start.tensors[name])
            objective = Objective(self._loss, model)
            quiet = RandomOff(alone=True, others=start.elsewhere)

            def evaluate() -> Tensor:
                done: list[tuple[Tensor, Weight]] = []
                with torch.enable_grad(), inside(model):
                    with quiet:
                        for piece in pieces:
                            inputs, targets = piece[0], piece[-1]
                            if objective.takes_model:
                                result = objective.given(model, inputs)  # type: ignore[misc]
                            else:
                                outputs = call(model, inputs)
                                result = objective.function(outputs, inputs, targets)(outputs, targets)
                            done.append(weighted(result, float(rows_of(inputs))))
                        weight = sum(float(each) for _, each in done)
                        loss: Any = sum(mean * (float(w) / weight) for mean, w in done)
                    with quiet if watched or quiet.used else nullcontext():
                        (loss * scale).backward()
                return loss.detach()  # type: ignore[no-any-return]

            losses = [evaluate()]

            def closure() -> Tensor:
                if not losses:  # the first evaluation has run, with the layout's gradients
                    optimizer.zero_grad()
                    losses.append(evaluate())
                    if self._clip_norm is not None:
                        nn.utils.clip_grad_norm_([*names], self._clip_norm)
                return losses.pop()

            gradients = {name: p.grad for p, name in names_of(model).items() if p.grad is not None}
            bits = {f"gradient.{name}": torch.finfo(grad.dtype).eps for name, grad in gradients.items()}
            bits |= dict.fromkeys(("loss", "norm"), max(2**-20, max(bits.values(), default=0.0) / MARGIN))
            loss, norm = float(losses[0]), global_norm(gradients.values()) / scale
            found = {f"gradient.{name}": _dense(grad) / scale for name, grad in gradients.items()}
            self._give(names, gradients, given)
            # torch's own optimizers draw no random numbers, and send nothing.
            of_torch = type(optimizer).__module__.startswith("torch.optim")
            with nullcontext() if of_torch and not watched else quiet:
                optimizer.step(closure) if requires_closure(optimizer) else optimizer.step()
            if routers := balanced_routers(model):
                balance_experts(routers)
            self.last_bit = max(self.last_bit, quiet.last_bit)
            return outcome(loss, norm, found | values(), bits)

    def groups(self) -> list[dict[str, Any]]:
        """The groups that the user's function makes of the model's parameters."""
        optimizer = by_parameters(self._make, self.model, {})(self.model.parameters())
        names = names_of(self.model)
        return [{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]

    @contextmanager
    def _without_trace(self, start: TrainingState) -> Iterator[None]:
        """Inside, this rank is alone. Afterwards loss, engines and random states are as they were."""
        kept = KeptAttributes(self._loss, *forwards(self.model))
        on_gpu = [torch.cuda.current_device()] if self.device.type == "cuda" else []
        try:
            # The loss may read a model that another engine trains.
            with alone(), untrained(), torch.random.fork_rng(on_gpu):
                start.of_functions.restore()
                yield
        finally:
            kept.restore()

    def _filled(self, start: TrainingState) -> nn.Module:
        """A copy of the model with the values and modes of the engine's."""
        copies: dict[int, Any] = {
            id(p): parameter_like(p, start.tensors[f"model.{name}"].to(self.device, p.dtype, copy=True))
            for name, p in self.model.named_parameters()
        }
        for name, buffer in self.model.named_buffers():
            if buffer.is_meta and f"model.{name}" in start.tensors:
                copies[id(buffer)] = start.tensors[f"model.{name}"].to(self.device, copy=True)
        model: nn.Module = copy.deepcopy(self.model, copies)
        for cell, part in self._cells:
            cell.cell_contents = copies[id(part)]
        for name, part in model.named_modules():
            for store in (part._buffers, part.__dict__):
                for attribute in store:
                    if (name, attribute) in start.attributes:
                        store[attribute] = copied(start.attributes[name, attribute])
        return model

    def _give(self, names: Mapping[Tensor, str], own: Tensors, given: Tensors) -> None:
        """Give parameters the gradients `given`, clipped. A parameter without an `own` gradient gets none."""
        # By these names, since a tied parameter's gradient may come under two.
        of_layout = [given[name] for each in own if (name := f"gradient.{each}") in given]
        factor = 1.0 if self._clip_norm is None else clip_factor(global_norm(of_layout), self._clip_norm)
        for parameter, name in names.items():
            parameter.grad = None
            if name in own:
                value = given[of] if (of := f"gradient.{name}") in given else torch.zeros_like(parameter)
                grad = value.sparse_mask(own[name].coalesce()) if own[name].is_sparse else value
                parameter.grad = (grad * factor).to(parameter.dtype)


def _dense(x: Tensor) -> Tensor:
    """In 32 bits at least, where gradients without their scale do not underflow."""
    dense = x.to_dense() if x.is_sparse else x.detach()
    return dense.to(torch.promote_types(x.dtype, torch.float32), copy=True)
