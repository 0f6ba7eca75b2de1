"""How the parameters that a worker has trained meet those of the others, fragment by fragment.

`AllReduceExchange` is for the ranks of a group: they reduce a fragment together, and each makes the same
outer step. `CoordinatorExchange` is for workers that come and go: it sends a fragment to the coordinator and
gets it back after the outer step. Each starts an exchange, and finishes it when it is asked for the result.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, NamedTuple

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
from minidist.parallel.flat.bucket_layout import BucketLayout
from minidist.parallel.flat.gradients import GradientComm
from minidist.parallel.flat.joined_messages import deal_to_buckets, digest_of

REFUSED = -1.0
"""A coordinator's answer, in place of its timeout, if a worker's model or number of fragments is another."""


def nesterov(
    parameters: Iterable[nn.Parameter], lr: float = 0.7, momentum: float = 0.9
) -> torch.optim.Optimizer:
    """Make DiLoCo's outer optimizer: SGD with Nesterov momentum (Douillard et al. 2023, section 3.1)."""
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum, nesterov=True)


class FlatCopies(NamedTuple):
    """Memory for copies of parameters, which is sent as one, and each parameter's view of it."""

    parameters: list[Any]
    flat: Tensor
    views: list[Tensor]


class AllReduceExchange:
    """The ranks of a group. `outer` is the outer optimizer, if there is one.

    limit: bytes of a bucket. A fragment is a list of buckets; `anchors` has the value that each parameter had
    after the last outer step.
    """

    def __init__(
        self,
        module: nn.Module,
        gradient_comm: GradientComm,
        limit: int,
        fragments: int,
        outer: MakeOptimizer | None,
    ) -> None:
        self._module, self._comm, self._limit, self._count = module, gradient_comm, limit, fragments
        self.anchors: dict[nn.Parameter, nn.Parameter] = {}
        self.outer: torch.optim.Optimizer | None = None
        self._parameters: list[nn.Parameter] = []
        self._fragments: list[list[FlatCopies]] = []
        self._under_way: list[tuple[FlatCopies, Any]] = []
        if outer is not None:
            self.anchors = {p: nn.Parameter(p.detach().clone()) for p in trainable(module)}
            self.outer = outer(self.anchors.values())
            self._lay_out()  # the ranks wait for each other here, and not in the first exchange

    def start(self, turn: int) -> None:
        """Launch the all-reduces of a fragment."""
        self._lay_out()
        self._send(self._fragments[turn % self._count] if self._fragments else ())

    def finish(self) -> Iterable[tuple[nn.Parameter, Tensor]]:
        """Wait for the means, and make the outer step; return each parameter with its new value."""
        values = self._means()
        if self.outer is not None:
            for parameter, mean in values.items():
                anchor = self.anchors[parameter]
                anchor.grad = mean.neg_().add_(anchor.detach())  # in the bucket's memory
            self.outer.step()
            self.outer.zero_grad()
            values = {parameter: self.anchors[parameter].detach() for parameter in values}
        return values.items()

    def average(self) -> None:
        """Average all parameters; the anchors are then the same."""
        self._lay_out()
        self._send([bucket for fragment in self._fragments for bucket in fragment])
        for parameter, mean in self._means().items():
            parameter.data.copy_(mean)
            if parameter in self.anchors:
                self.anchors[parameter].data.copy_(mean)

    @torch.no_grad()
    def _send(self, buckets: Iterable[FlatCopies]) -> None:
        algorithm, group = self._comm.algorithm, self._comm.group
        for bucket in buckets:
            torch._foreach_copy_(bucket.views, bucket.parameters)
            work = comm.all_reduce(bucket.flat, "mean", algorithm, group, async_op=True)
            self._under_way.append((bucket, work))

    def _means(self) -> dict[nn.Parameter, Tensor]:
        """Wait for the all-reduces that are under way."""
        means: dict[Any, Tensor] = {}
        for bucket, work in self._under_way:
            work.wait()
            means.update(zip(bucket.parameters, bucket.views, strict=True))
        self._under_way.clear()
        return means

    def _lay_out(self) -> None:
        """Deal the parameters to fragments and buckets, again if others get gradients now."""
        parameters = trainable(self._module)
        if list(map(id, parameters)) == list(map(id, self._parameters)):
            return
        if self.outer is not None and self.anchors.keys() != {*parameters}:
            raise ValueError("other parameters get gradients than when LocalSGD was made; make it again")
        self._parameters = parameters
        if self._comm.ranks == 1 and self.outer is None:
            return  # the mean is there already
        self._fragments = []
        for part in deal_parameters(parameters, self._count, "fragments"):
            self._fragments.append([])
            for indices in deal_to_buckets(part.parameters, range(len(part.parameters)), self._limit):
                layout, own = BucketLayout(indices, part.parameters), [part.parameters[i] for i in indices]
                flat = self._comm.zeros(layout.length, layout.dtype, own[0].device)
                self._fragments[-1].append(FlatCopies(own, flat, layout.views_of(flat)))

    def held(self) -> Iterable[Tensor]:
        """Return what stays between steps: the buckets, the anchors and the outer optimizer's state."""
        buckets = (bucket.flat for fragment in self._fragments for bucket in fragment)
        states = self.outer.state.values() if self.outer is not None else ()
        return (
            *buckets,
            *self.anchors.values(),
            *(x for each in states for x in each.values() if x is not None),
        )


class CoordinatorExchange:
    """A worker of a coordinator: its slot, and `joined_at`, the outer steps that the coordinator had made.

    The coordinator may wait for others for its own timeout, twice: for the first that sends, and then for the
    rest. So an answer may take that much longer, or a worker that hangs would end those that do not.
    """

    def __init__(self, model: nn.Module, address: str, fragments: int, timeout: float) -> None:
        self._parts = deal_parameters(trainable(model), fragments, "fragments")
        self._membership = Membership(address, timeout)
        theirs = self._membership.exchange(hello(model, fragments)).view(torch.float64).item()
        if theirs == REFUSED:
            self._membership.close()
            raise ValueError(
                f"fragments ({fragments}), or the model in a parameter's or buffer's name, shape, dtype or "
                f"requires_grad, is not as on the coordinator at {address}; give both sides the same"
            )
        self._membership.timeout += 2 * theirs
        answer = self._membership.receive()
        self.joined_at, self.slot = head_of(answer)
        whole_of(model).load_values(answer)
        self._under_way: tuple[ServerPart, Future[Tensor]]

    def start(self, turn: int) -> None:
        """Send a fragment, in a thread: this one can train on meanwhile, and the process end."""
        part, answer = self._parts[turn % len(self._parts)], Future[Tensor]()
        message = part.pack_values(turn)

        def exchange() -> None:
            try:
                answer.set_result(self._membership.exchange(message))
            except BaseException as error:
                answer.set_exception(error)

        self._under_way = part, answer
        threading.Thread(target=exchange, name="coordinator", daemon=True).start()

    def finish(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Wait for the coordinator's answer, or leave; return each parameter with its new value."""
        part, answer = self._under_way
        try:
            message = answer.result()
        except BaseException:
            self.close()
            raise
        return zip(part.parameters, part.unpack_values(message), strict=True)

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
