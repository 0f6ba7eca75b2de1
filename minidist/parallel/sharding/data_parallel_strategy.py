"""The strategy of plain data parallelism: every rank holds the whole model and the whole optimizer state.

What `DataParallel` leaves to the loop is done here; rows and loss travel at the end of the last bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from minidist.comm.work import Group
from minidist.parallel.contract.engine import MakeOptimizer
from minidist.parallel.contract.strategy import ResidentTensors, Strategy, TensorBox
from minidist.parallel.contract.training_state import (
    load_optimizer,
    names_of,
    optimizer_settings,
    optimizer_tensors,
    whole_chunks,
)
from minidist.parallel.guards.refusals import require_optimizer
from minidist.parallel.sharding.data_parallel import DataParallel
from minidist.parallel.training.master_weights import MasterWeights


class Replicated(Strategy):
    """Data parallelism over the ranks of a group; one process where there is one rank.

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
        self.masters: MasterWeights | None = None
        if master is None:
            self.optimizer = optimizer(model.parameters())
            require_optimizer(self.optimizer)
        else:
            self.optimizer = self.masters = MasterWeights(model.parameters(), optimizer, master)
        self._own = (0.0, 0.0)

    def forward(self, inputs: Tensor) -> Tensor:
        """What the module returns; see `DataParallel.forward`."""
        outputs: Tensor = self.parallel(inputs)
        return outputs

    def ready(self) -> None:
        """See `DataParallel.ready`."""
        self.parallel.ready()

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""
        self.optimizer.zero_grad()

    def no_sync(self) -> AbstractContextManager[None]:
        """See `DataParallel.no_sync`."""
        return self.parallel.no_sync()

    def begin_final_backward(self, rows: float, loss_sum: Tensor, waits: bool = True) -> None:
        """See `Strategy.begin_final_backward`."""
        reducer = self.parallel.reducer
        if reducer is None:
            self._own = (rows, float(loss_sum))
        else:
            reducer.scale, reducer.totals, reducer.waits = 1.0, (rows, loss_sum), waits

    def synchronize(self) -> tuple[float, float]:
        """See `Strategy.synchronize`."""
        self.parallel.synchronize()
        reducer = self.parallel.reducer
        if reducer is None:
            return self._own
        rows, loss = reducer.sums.tolist()
        return rows, loss

    def rescale(self, factor: float) -> None:
        """See `DataParallel.rescale_gradients`."""
        self.parallel.rescale_gradients(factor)

    def gradients(self) -> list[Tensor]:
        """All gradients."""
        return [gradient for _, gradient in self.named_gradients()]

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """See `Strategy.named_gradients`."""
        yield from ((name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None)

    def multiply(self, factor: float) -> None:
        """See `Strategy.multiply`. What compression has kept back of the gradients is not multiplied."""
        if self.masters is None:
            self.parallel.rescale_gradients(factor, kept=False)
        else:
            self.masters.factor *= factor

    def drop(self) -> None:
        """See `Strategy.drop`."""
        self.zero_grad()
        reducer = self.parallel.reducer
        if reducer is not None and reducer.plan is not None:
            reducer.plan.clear()

    def update(self) -> None:
        """The optimizer's step, the same on all ranks."""
        self.optimizer.step()

    def held(self) -> ResidentTensors:
        """See `Strategy.held`."""
        reducer = self.parallel.reducer
        buckets = [] if reducer is None or reducer.plan is None else reducer.plan.buckets
        masters = self._masters
        state = [tensor for _, _, tensor in optimizer_tensors(self.optimizer, self._names)]
        return ResidentTensors(
            [*self.model.parameters()],
            [*self.gradients(), *(bucket.flat for bucket in buckets)],
            [*state, *(master for parameter, master in masters.items() if master is not parameter)],
            [*self.model.buffers()],
        )

    def chunks(self) -> Iterator[TensorBox]:
        """Everything, whole; see `Strategy.chunks`."""
        yield from whole_chunks(self.model, self.optimizer, self._masters)

    def settings(self) -> dict[str, Any]:
        """See `Strategy.settings`."""
        settings, reducer = optimizer_settings(self.optimizer, self._names), self.parallel.reducer
        if reducer is not None:
            names, order = names_of(self.model), [] if reducer.plan is None else [reducer.plan.order]
            settings["order"] = [[names[reducer.parameters[place]] for place in each] for each in order]
        return settings

    def load_settings(self, settings: Mapping[str, Any], state: Mapping[str, Mapping[str, Any]]) -> None:
        """See `Strategy.load_settings`."""
        load_optimizer(self.optimizer, self._names, settings, state)

    def loaded(self) -> None:
        """See `Strategy.loaded`: the model's parameters are the masters, rounded."""
        if self.masters is not None:
            self.masters.copy_back()

    @property
    def _masters(self) -> dict[Tensor, Tensor]:
        """For each parameter its master, where there are masters."""
        if self.masters is None:
            return {}
        return dict(zip(self.masters.parameters, self.masters.masters, strict=True))

    @property
    def _names(self) -> dict[Tensor, str]:
        """The name of each parameter that the optimizer updates."""
        masters = self._masters
        return {masters.get(parameter, parameter): name for parameter, name in names_of(self.model).items()}
