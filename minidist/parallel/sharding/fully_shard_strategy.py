"""The strategy of ZeRO stage 3: `FullyShard`, as an engine trains with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from minidist.comm.work import Group
from minidist.parallel.contract.engine import MakeOptimizer
from minidist.parallel.contract.strategy import ResidentTensors, Strategy, TensorBox
from minidist.parallel.sharding.flat_state import (
    load_pieces,
    merge_pieces,
    pieces_settings,
    shard_chunks,
    shard_gradients,
    whole_units,
)
from minidist.parallel.sharding.fully_shard import FullyShard


class FullySharded(Strategy):
    """Stage 3 over the ranks of a group.

    options: those of `FullyShard`, such as `offload`.
    group: None for all ranks of the world.
    """

    sharded = True
    gathers = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: MakeOptimizer,
        options: Mapping[str, Any] | None = None,
        master: torch.dtype | None = None,
        group: Group = None,
    ) -> None:
        self.group = group
        self.parallel = FullyShard(model, optimizer, group, master=master, **(options or {}))
        self.parallel.gradients.operation = "sum"
        self.optimizer = self.parallel.optimizer
        self._own: tuple[float, float | Tensor] = (0.0, 0.0)

    def forward(self, inputs: Tensor) -> Tensor:
        """What the module returns; a collective. See `FullyShard.forward`."""
        outputs: Tensor = self.parallel(inputs)
        return outputs

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""
        self.parallel.zero_grad()

    def no_sync(self) -> AbstractContextManager[None]:
        """See `FullyShard.no_sync`: every micro-batch is reduced."""
        return self.parallel.no_sync()

    def begin_final_backward(self, rows: float, loss_sum: Tensor, waits: bool = True) -> None:
        """See `Strategy.begin_final_backward`."""
        self._own = rows, loss_sum

    def synchronize(self) -> tuple[float, float]:
        """See `Strategy.synchronize`."""
        rows, loss = self.parallel.synchronize(*self._own)
        return rows, loss

    def rescale(self, factor: float) -> None:
        """Multiply the gradients."""
        for gradient in self.gradients():
            gradient.mul_(factor)

    def gradients(self) -> list[Tensor]:
        """Those of this rank's shards."""
        return [piece.grad for piece in self.parallel.parameters() if piece.grad is not None]

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """See `Strategy.named_gradients`: of each parameter the elements in this rank's shards."""
        yield from shard_gradients(self.parallel)

    def update(self) -> None:
        """The optimizer's step on this rank's shards; the next pass gathers what it leaves."""
        self.parallel.step()

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """See `Engine.whole`. Sends what `FullyShard.summon` does, unit by unit."""
        yield from whole_units(self.parallel)

    def full_state_dict(self) -> dict[str, Tensor]:
        """See `FullyShard.state_dict`."""
        return self.parallel.state_dict()

    def held(self) -> ResidentTensors:
        """Shards, and what is gathered now; the buffers in which they are reduced are among the gradients."""
        stores, units = self.parallel.stores, self.parallel.units
        buffers = [buffer for each in self.parallel.gradients.buffers.values() for buffer in each]
        masters = [store.updated for store in stores if store.updated is not store.shard]
        state = [v for each in self.optimizer.state.values() for v in each.values() if isinstance(v, Tensor)]
        return ResidentTensors(
            [*(store.shard for store in stores), *(flat.full for unit in units for flat in unit.flats)],
            [*(store.grad for store in stores if store.grad is not None), *buffers],
            [*masters, *state],
            [*self.parallel.module.buffers()],
        )

    def chunks(self) -> Iterator[TensorBox]:
        """This rank's elements of every parameter and its state, as boxes; see `Strategy.chunks`."""
        yield from shard_chunks(self.parallel)

    def settings(self) -> dict[str, Any]:
        """See `Strategy.settings`."""
        return pieces_settings(self.parallel)

    def load_settings(self, settings: Mapping[str, Any], state: Mapping[str, Mapping[str, Any]]) -> None:
        """See `Strategy.load_settings`."""
        load_pieces(self.parallel, settings, state)

    def loaded(self) -> None:
        """After chunks were written: the half-precision shards from the masters, and long pieces again."""
        merge_pieces(self.parallel)
        for store in self.parallel.stores:
            store.publish()
