"""Run rungs of the training ladder and the engine's forms of them, in turns.

A rung is a closed loop over its batches. To time it as it stands, its batches note when the loop takes each
of them: from one to the next is a step. So the set-up at the start and the losses at the end stay out.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from minidist.benchmarks.harness.plain.plain_forms import FORMS
from minidist.benchmarks.harness.plain.plain_ladder import BY_NAME, LadderWork, RungForm
from minidist.benchmarks.harness.steps.training_steps import ADAMW
from minidist.benchmarks.harness.strategy_table.programs import Batch, Program, Ran
from minidist.benchmarks.harness.strategy_table.strategy_rounds import Measured, Timed, Worlds
from minidist.benchmarks.harness.strategy_table.strategy_steps import HELD, Facts, begin, drop
from minidist.parallel.contract.memory_report import Memory, memory_of
from minidist.parallel.contract.strategy import ResidentTensors
from minidist.parallel.training.activation_memory import ActivationCounter

WARM, STEPS = 1, 2
"""Steps of a turn before the clock starts, and steps that are timed; in both cases rounded up to periods."""
COUNTED = (
    "storages of tensors, each once: parameters, gradients and optimizer state as a backward pass ends, and "
    "saved activations at their peak; the engine's are those of engine.memory()"
)


class ClockedBatches(Sequence[Batch]):
    """Batches that note when a loop takes each of them, and when it comes back for one more."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches = batches
        self.times: list[float] = []

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._batches)

    def __getitem__(self, index: Any) -> Any:
        """Return a batch, without noting it."""
        return self._batches[index]

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches one after the other."""
        for batch in self._batches:
            self.times.append(time.perf_counter())
            yield batch
        self.times.append(time.perf_counter())


class Holdings:
    """The most bytes that a rung holds: what its optimizer got and keeps, and parameters with a gradient.

    They are counted each time a backward pass has ended, when most gradients are there.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer: torch.optim.Optimizer | None = None
        self.most = Memory(0, 0, 0, 0, 0)

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Make the optimizer for the rung."""
        self.optimizer = ADAMW(parameters)
        return self.optimizer

    def look(self) -> None:
        """Count what is held now."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        state = {} if self.optimizer is None else self.optimizer.state
        own = [p for group in groups for p in group["params"]]
        trained = [*own, *(p for p in self.model.parameters() if p.grad is not None)]
        found = memory_of(
            ResidentTensors(
                parameters=[p.detach() for p in trained],
                gradients=[p.grad for p in trained if p.grad is not None],
                optimizer=[value for values in state.values() for value in values.values()],
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

        with mock.patch.object(Tensor, "backward", then_look):
            yield
        if not self.most.total:
            self.look()


class RungProgram(Program):
    """A rung as a program. Every run trains a new model from the first weights."""

    def __init__(self, form: RungForm, work: LadderWork) -> None:
        self._form, self._work = form, work
        self._memory: Memory | None = None

    def timed(self, batches: Sequence[Batch]) -> Ran:
        """Train on global batches, of which the rung takes this rank's share; the first steps warm up."""
        model, clocked = self._work.build(), ClockedBatches(batches)
        if self._memory is None:
            held, whole = Holdings(model), [tensor for batch in batches for tensor in batch]
            # Without the model: a rung may free its first tensors, whose storages' names are then used again.
            with ActivationCounter(others=whole) as counter, held.watched():
                losses = self._train(model, clocked, held.make_optimizer)
            self._memory = Memory(**{**vars(held.most), "activations": counter.peak})
        else:
            losses = self._train(model, clocked, ADAMW)
        seconds = [after - before for before, after in itertools.pairwise(clocked.times)]
        warm = whole_periods(WARM, self._form)
        return Ran(statistics.fmean(seconds[warm:] or seconds or [0.0]), losses)

    def memory(self) -> Memory | None:
        """Return this rank's bytes, counted in the first run."""
        return self._memory

    def _train(self, model: nn.Module, batches: ClockedBatches, make_optimizer: Any) -> list[float | None]:
        losses: list[float | None] = self._form.module.train(
            model, batches, make_optimizer, **self._form.options
        )
        return losses


def whole_periods(steps: int, form: RungForm) -> int:
    """Round a number of steps up to whole periods of a rung's communication."""
    return math.ceil(steps / form.period) * form.period


def hold(name: str, plain: bool, work: LadderWork) -> Facts:
    """Keep a rung's program, or the engine's form of it, and run its first steps. All ranks call it."""
    form = BY_NAME[name]
    program = RungProgram(form, work) if plain else FORMS[form.engine](work)
    return begin(program_name(name, plain), program, work.batches(), form.period)


def turn(name: str, plain: bool) -> float:
    """Run a turn, and return the seconds of a step after those that warm up."""
    kept, form = HELD[program_name(name, plain)], BY_NAME[name]
    warm, steps = whole_periods(WARM, form), whole_periods(STEPS, form)
    if plain:  # it starts anew, and knows which steps to leave out
        return kept.run(warm + steps).seconds
    kept.run(warm)
    return kept.run(steps).seconds


def program_name(name: str, plain: bool) -> str:
    """Return the name under which a program is kept and measured."""
    return f"{'rung' if plain else 'engine'}, {name}"


def measure(worlds: Worlds, work: LadderWork, forms: Sequence[RungForm], rounds: int) -> Measured:
    """Measure rungs and the engine's forms, each once a round, a rung right before its engine's form."""
    programs = [(form, plain) for form in forms for plain in (True, False) if plain or form.engine]
    measured: Measured = {}
    try:
        for form, plain in programs:
            facts = worlds(form.ranks).run(hold, form.name, plain, work)
            measured[program_name(form.name, plain)] = Timed(facts)
        for _ in range(rounds):
            for form, plain in programs:
                seconds = worlds(form.ranks).run(turn, form.name, plain)
                measured[program_name(form.name, plain)].seconds.append(max(seconds))
    finally:
        for ranks in {form.ranks for form in forms}:
            worlds(ranks).run(drop)
    return measured
