"""An optimizer over shards, called by itself as loops do: its `step` and `zero_grad` do what is needed.

The gradients of shards are complete only once all ranks know which parameters were used, and in half
precision the units are gathered from copies of what the optimizer updates.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from minidist.parallel.training.clipping import guard

if TYPE_CHECKING:
    from minidist.parallel.sharding.fully_shard import FullyShard


def follow(sharded: FullyShard) -> None:
    """Have `sharded` hear of calls of its optimizer, and of clipping that would go wrong."""
    owner, optimizer = weakref.ref(sharded), sharded.optimizer

    def before(_: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        sharded = owner()
        if sharded is None or sharded.stepping:
            return
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise RuntimeError("an optimizer of shards takes no closure; run it, and call step() after it")
        if sharded.place.longest is not None:
            raise RuntimeError(
                "the optimizer's state lies on disk, and its own step() would bring all of it to memory; "
                "call the FullyShard's step()"
            )
        sharded.complete()

    def after(*_: Any) -> None:
        sharded = owner()
        if sharded is not None and not sharded.stepping:
            sharded.publish()

    def zero_grad(set_to_none: bool = True) -> None:
        sharded = owner()
        if sharded is not None:
            sharded.zero_grad(set_to_none)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]

    def why(whole: bool) -> str | None:
        """Against clipping the shards' gradients; whole: as if this rank had all."""
        sharded = owner()
        if sharded is None:
            return None
        if not sharded.gradients.synchronized:
            return "parameters has shards of a FullyShard, whose gradients are not complete"
        return "parameters has shards of a FullyShard, and sharded is False" if whole else None

    for store in sharded.stores:
        store.guarded_by(why)
    hidden = "parameters has a module's inside a FullyShard, which get no gradients"
    guard(sharded.module.parameters(), lambda _: hidden if owner() is not None else None)
