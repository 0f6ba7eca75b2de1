"""What each rank of the ZeRO benchmark does: our stages' steps in turn with those of torch's sharded loops.

Runs inside the ranks, as training_steps.py does. torch's loops are those that its tutorials give: for stage
1, DistributedDataParallel and a ZeroRedundancyOptimizer; for stages 2 and 3, FSDP2's `fully_shard` of each
block and of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import minidist as md
from minidist import comm
from minidist.benchmarks.harness.training_steps import ADAMW, SEED, Case, Timed, plain_loop
from minidist.kernels.measure.harness import time_in_turns
from minidist.model.configs import config
from minidist.model.gpt import GPT, Block

Step = Callable[[Tensor, Tensor], float]


@dataclass(frozen=True)
class Entry:
    """A stage of ours, and the loop of torch's that it is measured with."""

    stage: int
    peer: str
    peer_step: Callable[[nn.Module], Step]


def zero_redundancy(model: nn.Module) -> Step:
    """DistributedDataParallel with an optimizer whose state is sharded."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(
        parallel.parameters(), optimizer_class=torch.optim.AdamW, **ADAMW.keywords
    )
    return plain_loop(parallel, optimizer)


def fully_sharded(model: nn.Module) -> Step:
    """FSDP2: parameters, gradients and state sharded, each block a unit."""
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
    """Train in turn by our engine at each stage and by torch's loops, on the same rows from equal weights."""
    batches = case.batches(rounds + 2)  # one more for time_in_turns to warm up, and one for the ledger
    losses: dict[str, list[float]] = {}
    programs: dict[str, Callable[[], None]] = {}
    engines = {}

    def add(name: str, train: Step) -> None:
        losses[name] = []
        programs[name] = lambda: losses[name].append(train(*batches[len(losses[name])]))

    for name in names:
        entry = ENTRIES[name]
        engines[name] = md.prepare(case.build(), ADAMW, md.Layout(dp=md.size(), zero=entry.stage))
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
