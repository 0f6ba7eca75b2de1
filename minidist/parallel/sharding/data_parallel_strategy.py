"""The strategy of plain data parallelism: every rank keeps parameters, gradients and optimizer state whole.

It does what `DataParallel` leaves to the loop; weight and loss travel at the end of the last bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from minidist.comm.work import Group
from minidist.parallel.contract.strategy import ResidentTensors, Strategy, TensorBox
from minidist.parallel.contract.training_state import (
    load_optimizer,
    names_of,
    optimizer_settings,
    optimizer_tensors,
    whole_chunks,
)
from minidist.parallel.contract.user_functions import MakeOptimizer
from minidist.parallel.guards.refusals import require_optimizer
from minidist.parallel.sharding.data_parallel import DataParallel
from minidist.parallel.training.master_weights import MasterWeights


class Replicated(Strategy):
    """Data parallelism over the ranks of a group; one process where the group has one rank.

    options: those of `DataParallel`.
    master: the dtype in which the optimizer updates copies of the parameters; None for no copies.
    group: None for all ranks of the world.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: MakeOptimizer,
        options: Mapping[str, Any] | None = None,
        master: torch.dtype | None = None,
        group: Group = None,
    ) -> None:
        self.model, self.group = model, group
        self.parallel = DataParallel(model, group, **(options or {}))
        self.gradient_comm = self.parallel.gradient_comm
        self.masters: MasterWeights | None = None
        if master is None:
            self.optimizer = optimizer(model.parameters())
            require_optimizer(self.optimizer)
        else:
            self.optimizer = self.masters = MasterWeights(model.parameters(), optimizer, master)
        self._own = (0.0, 0.0)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's outputs."""
        return self.parallel(*args, **kwargs)

    def ready(self) -> None:
        """Prepare a pass, as `forward` does."""
        self.parallel.ready()

    def zero_grad(self) -> None:
        """Forget the gradients of the step before, also of parameters that the optimizer leaves out."""
        self.optimizer.zero_grad()
        self.model.zero_grad()

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, gradients add up on this rank and nothing is sent."""
        return self.parallel.no_sync()

    def begin_final_backward(self, weight: float | Tensor, loss_sum: Tensor, waits: bool = True) -> None:
        """Have the next backward pass sum the gradients, weight and loss over the ranks."""
        reducer = self.parallel.reducer
        if reducer is None:
            self._own = (float(weight), float(loss_sum))
        else:
            reducer.scale, reducer.totals, reducer.waits = 1.0, (weight, loss_sum), waits

    def synchronize(self) -> tuple[float, float]:
        """Complete the gradients; return weight and loss, summed over the ranks."""
        self.parallel.synchronize()
        reducer = self.parallel.reducer
        if reducer is None:
            return self._own
        weight, loss = reducer.sums.tolist()
        return weight, loss

    def rescale(self, factor: float) -> None:
        """Multiply the gradients, and what compression has kept back of them."""
        self.parallel.rescale_gradients(factor)

    def gradients(self) -> list[Tensor]:
        """All gradients."""
        return [gradient for _, gradient in self.named_gradients()]

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """All gradients, whole, with the names of their parameters."""
        yield from ((name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None)

    def multiply(self, factor: float) -> None:
        """Multiply the gradients that `update` takes, but not what compression has kept back of them."""
        if self.masters is None:
            self.parallel.rescale_gradients(factor, kept=False)
        else:
            self.masters.factor *= factor

    def drop(self) -> None:
        """Forget the gradients of a step that is skipped, and what compression has kept back of them."""
        self.zero_grad()
        reducer = self.parallel.reducer
        if reducer is not None and reducer.assignment is not None:
            reducer.assignment.clear()

    def update(self, closure: Callable[[], Any] | None = None) -> None:
        """The optimizer's step, the same on all ranks."""
        self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def held(self) -> ResidentTensors:
        """Everything, whole, and the buckets."""
        reducer = self.parallel.reducer
        buckets = [] if reducer is None or reducer.assignment is None else reducer.assignment.buckets
        masters = self._masters
        state = [tensor for _, _, tensor in optimizer_tensors(self.optimizer, self._names)]
        return ResidentTensors(
            [*self.model.parameters()],
            [*self.gradients(), *(bucket.gradients for bucket in buckets)],
            [*state, *(master for parameter, master in masters.items() if master is not parameter)],
            [*self.model.buffers()],
        )

    def chunks(self) -> Iterator[TensorBox]:
        """Everything, in boxes of whole tensors."""
        yield from whole_chunks(self.model, self.optimizer, self._masters)

    def settings(self) -> dict[str, Any]:
        """The optimizer's groups and numbers, and the order of the gradients once it is known."""
        settings, reducer = optimizer_settings(self.optimizer, self._names), self.parallel.reducer
        if reducer is not None:
            names, assignment = names_of(self.model), reducer.assignment
            orders = [] if assignment is None else [assignment.order]
            settings["order"] = [[names[reducer.parameters[index]] for index in order] for order in orders]
        return settings

    def load_settings(self, settings: Mapping[str, Any], state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take the groups of `settings`, and make room for the optimizer state."""
        load_optimizer(self.optimizer, self._names, settings, state)

    def loaded(self) -> None:
        """Round the loaded masters to the model's parameters."""
        if self.masters is not None:
            self.masters.copy_back()

    @property
    def _masters(self) -> dict[Tensor, Tensor]:
        """The master of each parameter; empty where there are none."""
        if self.masters is None:
            return {}
        return dict(zip(self.masters.parameters, self.masters.masters, strict=True))

    @property
    def _names(self) -> dict[Tensor, str]:
        """The name of each parameter that the optimizer updates."""
        masters = self._masters
        return {masters.get(parameter, parameter): name for parameter, name in names_of(self.model).items()}
