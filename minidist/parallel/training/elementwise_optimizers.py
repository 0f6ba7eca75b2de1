"""What an optimizer says about itself: whether it may update a part of a parameter, and its work for a whole.

An elementwise update computes each element's new value from that element's own history. It gives the same
result on a flat shard, cut in the middle of a row, as on whole parameters. Other optimizers need the
parameter's shape: Adafactor takes means over rows, Muon multiplies matrices. They update whole parameters,
one at a time, and ranks that share the state deal those to owners.

| Attribute of the class | Says |
|---|---|
| `elementwise` | whether it treats every element alone; an option of this name in a group comes first |
| `joins_cuts` | it joins matrices that tensor parallelism cut, and treats each matrix of a stack alone |
| `work(shape)` | the relative time of its update of a whole parameter; without it, the elements |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

UpdateWork = Callable[[tuple[int, ...]], float]
"""From a parameter's shape to the relative time of its update."""

ELEMENTWISE = frozenset(
    "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()  # noqa: SIM905 (one to a line)
)
"""Names of torch's optimizers that update each element by itself."""


UNSHAREABLE = {
    torch.optim.LBFGS: "its steps look at all parameters at once",
    torch.optim.SparseAdam: "its gradients are sparse",
}
"""Optimizers of which no rank can update some of the parameters, and why."""


def refuse_unshareable(kind: type) -> None:
    """ValueError where ranks that have different parameters, or parts of them, cannot share an optimizer."""
    for refused, reason in UNSHAREABLE.items():
        if issubclass(kind, refused):
            raise ValueError(
                f"optimizer is {refused.__name__}, which cannot be shared by parts, since {reason}; use dp "
                "alone, as in Layout(dp=2), or DataParallel"
            )


def is_elementwise(kind: type, group: Mapping[str, Any] | None = None) -> bool:
    """Whether an optimizer class updates each element of a group by itself, so that parameters may be cut.

    Torch's own are known. Any other class, even one derived from these, says so with `elementwise = True`, or
    for a group with an option of this name.
    """
    if group is not None and "elementwise" in group:
        return bool(group["elementwise"])
    if "elementwise" in vars(kind):
        return bool(vars(kind)["elementwise"])
    return kind.__name__ in ELEMENTWISE and kind.__module__.startswith("torch.optim.")


def work_of(kind: type) -> UpdateWork:
    """The relative time of an optimizer's update of a whole parameter, as a function of its shape."""
    work: UpdateWork = getattr(kind, "work", math.prod)
    return work
