"""Each rank keeps an n-th of every parameter. Units are gathered to compute, and their gradients reduced.

The model is cut into units (cut_into_units.py), such as transformer blocks, and a unit's parameters are whole
only while it is used (unit_runtime.py). When the backward pass leaves a unit, its gradients are reduced; they
are complete once all ranks know which parameters were used. In half precision, units are gathered from
rounded copies of the masters. A loop may call the optimizer's own `step` and `zero_grad`: hooks on them
complete the gradients before a step, and publish after it.

Source: Rajbhandari et al. 2020, "ZeRO", section 5.3.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from minidist.comm import work
from minidist.comm.algorithms.formulas import all_reduce_bytes
from minidist.comm.collectives import choose
from minidist.comm.errors import CollectiveError
from minidist.parallel.contract.training_state import model_tensors
from minidist.parallel.contract.user_functions import MakeOptimizer
from minidist.parallel.flat.buckets import Bucket
from minidist.parallel.flat.gradients import GradientsInLentMemory, Messages
from minidist.parallel.flat.joined_messages import broadcast_together
from minidist.parallel.flat.values import GatheredValues
from minidist.parallel.guards.claims import BY_FULLY_SHARD, claim
from minidist.parallel.sharding.optimizer.memory_source import MemorySource
from minidist.parallel.sharding.optimizer.optimizer_slices import OptimizerSlices
from minidist.parallel.sharding.optimizer.parameter_groups import FlatParameterGroups, steps_on
from minidist.parallel.sharding.optimizer.whole_on_owners import Home, WholeOnOwners
from minidist.parallel.sharding.sets.equal_start import set_for, shared_tensors
from minidist.parallel.sharding.sets.parameter_set import ParameterSet, Totals
from minidist.parallel.sharding.sharded import Sharded
from minidist.parallel.sharding.units.cut_into_units import Units, build
from minidist.parallel.sharding.units.unit_runtime import UnitRuntime
from minidist.parallel.sharding.units.units import Unit, weakly
from minidist.parallel.training.elementwise_optimizers import is_elementwise, refuse_unshareable, work_of
from minidist.parallel.training.master_weights import follow_own_methods


class ShardedParameters(Sharded):
    """This rank's shards of a model's parameters, and the optimizer that updates them.

    Making it is a collective, and takes the values of the module's parameters. sets: how the parameters are
    shared. The other arguments are those of `FullyShard`.
    """

    def __init__(
        self,
        module: nn.Module,
        make_optimizer: type[torch.optim.Optimizer] | MakeOptimizer,
        sets: Sequence[ParameterSet],
        memory: MemorySource,
        *,
        units: Units = None,
        initialize: Callable[[nn.Module], object] | None = None,
        prefetch: bool | None = None,
        master: torch.dtype | None = None,
        **defaults: Any,
    ) -> None:
        super().__init__(sets)
        names = [name for name, _ in module.named_parameters()]
        set_of = [set_for(name, sets) for name in names]
        for index, param_set in enumerate(set_of):
            param_set.indices.append(index)
        shared_tensors(module, sets)
        self.groups = FlatParameterGroups(make_optimizer, module, defaults)
        refuse_unshareable(type(self.groups.optimizer))
        groups = self.groups.optimizer.param_groups
        self._whole = {  # which no share of the optimizer's may cut
            index
            for index, number in self.groups.of.items()
            if not is_elementwise(type(self.groups.optimizer), groups[number])
        }
        comms = [param_set.gradient_comm for param_set in set_of]
        self.units = build(module, units, comms, initialize, memory, self._whole)
        claim(self, BY_FULLY_SHARD, module.parameters(), takes_values=True)
        for parameter in module.parameters():
            parameter.grad = None  # the first step would add to an old one
        broadcast_together([*module.buffers()], self.group)
        self.parameters = [*module.parameters()]  # others, if they were on the meta device
        self.set_of = dict(zip(self.parameters, set_of, strict=True))
        self.names = dict(zip(self.parameters, names, strict=True))
        self.model, self.group_names = module, self.groups.names
        self.buckets = [bucket for unit in self.units for bucket in unit.buckets]
        self.slices = OptimizerSlices(self.groups.optimizer, master, memory)
        self.optimizer = self.groups.optimizer
        if prefetch is None:
            over = self.gradient_comm.share_group
            how = {choose("all_gather", "auto", over, bucket.values.flat) for bucket in self.buckets}
            prefetch = how != {"shared_memory"}
        self.orders = None
        self._last = Messages(iter(()))  # the latest reduction, whose sum over copies may be under way
        self._accumulates = False  # whole gradients add up on this rank, in `grad`
        self.had_gradient = bytearray(len(self.parameters))  # on this rank, since `forget`
        self.is_complete = False  # the slices have the sums, and no backward pass has come since
        self._train([bucket for bucket in self.buckets if bucket.parameters[0].requires_grad])
        called = weakly(self.reduce), weakly(self.wait), weakly(self.follow_changes)
        self.runtime = UnitRuntime(self.units, *called, self.group, prefetch)
        self._watch(self.optimizer)
        hook = register_optimizer_step_pre_hook(weakly(self._refuse_other_optimizer))
        weakref.finalize(self, hook.remove).atexit = False

    def _train(self, buckets: Sequence[Bucket[GatheredValues]]) -> None:
        """Make slices of buckets, and of parameters in them that the optimizer needs whole; make room for
        their gradients. A collective.
        """
        homes: dict[Any, list[Home]] = {}
        self.slices.add(buckets, self.groups.of)
        for bucket in buckets:
            self.set_of[bucket.parameters[0]].buckets.append(bucket)
            for at, index in enumerate(bucket.layout.param_indices):
                if index in self._whole:
                    kind = bucket.layout.dtype, bucket.values.gradient_comm
                    homes.setdefault(kind, []).append((bucket, at))
        work, memory = work_of(type(self.groups.optimizer)), self.slices.memory
        for those in homes.values():
            self.on_owners.append(WholeOnOwners(those, self.parameters, memory, work))
            self.slices.add(self.on_owners[-1:], self.groups.of)
        self.groups.begin()
        for param_set in self.sets:
            param_set.make_room(self.parameters)

    def _watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Have the optimizer's own methods complete the gradients before, and publish after."""
        optimizer.register_step_pre_hook(weakly(self._before_step))
        optimizer.register_step_post_hook(weakly(self.after_own_method))
        optimizer.zero_grad = weakly(self.forget)  # type: ignore[method-assign]
        follow_own_methods(optimizer, weakly(self.after_own_method))

    def pieces(self) -> list[nn.Parameter]:
        """This rank's shards as the optimizer takes them, including those that it leaves out."""
        return [each.tensor for each in self.slices.all]

    def name_of(self, param_index: int) -> str:
        """A parameter's name in the module."""
        return self.names[self.parameters[param_index]]

    # The runtime calls these: before a pass, and as the backward pass leaves units.

    def follow_changes(self) -> None:
        """Begin with gradients of parameters that were frozen when this was made."""
        if work.is_alone:
            raise RuntimeError(
                "it calls a ZeRO-3 model inside a step that one process takes alone, without the other "
                "ranks' shards; give prepare(rehearse=False)"
            )
        frozen = [bucket for bucket in self.buckets if bucket.gradients is None]
        self.thaw([bucket for bucket in frozen if any(p.requires_grad for p in bucket.parameters)])

    def thaw(self, buckets: Sequence[Bucket[GatheredValues]]) -> None:
        """Train frozen buckets, too, from now on. A collective."""
        if buckets:
            self.wait()
            self._train(buckets)

    def reduce(self, unit: Unit, ahead: bool) -> None:
        """Launch the round of a unit's buckets, which are complete. ahead: while something else computes."""
        if self._accumulates:
            return
        self.is_complete = False
        for bucket in unit.buckets:
            if not isinstance(gradients := bucket.gradients, GradientsInLentMemory):  # frozen
                continue
            self._fill(gradients, bucket.parameters)
            messages = gradients.reduce(blocking=not ahead)
            if gradients.gradient_comm.hybrid is not None:  # do not wait for the sum over copies
                (self._last if ahead else messages).advance()
                self._last = messages
            elif not ahead:
                messages.complete()

    def _fill(self, into: GradientsInLentMemory, parameters: Sequence[nn.Parameter]) -> None:
        """Move the gradients of a bucket's parameters to where they are sent from."""
        into.complete()
        into.borrow()
        views, grads, has_rows = [], [], self.set_of[parameters[0]].pass_has_rows
        for view, parameter, index in zip(into.views, parameters, into.layout.param_indices, strict=True):
            grad = parameter.grad
            if grad is None:
                view.zero_()
                continue
            views.append(view)
            grads.append(grad.to_dense() if grad.is_sparse else grad.detach())
            self.had_gradient[index] |= has_rows
            parameter.grad = None
        if views:
            torch._foreach_copy_(views, grads)

    def wait(self) -> None:
        """Wait for all reductions."""
        for bucket in self.buckets:
            if isinstance(bucket.gradients, GradientsInLentMemory):
                bucket.gradients.complete()

    # A step.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's outputs for this rank's rows; units are gathered as they are called."""
        try:
            return self.runtime.root.module(*args, **kwargs)
        except BaseException:
            # A checkpoint stops its recomputation by an error, and then the backward pass goes on.
            if not self.runtime.in_backward():
                with suppress(CollectiveError):  # if a peer is gone, the first error says so
                    self.runtime.abandon()
            raise

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients add up on this rank if the residency keeps them whole.

        ZeRO 3 does not: this changes nothing there, since whole gradients would take n times the memory.
        """
        self._accumulates = self.residency.whole_gradients
        try:
            yield
        finally:
            self._accumulates = False

    def synchronize(self) -> tuple[float, float]:
        """Complete the gradients; returns the totals, summed over the ranks."""
        weight, loss = self.sum_over_ranks(self._own.weight, self._own.loss)
        return weight, loss

    def sum_over_ranks(self, weight: float | Tensor = 0.0, loss: float | Tensor = 0.0) -> list[float]:
        """Complete the gradients: settle which parameters any rank used. `step` does it if nobody has.

        Returns the sums over the ranks of two numbers, in an engine's step of weight and loss. Sends
        2 (n - 1) / n 8 (P + 2) bytes for P parameters.
        """
        self.runtime.finish()
        users: dict[int, float] = {}
        for param_set in self.sets:
            param_set.unused = [index for index in param_set.indices if not self.had_gradient[index]]
            param_set.fill_tail(Totals(weight, loss))
            param_set.send_tail().complete()
            users.update(zip(param_set.indices, param_set.tail.tolist(), strict=False))
        for whole in self.on_owners:
            whole.take_gradients()
        self.slices.give_gradients(users)
        self.is_complete = True
        sums: list[float] = self.sets[0].tail[-2:].tolist()
        return sums

    def complete(self) -> None:
        """Sum the gradients, unless no backward pass has come since they were. A collective."""
        if not self.is_complete:
            self.sum_over_ranks()

    def gradients(self) -> list[Tensor]:
        """This rank's part of the sums."""
        return self.slices.gradients()

    def rescale(self, factor: float, kept: bool = True) -> None:
        """Multiply the gradients."""
        for gradient in self.gradients():
            gradient.mul_(factor)

    def publish(self) -> None:
        """Write masters, rounded, into the shards, which the next pass gathers."""
        self.slices.round_masters()
        for whole in self.on_owners:
            whole.give_values()
        self.runtime.changed()

    def update(self, closure: Callable[[], Any] | None = None) -> None:
        """The optimizer's step on this rank's shards; the next pass gathers the result.

        closure: computes the gradients anew, for an optimizer that requires one.
        """
        self.slices.update(self.complete, self.publish, closure)

    def forget(self, set_to_none: bool = True) -> None:
        """Forget the gradients; the next ones are the first."""
        self.wait()
        for param_set in self.sets:
            param_set.begin()
        self.had_gradient, self.is_complete = bytearray(len(self.parameters)), False
        self.runtime.forget_copies()
        self.slices.drop_gradients()
        for whole in self.on_owners:
            whole.forget_gradients()

    def resident(self) -> list[Tensor]:
        """The shards, the whole parameters that this rank owns, and what is gathered now."""
        parts = [(each.shard, each.flat, each.secondary) for each in (b.values for b in self.buckets)]
        found = [tensor for part in parts for tensor in part if tensor is not None]
        return found + [whole.values.shard for whole in self.on_owners]

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter under all its names, gathered one unit at a time, and the buffers. A collective."""
        aliases: dict[Tensor, list[str]] = {}
        others, own = [], {*self.model.parameters()}
        for name, value in model_tensors(self.model).items():
            if value in own:
                aliases.setdefault(value, []).append(name)
            else:
                others.append((name, value.detach()))
        for unit in self.units:
            unit.show()
            try:
                for parameter in (p for bucket in unit.buckets for p in bucket.parameters):
                    for alias in aliases[parameter]:
                        yield alias, parameter.detach().clone()  # the unit's memory is given back
            finally:
                unit.free()
        yield from others

    def make_buckets(self, order: Sequence[Sequence[str]] | None, saved: Collection[str]) -> None:
        """Make room for the state of parameters that are frozen."""
        frozen = [bucket for bucket in self.buckets if bucket.gradients is None]
        self.thaw([b for b in frozen if any(self.names[p] in saved for p in b.parameters)])

    def bytes_per_step(self, passes: int = 1) -> int:
        """Bytes that this rank sends in a step of so many forward and backward passes, by the formula.

        An all-gather forward, one backward and a reduce-scatter: 3 (n - 1) / n of the padded bytes of the
        parameters, each flat tensor padded to a multiple of n. The root unit is gathered once and frozen
        parameters are not reduced: a third less for each. With hybrid sharding n is the number of owners, and
        the sums over m copies of a share send 2 (m - 1) / m of it. With k secondary shares the gathers after
        a step's first send (k - 1) / k. The counts of ranks that used each parameter, with two totals, send
        2 (n - 1) / n 8 (P + 2) for all n ranks. The first pass, which settles the order, sends 48 (n - 1) / n
        a unit more; one more call of a unit than was settled sends 32 (n - 1) / n and gathers it again.
        """
        sent = sum(whole.bytes_sent() for whole in self.on_owners)
        for unit in self.units:
            for bucket in unit.buckets:
                again, layout = passes * (2 - (unit is self.units[0])) - 1, bucket.layout
                near = layout.gather_bytes()
                if bucket.values.secondary is not None:
                    near = (layout.length - len(bucket.values.secondary)) * layout.dtype.itemsize
                sent += layout.gather_bytes() + again * near
                rounds = 0 if bucket.gradients is None else self.residency.reductions(passes)
                sent += rounds * layout.reduce_bytes()
        return sent + sum(
            all_reduce_bytes(8 * len(param_set.tail), param_set.gradient_comm.ranks)
            for param_set in self.sets
        )

    # What a loop around the optimizer may do with it.

    def _refuse_other_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Raise RuntimeError before another optimizer would step on the pieces."""
        if optimizer is not self.optimizer and steps_on(optimizer, self.pieces()):
            raise RuntimeError(
                f"{type(optimizer).__name__} was to step on the shards of a FullyShard, whose gradients only "
                "its own methods complete and forget; give the optimizer's class to FullyShard, and call its "
                "step() and zero_grad()"
            )

    def _before_step(self, _: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.slices.updating:
            return
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise RuntimeError("the optimizer of shards takes no closure; give it to the FullyShard's step()")
        if self.slices.memory.longest is not None:
            raise RuntimeError(
                "the optimizer's state lies on disk, and its own step() would bring all of it to memory; "
                "call the FullyShard's step()"
            )
        self.complete()
