"""Which optimizers may update a part of a parameter that ends anywhere.

An elementwise update computes each element's new value from that element's own history. It gives the same
result on a flat shard, cut in the middle of a row, as on whole parameters. Other optimizers need the
parameter's shape: Adafactor takes means over rows, Muon multiplies matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

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


def is_elementwise(kind: type) -> bool:
    """Whether an optimizer class updates each element by itself, so that a parameter may be cut anywhere.

    Torch's own are known. Any other class, even one derived from these, says so with `elementwise = True`.
    """
    if "elementwise" in vars(kind):
        return bool(vars(kind)["elementwise"])
    return kind.__name__ in ELEMENTWISE and kind.__module__.startswith("torch.optim.")


def require_elementwise(make: Callable[..., torch.optim.Optimizer]) -> None:
    """ValueError where `make`, a class or a partial of one, makes an optimizer that needs whole parameters.

    Any other function passes: the optimizer that it makes is checked once it is made.
    """
    kind: object = make
    while isinstance(kind, partial):
        kind = kind.func
    if isinstance(kind, type) and not is_elementwise(kind):
        refuse_unshareable(kind)
        raise ValueError(
            f"optimizer is {kind.__name__}, which needs whole parameters, and stage 3 gives it flat shards; "
            "use dp without zero, or Layout(zero=1) if it looks at one parameter at a time, as Adafactor "
            f"does, or one of {', '.join(sorted(ELEMENTWISE))}; if it treats every element alone, give its "
            "class the attribute elementwise = True"
        )
