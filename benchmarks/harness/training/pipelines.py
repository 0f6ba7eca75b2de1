"""Pipelines: torch's schedules as peers, our own without an engine, and what each rank does when.

This code runs inside the ranks. Models are not tied: torch's pipelining leaves tied weights to its user.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import inf
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

import minidist as md
from minidist import comm
from minidist.benchmarks.harness.training.programs import Program, stepped
from minidist.benchmarks.harness.training.what_is_trained import ADAMW, Work
from minidist.kernels.measure.timing_in_turns import LEAST
from minidist.model.configs import config
from minidist.parallel.contract.schedule_kinds import DEFAULT_SCHEDULE, SCHEDULES, StagePlacement
from minidist.parallel.layerwise.layer_by_layer import cut, measure
from minidist.parallel.schedules.simulation import Event


def stages(work: Work, name: str = DEFAULT_SCHEDULE) -> dict[int, nn.Module]:
    """Return this rank's stages by number, as a schedule places them, each some of the model's layers."""
    layers: Any = work.build().layers
    chunks = SCHEDULES[name].least_chunks
    parts, placement = _parts(work, chunks), SCHEDULES[name].placement(md.size(), chunks)
    own = placement.stages[md.rank()]
    return {stage: nn.Sequential(*(layers[i] for i in parts[stage])) for stage in own}


@cache  # all programs of a world cut alike
def _parts(work: Work, chunks: int) -> list[range]:
    layers: Any = work.build().layers
    if not work.cut_by_time:
        return cut(layers, chunks * md.size())
    inputs, _ = work.batches()[0]
    seconds = torch.tensor(measure(layers, inputs[: work.rows // work.micro_batches]))
    comm.broadcast(seconds)  # all ranks must cut alike
    return cut(layers, chunks * md.size(), seconds.tolist())


def pipeline(schedule: str, work: Work) -> Program:
    """Train with `md.Pipeline` by one of our schedules."""
    (stage,) = stages(work).values()
    return stepped(md.Pipeline(stage, schedule, work.micro_batches), stage)


def torch_pipeline(name: str, work: Work) -> Program:
    """Train by torch.distributed.pipelining's form of one of our schedules, on the same stages as ours."""
    from torch.distributed import pipelining
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti

    kind = SCHEDULES[name]
    held = stages(work, name)
    modules = nn.ModuleList(held.values())
    optimizer = ADAMW(modules.parameters())
    device, of = torch.device("cpu"), kind.least_chunks * md.size()
    own = [pipelining.PipelineStage(each, number, of, device) for number, each in held.items()]
    loss, made_by = nn.functional.cross_entropy, getattr(pipelining, kind.torch_name)
    schedule: Any = made_by(
        own if issubclass(made_by, PipelineScheduleMulti) else own[0],
        work.micro_batches,
        loss_fn=lambda outputs, t: loss(outputs.flatten(0, -2), t.flatten()),
    )

    def train(inputs: Tensor, targets: Tensor) -> float | None:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        given = (inputs,) if md.rank() == 0 else ()
        if of - 1 in held:  # on a V the first rank has the last stage
            schedule.step(*given, target=targets, losses=losses)
        else:
            schedule.step(*given)
        optimizer.step()
        return torch.stack(losses).mean().item() if losses else None

    return Program(train, module=modules, optimizer=optimizer)


def passes(work: Work, name: str, rounds: int, seconds: float = inf) -> list[list[Event]]:
    """Return when this rank ran which pass, for each of `rounds` steps; `LEAST` suffice after `seconds`.

    The ranks of a host share the clock.
    """
    held, batch = [*stages(work, name).values()], work.batches()[0]
    parallel = md.Pipeline(held, name, work.micro_batches)
    steps: list[list[Event]] = []
    begun = perf_counter()
    for number in range(rounds + 1):
        passed = comm.all_reduce(torch.tensor(perf_counter() - begun), "max")
        if len(steps) >= LEAST and float(passed) > seconds:
            break
        comm.barrier()
        with parallel.timed() as events:
            parallel.step(*batch)
        if number:  # the first one finds the shapes
            steps.append([event for event in events if event.instruction.computes])
    return steps


def message_seconds(work: Work, rounds: int = 40) -> float:
    """Return the seconds to send a micro-batch's activations to the other of two ranks: half a round trip."""
    shape = config(work.model)
    activations = torch.zeros(work.rows // work.micro_batches, shape.context, shape.width)
    other, first = 1 - md.rank(), md.rank() == 0
    moves: tuple[Callable[..., object], ...] = (comm.send, comm.recv) if first else (comm.recv, comm.send)
    seconds = []
    for _ in range(rounds + 10):  # the first ones connect
        comm.barrier()
        start = perf_counter()
        for move in moves:
            move(activations, other)
        seconds.append((perf_counter() - start) / 2)
    return median(seconds[10:])


def times(ranks: Sequence[Sequence[Event]], placement: StagePlacement) -> dict[str, list[list[float]]]:
    """Return the seconds per kind of pass, stage and micro-batch, as `schedules.simulate` takes them."""

    def of(kind: str, stage: int, rank: int) -> list[float]:
        return [
            each.end - each.start
            for each in sorted(ranks[rank], key=lambda each: each.instruction.micro_batch)
            if each.instruction.kind == kind and placement.stages[rank][each.instruction.chunk] == stage
        ]

    return {
        kind: [of(kind, stage, rank) for stage, rank in enumerate(placement.ranks)]
        for kind in {each.instruction.kind for own in ranks for each in own}
    }


def mean_times(ranks: Sequence[Sequence[Event]], placement: StagePlacement) -> dict[str, list[float]]:
    """Return the mean seconds per kind of pass and stage, which is all that a plan can know beforehand."""
    return {kind: [fmean(own) for own in each] for kind, each in times(ranks, placement).items()}


def timeline(ranks: Sequence[Sequence[Event]]) -> list[list[list[Any]]]:
    """Return each rank's passes in order: kind, micro-batch, chunk, start and end in seconds of the step."""
    began = min(own[0].start for own in ranks)

    def box(each: Event) -> list[Any]:
        of = each.instruction
        return [of.kind, of.micro_batch, of.chunk, each.start - began, each.end - began]

    return [[box(each) for each in own] for own in ranks]
