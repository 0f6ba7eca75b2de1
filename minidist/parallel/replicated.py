"""The strategy of plain data parallelism: every rank holds the whole model and the whole optimizer state.

What `DataParallel` leaves to the loop is done here; rows and loss travel at the end of the last bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from minidist.parallel.data_parallel import DataParallel
from minidist.parallel.engine import MakeOptimizer
from minidist.parallel.strategy import Chunk, Held, Strategy
from minidist.parallel.training_state import (
    load_optimizer,
    names_of,
    optimizer_settings,
    optimizer_tensors,
    whole_chunks,
)


class Replicated(Strategy):
    """Data parallelism over all ranks of the world; one process where there is one rank.

    options: those of `DataParallel`.
    """

    def __init__(
        self, model: nn.Module, optimizer: MakeOptimizer, options: Mapping[str, Any] | None = None
    ) -> None:
        self.model = model
        self.parallel = DataParallel(model, **(options or {}))
        self.optimizer = optimizer(model.parameters())
        self._own = (0.0, 0.0)

    def forward(self, inputs: Tensor) -> Tensor:
        """What the module returns; see `DataParallel.forward`."""
        outputs: Tensor = self.parallel(inputs)
        return outputs

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""
        self.optimizer.zero_grad()

    def no_sync(self) -> AbstractContextManager[None]:
        """See `DataParallel.no_sync`."""
        return self.parallel.no_sync()

    def announce(self, rows: float, loss_sum: Tensor) -> None:
        """See `Strategy.announce`."""
        reducer = self.parallel.reducer
        if reducer is None:
            self._own = (rows, float(loss_sum))
        else:
            reducer.scale, reducer.totals = 1.0, (rows, loss_sum)

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
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def update(self) -> None:
        """The optimizer's step, the same on all ranks."""
        self.optimizer.step()

    def full_state_dict(self) -> dict[str, Tensor]:
        """Every parameter and buffer. Nothing is sent: each rank has all."""
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def held(self) -> Held:
        """See `Strategy.held`."""
        reducer = self.parallel.reducer
        buckets = [] if reducer is None or reducer.plan is None else reducer.plan.buckets
        return Held(
            [*self.model.parameters()],
            [*self.gradients(), *(bucket.flat for bucket in buckets)],
            [tensor for _, _, tensor in optimizer_tensors(self.optimizer, names_of(self.model))],
            [*self.model.buffers()],
        )

    def chunks(self) -> Iterator[Chunk]:
        """Everything, whole; see `Strategy.chunks`."""
        yield from whole_chunks(self.model, self.optimizer)

    def settings(self) -> dict[str, Any]:
        """See `Strategy.settings`."""
        return optimizer_settings(self.optimizer, names_of(self.model))

    def load_settings(self, settings: Mapping[str, Any], state: Mapping[str, Mapping[str, Any]]) -> None:
        """See `Strategy.load_settings`."""
        load_optimizer(self.optimizer, names_of(self.model), settings, state)
