"""A training loop that the benchmarks run: it times its steps and counts its memory.

This code runs inside the ranks. They keep programs between calls (`rounds.py`), so that many programs can
take turns. `engine` makes the loop of our engine; each of `LOOPS` is a training loop that a user writes
around one of minidist's classes. All ranks call them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

import minidist as md
from minidist import comm
from minidist.benchmarks.harness.training.what_is_trained import ADAMW, SEED, Batch, Train, Work, plain_loop
from minidist.model.loss import cross_entropy
from minidist.model.matmul import Linear
from minidist.model.mlp import MLP
from minidist.parallel.averaging.exchanges import AllReduceExchange
from minidist.parallel.contract.memory_report import Memory, ResidentTensors, memory_of
from minidist.parallel.engine.training_step import Engine
from minidist.parallel.layerwise.layer_by_layer import cut
from minidist.parallel.tensor_parallel.plans import plan_for
from minidist.parallel.tensor_parallel.replace_layers import parallelize
from minidist.parallel.tensor_parallel.vocabulary import vocab_parallel_cross_entropy, vocabulary_of
from minidist.parallel.training.activation_memory import ActivationCounter

COUNTED = (
    "storages of tensors, each once: engine.memory(), and for a peer its parameters, gradients, optimizer "
    "state and saved activations, without buffers that its reducers keep to themselves"
)
EVERY = 4
"""Steps of local SGD between two averages."""


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

    def run(self, batches: Sequence[Batch], warm: int = 0) -> Ran:
        """Wait for all ranks, then train on global batches; the first `warm` steps are not timed."""
        comm.barrier()
        return self.timed(batches, warm)

    def timed(self, batches: Sequence[Batch], warm: int = 0) -> Ran:
        """Train on this rank's shares of global batches, and time it."""
        own, ranks = self.share
        shares = [(x.tensor_split(ranks)[own], y.tensor_split(ranks)[own]) for x, y in batches]
        losses = [self._step(*share) for share in shares[:warm]]
        start = time.perf_counter()
        losses += [self._step(*share) for share in shares[warm:]]
        return Ran((time.perf_counter() - start) / (len(shares) - warm), losses)

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


def looped(
    model: Any, optimizer: Any = None, share: tuple[int, int] | None = None, counted: bool = True, **loop: Any
) -> Program:
    """A program of `plain_loop`, by default with AdamW, and on ranks that share a batch's rows.

    share: (0, 1) if all ranks have the same rows. counted: whether memory can be seen from outside. loop:
    options of `plain_loop`.
    """
    optimizer = ADAMW(model.parameters()) if optimizer is None else optimizer
    train, share = plain_loop(model, optimizer, **loop), share or (md.rank(), md.size())
    return Program(train, share, model if counted else None, optimizer)


class EngineProgram(Program):
    """The training loop of an engine."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.step, (engine.data_rank, engine.data_ranks))
        self.engine = engine

    def memory(self) -> Memory:
        """Return the engine's own count."""
        return self.engine.memory()


def engine(
    layout: str, work: Work, adapt: Callable[[Any], nn.Module] | None = None, **options: Any
) -> EngineProgram:
    """Make the loop of an engine in this layout.

    adapt: what makes the model ready for the engine. options: those of `md.prepare`.
    """
    given: dict[str, Any] = {"optimizer": ADAMW, "rehearse": False, **options}
    model = work.build() if adapt is None else adapt(work.build())
    return EngineProgram(md.prepare(model, layout=md.Layout.parse(layout), **given))


def local_sgd(work: Work, every: int = EVERY, **options: Any) -> Program:
    """Train each rank on its own rows, and average the ranks' parameters every few steps.

    options: of `LocalSGD`, such as an outer optimizer.
    """
    model = md.LocalSGD(work.build(), every=every, **options)
    assert isinstance(model._exchange, AllReduceExchange)
    optimizer = ADAMW(model.parameters())
    loop = plain_loop(model, optimizer, cross_entropy)

    def train(inputs: Tensor, targets: Tensor) -> float:
        loss = loop(inputs, targets)
        model.synchronize()
        return loss

    return Program(train, (md.rank(), md.size()), model, optimizer, model._exchange.held)


def layer_by_layer(work: Work) -> Program:
    """Give each rank some of the layers; the whole batch passes through the ranks one after the other."""
    model: Any = work.build()
    layers = getattr(model, "layers", model)  # the training ladder's GPT is a chain itself
    part = nn.Sequential(*(layers[i] for i in cut(layers, md.size())[md.rank()]))
    return stepped(md.LayerByLayer(part), part)


def stepped(parallel: md.LayerByLayer | md.Pipeline, part: nn.Module) -> Program:
    """A program that trains this rank's part of a model with the `step` of what runs the layers."""
    optimizer = ADAMW(part.parameters())

    def train(inputs: Tensor, targets: Tensor) -> float:
        optimizer.zero_grad()
        loss = parallel.step(inputs, targets)
        optimizer.step()
        return loss

    return Program(train, module=part, optimizer=optimizer)


def fully_shard(work: Work, **options: Any) -> Program:
    """Train with `md.FullyShard`, which is the model and the optimizer in one."""
    sharded = md.FullyShard(work.build(), ADAMW, **options)
    return looped(sharded, sharded, counted=False)


def tensor_parallel(work: Work, **options: Any) -> Program:
    """Cut all matrices of a GPT, and compute the loss from each rank's part of the logits."""
    model = work.build()
    parallelize(model, plan_for(model), **options)
    vocabulary = vocabulary_of(model)

    def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(outputs, targets, vocabulary=vocabulary)

    return looped(model, adamw_for(model), (0, 1), counted=False, loss_of=loss_of)


def adamw_for(model: nn.Module) -> Any:
    """Make the optimizer of a model that has plain parameters beside DTensors.

    AdamW's fused call takes plain tensors or DTensors of one mesh, not both, so each kind has a group of its
    own. One call for each parameter would take far longer on DTensors.
    """
    kinds: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        kind = type(parameter.data), getattr(parameter, "device_mesh", None)
        kinds.setdefault(kind, []).append(parameter)
    return ADAMW([{"params": parameters} for parameters in kinds.values()])


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

    def run(self, batches: Sequence[Batch], warm: int = 0) -> Ran:
        """Serve or train on global batches, in a new server's world."""
        assert self.module is not None
        server = md.ParameterServer(self.module, ADAMW, max_staleness=self._max_staleness)
        self._server, self.optimizer = server, server.optimizer
        comm.barrier()
        if server.is_server:
            server.serve()
            return Ran(0.0, [None] * len(batches))  # only the workers' times count
        server.pull()
        ran = self.timed(batches, warm)
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


def matrix_unit(work: Work) -> Program:
    """Train the MLP in one process on rung 8: products of bf16 numbers, float32 parameters and gradients."""
    model = MLP((64, *work.hidden, 10), seed=SEED, linear=partial(Linear, rung="s8_matrix_unit"))
    return looped(model, share=(0, 1))


LOOPS: dict[str, Callable[..., Program]] = {
    "local SGD": local_sgd,
    "DiLoCo": partial(local_sgd, outer=md.nesterov),
    "layer by layer": layer_by_layer,
    "synchronous server": lambda work: ServerProgram(work, 0),
    "asynchronous server": lambda work: ServerProgram(work, None),
    "FullyShard": fully_shard,
    "parallelize": tensor_parallel,
    "matrix unit": matrix_unit,
}
