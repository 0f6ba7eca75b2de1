"""Time our ZeRO stages in turns with torch's sharded training loops.

This code runs inside the ranks. torch's loops follow its tutorials: DistributedDataParallel with a
ZeroRedundancyOptimizer for stage 1, and FSDP2's `fully_shard` of each block and of the model for stage 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import minidist as md
from minidist import comm
from minidist.benchmarks.harness.steps.training_steps import ADAMW, SEED, Case, Timed, plain_loop
from minidist.kernels.measure.harness import time_in_turns
from minidist.model.blocks import Block
from minidist.model.configs import config
from minidist.model.gpt import GPT

Step = Callable[[Tensor, Tensor], float]


@dataclass(frozen=True)
class Entry:
    """One of our ZeRO stages, and the torch loop that it is compared with."""

    stage: int
    peer: str
    peer_step: Callable[[nn.Module], Step]


def zero_redundancy(model: nn.Module) -> Step:
    """Train with DistributedDataParallel and an optimizer whose state is sharded."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(
        parallel.parameters(), optimizer_class=torch.optim.AdamW, **ADAMW.keywords
    )
    return plain_loop(parallel, optimizer)


def fully_sharded(model: nn.Module) -> Step:
    """Train with FSDP2: parameters, gradients and optimizer state are sharded, and each block is a unit."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (md.size(),))
    for module in [*model.modules()]:
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return plain_loop(model, ADAMW(model.parameters()))


ENTRIES: dict[str, Entry] = {
    "stage 1": Entry(1, "torch ZeroRedundancyOptimizer", zero_redundancy),
    "stage 2": Entry(2, "torch fully_shard", fully_sharded),
}


def time_entries(case: Case, names: Sequence[str], rounds: int) -> dict[str, Timed]:
    """Train in turns by our stages and by torch's loops, on the same rows from equal weights."""
    batches = case.batches(rounds + 2)  # one more for time_in_turns to warm up, and one for the ledger
    losses: dict[str, list[float]] = {}
    programs: dict[str, Callable[[], None]] = {}
    engines = {}

    def add(name: str, train: Step) -> None:
        losses[name] = []
        programs[name] = lambda: losses[name].append(train(*batches[len(losses[name])]))

    for name in names:
        entry = ENTRIES[name]
        engines[name] = md.prepare(
            case.build(), ADAMW, md.Layout(dp=md.size(), zero=entry.stage), rehearse=False
        )
        add(name, engines[name].step)
        if entry.peer not in programs:
            add(entry.peer, entry.peer_step(GPT(config(case.model), seed=SEED)))
    seconds = time_in_turns(programs, rounds)
    timed = {}
    for name, engine in engines.items():
        peer = ENTRIES[name].peer
        with comm.ledger() as ledger:
            engine.step(*batches[-1])
        timed[name] = Timed(
            seconds[name], seconds[peer], losses[name], losses[peer], ledger.bytes_sent, ledger.comm_overlap
        )
    return timed
