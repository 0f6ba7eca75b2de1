"""Training loops of Accelerate and of DeepSpeed's ZeRO, on the CPU over gloo.

Either package is imported only when one of its programs is made, and uses the existing process group.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

from torch import Tensor, nn

import minidist as md
from minidist.benchmarks.harness.steps.training_steps import ADAMW
from minidist.benchmarks.harness.strategy_table.programs import Program
from minidist.benchmarks.harness.strategy_table.strategies import Work


def accelerated(work: Work) -> Program:
    """Make a training loop whose model and optimizer Accelerate has prepared."""
    _set_launcher_variables()
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = work.build()
    prepared, optimizer = accelerator.prepare(model, ADAMW(model.parameters()))

    def train(inputs: Tensor, targets: Tensor) -> float:
        optimizer.zero_grad()
        loss = _cross_entropy(prepared(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        return loss.item()

    return Program(train, (md.rank(), md.size()), model, optimizer.optimizer)


def deep_speed(stage: int, work: Work) -> Program:
    """Make a training loop on a DeepSpeed engine with this stage of ZeRO, in float32."""
    _set_launcher_variables()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.filterwarnings("ignore", category=FutureWarning)  # it calls functions that torch has renamed
    import deepspeed

    # DeepSpeed would spend a minute compiling its own communication operator; all programs here use gloo.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    model = work.build()
    rows = work.rows // md.size()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": rows,
        "train_batch_size": work.rows,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,  # its default is 1, but no other program here clips
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=ADAMW(model.parameters()), config=config)

    def train(inputs: Tensor, targets: Tensor) -> float:
        loss = _cross_entropy(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return Program(train, (md.rank(), md.size()))


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def _set_launcher_variables() -> None:
    """Set the environment variables that a launcher would set and that both packages read."""
    os.environ.update(
        RANK=str(md.rank()),
        WORLD_SIZE=str(md.size()),
        LOCAL_RANK=str(md.rank()),
        LOCAL_WORLD_SIZE=str(md.size()),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
    )
