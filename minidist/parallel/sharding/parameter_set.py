"""A set of parameters that ranks share in one way, and what all such sets have in common: update, publish,
clip.

A set says which parameters it has, what each rank keeps whole (residency.py), which ranks average the
gradients and which of them own a share each (`GradientComm`). How gradients come to be complete differs:
where parameters are whole, whenever some arrive (whole_parameters.py); otherwise when a unit of the model is
left (sharded_parameters.py). From there on all sets do the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from minidist.parallel.flat.buckets import Bucket
from minidist.parallel.flat.gradient_comm import GradientComm
from minidist.parallel.sharding.gradient_rounds import GradientRounds
from minidist.parallel.sharding.optimizer_slices import OptimizerSlices
from minidist.parallel.sharding.residency import Residency
from minidist.parallel.training.clipping import check_max_norm, check_norm_type, clip_gradients


class ParameterSet(ABC):
    """Parameters that the same ranks share in the same way.

    Attributes:
        residency: what every rank keeps whole. gradient_comm: its `group` averages the gradients, and its
            `share_group` are the owners of a share each.
        parameters: by index. buckets: hold them, as far as they are dealt. slices: this rank's part. rounds:
            reduce the gradients, once the first backward pass has dealt the parameters.
        waiting: indices of parameters that no bucket holds yet, where a share of them will have the state.
        masters: their whole masters until then.
        orders: parameter indices, for each time that some were dealt; None where none are.
    """

    residency: Residency
    gradient_comm: GradientComm
    parameters: Sequence[nn.Parameter]
    buckets: list[Bucket]
    slices: OptimizerSlices
    rounds: GradientRounds | None
    waiting: list[int]
    masters: dict[Tensor, Tensor]
    orders: list[list[int]] | None

    @abstractmethod
    def complete(self, steps: bool = False) -> None:
        """Complete the gradients and give them to the slices, unless that is done. A collective.

        steps: an update follows, which uses them up.
        """

    @abstractmethod
    def publish(self) -> None:
        """Let all ranks compute with what the optimizer has made of the slices. A collective."""

    @abstractmethod
    def name_of(self, param_index: int) -> str:
        """A parameter's name."""

    def rescale(self, factor: float, kept: bool = True) -> None:
        """Multiply the complete gradients; with `kept` also what compression has kept back of them."""
        for gradient in self.gradients():
            gradient.mul_(factor)

    def after_own_method(self, *_: Any) -> None:
        """Publish what a method of the optimizer's own has changed, unless its step calls that method."""
        if not self.slices.updating:
            self.publish()

    @abstractmethod
    def gradients(self) -> list[Tensor]:
        """This rank's part of the complete gradients."""

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Shorten the gradients if their norm over all ranks is above `max_norm`; returns the norm before.

        A collective: it completes the gradients, and sends 2 (n - 1) / n 8 bytes more if they are shared.
        """
        check_max_norm("max_norm", max_norm)
        check_norm_type(norm_type)
        self.complete()
        is_shared, over = not self.residency.state, self.gradient_comm.share_group
        return clip_gradients(self.gradients(), max_norm, is_shared, over, norm_type)
