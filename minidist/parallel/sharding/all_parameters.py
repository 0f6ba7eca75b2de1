"""All parameters of a model, in sets, and this rank's part of the optimizer: norm, clip and publish.

How gradients come to be complete differs: where parameters are whole, whenever some arrive
(whole_parameters.py); otherwise when a unit of the model is left (sharded_parameters.py). From there on all
sets do the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from minidist.parallel.flat.buckets import Bucket
from minidist.parallel.sharding.optimizer.optimizer_slices import OptimizerSlice, OptimizerSlices
from minidist.parallel.sharding.optimizer.whole_on_owners import WholeOnOwners
from minidist.parallel.sharding.sets.parameter_set import ParameterSet
from minidist.parallel.training import clipping


class AllParameters(ABC):
    """The parameters that ranks train together, and what all of them have in common once sums are complete.

    Attributes:
        sets: all ranks that train the model share the first; some of them share each of the others.
        parameters: by index. set_of: the set of each. buckets: hold them, as far as they are dealt.
        on_owners: those of which only shards are in buckets, and the optimizer needs the whole.
        slices: this rank's part.
        undealt: indices of parameters in no bucket yet, where a share of them will have the state.
        undealt_masters: their whole masters until then.
        orders: parameter indices, for each time that some were dealt; None where none are.
    """

    sets: list[ParameterSet]
    parameters: Sequence[nn.Parameter]
    set_of: dict[Tensor, ParameterSet]
    buckets: list[Bucket]
    on_owners: list[WholeOnOwners]
    slices: OptimizerSlices
    undealt: list[int]
    undealt_masters: dict[Tensor, Tensor]
    orders: list[list[int]] | None

    @abstractmethod
    def name_of(self, param_index: int) -> str:
        """A parameter's name."""

    @abstractmethod
    def value_buckets(self) -> list[Bucket]:
        """The buckets that hold parameters' values, cut into shares."""

    @abstractmethod
    def complete(self) -> None:
        """Sum the gradients over the ranks and give the slices their part, unless that is done."""

    @abstractmethod
    def gradients(self) -> list[Tensor]:
        """This rank's part of the sums, as far as the slices have it."""

    @abstractmethod
    def publish(self) -> None:
        """Let all ranks compute with what the optimizer has made of the slices. A collective."""

    def set_of_slice(self, each: OptimizerSlice) -> ParameterSet:
        """The set of the parameters in a slice."""
        whole = each.value if each.bucket is None else self.parameters[each.ranges[0].param_index]
        return self.set_of[whole]

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
        over, is_shared = first.gradient_comm.share_group, not first.residency.state
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
