"""Time our pipeline schedules in turns with those of torch's pipelining.

This code runs inside the ranks. Both train the same stages of a byte GPT on the same rows. The output matrix
is not tied to the token table, since torch's pipelining leaves tied weights to its user.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from math import inf
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

import minidist as md
from minidist import comm
from minidist.benchmarks.harness.steps.training_steps import ADAMW, SEED
from minidist.kernels.measure.harness import LEAST, time_in_turns
from minidist.model.configs import GPTConfig, config
from minidist.model.data import dataset
from minidist.model.gpt import GPT
from minidist.parallel.contract.schedule_kinds import DEFAULT_SCHEDULE, SCHEDULES, StagePlacement, round_robin
from minidist.parallel.pipeline.instructions import Instruction
from minidist.parallel.pipeline.layer_by_layer import cut, measure
from minidist.parallel.pipeline.simulation import Event

PEERS = {n: kind.torch_name for n, kind in SCHEDULES.items() if kind.torch_name and not kind.splits_backward}
"""Our schedules that torch's pipelining also has, and its classes. Its zero bubble is another one."""


@dataclass(frozen=True)
class Case:
    """The model to train, the rows of a global batch, and its micro-batches."""

    model: str
    rows: int
    micro_batches: int

    def batches(self, steps: int) -> list[tuple[Tensor, Tensor]]:
        """Return the first global batches, the same on every rank."""
        data = dataset("bytes", length=config(self.model).context, limit=self.rows * steps)
        return [data.train[step * self.rows : (step + 1) * self.rows] for step in range(steps)]

    def stages(self, name: str = DEFAULT_SCHEDULE) -> list[nn.Module]:
        """Return this rank's layers, a module per chunk, cut so that the slowest part is fastest."""
        placement = SCHEDULES[name].placement(md.size(), SCHEDULES[name].least_chunks)
        shape = config(self.model)
        assert isinstance(shape, GPTConfig)
        layers = GPT(replace(shape, tied=False), seed=SEED).layers
        inputs, _ = self.batches(1)[0]
        seconds = torch.tensor(measure(layers, inputs[: self.rows // self.micro_batches]))
        comm.broadcast(seconds)  # all ranks must cut alike
        parts = cut(layers, len(placement.ranks), seconds.tolist())
        own = placement.stages[md.rank()]
        return [nn.Sequential(*(layers[i] for i in parts[stage])) for stage in own]


@dataclass(frozen=True)
class Timed:
    """One rank's measurement of a schedule; the lists have one item per round, times in seconds."""

    ours: list[float]
    peer: list[float]
    our_losses: list[float]
    peer_losses: list[float]  # empty but on the last rank
    bytes_per_step: int


@dataclass(frozen=True)
class Pass:
    """A timed forward or backward pass, by a clock that all ranks share."""

    instruction: Instruction
    start: float
    end: float


def torch_loop(
    name: str, stages: dict[int, nn.Module], of: int, micro_batches: int, optimizer: Any
) -> Callable[[Tensor, Tensor], float | None]:
    """Return a training step by a schedule of `torch.distributed.pipelining`; the last rank returns the loss.

    `stages` maps stage numbers to this rank's stages; `of` is the number of stages on all ranks.
    """
    from torch.distributed import pipelining

    rank, last = md.rank(), md.size() - 1
    own = [pipelining.PipelineStage(each, i, of, torch.device("cpu")) for i, each in stages.items()]
    loss = nn.functional.cross_entropy
    schedule: Any = getattr(pipelining, name)(
        own if name.startswith("ScheduleInterleaved") else own[0],
        micro_batches,
        loss_fn=lambda outputs, t: loss(outputs.flatten(0, -2), t.flatten()),
    )

    def step(inputs: Tensor, targets: Tensor) -> float | None:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        given = (inputs,) if rank == 0 else ()
        if rank == last:
            schedule.step(*given, target=targets, losses=losses)
        else:
            schedule.step(*given)
        optimizer.step()
        return torch.stack(losses).mean().item() if losses else None

    return step


def time_schedules(case: Case, names: Sequence[str], rounds: int) -> dict[str, Timed]:
    """Train in turns by our schedules and by torch's, on the same rows from equal weights."""
    batches = case.batches(rounds + 2)  # one more for time_in_turns to warm up, and one for the ledger
    (stage,) = case.stages()
    programs: dict[str, Callable[[], None]] = {}
    losses: dict[str, list[float | None]] = {}
    steps: dict[str, Callable[[Tensor, Tensor], float | None]] = {}

    def add(name: str, step: Callable[[Tensor, Tensor], float | None]) -> None:
        losses[name], steps[name] = [], step
        programs[name] = lambda: losses[name].append(step(*batches[len(losses[name])]))

    for name in names:
        add(name, _ours(name, deepcopy(stage), case.micro_batches))
        if name in PEERS:
            copied = deepcopy(stage)
            adamw = ADAMW(copied.parameters())
            add(
                PEERS[name],
                torch_loop(PEERS[name], {md.rank(): copied}, md.size(), case.micro_batches, adamw),
            )
    seconds = time_in_turns(programs, rounds)
    timed = {}
    for name in names:
        with comm.ledger() as ledger:
            steps[name](*batches[-1])
        peer = PEERS.get(name, "")
        own, theirs = ([loss for loss in losses.get(of, []) if loss is not None] for of in (name, peer))
        timed[name] = Timed(seconds[name], seconds.get(peer, []), own, theirs, ledger.bytes_sent)
    return timed


def _ours(name: str, stage: nn.Module, micro_batches: int) -> Callable[[Tensor, Tensor], float]:
    pipeline, optimizer = md.Pipeline(stage, name, micro_batches), ADAMW(stage.parameters())

    def step(inputs: Tensor, targets: Tensor) -> float:
        optimizer.zero_grad()
        loss = pipeline.step(inputs, targets)
        optimizer.step()
        return loss

    return step


def passes(case: Case, name: str, rounds: int, seconds: float = inf) -> list[list[Pass]]:
    """Return when this rank ran which pass, for each of `rounds` steps; `LEAST` suffice after `seconds`."""
    stages, (batch,) = case.stages(name), case.batches(1)
    pipeline = md.Pipeline(stages, name, case.micro_batches)
    steps: list[list[Pass]] = []
    begun = perf_counter()
    for number in range(rounds + 1):
        passed = comm.all_reduce(torch.tensor(perf_counter() - begun), "max")
        if len(steps) >= LEAST and float(passed) > seconds:
            break
        comm.barrier()
        with pipeline.timed() as events:
            pipeline.step(*batch)
        if number:  # the first one finds the shapes
            steps.append([Pass(*event) for event in events if event.instruction.computes])
    return steps


def message_seconds(case: Case, rounds: int = 40) -> float:
    """Return the seconds to send a micro-batch's activations to the other of two ranks: half a round trip."""
    shape = config(case.model)
    activations = torch.zeros(case.rows // case.micro_batches, shape.context, shape.width)
    other, first = 1 - md.rank(), md.rank() == 0
    seconds = []
    for _ in range(rounds + 10):  # the first ones connect
        comm.barrier()
        start = perf_counter()
        for move in (comm.send, comm.recv) if first else (comm.recv, comm.send):
            move(activations, other)
        seconds.append((perf_counter() - start) / 2)
    return median(seconds[10:])


def times(
    ranks: Sequence[Sequence[Pass]], placement: StagePlacement | None = None
) -> dict[str, list[list[float]]]:
    """Return the seconds per kind of pass, stage and micro-batch, as `schedules.simulate` takes them.

    placement: where the stages are; None for round robin.
    """
    everything = [each.instruction for own in ranks for each in own]
    if placement is None:
        placement = round_robin(len(ranks), 1 + max(each.chunk for each in everything))
    return {
        kind: [
            [
                each.end - each.start
                for each in sorted(ranks[rank], key=lambda each: each.instruction.micro_batch)
                if each.instruction.kind == kind and placement.stages[rank][each.instruction.chunk] == stage
            ]
            for stage, rank in enumerate(placement.ranks)
        ]
        for kind in {each.kind for each in everything}
    }


def mean_times(
    ranks: Sequence[Sequence[Pass]], placement: StagePlacement | None = None
) -> dict[str, list[float]]:
    """Return the mean seconds per kind of pass and stage, which is all that a plan can know beforehand."""
    return {kind: [fmean(own) for own in each] for kind, each in times(ranks, placement).items()}


def timeline(ranks: Sequence[Sequence[Pass | Event]]) -> list[list[list[Any]]]:
    """Return each rank's passes in order: kind, micro-batch, chunk, start and end in seconds of the step."""
    began = min(own[0].start for own in ranks)
    return [
        [
            [
                each.instruction.kind,
                each.instruction.micro_batch,
                each.instruction.chunk,
                each.start - began,
                each.end - began,
            ]
            for each in own
        ]
        for own in ranks
    ]
