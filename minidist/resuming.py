"""A training that is stopped at any moment and goes on: what `minidist train --save` does beside the steps.

A killed rank takes the run with it; torchrun, or whoever gives the command again, starts it anew, and it goes
on from the newest checkpoint that is whole. What came after that is trained again, to the same bits, since
order, random states and sums are the same. SIGTERM, which a spot machine sends shortly before it goes, is no
crash: ranks agree at the end of the step, save, and leave.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from minidist import comm
from minidist.checkpoint import checkpoints, load, save
from minidist.model import Sampler
from minidist.parallel.engine import Engine


class Resuming:
    """Saves a training as it goes, and takes it up again.

    folder: of the checkpoints. every: steps from one to the next. keep: how many. description: what the
    losses depend on beside the step; a folder of another description is refused.
    """

    def __init__(
        self,
        engine: Engine,
        sampler: Sampler,
        folder: str,
        every: int,
        keep: int,
        description: Mapping[str, Any],
    ) -> None:
        self.engine, self.sampler, self.folder = engine, sampler, folder
        self.every, self.keep, self.description = every, keep, dict(description)
        self.saved: int | None = None  # the step that was saved last

    def losses(self, resume: bool = True) -> list[float]:
        """Those of the steps done so far, which the engine has then: none where the folder has no checkpoint.

        Raises:
            ValueError: the folder has checkpoints, and they are another training's, or `resume` is False.
            CheckpointError: none of them is whole.
        """
        found = torch.tensor(len(checkpoints(self.folder)), device=comm.device())
        if not comm.broadcast(found):
            return []
        if not resume:
            raise ValueError(
                f"{self.folder} has checkpoints, and the training is not to go on from them; give another "
                "folder, or resume"
            )
        loaded = load(self.engine, self.folder, latest=True, sampler=self.sampler)
        saved = loaded.extra["training"]
        for name, mine in self.description.items():
            if saved.get(name) != mine:
                raise ValueError(
                    f"{loaded.path} is of a training with {name}={saved.get(name)!r}, and this one has "
                    f"{mine!r}; give what it was started with, or another folder"
                )
        self.saved = loaded.step
        losses: list[float] = loaded.extra["losses"]
        return losses

    def step_done(self, losses: list[float], last: bool, asked: bool) -> bool:
        """Save where it is time to; whether the training is to stop here, the same on all ranks.

        losses: of all steps so far. last: whether these are all. asked: whether this rank was asked to stop.
        Sends 2 (n - 1) / n 8 bytes.
        """
        stop = torch.tensor(int(asked), device=comm.device())
        comm.all_reduce(stop, "max")
        step = len(losses)
        if self.saved != step and (last or stop or step % self.every == 0):
            extra = {"losses": losses, "training": self.description}
            save(self.engine, self.folder, step=step, keep=self.keep, sampler=self.sampler, extra=extra)
            self.saved = step
        return bool(stop)
