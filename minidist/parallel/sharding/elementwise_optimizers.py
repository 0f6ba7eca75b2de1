"""Which optimizers may update a part of a parameter that ends anywhere.

An elementwise update computes each element's new value from that element's own history. It gives the same on
a flat shard, cut in the middle of a row, as on whole parameters. Others, such as Adafactor with its means
over rows or Muon with its matrix products, need the parameter's shape.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

ELEMENTWISE = frozenset(
    {
        "ASGD",
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    }
)
"""Names of torch's optimizers that update each element by itself."""


def is_elementwise(kind: type) -> bool:
    """Whether an optimizer class updates each element by itself, so that a parameter may be cut anywhere.

    torch's that do are known; another class, also one made from these, says so with `elementwise = True`.
    """
    if "elementwise" in vars(kind):
        return bool(vars(kind)["elementwise"])
    return kind.__name__ in ELEMENTWISE and kind.__module__.startswith("torch.optim.")


def require_elementwise(make: Callable[..., torch.optim.Optimizer]) -> None:
    """ValueError where `make`, a class or a partial of one, makes an optimizer that needs whole parameters.

    What another function makes is known when it is made.
    """
    kind: object = make
    while isinstance(kind, partial):
        kind = kind.func
    if isinstance(kind, type) and not is_elementwise(kind):
        raise ValueError(
            f"optimizer is {kind.__name__}, which needs whole parameters, and stage 3 gives it flat "
            "shards; use Layout(zero=1), which splits at whole parameters, or one of "
            + ", ".join(sorted(ELEMENTWISE))
        )
