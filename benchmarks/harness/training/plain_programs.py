"""Run a rung of the training ladder as a program.

A rung is a closed loop over its batches. To time it as it stands, its batches note when the loop takes each
of them: from one to the next is a step. So the set-up at the start and the losses at the end stay out.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from minidist.benchmarks.harness.training.plain_ladder import LadderWork, RungForm
from minidist.benchmarks.harness.training.programs import Program, Ran
from minidist.benchmarks.harness.training.rounds import Job
from minidist.benchmarks.harness.training.what_is_trained import ADAMW, Batch, Work
from minidist.parallel.contract.memory_report import Memory, ResidentTensors, memory_of
from minidist.parallel.training.activation_memory import ActivationCounter
from minidist.plain import muon

WARM, STEPS = 1, 2
"""Steps of a turn before the clock starts, and steps that are timed; in both cases rounded up to periods."""
COUNTED = (
    "storages of tensors, each once: parameters, gradients and optimizer state as a backward pass ends, and "
    "saved activations at their peak; the engine's are those of engine.memory()"
)


class ClockedBatches(list[Batch]):
    """Batches that note when a loop takes each of them, and when it comes back for one more."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        super().__init__(batches)
        self.times: list[float] = []

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches one after the other."""
        for batch in super().__iter__():
            self.times.append(time.perf_counter())
            yield batch
        self.times.append(time.perf_counter())


class Holdings:
    """The most bytes that a rung holds: what its optimizers got and keep, and parameters with a gradient.

    They are counted each time a backward pass has ended, when most gradients are there.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizers: list[torch.optim.Optimizer] = []
        self.stacks: list[muon.Stack] = []  # Muon's momentum is in no optimizer
        self.most = Memory(0, 0, 0, 0, 0)

    def look(self) -> None:
        """Count what is held now."""
        own = [p for each in self.optimizers for group in each.param_groups for p in group["params"]]
        trained = [*own, *(p for p in self.model.parameters() if p.grad is not None)]
        found = memory_of(
            ResidentTensors(
                parameters=[p.detach() for p in trained],
                gradients=[p.grad for p in trained if p.grad is not None],
                optimizer=[
                    *(v for each in self.optimizers for kept in each.state.values() for v in kept.values()),
                    *(each.momentum for each in self.stacks),
                ],
                buffers=[],
            )
        )
        self.most = max(self.most, found, key=lambda memory: memory.total)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, look after every backward pass. A server of parameters has none: look at the end."""
        backward: Any = Tensor.backward

        def then_look(tensor: Tensor, *args: Any) -> None:
            backward(tensor, *args)
            self.look()

        def noted(kind: Any, into: list[Any]) -> Any:
            begin = kind.__init__

            def note(made: Any, *args: Any, **kwargs: Any) -> None:
                begin(made, *args, **kwargs)
                into.append(made)

            return mock.patch.object(kind, "__init__", note)

        with (
            mock.patch.object(Tensor, "backward", then_look),
            noted(torch.optim.Optimizer, self.optimizers),
            noted(muon.Stack, self.stacks),
        ):
            yield
        if not self.most.total:
            self.look()


class RungProgram(Program):
    """A rung as a program. Every run trains a new model from the first weights."""

    def __init__(self, form: RungForm, work: Work) -> None:
        self._form, self._work = form, work
        self._memory: Memory | None = None

    def timed(self, batches: Sequence[Batch], warm: int = 0) -> Ran:
        """Train on global batches, of which the rung takes this rank's share."""
        model, clocked = self._work.build(), ClockedBatches(batches)
        train = partial(self._form.module.train, **self._form.options)
        if self._memory is None and len(batches) > self._form.period:  # an outer optimizer has made a step
            held, whole = Holdings(model), [tensor for batch in batches for tensor in batch]
            # Without the model: a rung may free its first tensors, whose storages' names are then used again.
            with ActivationCounter(others=whole) as counter, held.watched():
                losses = train(model, clocked, ADAMW)
            self._memory = Memory(**{**vars(held.most), "activations": counter.peak})
        else:
            losses = train(model, clocked, ADAMW)
        seconds = [after - before for before, after in itertools.pairwise(clocked.times)]
        return Ran(statistics.fmean(seconds[warm:] or [0.0]), losses)  # a server takes no batches

    def memory(self) -> Memory | None:
        """Return this rank's bytes, counted in the first run that is long enough."""
        return self._memory


def whole_periods(steps: int, form: RungForm) -> int:
    """Round a number of steps up to whole periods of a rung's communication."""
    return math.ceil(steps / form.period) * form.period


def program_name(name: str, plain: bool) -> str:
    """Return the name under which a rung, or the engine's form of it, is measured."""
    return name if plain else f"engine, {name}"


def jobs(work: LadderWork, forms: Sequence[RungForm]) -> dict[str, Job]:
    """Return the programs of rungs, a rung right before its engine's form."""
    made = {}
    for form in forms:
        warm, steps = whole_periods(WARM, form), whole_periods(STEPS, form)
        rung = Job(form.ranks, work, partial(RungProgram, form), form.period, warm=warm, steps=steps)
        made[program_name(form.name, plain=True)] = rung
        made[program_name(form.name, plain=False)] = rung._replace(make=form.make)
    return made
