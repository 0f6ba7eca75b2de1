"""What local SGD with an outer optimizer computes, in one process: from who took part in each outer step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

import minidist as md
from minidist.parallel.averaging.parameter_assignment import deal_parameters
from minidist.parallel.contract.user_functions import MakeOptimizer
from tests.helpers.models import mlp, vectors

ADAMW = partial(torch.optim.AdamW, lr=0.01)
AVERAGE = partial(torch.optim.SGD, lr=1.0)


def inner_step(model: nn.Module, optimizer: torch.optim.Optimizer, slot: int, step: int) -> None:
    """Train on the rows of this slot and step."""
    inputs, targets = vectors(torch.Generator().manual_seed(1000 * slot + step), 4)
    optimizer.zero_grad()
    md.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


class Worker:
    """A worker's model and optimizer, which begin with the global weights."""

    def __init__(self, anchors: Sequence[Tensor], slot: int) -> None:
        self.model, self.slot = mlp(0), slot
        self.optimizer = ADAMW(self.model.parameters())
        self.update([*self.model.parameters()], anchors, kept=0.0)

    @staticmethod
    @torch.no_grad()
    def update(own: Sequence[Tensor], new: Sequence[Tensor], kept: float) -> None:
        for mine, value in zip(own, new, strict=True):
            mine.copy_(kept * mine + (1 - kept) * value)


def replay(
    log: Sequence[dict[int, int]],
    every: int,
    fragments: int = 1,
    delay: int = 0,
    outer: MakeOptimizer = md.nesterov,
) -> tuple[nn.Module, dict[int, nn.Module]]:
    """Return the global model after these outer steps, and each worker's, `delay` steps later.

    log: {worker: slot} of those that took part in each.
    """
    whole = mlp(0)
    anchors = [*whole.parameters()]
    optimizer = outer(anchors)
    position = {parameter: i for i, parameter in enumerate(anchors)}
    parts = [[position[p] for p in part.parameters] for part in deal_parameters(anchors, fragments)]
    workers: dict[int, Worker] = {}
    due, kept = 0, 0.5 if delay else 0.0

    def train(worker: Worker, steps: range, applied_at: int, indices: Sequence[int]) -> None:
        for step in (steps.start - 1, *steps):  # the first is done
            if step in steps:
                inner_step(worker.model, worker.optimizer, worker.slot, step)
            if step + 1 == applied_at:
                own = [*worker.model.parameters()]
                Worker.update([own[i] for i in indices], [anchors[i] for i in indices], kept)

    for turn, took_part in enumerate(log):
        before, due = due, turn // fragments * every + (turn % fragments + 1) * every // fragments
        for number, slot in took_part.items():
            applied_at = before + delay if number in workers else -1
            worker = workers.setdefault(number, Worker(anchors, slot))
            train(worker, range(before, due), applied_at, parts[(turn - 1) % fragments])
        models = [[*workers[number].model.parameters()] for number in took_part]
        for index in parts[turn % fragments]:
            anchors[index].grad = (anchors[index] - sum(m[index] for m in models) / len(models)).detach()
        optimizer.step()
        optimizer.zero_grad()
    for number in log[-1]:
        train(workers[number], range(due, due + delay), due + delay, parts[(len(log) - 1) % fragments])
    return whole, {number: workers[number].model for number in log[-1]}
