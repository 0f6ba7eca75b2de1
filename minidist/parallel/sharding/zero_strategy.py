"""The strategy of ZeRO's stages 1 and 2: whole parameters on every rank, the rest in shares.

`ZeroOptimizer` makes the step. This file tells it which backward pass is the last, sums rows and loss, and
tells a checkpoint where each part of the state lies.
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

    A step sends `optimizer.bytes_per_step()`; in stage 2 each further micro-batch sends all of that but the
    all-gather once more.

    options: of `DataParallel`: bucket_mb, algorithm, overlap and broadcast_buffers; with compression,
    ValueError. master: see `ZeroOptimizer`. group: None for all ranks of the world.
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
        self.group, options = group, options or {}
        if options.get("compression") is not None:
            raise ValueError(
                f"compression is {options['compression']!r} with zero={stage} in the layout, which reduces "
                "gradients to their owners as they are; use zero=0 for compressed ones"
            )
        self.model, self.names = model, names_of(model)
        self.optimizer: ZeroOptimizer = ZeroOptimizer(
            model.parameters(), optimizer, stage, group, bucket_mb=options.get("bucket_mb", 25), master=master
        )
        self.partition = self.optimizer.partition
        self.partition.names = self.names
        self.partition.gradient_comm.algorithm = options.get("algorithm", "auto")
        if self.partition.gradient_comm.ranks > 1:
            require_same("buffers", model.named_buffers(), group)
            broadcast_together([*model.buffers()], group)
        self._broadcast_buffers = options.get("broadcast_buffers", False)
        self.partition.average = False  # the engine sums with weights of its own
        if stage == 1:
            self.partition.residency = "buckets"
        self.partition.overlap = self.partition.reducer.overlap = options.get("overlap", True)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the module's outputs for this rank's rows."""
        self.ready()
        outputs: Tensor = self.model(inputs)
        return outputs

    def ready(self) -> None:
        """Prepare a pass, as `forward` does."""
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
        """Change nothing: stage 1 sends only after `begin_final_backward`, stage 2 in every backward pass."""
        return nullcontext()

    def begin_final_backward(self, rows: float, loss_sum: Tensor, waits: bool = True) -> None:
        """Have the next backward pass sum the gradients, rows and loss over the ranks."""
        reducer = self.partition.reducer
        reducer.syncing, reducer.waits, reducer.totals = True, waits, (rows, loss_sum, 1.0)

    def synchronize(self) -> tuple[float, float]:
        """Complete the gradients, in all ranks' rounds; return rows and loss, summed over the ranks."""
        assignment, reducer = self.optimizer.synchronize(), self.partition.reducer
        while float(reducer.sums[2]) < self.partition.gradient_comm.ranks:
            reducer.totals = (0.0, 0.0, 1.0)
            reducer.reduce()
        rows, loss = assignment.totals.tolist()
        return rows, loss

    def rescale(self, factor: float) -> None:
        """Multiply this rank's share of the gradients."""
        self.partition.reducer.settled().rescale(factor)

    def gradients(self) -> list[Tensor]:
        """This rank's share of the gradients, in flat tensors."""
        return self.optimizer.gradients()

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The part of each parameter's gradient that is in this rank's share."""
        for bucket in self.partition.buckets:
            if bucket.reduced is not None:
                for start, span in bucket.ranges():
                    yield self._name(span.param_index), bucket.reduced[start : start + len(span)]

    def _name(self, param_index: int) -> str:
        return self.names[self.partition.trained[param_index]]

    def multiply(self, factor: float) -> None:
        """Multiply this rank's share of the gradients once it is cast to the dtype of the update."""
        self.partition.slices.factor *= factor

    def update(self) -> None:
        """Update this rank's share, and publish everyone's."""
        self.optimizer.update()
        for parameter in self.partition.trained:
            parameter.grad = None  # it has sums in one part and this rank's own gradients in the others

    def held(self) -> ResidentTensors:
        """Whole parameters and this rank's shares. Copies in the master dtype count as the optimizer's."""
        partition, assignment = self.partition, self.partition.reducer.assignment
        state = [v for each in partition.inner.state.values() for v in each.values() if isinstance(v, Tensor)]
        masters = [each.tensor for each in partition.slices.all if each.tensor is not each.value]
        own = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        return ResidentTensors(
            [*self.model.parameters()],
            [*own, *(assignment.tensors() if assignment is not None else [])],
            [*state, *masters, *partition.masters.values()],
            [*self.model.buffers()],
        )

    def begin_masters(self, exact: Mapping[str, Tensor]) -> None:
        """Let masters begin with these values, whole until the first backward pass deals the parameters."""
        for parameter in self._waiting():
            if self.names[parameter] in exact:
                self.partition.masters[parameter] = exact[self.names[parameter]]

    def _waiting(self) -> list[nn.Parameter]:
        """The parameters that no backward pass has dealt to buckets yet."""
        return [self.partition.trained[index] for index in self.partition.waiting]

    # The state by names.

    def chunks(self) -> Iterator[TensorBox]:
        """Boxes of whole parameters, of this rank's masters and state, and of whatever is not dealt yet."""
        partition = self.partition
        partition.refuse_reassigned()
        waiting, master = self._waiting(), partition.slices.master
        in_masters = {p for p in partition.trained if master not in (None, p.dtype)} - {*waiting}
        aliases: dict[Tensor, list[str]] = {}  # of masters; tied parameters have several names
        for name, value in self.model.state_dict(keep_vars=True).items():
            if value in in_masters:
                aliases.setdefault(value, []).append("model." + name)
            else:
                yield _whole("model." + name, partition.masters.get(value, value).detach())
        for parameter in waiting:
            for key, value in partition.inner.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield _whole(f"optimizer.{self.names[parameter]}.{key}", value)
        given = set()  # names of scalars: this rank may have several slices of one parameter
        for _, span, tensor, state in partition.slices.by_parameter():
            parameter = partition.trained[span.param_index]
            shape = tuple(parameter.shape)
            for alias in aliases.get(parameter, []):
                yield from cut_chunks(alias, shape, span.start, tensor)
            for key, value in state.items():
                name = f"optimizer.{self.names[parameter]}.{key}"
                if partition.slices.is_cut(key, value):
                    yield from cut_chunks(name, shape, span.start, value)
                elif isinstance(value, Tensor) and name not in given:
                    given.add(name)
                    yield _whole(name, value)

    def settings(self) -> dict[str, Any]:
        """The optimizer's groups, the numbers in this rank's share of the state, and the gradients' order."""
        partition = self.partition
        states = [(span.param_index, state) for _, span, _, state in partition.slices.by_parameter()]
        states += [(i, partition.inner.state.get(partition.trained[i], {})) for i in partition.waiting]
        state: dict[str, dict[str, Any]] = {}
        for index, each in states:
            if numbers := {key: value for key, value in each.items() if not isinstance(value, Tensor)}:
                state[self._name(index)] = numbers
        order = [[self._name(index) for index in each] for each in partition.orders]
        return {**optimizer_settings(self.optimizer, self.names), "state": state, "order": order}

    def load_settings(self, settings: Mapping[str, Any], state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take the groups of `settings`, make the saved run's buckets, and make room for the optimizer state.

        Buckets are made in the saved order: otherwise a share would hold other parameters, and sums would add
        up in another order. If the state was saved before a first backward pass, all of it, mostly none,
        waits here for one. A strategy that saves no order is taken to have that of registration, reversed.
        """
        partition = self.partition
        load_optimizer(self.optimizer, self.names, {**settings, "state": {}}, {})
        partition.follow_changes()
        partition.inner.state.clear()
        partition.masters.clear()
        index_of = {self.names[parameter]: index for index, parameter in enumerate(partition.trained)}
        order = settings.get("order")
        if order is None:
            order = [[*reversed(index_of)]]
        partition.arrange([index_of[name] for name in each if name in index_of] for each in order)
        wholes: dict[
            tuple[str, str], Tensor
        ] = {}  # scalars are one for all slices of a parameter, until `loaded`

        def empty(name: str, device: torch.device, cut_to: int | None) -> dict[str, Any]:
            """A parameter's loaded numbers, and tensors to load into, where elements are cut to that many."""
            values = dict(settings["state"].get(name, {}))
            for key, (shape, dtype) in state.get(name, {}).items():
                if cut_to is not None and key not in SCALARS:
                    values[key] = torch.zeros(cut_to, dtype=dtype, device=device)
                else:
                    whole = torch.zeros(shape, dtype=dtype, device=device if shape else "cpu")
                    values[key] = wholes.setdefault((name, key), whole)
            return values

        for parameter in self._waiting():
            if values := empty(self.names[parameter], parameter.device, None):
                partition.inner.state[parameter] = values
            if partition.slices.master not in (None, parameter.dtype):
                partition.masters[parameter] = parameter.detach().to(partition.slices.master)
        partition.slices.apart()
        for each in partition.slices.all:
            (span,) = each.ranges
            cut_to = len(span) if partition.slices.cut_anywhere else None
            if values := empty(self._name(span.param_index), each.tensor.device, cut_to):
                partition.inner.state[each.tensor] = values

    def loaded(self) -> None:
        """Publish loaded masters, which sends a step's all-gather, and join slices whose state agrees."""
        self.partition.reload()


def _whole(name: str, tensor: Tensor) -> TensorBox:
    return TensorBox(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)
