"""Solutions of lesson 12.

GPipe is from Huang et al. 2019, "GPipe", section 2.3; 1F1B from Narayanan et al. 2019, "PipeDream", section
3.2; the backward pass in two parts, and the schedule at the end (ZB-H1), from Qi et al. 2024, "Zero Bubble
Pipeline Parallelism".
"""

from __future__ import annotations

import torch
from torch import nn

import minidist as md
from minidist import comm
from minidist.parallel.schedules import Instruction


def fill(weights: list[float], most: float) -> list[range]:
    """Fill parts from the left, each as full as `most` allows."""
    parts, begin, weight = [], 0, 0.0
    for i, each in enumerate(weights):
        if weight + each > most:  # layer i begins a new part
            parts.append(range(begin, i))
            begin, weight = i, 0.0
        weight += each
    if len(weights) > begin:
        parts.append(range(begin, len(weights)))
    return parts


def step(stage: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> float | None:
    """One batch forward and backward through all ranks' stages; the loss on the last rank."""
    r, last = md.rank(), md.size() - 1
    x = inputs
    if r > 0:
        x = comm.recv(torch.empty_like(inputs), r - 1).requires_grad_()
    y = stage(x)
    if r == last:
        y = ((y - targets) ** 2).mean()
        y.backward()
    else:
        comm.send(y.detach(), r + 1)
        y.backward(comm.recv(torch.empty_like(y), r + 1))
    if r > 0:
        comm.send(x.grad, r - 1)
    return y.item() if r == last else None


def gpipe(ranks: int, micro_batches: int) -> list[list[Instruction]]:
    """For each rank: all forward passes, then all backward passes."""
    forwards = [Instruction("forward", i) for i in range(micro_batches)]
    backwards = [Instruction("backward", i) for i in range(micro_batches)]
    return [forwards + backwards for _ in range(ranks)]


def bubble(ranks: int, micro_batches: int) -> float:
    """The share of time in which ranks wait: p - 1 steps of the m + p - 1 that it all takes."""
    return (ranks - 1) / (micro_batches + ranks - 1)


def one_f_one_b(ranks: int, micro_batches: int) -> list[list[Instruction]]:
    """For each rank: a few forward passes, then one forward and one backward in turn."""
    schedule = []
    for rank in range(ranks):
        ahead = min(ranks - 1 - rank, micro_batches)  # forward passes before the first pair
        own = [Instruction("forward", i) for i in range(ahead)]
        for i in range(micro_batches):
            if ahead + i < micro_batches:
                own.append(Instruction("forward", ahead + i))
            own.append(Instruction("backward", i))
        schedule.append(own)
    return schedule


def my_schedule(ranks: int, micro_batches: int) -> list[list[Instruction]]:
    """1F1B with backward passes in two; rank r keeps r micro-batches' weight gradients back (ZB-H1)."""
    schedule = []
    for rank, passes in enumerate(one_f_one_b(ranks, micro_batches)):
        own, waiting = [], []
        for each in passes:
            if each.kind == "forward":
                own.append(each)
                continue
            own.append(Instruction("backward_input", each.micro_batch))
            waiting.append(Instruction("backward_weight", each.micro_batch))
            if len(waiting) > rank:
                own.append(waiting.pop(0))
        schedule.append(own + waiting)
    return schedule
