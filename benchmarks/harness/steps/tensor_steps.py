"""Time our tensor parallelism in turns with torch's.

This code runs inside the ranks. Both loops train one model on rows that all ranks have, with the same
optimizer. torch's loop follows its tutorial on tensor parallelism: `parallelize_module` with column and row
styles in each block. It comes in two forms, and the faster one is the peer: the token table and the head are
whole on every rank, or both are cut by the vocabulary, with `loss_parallel`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

import minidist as md
from minidist import comm
from minidist.benchmarks.harness.steps.training_steps import ADAMW, SEED
from minidist.kernels.measure.harness import time_in_turns
from minidist.model.blocks import Block
from minidist.model.configs import config
from minidist.model.data import dataset
from minidist.model.gpt import GPT
from minidist.model.sampler import Sampler
from minidist.parallel.tensor.parallelize import parallelize
from minidist.parallel.tensor.plans import plan_for
from minidist.parallel.tensor.vocabulary import vocab_parallel_cross_entropy, vocabulary_of

Step = Callable[[Tensor, Tensor], float]
MODEL = "byte-small"
OURS: dict[str, dict[str, Any]] = {
    "tensor parallel": {},
    "sequence parallel": {"sequence_parallel": True},
}
"""Our forms, with their options of `parallelize`."""


@dataclass(frozen=True)
class Timed:
    """One rank's measurement: seconds and losses of each program, and the communication of each of ours."""

    seconds: dict[str, list[float]]
    losses: dict[str, list[float]]
    bytes_per_step: dict[str, int]
    comm_overlap: dict[str, float]


def ours(options: Mapping[str, Any]) -> Step:
    """Cut all matrices, and compute the loss from each rank's part of the logits."""
    model = GPT(config(MODEL), seed=SEED)
    parallelize(model, plan_for(model), **options)
    vocabulary = vocabulary_of(model)
    return _loop(model, lambda x, y: vocab_parallel_cross_entropy(x, y, vocabulary=vocabulary))


def blocks_cut_by_torch() -> Step:
    """Cut the blocks with torch; the token table and the head stay whole."""
    model = GPT(config(MODEL), seed=SEED)
    cut_blocks(model, _mesh())
    return _loop(model, _cross_entropy)


def all_cut_by_torch() -> Step:
    """Cut the blocks, the token table and the head with torch, and compute the loss of the cut logits."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )

    model = GPT(config(MODEL), seed=SEED)
    mesh = _mesh()
    cut_blocks(model, mesh)
    first: Any = model.layers[0]
    last: Any = model.layers[-1]
    whole, part = Replicate(), Shard(-1)
    parallelize_module(first, mesh, {"token": RowwiseParallel(input_layouts=whole)})
    style = ColwiseParallel(input_layouts=whole, output_layouts=part, use_local_output=False)
    parallelize_module(last, mesh, {"output": style})
    last.output.weight = first.token.weight  # torch has untied the two
    return _loop(model, _cross_entropy, loss_parallel)


PEERS: dict[str, Callable[[], Step]] = {
    "torch parallelize_module": blocks_cut_by_torch,
    "torch parallelize_module, loss_parallel": all_cut_by_torch,
}


def _mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (md.size(),))


def cut_blocks(model: nn.Module, mesh: Any) -> None:
    """Cut attention by heads and the MLP by its hidden width, in each block of a GPT, over a torch mesh."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns = dict.fromkeys(
        ["attention.query", "attention.key", "attention.value", "mlp.up"], ColwiseParallel
    )
    rows = dict.fromkeys(["attention.output", "mlp.down"], RowwiseParallel)
    for block in model.modules():
        if isinstance(block, Block):
            styles: dict[str, Any] = {name: style() for name, style in (columns | rows).items()}
            parallelize_module(block, mesh, styles)


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def _loop(
    model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor], around: Callable[[], Any] = nullcontext
) -> Step:
    # AdamW's fused call takes plain tensors or DTensors, not both, so each kind has a group of its own. One
    # call for each parameter would take far longer on DTensors.
    kinds: dict[type, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        kinds.setdefault(type(parameter.data), []).append(parameter)
    groups = [{"params": parameters} for parameters in kinds.values()]
    optimizer = ADAMW(groups)

    def step(inputs: Tensor, targets: Tensor) -> float:
        optimizer.zero_grad()
        with around():
            loss = loss_of(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.item()

    return step


def batches(rows: int, steps: int) -> list[tuple[Tensor, Tensor]]:
    """Return the first global batches; every rank has all rows."""
    data = dataset("bytes", length=config(MODEL).context, limit=rows * steps)
    sampler = Sampler(len(data.train), rows, drop_last=True, seed=SEED)
    return [data.train[sampler.share(step)] for step in range(steps)]


def time_in_ranks(rows: int, rounds: int) -> Timed:
    """Train in turns by every form of ours and of torch's, on the same rows from equal weights."""
    data = batches(rows, rounds + 2)  # one more for time_in_turns to warm up, and one for the ledger
    steps = {name: ours(options) for name, options in OURS.items()}
    steps |= {name: build() for name, build in PEERS.items()}
    losses: dict[str, list[float]] = {name: [] for name in steps}

    def program(name: str) -> Callable[[], None]:
        return lambda: losses[name].append(steps[name](*data[len(losses[name])]))

    seconds = time_in_turns({name: program(name) for name in steps}, rounds)
    sent, hidden = {}, {}
    for name in OURS:
        with comm.ledger() as ledger:
            steps[name](*data[-1])
        sent[name], hidden[name] = ledger.bytes_sent, ledger.comm_overlap
    return Timed(seconds, losses, sent, hidden)
