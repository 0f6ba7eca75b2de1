"""The strategies of ZeRO's stages for an engine: `ShardedState` for stages 1 and 2, `FullySharded` for 3.

`ZeroOptimizer` and `FullyShard` make the step. This file tells them which backward pass is the last, and sums
weight and loss. state_by_name.py tells checkpoints where each part of the state lies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minidist.parallel.contract.strategy import ResidentTensors
from minidist.parallel.contract.training_state import model_tensors, names_of
from minidist.parallel.contract.user_functions import MakeOptimizer
from minidist.parallel.flat.gradient_comm import GradientComm
from minidist.parallel.flat.joined_messages import broadcast_together, require_same
from minidist.parallel.sharding.fully_shard import FullyShard
from minidist.parallel.sharding.state_by_name import SharingStrategy, tensors_of
from minidist.parallel.sharding.zero import ZeroOptimizer


class ShardedState(SharingStrategy):
    """ZeRO's stage 1 or 2: whole parameters on every rank, the rest in shares.

    A step sends `optimizer.bytes_per_step()`; in stage 2 each further micro-batch sends all of that but the
    all-gather once more.

    options: of `DataParallel`: bucket_mb, algorithm, overlap and broadcast_buffers; with compression,
    ValueError. master: see `ZeroOptimizer`.
    """

    optimizer: ZeroOptimizer

    def __init__(
        self,
        model: nn.Module,
        optimizer: MakeOptimizer,
        stage: int,
        options: Mapping[str, Any] | None = None,
        master: torch.dtype | None = None,
        gradient_comm: GradientComm | None = None,
    ) -> None:
        options = options or {}
        if options.get("compression") is not None:
            raise ValueError(
                f"compression is {options['compression']!r} with zero={stage} in the layout, which reduces "
                "gradients to their owners as they are; use zero=0 for compressed ones"
            )
        self.gradient_comm = gradient_comm = gradient_comm or GradientComm(None)
        gradient_comm.algorithm = options.get("algorithm", "auto")
        self.model, self.names, self.group = model, names_of(model), gradient_comm.group
        self.share_group, self.owners = gradient_comm.share_group, gradient_comm.owners
        bucket_mb = options.get("bucket_mb", 25)
        self.optimizer = ZeroOptimizer(
            model.parameters(), optimizer, stage, gradient_comm, bucket_mb=bucket_mb, master=master
        )
        self.partition, self.slices = self.optimizer.partition, self.optimizer.partition.slices
        self.partition.names = self.names
        self.parameters, self.buckets = self.partition.trained, self.partition.buckets
        groups = self.optimizer.param_groups
        self.group_names = [[self.names[p] for p in group["params"]] for group in groups]
        self.unsliced, self.unsliced_masters = self.partition.inner.state, self.partition.masters
        updated = set(self.partition.parameters)
        self.left_out = {name: p for name, p in model.named_parameters() if p not in updated}
        if gradient_comm.ranks > 1:
            others = [*self.left_out.items(), *model.named_buffers()]
            require_same("buffers, and parameters that the optimizer leaves out", others, self.group)
            broadcast_together([tensor for _, tensor in others], self.group)
        self._broadcast_buffers = options.get("broadcast_buffers", False)
        self.partition.average = False  # the engine sums with weights of its own
        if stage == 1:
            self.partition.residency = "buckets"
        self.partition.overlap = self.partition.reducer.overlap = options.get("overlap", True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on this rank's rows."""
        self.ready()
        return self.model(*args, **kwargs)

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
        for parameter in self.left_out.values():
            parameter.grad = None
        self.partition.reducer.syncing = self.optimizer.stage == 2

    def begin_final_backward(self, weight: float | Tensor, loss_sum: Tensor, waits: bool = True) -> None:
        """Have the next backward pass sum the gradients, weight and loss over the ranks."""
        reducer = self.partition.reducer
        reducer.syncing, reducer.waits, reducer.totals = True, waits, (weight, loss_sum, 1.0)

    def synchronize(self) -> tuple[float, float]:
        """Complete the gradients, in all ranks' rounds; return weight and loss, summed over the ranks."""
        reducer = self.optimizer.reducer()
        assignment = reducer.synchronize()
        while float(reducer.sums[2]) < self.partition.gradient_comm.ranks:
            reducer.totals = (0.0, 0.0, 1.0)
            reducer.synchronize()
        self.optimizer.take(assignment)
        self.sum_left_out()
        weight, loss = assignment.totals.tolist()
        return weight, loss

    def update(self, closure: Callable[[], Any] | None = None) -> None:
        """Update this rank's share, and publish everyone's."""
        self.optimizer.step(closure)
        for parameter in self.partition.trained:
            parameter.grad = None  # it has sums in one part and this rank's own gradients in the others

    def held(self) -> ResidentTensors:
        """Whole parameters and this rank's shares. Copies in the master dtype count as the optimizer's."""
        partition, assignment = self.partition, self.partition.reducer.assignment
        own = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        return ResidentTensors(
            [*self.model.parameters()],
            [*own, *(assignment.tensors() if assignment is not None else [])],
            [*tensors_of(partition.inner), *self.slices.masters(), *partition.masters.values()],
            [*self.model.buffers()],
        )

    def waiting(self) -> Sequence[nn.Parameter]:
        """The parameters that no backward pass has dealt to buckets yet."""
        return [self.partition.trained[index] for index in self.partition.waiting]

    def settings(self) -> dict[str, Any]:
        """The optimizer's groups, the numbers in its state, and the gradients' order."""
        order = [[self._name(index) for index in each] for each in self.partition.orders]
        return {**super().settings(), "order": order}

    def make_buckets(self, settings: Mapping[str, Any], saved: Collection[str]) -> None:
        """Make the buckets in the saved order: in another one, sums would add up in another order.

        A strategy that saves no order is taken to have that of registration, reversed.
        """
        self.partition.follow_changes()
        order = settings.get("order")
        had = {*saved, *(name for each in order or () for name in each)}
        self.partition.expect(p for p in self.partition.parameters if self.names[p] in had)
        index_of = {self.names[parameter]: index for index, parameter in enumerate(self.partition.trained)}
        if order is None:
            order = [[*reversed(index_of)]]
        self.partition.arrange([index_of[name] for name in each if name in index_of] for each in order)

    @torch.no_grad()
    def loaded(self) -> None:
        """Publish loaded masters, which sends a step's all-gather, and join slices whose state agrees."""
        if self.slices.reload():
            self.partition.publish()
        for parameter, master in self.unsliced_masters.items():
            parameter.copy_(master)


