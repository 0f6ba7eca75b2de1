"""How the parameters that a worker has trained meet those of the others, fragment by fragment.

`AllReduceExchange` is for the ranks of a group: they reduce a fragment together, and each makes the same
outer step. `CoordinatorExchange` is for workers that come and go: it sends a fragment to the coordinator and
gets it back after the outer step. Each starts an exchange, and finishes it when it is asked for the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.comm.membership import Membership
from minidist.parallel.averaging.parameter_assignment import (
    ServerPart,
    deal_parameters,
    head_of,
    in_order,
    trainable,
)
from minidist.parallel.contract.user_functions import MakeOptimizer
from minidist.parallel.flat.buckets import Bucket, GradientComm
from minidist.parallel.flat.joined_messages import deal_to_buckets, digest_of

REFUSED = -1
"""Opens a coordinator's answer to a worker whose model or number of fragments is another."""


def nesterov(
    parameters: Iterable[nn.Parameter], lr: float = 0.7, momentum: float = 0.9
) -> torch.optim.Optimizer:
    """Make DiLoCo's outer optimizer: SGD with Nesterov momentum (Douillard et al. 2023, section 3.1)."""
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum, nesterov=True)


class Fragment:
    """Parameters that are averaged together, in buckets.

    Attributes:
        parameters, buckets: in the same order.
        anchors: the parameters after the last outer step; none without an outer optimizer.
    """

    def __init__(self, part: ServerPart, gradient_comm: GradientComm, limit: int, anchored: bool) -> None:
        self.parameters: list[nn.Parameter] = []
        self.buckets: list[Bucket] = []
        self._works: list[Any] = []
        for indices in deal_to_buckets(part.parameters, range(len(part.parameters)), limit):
            chosen = [part.parameters[index] for index in indices]
            numel = sum(parameter.numel() for parameter in chosen)
            self.parameters += chosen
            self.buckets.append(Bucket(range(len(chosen)), chosen))
            self.buckets[-1].hold(gradient_comm.zeros(numel, chosen[0].dtype, chosen[0].device))
        self.anchors = [nn.Parameter(p.detach().clone()) for p in self.parameters] if anchored else []

    @torch.no_grad()
    def start(self, gradient_comm: GradientComm) -> None:
        """Copy the parameters, and launch the all-reduces."""
        algorithm, group = gradient_comm.algorithm, gradient_comm.group
        for bucket in self.buckets:
            torch._foreach_copy_(bucket.views, bucket.parameters)
            self._works.append(comm.all_reduce(bucket.gradients, "mean", algorithm, group, async_op=True))

    def means(self) -> list[Tensor]:
        """Wait, and return the mean of each parameter."""
        while self._works:
            self._works.pop(0).wait()
        return [view for bucket in self.buckets for view in bucket.views]


class AllReduceExchange:
    """The ranks of a group. `outer` is the outer optimizer, if there is one."""

    def __init__(
        self,
        module: nn.Module,
        gradient_comm: GradientComm,
        limit: int,
        fragments: int,
        outer: MakeOptimizer | None,
    ) -> None:
        self._module, self._comm, self._limit, self._count = module, gradient_comm, limit, fragments
        self._anchored = outer is not None
        self._parameters: list[nn.Parameter] = []
        self._fragments: list[Fragment] = []
        self._under_way: Fragment | None = None
        self.outer: torch.optim.Optimizer | None = None
        if outer is not None:
            self._lay_out()
            self.outer = outer([anchor for each in self._fragments for anchor in each.anchors])

    def start(self, turn: int) -> None:
        """Launch the all-reduces of a fragment."""
        self._lay_out()
        self._under_way = self._fragments[turn % self._count] if self._fragments else None
        if self._under_way is not None:
            self._under_way.start(self._comm)

    def finish(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Wait for the mean, and make the outer step; return each parameter with its new value."""
        fragment = self._under_way
        if fragment is None:
            return ()
        values = fragment.means()
        if self.outer is not None:
            for anchor, mean in zip(fragment.anchors, values, strict=True):
                anchor.grad = mean.neg_().add_(anchor.detach())  # in the bucket's memory
            self.outer.step()
            for anchor in fragment.anchors:
                anchor.grad = None
            values = [anchor.detach() for anchor in fragment.anchors]
        return zip(fragment.parameters, values, strict=True)

    @torch.no_grad()
    def average(self) -> None:
        """Average all parameters; the anchors are then the same."""
        self._lay_out()
        for fragment in self._fragments:
            fragment.start(self._comm)
        for fragment in self._fragments:
            means = fragment.means()
            for values in (fragment.parameters, fragment.anchors)[: 1 + self._anchored]:
                torch._foreach_copy_([*values], means)

    def held(self) -> Iterator[Tensor]:
        """Return the tensors that stay between steps: the buckets, and the anchors."""
        for fragment in self._fragments:
            yield from (bucket.gradients for bucket in fragment.buckets)
            yield from fragment.anchors

    def _lay_out(self) -> None:
        """Make the fragments, again if other parameters get gradients now."""
        parameters = trainable(self._module)
        if list(map(id, parameters)) == list(map(id, self._parameters)):
            return
        if self.outer is not None:
            raise ValueError("other parameters get gradients than when LocalSGD was made; make it again")
        self._parameters = parameters
        if self._comm.ranks > 1 or self._anchored:  # the mean over one rank is there already
            parts = deal_parameters(parameters, self._count, "fragments")
            self._fragments = [Fragment(part, self._comm, self._limit, self._anchored) for part in parts]


class CoordinatorExchange:
    """A worker of a coordinator.

    Attributes:
        slot: this worker's.
        joined_at: the outer steps that the coordinator had made.
    """

    def __init__(self, model: nn.Module, address: str, fragments: int, timeout: float) -> None:
        self._parts = deal_parameters(trainable(model), fragments, "fragments")
        self._membership = Membership(address, timeout)
        answer = self._membership.exchange(hello(model, fragments))
        self.joined_at, self.slot = head_of(answer)
        if self.joined_at == REFUSED:
            self._membership.close()
            raise ValueError(
                f"fragments ({fragments}), or the model in a parameter's or buffer's name, shape, dtype or "
                f"requires_grad, is not as on the coordinator at {address}; give both sides the same"
            )
        whole_of(model).load_values(answer)
        self._thread = ThreadPoolExecutor(1, "coordinator")
        self._under_way: tuple[ServerPart, Future[Tensor]]

    def start(self, turn: int) -> None:
        """Send a fragment, in a thread: this one can train on meanwhile."""
        part = self._parts[turn % len(self._parts)]
        self._under_way = part, self._thread.submit(self._membership.exchange, part.pack_values(turn))

    def finish(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Wait for the coordinator's answer; return each parameter with its new value."""
        part, answer = self._under_way
        return zip(part.parameters, part.unpack_values(answer.result()), strict=True)

    def held(self) -> Iterable[Tensor]:
        """Return nothing: the coordinator has it all."""
        return ()

    def close(self) -> None:
        """Leave."""
        self._membership.close()


def hello(model: nn.Module, fragments: int) -> Tensor:  # (16,) uint8
    """Return a worker's first message, which says what it trains."""
    digest = digest_of([*model.named_parameters(), *model.named_buffers()])
    return torch.tensor([digest, fragments]).view(torch.uint8)


def whole_of(model: nn.Module) -> ServerPart:
    """Return everything that a worker begins with: the parameters, also frozen ones, and the buffers."""
    return in_order((*model.parameters(), *model.buffers()))
