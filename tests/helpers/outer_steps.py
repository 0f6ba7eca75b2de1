"""What local SGD with an outer optimizer computes, in one process: from who took part in each outer step."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

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


def replay(
    log: Sequence[dict[int, int]],
    every: int,
    fragments: int = 1,
    delay: int = 0,
    outer: MakeOptimizer = md.nesterov,
) -> tuple[nn.Module, dict[int, nn.Module]]:
    """Return the global model after these outer steps, and that of each worker, `delay` steps later.

    log: {worker: slot} of those that took part in each.
    """
    whole = mlp(0)
    anchors = [*whole.parameters()]
    optimizer = outer(anchors)
    position = {parameter: i for i, parameter in enumerate(anchors)}
    parts = [[position[p] for p in part.parameters] for part in deal_parameters(anchors, fragments)]
    workers: dict[int, tuple[nn.Module, torch.optim.Optimizer]] = {}

    def train(number: int, slot: int, begin: int, end: int, turn: int) -> None:
        """Train from one step to another; the values of `turn` arrive `delay` steps after the first."""
        is_new = number not in workers
        if is_new:
            workers[number] = (fresh := copy.deepcopy(whole)), ADAMW(fresh.parameters())
        model, inner = workers[number]
        for step in range(begin, end + 1):
            if step == begin + delay and not is_new:
                with torch.no_grad():
                    for index in parts[turn % fragments]:
                        [*model.parameters()][index].lerp_(anchors[index], 0.5 if delay else 1.0)
            if step < end:
                inner_step(model, inner, slot, step)

    due = 0
    for turn, took_part in enumerate(log):
        before, due = due, turn // fragments * every + (turn % fragments + 1) * every // fragments
        for number, slot in took_part.items():
            train(number, slot, before, due, turn - 1)
        trained = [[*workers[number][0].parameters()] for number in took_part]
        for index in parts[turn % fragments]:
            mean = sum(model[index].detach() for model in trained) / len(trained)
            anchors[index].grad = anchors[index].detach() - mean
        optimizer.step()
        optimizer.zero_grad()
    for number, slot in log[-1].items():
        train(number, slot, due, due + delay, len(log) - 1)
    return whole, {number: workers[number][0] for number in log[-1]}
