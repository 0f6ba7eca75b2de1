"""DiLoCo with workers that come and go: a coordinator has the weights and takes the outer steps.

Workers train alone for k steps and send their parameters. When all workers have sent, the coordinator takes
their mean, makes a step of the outer optimizer, and answers with the new weights. Each worker is a process of
its own that only the coordinator knows (`comm/membership.py`). So a worker that is killed while it computes
or sends is left out of the next outer step (it counts if all had arrived), and nobody else notices. A new
worker waits for the end of the outer step that is under way, and begins with its weights.

`Updates` decides whom an outer step waits for, as in the synchronous parameter server (bound 0).

Sources: Douillard et al. 2023, "DiLoCo", algorithm 1 and section 3.3 (workers that come, go and fail to
answer); Jaghouar et al. 2024, "OpenDiLoCo", section 3.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from minidist._arguments import check_seconds, check_whole
from minidist.comm.membership import Members, check_port
from minidist.comm.world import DEFAULT_TIMEOUT
from minidist.parallel.averaging.exchanges import REFUSED, hello, nesterov, whole_of
from minidist.parallel.averaging.parameter_assignment import HEAD, deal_parameters, trainable
from minidist.parallel.averaging.staleness import Updates
from minidist.parallel.contract.user_functions import MakeOptimizer
from minidist.parallel.guards.refusals import require_model

LAST_ANSWERS = 1.0
"""Seconds to send what is queued when `serve` raises, such as after Ctrl-C: a worker may not read."""


class Coordinator:
    """Holds the weights that workers train with `LocalSGD`, and takes the outer steps; workers come and go.

    In one process, which may be the one that starts the workers:

    >>> coordinator = md.Coordinator(model, workers=3)
    >>> address = coordinator.address  # for the workers
    >>> log = coordinator.serve(outer_steps=100)

    In each worker, at any time, on the same machine:

    >>> model = md.LocalSGD(model, every=50, coordinator=address)  # has the coordinator's weights
    >>> while model.outer_steps < 100:
    ...     inputs, targets = data[sampler_of(model.slot).share(model.steps)]
    ...     ...  # compute, and step the worker's own optimizer
    ...     model.synchronize()

    A worker has the smallest free slot, so one that replaces another takes the same share of the rows; while
    it is missing, nobody trains on that share. `log` says who took part: {worker: slot} for each outer step.
    Workers are numbered as they come, from 0. With the log one process can compute the same.

    A worker that dies, raises or leaves counts if all that it sent had arrived, and is left out if not. One
    that takes longer than `timeout` is left out too, and gets a CollectiveError when it comes back. When the
    coordinator dies, every worker gets a CollectiveError at its next exchange and keeps its weights. Save
    `model` and `outer` in `after_step`: a new coordinator made from them goes on, with new workers.

    For S bytes of the parameters that get gradients, a worker sends (S + 16 F) / k bytes in a step, on
    average, and the coordinator as many to each. A worker that joins sends 16 bytes, and gets 24 and all
    parameters and buffers. The coordinator keeps n messages beside the model and the outer optimizer's state.
    Messages go through the CPU even if a model is on a GPU.

    Args:
        model: the same architecture as the workers'.
        outer: a function from parameters to the outer optimizer.
        workers: how many have to come before the first outer step.
        fragments: F, as the workers' argument of `LocalSGD`.
        timeout: the most seconds that the coordinator waits without an event: for workers to come, for the
            first to send after an outer step, and then for the others. k steps may take no longer.
        port: to listen on at 127.0.0.1; 0 for a free one.

    Raises TypeError or ValueError if an argument is wrong.
    """

    def __init__(
        self,
        model: nn.Module,
        outer: MakeOptimizer = nesterov,
        workers: int = 1,
        fragments: int = 1,
        timeout: float = DEFAULT_TIMEOUT,
        port: int = 0,
    ) -> None:
        require_model(model, outer, "outer")
        check_whole("workers", workers, 1)
        check_whole("fragments", fragments, 1)
        check_port(port)
        check_seconds("timeout", timeout)
        self.model, self.timeout = model, timeout
        self._parts = deal_parameters(trainable(model), fragments, "fragments")
        self._whole = whole_of(model)
        self.outer = outer(trainable(model))
        self._hello = hello(model, fragments).numpy().tobytes()
        self._members = Members(HEAD + max(part.bytes for part in self._parts), port)
        self.address = self._members.address
        self.log: list[dict[int, int]] = []
        self._wanted = workers  # 0 once they have come
        self._coming: list[int] = []  # members that wait for an outer step to end
        self._slots: dict[int, int] = {}  # member that works -> its slot
        self._sent: dict[int, tuple[int, Tensor]] = {}  # member -> its slot and message, until the outer step
        self._updates = Updates((), max_staleness=0)
        self._served = False

    def serve(
        self, outer_steps: int, after_step: Callable[[int], object] | None = None
    ) -> list[dict[int, int]]:
        """Take `outer_steps` steps, one for each fragment in turn; then part from the workers.

        after_step: called after each with their number so far, once the workers have their answers. Returns
        the log. Raises TimeoutError if no worker comes within the time limit, and RuntimeError when it is
        called again.
        """
        if self._served:
            raise RuntimeError("serve has ended, and its connections too; make a Coordinator of this model")
        self._served, limit = True, LAST_ANSWERS
        self._wait_again()
        try:
            while len(self.log) < outer_steps:
                for member, message in self._members.wait(self._deadline - time.monotonic()):
                    self._handle(member, message)
                if time.monotonic() > self._deadline:
                    self._leave_out_the_late()
                while together := self._updates.next():
                    self.log.append(self._step(together))
                    if after_step is not None:
                        after_step(len(self.log))
                    self._admit()
                if not self._updates.pulled and len(self._coming) >= max(1, self._wanted):
                    self._admit()
            limit = self.timeout
        finally:
            self._members.close(limit)
        return self.log

    def _wait_again(self) -> None:
        self._deadline = time.monotonic() + self.timeout

    def _handle(self, member: int, message: bytearray | None) -> None:
        """Take a worker's message; None if it has gone."""
        if message is None:
            self._drop(member)
        elif member in self._slots:
            part = self._parts[self._updates.made % len(self._parts)]
            if self._updates.has_pushed(member) or len(message) != HEAD + part.bytes:
                self._drop(member)
                return
            if not self._sent:
                self._wait_again()
            self._sent[member] = self._slots[member], torch.frombuffer(message, dtype=torch.uint8)
            self._updates.push(member)
        elif message == self._hello and member not in self._coming:
            self._coming.append(member)
            self._members.send(member, _seconds(self.timeout))
        else:
            self._members.send(member, _seconds(REFUSED))
            self._drop(member)

    def _drop(self, member: int) -> None:
        """Go on without a member. What it has sent still counts."""
        self._members.drop(member)
        if member in self._coming:
            self._coming.remove(member)
        elif member in self._slots:
            del self._slots[member]
            self._updates.leave(member)
            if not self._slots:
                self._wait_again()

    def _leave_out_the_late(self) -> None:
        late = [member for member in self._slots if not self._updates.has_pushed(member)]
        if not late and not self._sent:
            raise TimeoutError(
                f"{len(self._coming)} workers have come to {self.address} within {self.timeout:g} s, and "
                f"{max(1, self._wanted)} are needed; start more, or give a longer timeout="
            )
        for member in late:
            self._drop(member)
        self._wait_again()

    def _admit(self) -> None:
        """Give those that have come a slot and the weights."""
        for member in self._coming:
            slot = min({*range(len(self._slots) + 1)} - {*self._slots.values()})
            self._slots[member] = slot
            self._updates.pull(member)
            self._members.send(member, self._whole.pack_values(self._updates.made, slot))
        self._coming.clear()
        self._wanted = 0
        self._wait_again()

    @torch.no_grad()
    def _step(self, together: list[int]) -> dict[int, int]:
        """Take an outer step towards the mean of these workers' parameters, and answer them."""
        made = self._updates.made
        part = self._parts[(made - 1) % len(self._parts)]
        sent = {member: self._sent.pop(member) for member in together}
        values = zip(*(part.unpack_values(message) for _, message in sent.values()), strict=True)
        for parameter, each in zip(part.parameters, values, strict=True):
            mean = torch.stack(each).mean(0).to(parameter.device)
            parameter.grad = parameter.detach() - mean
        self.outer.step()
        for parameter in part.parameters:
            parameter.grad = None
        for member, (slot, _) in sent.items():
            self._members.send(member, part.pack_values(made, slot))
        self._wait_again()
        return {member: slot for member, (slot, _) in sent.items()}


def _seconds(timeout: float) -> Tensor:  # (8,) uint8
    """Return the first answer to a worker: how long this side may wait for others."""
    return torch.tensor([timeout], dtype=torch.float64).view(torch.uint8)
