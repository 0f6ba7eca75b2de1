"""A rank alone: train as one of two ranks, with calls that send nothing, and look at placements.

`check` says what is wrong with a training before it runs. Each call returns something of the right shape, and
the optimizer changes nothing: only placements matter (placements.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import zip_longest
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from minidist.plain.mistakes.ranks import Work
from minidist.plain.placements import GIVES, TAKES_NOT, Placements, Wrong

SIZES, ROWS, T = {"layers": 2, "width": 24, "heads": 4, "vocabulary": 53}, 30, 14  # see placements.SHARED


class Lone(Placements):
    """What a rank's training uses as `comm`, and its optimizer."""

    Work = Work

    def __init__(self, rank: int, other: Lone | None = None) -> None:
        super().__init__(rank, other)
        self.trained, self.why, self.sent = list[Tensor](), dict[int, str](), "varying"
        self.rank, self.size = lambda: rank, lambda: 2
        for name in (*GIVES, "all_to_all", "send", "recv"):
            setattr(self, name, partial(self._call, name))

    def _call(self, name: str, x: Tensor, *_: Any, out: Any = None, async_op: bool = False, **__: Any) -> Any:
        [at], own = self.look(name, [x]), name in ("send", "recv")
        if not own:
            self.calls.append(f"{name} of {[*x.shape]}")
        if at in TAKES_NOT.get(name, {}):
            self.wrong(f"{name} of {[*x.shape]}, which is {at}: {TAKES_NOT[name][at]}")
        gives = GIVES.get(name, at if at == "shard" else "varying")
        if name == "send":
            self.sent = gives
            return Work(lambda: x) if async_op else x
        if name == "recv":  # zeros, placed like what this rank has sent
            x.detach().zero_()
        elif name == "all_gather":
            x = torch.cat([x.detach()] * 2) if out is None else out.copy_(torch.cat([x.detach()] * 2))
        elif name in ("reduce_scatter", "all_to_all"):
            x = x.chunk(2)[self.number].clone() if name == "reduce_scatter" else x.clone()
        finish = partial(self.put, x, self.sent if name == "recv" else gives)
        return Work(finish) if async_op else finish()

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Make an optimizer that looks at gradients alone; what both ranks train is replicated."""
        own = list(parameters)
        with _disable_current_modes():
            self.trained = [p.detach().clone() for p in own]
            theirs = getattr(self.other, "trained", [])
            shared = [any(torch.equal(p, q) for q in theirs) for p in self.trained]
        if any(both and self.at(p) == "varying" for p, both in zip(own, shared, strict=True)):
            self.wrong("parameters begin with other values on every rank")

        def step(*_: Any) -> None:
            if all(p.grad is None for p in own):
                self.wrong("the optimizer gets no gradients")
            self.look("step", [*own])
            for p, both in zip(own, shared, strict=True):
                at = "zero" if p.grad is None else self.at(p.grad)
                if not both and at in ("partial", "replicated"):
                    self.wrong(f"a parameter {[*p.shape]} is this rank's own, and its gradient is {at}")
                if at not in ("replicated", "zero"):
                    self.whole[p.untyped_storage()._cdata] = "varying"
                    self.why.setdefault(id(p), f"its gradient is {at}")

        made = torch.optim.SGD(own, lr=0.0)
        made.step = MethodType(step, made)  # type: ignore[method-assign]
        return made


def check(
    bound: Callable[[Any], Callable[..., Any]], make: Callable[..., nn.Sequential], **options: Any
) -> str:
    """Return the first wrong use in two steps of training, or an empty string.

    bound: from what a training uses as `comm` to its `train`. make: builds its model, of SIZES.
    """
    first, second = Lone(0), Lone(1)
    for me in (first, second, Lone(0, second), Lone(1, first)):
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(SIZES["vocabulary"], (ROWS, T + 1), generator=generator)
        model, batches = make(**SIZES), [(tokens[:, :-1], tokens[:, 1:])] * 2
        for p in model.parameters():
            me.put(p.detach().copy_(torch.rand(p.shape, generator=generator)), "varying")
        try:
            with me:
                bound(me)(model, batches, me.optimizer, **options)
            for name, p in model.named_parameters():
                if me.at(p) != "replicated":
                    me.wrong(f"{name} ends with other values on every rank; {me.why.get(id(p), '')}")
        except Wrong as wrong:
            return str(wrong)
    pairs = zip_longest(first.calls, second.calls, fillvalue="nothing")
    return next((f"rank 0 calls {a} where rank 1 calls {b}" for a, b in pairs if a != b), "")
