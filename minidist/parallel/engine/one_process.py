"""`OneProcess`: a step as a single process takes it, on rank 0, from the state of the layout's engine.

It keeps a copy of the model as it was before it was cut, without values. For each step that copy gets the
values of the whole model, the user's function makes an optimizer of its parameters, and an engine of one rank
gets the whole state. No other rank, no bucket and no cut layer takes part.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minidist.comm.mesh import Mesh
from minidist.comm.work import alone
from minidist.parallel.contract.kept_attributes import KeptAttributes, cells_of, computed, copied, forwards
from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.residency import DATA_PARALLEL
from minidist.parallel.contract.training_state import names_of, parameter_like, state_kinds
from minidist.parallel.contract.user_functions import Loss, by_parameters
from minidist.parallel.engine.partition_model import partition_model
from minidist.parallel.engine.training_step import Engine
from minidist.parallel.engine.whole_state import Batch, TrainingState, gradients_of
from minidist.parallel.guards.claims import untrained
from minidist.parallel.sharding.share_model import share_model
from minidist.parallel.training.clipping import clip_factor, global_norm
from minidist.parallel.training.comparable_steps import MARGIN, RandomOff
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
        inside: Inside = nullcontext,
    ) -> Outcome:
        """Take one step on `pieces`, whose losses are averaged by their weights.

        The loss starts with the attributes that it had before the engine's step, and gets today's back.

        Args:
            given: the gradients to update with, as in `Outcome.tensors`. Given the layout's gradients, the
                update equals the layout's to rounding, even if rounding has changed those gradients a lot.
            scale: the factor on the loss before its backward pass.
            inside: makes a context for the passes through a model.
        """
        with self._without_trace(start):
            engine = self._engine(start)
            engine.precision.scale = scale
            norm, found, bits = math.nan, dict[str, Tensor](), dict[str, float]()

            def take_given() -> None:
                nonlocal norm
                named = ((name, p.grad) for p, name in names_of(engine.model).items())
                bits.update((f"gradient.{n}", torch.finfo(g.dtype).eps) for n, g in named if g is not None)
                norm, boxes = gradients_of(engine, scale)
                found.update((box.name, box.tensor) for box in boxes)
                # By these names, since a tied parameter's gradient may come under two.
                used = {name: given.get(name, torch.zeros_like(own)) for name, own in found.items()}
                factor = scale
                if self._clip_norm is not None:
                    factor *= clip_factor(global_norm(used.values()), self._clip_norm)
                    engine.clip_norm = self._clip_norm  # in an optimizer's further evaluations
                for name, own in engine.strategy.named_gradients():
                    value = used[f"gradient.{name}"] * factor
                    own.copy_(value.sparse_mask(own.coalesce()) if own.is_sparse else value)

            engine.before_update = take_given
            quiet = RandomOff(alone=True, others=start.elsewhere)
            with quiet, inside(engine.model):
                pairs = [(piece[0], piece[-1]) for piece in pieces]
                loss = engine._train([engine.executor.own_batch(pair) for pair in pairs])
            engine.before_update = None  # so that the engine's memory is free as this returns
            self.last_bit = max(self.last_bit, quiet.last_bit)
            bits |= dict.fromkeys(("loss", "norm"), max(2**-20, max(bits.values(), default=0.0) / MARGIN))
            found |= {box.name: box.tensor for box in engine.state_boxes() if box.name.startswith("model.")}
            return outcome(loss, norm, found, bits)

    def groups(self) -> list[dict[str, Any]]:
        """The groups that the user's function makes of the model's parameters."""
        optimizer = by_parameters(self._make, self.model, {})(self.model.parameters())
        names = names_of(self.model)
        return [{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]

    def _engine(self, start: TrainingState) -> Engine:
        """An engine of one rank with the state at the start."""
        layout = Layout(precision=self._layout.precision, recompute=self._layout.recompute)
        precision, model = Precision(layout.precision), self._filled(start)
        precision.scales = False  # the other engine decides which steps to skip
        precision.convert(model)
        recompute_by(model, layout.recompute)
        part = partition_model(model, layout, Mesh())
        make = by_parameters(self._make, model, {})
        strategy = share_model(model, make, DATA_PARALLEL, None, precision.master)
        engine = Engine(part, strategy, layout, self._loss, precision)
        trained = {name: value for each in start.parts for name, value in each.trained.items()}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained.get(name, parameter.requires_grad))
        numbers = {name: value for each in start.parts for name, value in each.numbers.items()}
        kinds = ((name, x.shape, x.dtype) for name, x in start.tensors.items())
        engine.load_state_settings({"groups": start.groups, "state": numbers}, state_kinds(kinds))
        for box in engine.state_boxes():
            if box.name in start.tensors:
                box.tensor.copy_(start.tensors[box.name])
        strategy.loaded()
        return engine

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
