"""Strategies without an engine: training loops that a user writes around one of minidist's classes.

Each of `LOOPS` is a function from the work to a program. All ranks call it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

import minidist as md
from minidist import comm
from minidist.benchmarks.harness.steps.training_steps import ADAMW
from minidist.benchmarks.harness.strategy_table.programs import Batch, Program, Ran
from minidist.benchmarks.harness.strategy_table.strategies import EVERY, Work
from minidist.model.loss import cross_entropy
from minidist.parallel.pipeline.layer_by_layer import cut


def local_sgd(work: Work) -> Program:
    """Train each rank on its own rows, and average the ranks' parameters every few steps."""
    model = md.LocalSGD(work.build(), every=EVERY)
    optimizer = ADAMW(model.parameters())

    def train(inputs: Tensor, targets: Tensor) -> float:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        model.synchronize()
        return loss.item()

    def averaged() -> list[Tensor]:
        return [bucket.gradients for bucket in model._buckets]

    return Program(train, (md.rank(), md.size()), model, optimizer, averaged)


def layer_by_layer(work: Work) -> Program:
    """Give each rank some of the layers; the whole batch passes through the ranks one after the other."""
    model: Any = work.build()
    layers = getattr(model, "layers", model)  # the training ladder's GPT is a chain itself
    part = nn.Sequential(*(layers[i] for i in cut(layers, md.size())[md.rank()]))
    parallel, optimizer = md.LayerByLayer(part), ADAMW(part.parameters())

    def train(inputs: Tensor, targets: Tensor) -> float:
        optimizer.zero_grad()
        loss = parallel.step(inputs, targets)
        optimizer.step()
        return loss

    return Program(train, module=part, optimizer=optimizer)


class ServerProgram(Program):
    """A training loop with a parameter server, whose workers share a batch's rows.

    A server runs until its workers are done, so each turn has a new server over the same model. A step lasts
    from one pull to the end of the next, so it includes the wait for the update.
    """

    def __init__(self, work: Work, max_staleness: int | None) -> None:
        model, workers = work.build(), md.size() - 1
        super().__init__(self._train, (max(0, md.rank() - 1), workers), model, more=lambda: self._gradients)
        self._max_staleness = max_staleness
        self._server: md.ParameterServer | None = None
        self._gradients: list[Tensor] = []

    def run(self, batches: Sequence[Batch]) -> Ran:
        """Serve or train on global batches, in a new server's world."""
        assert self.module is not None
        server = md.ParameterServer(self.module, ADAMW, max_staleness=self._max_staleness)
        self._server, self.optimizer = server, server.optimizer
        comm.barrier()
        if server.is_server:
            server.serve()
            return Ran(0.0, [None] * len(batches))  # only the workers' times count
        server.pull()
        ran = self.timed(batches)
        server.done()
        return ran

    def _train(self, inputs: Tensor, targets: Tensor) -> float:
        server = self._server
        assert server is not None
        loss = cross_entropy(server.model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        if not self._gradients:  # a push drops the gradients: keep those of the first step to count them
            self._gradients = [p.grad for p in server.model.parameters() if p.grad is not None]
        server.push(rows=len(inputs))
        server.pull()
        return loss.item()


LOOPS: dict[str, Callable[[Work], Program]] = {
    "local SGD": local_sgd,
    "layer by layer": layer_by_layer,
    "synchronous server": lambda work: ServerProgram(work, 0),
    "asynchronous server": lambda work: ServerProgram(work, None),
}
