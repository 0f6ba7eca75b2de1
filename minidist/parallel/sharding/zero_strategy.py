"""The strategy of ZeRO's stages 1 and 2: whole parameters on every rank, the rest in shares.

A step is `ZeroOptimizer`'s; here is what an engine and a checkpoint need of it beside: when a backward pass
is the last, rows and loss, and where each part of the state lies.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
sections 5.1 and 5.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from minidist.comm.work import Group
from minidist.parallel.contract.engine import MakeOptimizer
from minidist.parallel.contract.strategy import ResidentTensors, Strategy, TensorBox, cut_chunks
from minidist.parallel.contract.training_state import load_optimizer, names_of, optimizer_settings
from minidist.parallel.flat.buckets import broadcast_together, require_same
from minidist.parallel.sharding.optimizer_slices import SCALARS
from minidist.parallel.sharding.zero import ZeroOptimizer


class ShardedState(Strategy):
    """ZeRO's stage 1 or 2 over the ranks of a group.

    A step sends `optimizer.bytes_per_step()`; stage 2 all of that but the all-gather once more for each
    further micro-batch.

    Args:
        model: the same architecture on all ranks.
        optimizer: a function from parameters to a torch optimizer.
        stage: 1 or 2.
        options: of `DataParallel`: bucket_mb, algorithm, overlap and broadcast_buffers.
        master: see `ZeroOptimizer`.
        group: None for all ranks of the world.

    Raises:
        ValueError: an option that sharded gradients have no use for, or an optimizer that cannot be shared.
    """

    sharded = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: MakeOptimizer,
        stage: int,
        options: Mapping[str, Any] | None = None,
        master: torch.dtype | None = None,
        group: Group = None,
    ) -> None:
        self.group = group
        options = dict(options or {})
        if options.get("compression") is not None:
            raise ValueError(
                f"compression is {options['compression']!r} with zero={stage} in the layout, which reduces "
                "gradients to their owners as they are; use zero=0 for compressed ones"
            )
        self.model, self.names = model, names_of(model)
        buffers = dict(model.named_buffers())
        self.optimizer: ZeroOptimizer = ZeroOptimizer(
            model.parameters(), optimizer, stage, group, bucket_mb=options.get("bucket_mb", 25), master=master
        )
        self.partition = self.optimizer.partition
        exchange = self.partition.exchange
        exchange.algorithm = options.get("algorithm", "auto")
        if exchange.ranks > 1:
            require_same("buffers", buffers.items(), exchange.group)
            broadcast_together([*buffers.values()], exchange.group)
        self._broadcast_buffers = options.get("broadcast_buffers", False)
        # The engine says which backward pass is the last, and sums with weights of its own.
        self.partition.average = False
        if stage == 1:
            self.partition.keep = "buckets"
        self.partition.overlap = self.partition.reducer.overlap = options.get("overlap", True)

    def forward(self, inputs: Tensor) -> Tensor:
        """What the module returns for this rank's rows."""
        self.ready()
        outputs: Tensor = self.model(inputs)
        return outputs

    def ready(self) -> None:
        """See `Strategy.ready`."""
        if torch.is_grad_enabled():
            self.partition.reducer.recover()
            self.partition.follow_changes()
            if self._broadcast_buffers and self.model.training:
                broadcast_together([*self.model.buffers()], self.group)

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""
        self.optimizer.zero_grad()
        self.partition.reducer.syncing = self.optimizer.stage == 2

    def no_sync(self) -> AbstractContextManager[None]:
        """In stage 1 nothing is sent before `begin_final_backward`; stage 2 sends in every backward pass."""
        return nullcontext()

    def begin_final_backward(self, rows: float, loss_sum: Tensor, waits: bool = True) -> None:
        """See `Strategy.begin_final_backward`."""
        reducer = self.partition.reducer
        reducer.syncing, reducer.waits, reducer.totals = True, waits, (rows, loss_sum, 1.0)

    def synchronize(self) -> tuple[float, float]:
        """See `Strategy.synchronize`. A rank takes part in what others have left of micro-batches."""
        plan, reducer = self.optimizer.synchronize(), self.partition.reducer
        while float(reducer.sums[2]) < self.partition.exchange.ranks:
            reducer.totals = (0.0, 0.0, 1.0)
            reducer.reduce()
        rows, loss = plan.totals.tolist()
        return rows, loss

    def rescale(self, factor: float) -> None:
        """Multiply this rank's share of the gradients."""
        self.partition.reducer.settled().rescale(factor)

    def gradients(self) -> list[Tensor]:
        """This rank's share of the gradients, in flat tensors."""
        return self.optimizer.gradients()

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """See `Strategy.named_gradients`: of each parameter the part that is in this rank's share."""
        partition = self.partition
        for bucket in partition.buckets:
            if bucket.reduced is not None:
                for start, fragment in bucket.fragments():
                    name = self.names[partition.trained[fragment.place]]
                    yield name, bucket.reduced[start : start + len(fragment)]

    def multiply(self, factor: float) -> None:
        """Multiply this rank's share once it is cast to the dtype of the update; see `Strategy.multiply`."""
        self.partition.pieces.factor *= factor

    def update(self) -> None:
        """Update this rank's share, and gather everyone's."""
        self.optimizer.update()
        for parameter in self.partition.trained:
            parameter.grad = None  # which has sums in a part of it, and this rank's own in the others

    def held(self) -> ResidentTensors:
        """See `Strategy.held`. Copies in the master dtype count as the optimizer's."""
        partition, plan = self.partition, self.partition.reducer.plan
        state = [v for each in partition.inner.state.values() for v in each.values() if isinstance(v, Tensor)]
        masters = [piece.tensor for piece in partition.pieces.all if piece.tensor is not piece.value]
        masters += partition.masters.values()
        own = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        return ResidentTensors(
            [*self.model.parameters()],
            [*own, *(plan.tensors() if plan is not None else [])],
            [*state, *masters],
            [*self.model.buffers()],
        )

    def begin_masters(self, exact: Mapping[str, Tensor]) -> None:
        """See `Strategy.begin_masters`. They are whole until the first backward pass deals the parameters."""
        partition = self.partition
        for parameter in [partition.trained[place] for place in partition.waiting]:
            if self.names[parameter] in exact:
                partition.masters[parameter] = exact[self.names[parameter]]

    # The state by names.

    def chunks(self) -> Iterator[TensorBox]:
        """Parameters whole, or this rank's part where there are masters; its part of the state.

        All of what the first backward pass has not dealt yet.
        """
        partition = self.partition
        partition.take_reassigned()
        waiting = [partition.trained[place] for place in partition.waiting]
        shapes = {p: tuple(p.shape) for p in partition.trained}
        in_masters = {p for p in partition.trained if partition.pieces.master not in (None, p.dtype)} - {
            *waiting
        }
        aliases: dict[Tensor, list[str]] = {}  # of masters; tied parameters have several
        for name, value in self.model.state_dict(keep_vars=True).items():
            if value in in_masters:
                aliases.setdefault(value, []).append("model." + name)
            else:
                whole = partition.masters.get(value, value).detach()
                yield TensorBox("model." + name, tuple(whole.shape), (0,) * whole.dim(), whole)
        for parameter in waiting:
            for key, value in partition.inner.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    full = f"optimizer.{self.names[parameter]}.{key}"
                    yield TensorBox(full, tuple(value.shape), (0,) * value.dim(), value)
        given = set()  # scalars of parameters of which this rank has several pieces
        for _, fragment, tensor, state in partition.pieces.parts():
            parameter = partition.trained[fragment.place]
            name, shape = self.names[parameter], shapes[parameter]
            for alias in aliases.get(parameter, []):
                yield from cut_chunks(alias, shape, fragment.start, tensor)
            for key, value in state.items():
                if partition.pieces.is_part(key, value):
                    yield from cut_chunks(f"optimizer.{name}.{key}", shape, fragment.start, value)
                elif isinstance(value, Tensor) and (name, key) not in given:
                    given.add((name, key))
                    yield TensorBox(f"optimizer.{name}.{key}", tuple(value.shape), (0,) * value.dim(), value)

    def settings(self) -> dict[str, Any]:
        """See `Strategy.settings`; numbers of the optimizer's state are those of this rank's share."""
        partition = self.partition
        states = [(fragment.place, state) for _, fragment, _, state in partition.pieces.parts()]
        states += [
            (place, partition.inner.state.get(partition.trained[place], {})) for place in partition.waiting
        ]
        numbers = {
            self.names[partition.trained[place]]: {
                k: v for k, v in state.items() if not isinstance(v, Tensor)
            }
            for place, state in states
        }
        state = {name: values for name, values in numbers.items() if values}
        order = [[self.names[partition.trained[place]] for place in each] for each in partition.orders]
        return {**optimizer_settings(self.optimizer, self.names), "state": state, "order": order}

    def load_settings(self, settings: Mapping[str, Any], state: Mapping[str, Mapping[str, Any]]) -> None:
        """See `Strategy.load_settings`.

        Buckets are made in the saved order, or shares would be of other parameters, and sums be added up in
        another order. Where that was saved before a first backward pass, all of the state, mostly none, waits
        here for one. Of strategies that do not tell, the order in which parameters are registered is a guess.
        """
        partition = self.partition
        load_optimizer(self.optimizer, self.names, {**settings, "state": {}}, {})
        partition.follow_changes()
        partition.inner.state.clear()
        partition.masters.clear()
        place_of = {self.names[parameter]: place for place, parameter in enumerate(partition.trained)}
        order = settings.get("order")
        if order is None:
            order = [[*reversed(place_of)]]
        partition.arrange([place_of[name] for name in each if name in place_of] for each in order)
        for parameter in [partition.trained[place] for place in partition.waiting]:
            name, device = self.names[parameter], parameter.device
            whole = {
                key: torch.zeros(shape, dtype=dtype, device=device if shape else "cpu")
                for key, (shape, dtype) in state.get(name, {}).items()
            }
            if whole := {**settings["state"].get(name, {}), **whole}:
                partition.inner.state[parameter] = whole
            if partition.pieces.master not in (None, parameter.dtype):
                partition.masters[parameter] = parameter.detach().to(partition.pieces.master)
        partition.pieces.apart()
        scalars: dict[tuple[str, str], Tensor] = {}  # one for all pieces of a parameter, until `loaded`
        for piece in partition.pieces.all:
            (fragment,) = piece.fragments
            name = self.names[partition.trained[fragment.place]]
            values: dict[str, Any] = dict(settings["state"].get(name, {}))
            for key, (shape, dtype) in state.get(name, {}).items():
                part = partition.pieces.cut_anywhere and key not in SCALARS
                size = (len(fragment),) if part else shape
                device = piece.tensor.device if size else torch.device("cpu")
                empty = torch.zeros(size, dtype=dtype, device=device)
                values[key] = empty if part else scalars.setdefault((name, key), empty)
            if values:
                partition.inner.state[piece.tensor] = values

    def loaded(self) -> None:
        """Take loaded masters into the model of every rank, and join pieces whose state agrees.

        A collective where there are masters; it sends what the all-gather of a step does.
        """
        self.partition.reload()
