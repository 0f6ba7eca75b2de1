"""A set of parameters that ranks share in one way, and what all such sets have in common: update, publish,
clip.

A set says which parameters it has, what each rank keeps whole (residency.py), which ranks average the
gradients and which of them own a share each (`GradientComm`). How gradients come to be complete differs:
where parameters are whole, whenever some arrive (whole_parameters.py); otherwise when a unit of the model is
left (sharded_parameters.py). From there on all sets do the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from minidist.parallel.contract.engine import requires_closure
from minidist.parallel.flat.buckets import Bucket
from minidist.parallel.flat.gradient_comm import GradientComm
from minidist.parallel.sharding.gradient_rounds import GradientRounds
from minidist.parallel.sharding.optimizer_slices import OptimizerSlices
from minidist.parallel.sharding.residency import Residency
from minidist.parallel.training.clipping import check_max_norm, check_norm_type, clip_gradients


class SharedParameters(ABC):
    """Parameters that the same ranks share in the same way.

    Attributes:
        residency: what every rank keeps whole. gradient_comm: its `group` averages the gradients, and its
            `share_group` are the owners of a share each.
        parameters: by index. buckets: hold them, as far as they are dealt. slices: this rank's part. rounds:
            reduce the gradients, once the first backward pass has dealt the parameters.
        waiting, masters: the indices of parameters that no backward pass has dealt yet, though a share of
            them will have the state; their masters, whole.
        orders: parameter indices, for each time that some were dealt; None where none are.
    """

    residency: Residency
    gradient_comm: GradientComm
    parameters: Sequence[nn.Parameter]
    buckets: list[Bucket]
    slices: OptimizerSlices
    rounds: GradientRounds | None
    updating = False  # the optimizer's step is under way
    waiting: list[int]
    masters: dict[Tensor, Tensor]
    orders: list[list[int]] | None

    # What a step asks for. Each is a collective where it sends.

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on this rank's rows."""

    def ready(self) -> None:  # noqa: B027 (sharded parameters see their units called)
        """Prepare for forward passes that do not go through `forward`."""

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, gradients add up on this rank and nothing is sent, if the residency keeps them whole."""

    @abstractmethod
    def begin_final_backward(self, totals: tuple[float | Tensor, float | Tensor], waits: bool) -> None:
        """Have the next backward pass complete the gradients; `totals` are summed over the ranks, too."""

    @abstractmethod
    def synchronize(self) -> tuple[float, float]:
        """Complete the gradients and give them to the slices; returns the totals, summed over the ranks."""

    @abstractmethod
    def complete(self, steps: bool = False) -> None:
        """Complete the gradients and give them to the slices, unless that is done.

        steps: an update follows, which uses them up.
        """

    @abstractmethod
    def publish(self) -> None:
        """Let all ranks compute with what the optimizer has made of the slices."""

    @abstractmethod
    def updated(self) -> None:
        """React to the end of an update."""

    @abstractmethod
    def forget(self) -> None:
        """Forget the gradients."""

    def clear(self) -> None:  # noqa: B027 (only compression keeps something)
        """Drop what compression has kept back of the gradients."""

    def rescale(self, factor: float, kept: bool = True) -> None:
        """Multiply the complete gradients; with `kept` also what compression has kept back of them."""
        for gradient in self.gradients():
            gradient.mul_(factor)

    @abstractmethod
    def bytes_per_step(self, passes: int = 1) -> int:
        """Bytes that this rank sends in a step of so many forward and backward passes."""

    # What the state asks for.

    @abstractmethod
    def name_of(self, param_index: int) -> str:
        """A parameter's name."""

    @abstractmethod
    def make_buckets(self, order: Sequence[Sequence[str]] | None, saved: Collection[str]) -> None:
        """Make the buckets that a saved run had, as far as they are not there.

        order: names, as `StateByName.settings` gives them; None where the run had none. saved: names of the
        parameters with optimizer state. A frozen one may have some, to go on with later.
        """

    @abstractmethod
    def resident(self) -> list[Tensor]:
        """The parameters, or the parts of them, that this rank holds now."""

    # What is the same for all.

    def update(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """The optimizer's step on this rank's slices, then `publish`. A collective.

        closure: computes the loss and its gradients anew. An optimizer that requires one calls it itself;
        each call but the first publishes before. options: further arguments of the optimizer's own `step`.
        Returns the loss.
        """
        owns_closure = closure is not None and requires_closure(self.slices.optimizer)
        calls = 0

        def evaluate() -> Any:
            nonlocal calls
            if calls:  # the optimizer has changed the slices since
                self.publish()
            calls += 1
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self.complete(steps=True)
            return loss

        self.updating = True
        try:
            if owns_closure:
                loss = self.slices.step(closure=evaluate, **options)
            else:
                loss = evaluate()
                self.slices.step(**options)
        finally:
            self.updating = False
        self.publish()
        self.updated()
        return loss

    def after_own_method(self, *_: Any) -> None:
        """Publish what a method of the optimizer's own has changed, unless its step calls that method."""
        if not self.updating:
            self.publish()

    def gradients(self) -> list[Tensor]:
        """This rank's part of the complete gradients."""
        return self.slices.gradients()

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Shorten the gradients if their norm over all ranks is above `max_norm`; returns the norm before.

        A collective: it completes the gradients, and sends 2 (n - 1) / n 8 bytes more if they are shared.
        """
        check_max_norm("max_norm", max_norm)
        check_norm_type(norm_type)
        self.complete()
        is_shared, over = not self.residency.state, self.gradient_comm.share_group
        return clip_gradients(self.gradients(), max_norm, is_shared, over, norm_type)

    def named_ranges(self) -> Iterator[tuple[str, range, Tensor]]:
        """This rank's part of each parameter: its name, which elements of it, flattened, and their values."""
        for bucket in self.buckets:
            for at, span in bucket.ranges():
                elements = range(span.start, span.stop)
                yield self.name_of(span.param_index), elements, bucket.shard[at : at + len(span)]
