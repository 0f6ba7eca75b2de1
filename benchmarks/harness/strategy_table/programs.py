"""A training loop that the benchmarks of strategies run: it times its steps and counts its memory.

This code runs inside the ranks. They keep programs between calls (`strategy_steps.py`), so that many programs
can take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from minidist import comm
from minidist.parallel.contract.memory_report import Memory, memory_of
from minidist.parallel.contract.strategy import ResidentTensors
from minidist.parallel.engine.training_step import Engine
from minidist.parallel.training.activation_memory import ActivationCounter

Batch = tuple[Tensor, Tensor]
Train = Callable[[Tensor, Tensor], "float | None"]
"""A step on this rank's share of a batch; it returns the loss, or None if this rank does not know it."""
COUNTED = (
    "storages of tensors, each once: engine.memory(), and for a peer its parameters, gradients, optimizer "
    "state and saved activations, without buffers that its reducers keep to themselves"
)


class Ran(NamedTuple):
    """A rank's measurement of some steps."""

    seconds: float  # per step
    losses: list[float | None]  # per step; None if this rank does not know it


class Program:
    """A training loop whose steps are calls of one function.

    Args:
        train: see `Train`.
        share: this rank's index among the ranks that share a batch's rows, and their number.
        module, optimizer: the memory of these is counted; None if it can't be.
        more: returns further tensors, such as communication buffers, which count as gradients.
    """

    def __init__(
        self,
        train: Train,
        share: tuple[int, int] = (0, 1),
        module: nn.Module | None = None,
        optimizer: Any = None,
        more: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        self.train, self.share = train, share
        self.module, self.optimizer, self.more = module, optimizer, more
        self._activations: int | None = None  # None before the first step

    def run(self, batches: Sequence[Batch]) -> Ran:
        """Wait for all ranks, then train on global batches."""
        comm.barrier()
        return self.timed(batches)

    def timed(self, batches: Sequence[Batch]) -> Ran:
        """Train on this rank's shares of global batches, and time it."""
        own, ranks = self.share
        shares = [(x.tensor_split(ranks)[own], y.tensor_split(ranks)[own]) for x, y in batches]
        start = time.perf_counter()
        losses = [self._step(*share) for share in shares]
        return Ran((time.perf_counter() - start) / len(shares), losses)

    def _step(self, inputs: Tensor, targets: Tensor) -> float | None:
        if self._activations is not None or self.module is None:
            return self.train(inputs, targets)
        with ActivationCounter(self.module, (inputs, targets)) as counter:
            loss = self.train(inputs, targets)
        self._activations = counter.peak
        return loss

    def memory(self) -> Memory | None:
        """Return this rank's bytes after a step, counted as by `engine.memory`, or None if they can't be."""
        if self.module is None:
            return None
        return memory_of(held_by(self.module, self.optimizer, self.more()), self._activations or 0)


class EngineProgram(Program):
    """The training loop of an engine."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.step, (engine.data_rank, engine.data_ranks))
        self.engine = engine

    def memory(self) -> Memory:
        """Return the engine's own count."""
        return self.engine.memory()


def held_by(module: nn.Module, optimizer: Any, more: Iterable[Tensor] = ()) -> ResidentTensors:
    """Return the tensors that a loop keeps between steps, as far as they can be seen from outside.

    optimizer: may wrap another one, as `ZeroRedundancyOptimizer` does; None if this rank has none.
    """
    inner = getattr(optimizer, "optim", optimizer)
    parameters = [*module.parameters()]
    states = () if inner is None else (value for each in inner.state.values() for value in each.values())
    return ResidentTensors(
        parameters=[_local(p) for p in parameters],
        gradients=[*(_local(p.grad) for p in parameters if p.grad is not None), *more],
        optimizer=[_local(value) for value in states if isinstance(value, Tensor)],
        buffers=[*module.buffers()],
    )


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, and any other tensor as it is."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.detach()