class FullySharded(SharingStrategy):
    """ZeRO's stage 3: every rank keeps only its share of parameters, gradients and state.

    options: those of `FullyShard`, such as `offload`.
    """

    gathers = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: MakeOptimizer,
        options: Mapping[str, Any] | None = None,
        master: torch.dtype | None = None,
        gradient_comm: GradientComm | None = None,
    ) -> None:
        self.gradient_comm = gradient_comm = gradient_comm or GradientComm(None)
        self.group, self.share_group = gradient_comm.group, gradient_comm.share_group
        self.owners = gradient_comm.owners
        self.parallel = FullyShard(model, optimizer, gradient_comm, master=master, **(options or {}))
        self.model, self.names = model, names_of(model)
        self.optimizer, self.slices = self.parallel.optimizer, self.parallel.slices
        self.sharding = self.parallel.sharding
        self.parameters, self.group_names = [*model.parameters()], self.parallel.groups.names
        self.buckets = [bucket for unit in self.parallel.units for bucket in unit.buckets]
        for bucket in self.buckets:
            bucket.op = "sum"  # the engine weights them
        self.unsliced, self.unsliced_masters = {}, {}
        self._own: tuple[float | Tensor, float | Tensor] = (0.0, 0.0)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on this rank's rows. A collective."""
        return self.sharding.forward(*args, **kwargs)

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""
        self.sharding.zero_grad()

    def begin_final_backward(self, weight: float | Tensor, loss_sum: Tensor, waits: bool = True) -> None:
        """Keep weight and loss for `synchronize`, which sums them."""
        self._own = weight, loss_sum

    def synchronize(self) -> tuple[float, float]:
        """Complete the gradients; return weight and loss, summed over the ranks."""
        weight, loss = self.sharding.synchronize(self._own)
        return weight, loss

    def update(self, closure: Callable[[], Any] | None = None) -> None:
        """The optimizer's step on this rank's shards; the next pass gathers the result."""
        self.sharding.step(closure)

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter under all its names, then the buffers."""
        aliases: dict[Tensor, list[str]] = {}
        others = []
        for name, value in model_tensors(self.model).items():
            if value in self.names:
                aliases.setdefault(value, []).append(name)
            else:
                others.append((name, value.detach()))
        for parameter in self.sharding.whole():
            for alias in aliases[parameter]:
                yield alias, parameter.detach().clone()  # its unit's memory is given back
        yield from others

    def make_buckets(self, settings: Mapping[str, Any], saved: Collection[str]) -> None:
        """Make room for the state of parameters that are frozen."""
        frozen = [bucket for bucket in self.buckets if bucket.frozen]
        self.sharding.thaw([b for b in frozen if any(self.names[p] in saved for p in b.parameters)])

    def held(self) -> ResidentTensors:
        """Shards and what is gathered now; the buffers that reduce gradients count among the gradients."""
        buckets = self.buckets
        return ResidentTensors(
            [tensor for b in buckets for tensor in (b.shard, b.values, b.secondary) if tensor is not None],
            [
                *(bucket.reduced for bucket in buckets if bucket.reduced is not None),
                *(memory.flat for memory in self.sharding.gradients.memories),
            ],
            [*self.slices.masters(), *tensors_of(self.optimizer)],
            [*self.model.buffers()],
        )

    def loaded(self) -> None:
        """Join slices whose state agrees, and round masters to the shards."""
        self.slices.reload()
        self.sharding.runtime.changed()
