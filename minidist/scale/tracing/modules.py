"""Records when modules and optimizers compute: forward passes, backward passes and steps.

Hooks on the modules record forward passes. The operations that a forward pass leaves for the backward pass
belong to the innermost module that it runs in; hooks on these operations record its backward pass, and do not
change the graph. Hooks cost some microseconds per operation.

Source: Paszke et al. 2017, "Automatic differentiation in PyTorch" (the graph of operations).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from minidist.parallel.contract.batch import tensors_in
from minidist.scale.tracing.slices import Atom, Slice

KEY = "minidist.trace"
"""The key under which an operation's metadata names the trace that records it."""


class Modules:
    """Records the named modules, and all optimizers of this process, between `open` and `close`."""

    def __init__(self, named: Sequence[tuple[str, nn.Module]]) -> None:
        first = {id(module): (name, module) for name, module in reversed(named)}
        self._named = [*reversed(first.values())]  # each module once, by its first name
        self.slices: dict[int, list[Slice]] = defaultdict(list)  # by thread; all but backward passes
        self.atoms: dict[int, list[Atom]] = defaultdict(list)  # by thread; operations of backward passes
        self._open: dict[int, list[tuple[object, str, float, int]]] = defaultdict(list)
        self._inside: dict[int, int] = defaultdict(int)  # operations of a backward pass in progress
        self._mark = object()  # identifies this trace, since an operation may outlive it
        self._handles: list[Any] = []

    def open(self) -> None:
        """Start recording."""
        for name, module in self._named:
            self._handles += [
                module.register_forward_pre_hook(partial(self._begin, name), prepend=True),
                # Call it on errors as well: recomputation raises one once it has all that it needs.
                module.register_forward_hook(self._end, always_call=True),
            ]
        self._handles += [
            register_optimizer_step_pre_hook(partial(self._begin, "")),
            register_optimizer_step_post_hook(self._end),
        ]

    def close(self) -> None:
        """Stop recording and remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _begin(self, name: str, owner: object, *arguments: Any) -> None:
        """A module's forward pass begins, or an optimizer's step."""
        recorded = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        name = name or f"{type(owner).__name__}.step"
        self._open[get_ident()].append((owner, name, time.perf_counter(), recorded))

    def _end(self, ended: object, arguments: Any, outputs: Any) -> None:
        """It ends, and so does everything that has begun since and was left by an error."""
        now, thread = time.perf_counter(), get_ident()
        stack, again = self._open[thread], self._inside[thread] > 0
        if not any(owner is ended for owner, *_ in stack):  # it began before the trace
            return
        path = tuple(name for _, name, *_ in stack)
        owner: object = None
        while owner is not ended:
            owner, name, start, recorded = stack.pop()
            kind = "optimizer" if isinstance(owner, Optimizer) else "recompute" if again else "forward"
            self.slices[thread].append(Slice("", kind, name, start, now))
        if kind == "forward":  # no backward pass goes through recomputed operations
            self._watch(outputs, recorded, path)

    def _watch(self, outputs: Any, first: int, path: tuple[str, ...]) -> None:
        """Put hooks on the operations recorded from number `first` on that have none yet."""
        stack: list[Node | None] = [x.grad_fn for _, x in tensors_in(outputs)]
        while stack:
            node = stack.pop()
            if node is None or node._sequence_nr() < first:
                continue
            notes: Any = node.metadata
            if notes.get(KEY) is self._mark:
                continue
            notes[KEY] = self._mark
            self._time(node, path)
            stack += [below for below, _ in node.next_functions]

    def _time(self, node: Node, path: tuple[str, ...]) -> None:
        begun: list[float] = []

        def before(gradients: Any) -> None:
            self._inside[get_ident()] += 1
            begun.append(time.perf_counter())

        def after(gradients: Any, outputs: Any) -> None:
            ended, thread = time.perf_counter(), get_ident()
            self._inside[thread] -= 1
            number = torch._C._current_graph_task_id()
            self.atoms[thread].append(Atom(begun.pop(), ended, path, number))

        self._handles += [node.register_prehook(before), node.register_hook(after)]


def named_parts(module: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    """A module and its submodules with their names, except compiled modules and what they contain."""
    found, compiled = [], list[nn.Module]()
    for name, part in module.named_modules():
        if part._compiled_call_impl is not None or "_orig_mod" in part._modules:
            compiled += part.modules()
        if not any(part is each for each in compiled):
            found.append((prefix + (name or type(part).__name__), part))
    return found
