"""Solutions of lesson 15.

The order of ranks is that of Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM", section 3; the bytes of states are those of Rajbhandari et al. 2020, "ZeRO".
"""

from __future__ import annotations

import copy

import torch

import minidist as md
from checks.training import Training


def place(rank: int, layout: md.Layout) -> tuple[int, int, int, int]:
    """A rank's coordinates (pp, dp, cp, tp); tp counts fastest."""
    rank, tp = divmod(rank, layout.tp)
    rank, cp = divmod(rank, layout.cp)
    pp, dp = divmod(rank, layout.dp)
    return pp, dp, cp, tp


def group(rank: int, axis: str, layout: md.Layout) -> list[int]:
    """All ranks whose coordinates on the other axes are those of `rank`, in order."""
    free = ("pp", "dp", "cp", "tp").index(axis)

    def others(r: int) -> list[int]:
        return [at for i, at in enumerate(place(r, layout)) if i != free]

    return [r for r in range(layout.ranks) if others(r) == others(rank)]


def memory(parameters: float, layout: md.Layout) -> float:
    """Bytes of parameters, gradients and optimizer on one rank, with Adam."""
    weight, gradient, state = (4, 4, 8) if layout.precision == "fp32" else (2, 2, 12)
    own = parameters / (layout.tp * layout.pp)  # what this rank has of the model
    n = layout.dp * layout.cp  # ranks that have the same of it, and share it by ZeRO
    return own * (
        weight / (n if layout.zero >= 3 else 1)
        + gradient / (n if layout.zero >= 2 else 1)
        + state / (n if layout.zero >= 1 else 1)
    )


def bytes_per_step(layout: md.Layout, parameters: float, blocks: int, activations: float) -> dict[str, float]:
    """Bytes that a rank sends in a step, for each axis."""
    element = 4 if layout.precision == "fp32" else 2
    gradients = element * parameters / (layout.tp * layout.pp)
    passes = 3 if layout.zero == 3 else 2
    all_reduces = 4 * blocks / layout.pp
    return {
        "dp": passes * (layout.dp - 1) / layout.dp * gradients,
        "tp": all_reduces * 2 * (layout.tp - 1) / layout.tp * activations,
        "pp": min(layout.pp - 1, 2) * activations,  # to the next stage, and back to the one before
    }


def choose(
    layouts: list[md.Layout],
    budget: float,
    need,  # of a layout: bytes
    seconds,  # of a layout: a prediction
) -> md.Layout | None:
    """Plain data parallelism where it fits, else the fastest that fits, else None."""
    fitting = [layout for layout in layouts if need(layout) <= budget]
    for layout in fitting:
        if layout.tp == layout.pp == layout.cp == 1 and layout.zero == 0:
            return layout
    return min(fitting, key=seconds, default=None)


class Checkpoint:
    """All that the next steps of a training depend on."""

    def save(self, run: Training) -> dict[str, object]:
        """A copy of it, which later steps of `run` leave as it is."""
        return copy.deepcopy(
            {
                "model": run.model.state_dict(),
                "optimizer": run.optimizer.state_dict(),
                "steps": run.steps,
                "order": run.order,
                "random": torch.get_rng_state(),
            }
        )

    def load(self, run: Training, saved: dict[str, object]) -> None:
        """Make `run`, which is new, go on where the saved one was."""
        run.model.load_state_dict(saved["model"])
        run.optimizer.load_state_dict(saved["optimizer"])
        run.steps, run.order = saved["steps"], saved["order"]
        torch.set_rng_state(saved["random"])
