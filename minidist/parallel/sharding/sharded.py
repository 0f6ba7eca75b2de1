"""`Sharded`: the engine's strategy for plain data parallelism and ZeRO 1 to 3, whatever each rank keeps.

The table in contract/residency.py decides: data parallelism and ZeRO 1 to 3 are this one strategy with four
rows. A model may have several sets of parameters, each with its row and its ranks (parameter_set.py). How
gradients come to be sums differs: where parameters are whole, whenever some arrive (whole_parameters.py);
otherwise when a unit of the model is left (sharded_parameters.py). From there on all rows do the same, which
is here, and state_by_name.py knows where each part of the state lies.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from minidist.parallel.contract.strategy import ResidentTensors
from minidist.parallel.flat.buckets import Bucket
from minidist.parallel.sharding.optimizer.whole_on_owners import WholeOnOwners
from minidist.parallel.sharding.sets.parameter_set import ParameterSet
from minidist.parallel.sharding.state_by_name import StateByName, tensor_boxes
from minidist.parallel.training import clipping


class Sharded(StateByName):
    """Parameters that ranks train together, each keeping what a row of the table says.

    With the row of data parallelism that is everything, and only the gradients' sums are shared.

    Attributes:
        buckets: hold the parameters, as far as they are dealt.
        on_owners: those of which only shards are in buckets, and the optimizer needs the whole.
    """

    buckets: list[Bucket]

    def __init__(self, sets: Sequence[ParameterSet]) -> None:
        self.sets, (first, *others) = [*sets], sets
        self.gradient_comm, self.group = first.gradient_comm, first.gradient_comm.group
        self.sharded = any(not param_set.residency.state for param_set in sets)
        self.gathers = not first.residency.parameters or bool(others)  # rows go to their experts
        self.on_owners: list[WholeOnOwners] = []
        self._own: tuple[float | Tensor, float | Tensor] = (0.0, 0.0)  # this rank's totals

    @abstractmethod
    def complete(self) -> None:
        """Sum the gradients over the ranks and give the slices their part, unless that is done."""

    @abstractmethod
    def forget(self) -> None:
        """Forget the gradients of a step, and their sums."""

    @abstractmethod
    def clear(self) -> None:
        """Drop what compression has kept back of the gradients, and the gradients in the buckets."""

    @abstractmethod
    def rescale(self, factor: float, kept: bool = True) -> None:
        """Multiply the gradients; with `kept` also what compression has kept back of them."""

    @abstractmethod
    def resident(self) -> list[Tensor]:
        """The tensors that hold parameters on this rank now."""

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""
        if not self.sharded:
            self.optimizer.zero_grad()  # an optimizer's own may do more
        self.forget()

    def begin_final_backward(self, weight: float | Tensor, loss_sum: Tensor, waits: bool = True) -> None:
        """Keep this rank's weight and loss for the end of the next backward pass, which sums them."""
        self._own = weight, loss_sum

    def announce(self, is_padding: bool) -> None:
        """Say whether the rows of the next pass are padding: they use no parameter of the first set.

        Other sets, such as experts, also get rows of other ranks, which may count.
        """
        self.gradient_comm.pass_has_rows = not is_padding

    def multiply(self, factor: float) -> None:
        """Multiply the gradients that `update` takes, but not what compression has kept back of them."""
        self.rescale(factor, kept=False)

    def drop(self) -> None:
        """Forget the gradients of a step that is skipped, and what compression has kept back of them."""
        self.zero_grad()
        self.clear()

    def held(self) -> ResidentTensors:
        """What this rank holds now. Masters count as the optimizer's, memory for reductions as gradients."""
        sums = [tensor for each in self.sets for tensor in each.tensors()]
        sums += [each.reduced for each in self.on_owners if each.reduced is not None]
        own = [p.grad for p in self.model.parameters() if p.grad is not None]
        state = self.optimizer.state.values()
        return ResidentTensors(
            self.resident(),
            [*own, *sums],
            [
                *self.slices.masters(),
                *self.undealt_masters.values(),
                *(box.tensor for each in state for box in tensor_boxes("", each)),
            ],
            [*self.model.buffers()],
        )

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
