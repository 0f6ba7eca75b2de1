"""`Sharded`: the engine's strategy for plain data parallelism and ZeRO 1 to 3, whatever each rank keeps.

The table in contract/residency.py decides: data parallelism and ZeRO 1 to 3 are this one strategy with four
rows. The engine's step (engine/training_step.py) is the same for all of them, and calls these methods. A
model may have several sets of parameters, each with its ranks (parameter_set.py). How gradients come to be
sums differs: where parameters are whole, whenever some arrive (whole_parameters.py); otherwise when a unit of
the model is left (sharded_parameters.py). From there on all rows do the same, which is here, and
state_by_name.py tells where each part of the state lies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from minidist.parallel.contract.memory_report import ResidentTensors
from minidist.parallel.contract.tensor_boxes import optimizer_boxes
from minidist.parallel.flat.bucket_layout import ParameterRange
from minidist.parallel.flat.buckets import Bucket
from minidist.parallel.sharding.optimizer.optimizer_slices import OptimizerSlice, OptimizerSlices
from minidist.parallel.sharding.optimizer.whole_on_owners import WholeOnOwners
from minidist.parallel.sharding.sets.parameter_set import ParameterSet, Totals
from minidist.parallel.training import clipping


class Sharded(ABC):
    """Parameters that the ranks of a group train together, each keeping what a row of the table says.

    With the row of data parallelism that is everything, and only the gradients' sums are shared.

    In a step the engine calls `zero_grad`, then `forward` and a backward pass for each micro-batch. All but
    the last are inside `no_sync`, and `begin_final_backward` comes before the last backward pass. Then follow
    `synchronize`, perhaps `rescale`, and `update`, or `drop` if the step is skipped. A pipeline computes
    without `forward`: it calls `ready` first, and `begin_final_backward` before the last backward pass, or
    after it if all were inside `no_sync`.

    Attributes:
        model: the whole model, or the part of it that these ranks train.
        sets: all ranks that train the model share the first; some of them share each of the others.
        gradient_comm: sums gradients over the ranks of `group`, which is None for all of the world.
        parameters: by index. names: of each; the first one of a tied parameter. set_of: the set of each.
        optimizer: for the parameters, or this rank's share of them; learning-rate schedulers take it.
        group_names: the names in each of the optimizer's groups.
        slices: this rank's part.
        residency: the row, the same for all sets.
        sharded: whether this rank's update uses a share of the gradients, and not all.
        gathers: whether `forward` is a collective, which a rank without rows also has to call.
        buckets: hold the parameters, as far as they are dealt.
        on_owners: those of which only shards are in buckets, and the optimizer needs the whole.
        orders: parameter indices, for each time that some were dealt; None where none are.
    """

    model: nn.Module
    parameters: Sequence[nn.Parameter]
    names: Mapping[Tensor, str]
    set_of: dict[Tensor, ParameterSet]
    optimizer: torch.optim.Optimizer
    group_names: Sequence[Sequence[str]]
    slices: OptimizerSlices
    buckets: list[Bucket[Any]]
    orders: list[list[int]] | None

    def __init__(self, sets: Sequence[ParameterSet]) -> None:
        self.sets, (first, *others) = [*sets], sets
        self.gradient_comm, self.group = first.gradient_comm, first.gradient_comm.group
        self.residency = first.residency
        if any(param_set.residency != self.residency for param_set in others):
            raise ValueError(
                f"the residencies are {[each.residency for each in sets]}; either all sets of parameters are "
                "whole between steps, or none is, and so are their gradients and state: give all sets one row"
            )
        self.sharded = not self.residency.whole_state
        self.gathers = not self.residency.whole_parameters or bool(others)  # rows go to their experts
        self.on_owners: list[WholeOnOwners] = []
        self._own = Totals()

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The whole model's outputs for this rank's rows."""

    def ready(self) -> None:  # noqa: B027 (units prepare themselves, as they are called)
        """Prepare for forward passes that do not call `forward`."""

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, more backward passes follow: gradients that are kept whole are not sent yet."""

    @abstractmethod
    def synchronize(self) -> tuple[float, float]:
        """Wait until the gradients are complete; returns weight and loss, summed over the ranks."""

    @abstractmethod
    def update(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the optimizer's step; every rank then computes with the new parameters.

        closure: for an optimizer that requires one: runs all passes and `synchronize`, and returns the loss.
        """

    @abstractmethod
    def publish(self) -> None:
        """Let all ranks compute with what the optimizer has made of the slices. A collective."""

    @abstractmethod
    def make_buckets(self, order: Sequence[Sequence[str]] | None, saved: Collection[str]) -> None:
        """Make the buckets of a saved run; saved: names with optimizer state. A collective."""

    @abstractmethod
    def gradients(self) -> list[Tensor]:
        """This rank's part of the sums, as far as the slices have it."""

    @abstractmethod
    def complete(self) -> None:
        """Sum the gradients over the ranks and give the slices their part, unless that is done."""

    @abstractmethod
    def forget(self) -> None:
        """Forget the gradients of a step, and their sums."""

    @abstractmethod
    def rescale(self, factor: float, kept: bool = True) -> None:
        """Multiply the gradients, also what compression has kept back of them.

        Without `kept` only those that `update` takes, in the masters' precision if there are masters.
        """

    @abstractmethod
    def resident(self) -> list[Tensor]:
        """The tensors that hold parameters on this rank now."""

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and buffer, as for `Engine.whole`. Sends nothing if each rank has all of them."""
        for name, value in self.model.state_dict().items():
            if isinstance(value, Tensor):  # `training_state.extra_state` has the rest
                yield name, value.detach()

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""
        if not self.sharded:
            self.optimizer.zero_grad()  # an optimizer's own may do more
        self.forget()

    def begin_final_backward(self, weight: float | Tensor, loss_sum: Tensor, waits: bool = True) -> None:
        """Announce the backward pass that completes the gradients, which then become sums over the ranks.

        weight, loss_sum: of this rank's losses, and their sum, each times its weight; summed as well. waits:
        whether the end of that pass may wait for the sums.
        """
        self._own = Totals(weight, loss_sum, last_passes=1.0)

    def announce(self, is_padding: bool) -> None:
        """Say whether the rows of the next pass are padding: they use no parameter of the first set.

        Other sets, such as experts, also get rows of other ranks, which may count.
        """
        self.sets[0].pass_has_rows = not is_padding

    def drop(self) -> None:
        """Forget the gradients of a step that is skipped, and what compression has kept back of them."""
        self.zero_grad()
        for param_set in self.sets:
            param_set.clear()

    def held(self) -> ResidentTensors:
        """What this rank holds now. Masters count as the optimizer's, memory for reductions as gradients."""
        sums = [tensor for each in self.sets for tensor in each.tensors()]
        sums += [each.gradients.reduced for each in self.on_owners if each.gradients is not None]
        own = [p.grad for p in self.model.parameters() if p.grad is not None]
        state = self.optimizer.state.values()
        return ResidentTensors(
            self.resident(),
            [*own, *sums],
            [*self.slices.masters(), *(box.tensor for each in state for box in optimizer_boxes("", each))],
            [*self.model.buffers()],
        )

    def value_buckets(self) -> list[Bucket[Any]]:
        """The buckets that hold parameters' values, cut into shares."""
        return self.buckets if self.sharded else []

    def parameter_of(self, each: OptimizerSlice, span: ParameterRange) -> Tensor:
        """The parameter of which a slice has a range."""
        return each.value if each.bucket is None else self.parameters[span.param_index]

    def set_of_slice(self, each: OptimizerSlice) -> ParameterSet:
        """The set of the parameters in a slice."""
        return self.set_of[self.parameter_of(each, each.ranges[0])]

    def after_own_method(self, *_: Any) -> None:
        """Publish what a method of the optimizer's own has changed, unless its step calls that method."""
        if not self.slices.updating:
            self.publish()

    def norm(self, norm_type: float = 2.0) -> float:
        """The norm of the gradients over all ranks, each element counted once. A collective.

        It sends 2 (n - 1) / n 8 bytes over the owners of the shares, if there are any; with several sets over
        all ranks.
        """
        gradients, (first, *others) = self.gradients(), self.sets
        over, is_shared = first.gradient_comm.share_group, self.sharded
        if others:
            counted = [each for each in self.slices.all if self.set_of_slice(each).counts_here]
            gradients = [each.tensor.grad for each in counted if each.tensor.grad is not None]
            over, is_shared = first.gradient_comm.group, True
        return clipping.global_norm(gradients, is_shared, over, norm_type)

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Shorten the gradients if their norm over all ranks is above `max_norm`; call it before `step`.

        It does what `torch.nn.utils.clip_grad_norm_` does in one process, but for the `grad` of parameters.
        A collective: it completes the gradients, as `step` then need not, and sends 2 (n - 1) / n 8 bytes
        more. norm_type: the p of the p-norm, above 0, or `math.inf`. Returns the norm before.
        """
        clipping.check_max_norm("max_norm", max_norm)
        clipping.check_norm_type(norm_type)
        self.complete()
        norm = self.norm(norm_type)
        if (factor := clipping.clip_factor(norm, max_norm)) != 1:
            for gradient in self.gradients():
                gradient.mul_(factor)
        return norm
