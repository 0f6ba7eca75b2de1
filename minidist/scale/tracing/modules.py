"""Notes when modules and optimizers compute: their forward passes, backward passes and steps.

Forward passes are seen by hooks on the modules. Operations that a module's forward pass has recorded for the
backward pass belong to it, the innermost where modules lie in one another; hooks on these operations see its
backward pass, and change nothing in the graph. Hooks cost some microseconds for each operation.

Source: Paszke et al. 2017, "Automatic differentiation in PyTorch" (the graph of operations).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from minidist.parallel.sharding.unit_hooks import tensors_in
from minidist.scale.tracing.slices import Atom, Slice

KEY = "minidist.trace"
"""Under which an operation keeps the trace that watches it."""


class Modules:
    """Watches modules, and every optimizer of this process, between `open` and `close`.

    Args:
        named: the modules with the names to call them by.

    Attributes:
        slices: for each thread what was seen, but for backward passes.
        atoms: for each thread the operations of backward passes.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Module]]) -> None:
        self._named = named
        self.slices: dict[int, list[Slice]] = defaultdict(list)
        self.atoms: dict[int, list[Atom]] = defaultdict(list)
        self._open: dict[int, list[tuple[object, str, float, int]]] = defaultdict(list)
        self._inside: dict[int, int] = defaultdict(int)  # operations of a backward pass under way
        self._mark = object()  # of this trace, since an operation may outlive it
        self._handles: list[Any] = []

    def open(self) -> None:
        """Begin."""
        for name, module in self._named:
            self._handles += [
                module.register_forward_pre_hook(self._before(name), prepend=True),
                # Also where it raises an error, as what is computed again does once it has all that it needs.
                module.register_forward_hook(self._after, always_call=True),
            ]
        self._handles += [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def close(self) -> None:
        """End, and leave no hook behind."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, name: str) -> Callable[..., None]:
        def before(module: nn.Module, inputs: Any) -> None:
            recorded = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
            self._open[get_ident()].append((module, name, time.perf_counter(), recorded))

        return before

    def _after(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        ended, thread = time.perf_counter(), get_ident()
        stack = self._open[thread]
        if not any(owner is module for owner, *_ in stack):  # it began before the trace
            return
        again = self._inside[thread] > 0
        path = tuple(name for _, name, *_ in stack)
        owner: object = None
        while owner is not module:
            owner, name, start, recorded = stack.pop()
            kind = "recompute" if again else "forward"
            self.slices[thread].append(Slice("", kind, name, start, ended))
        if not again:  # what is computed again is never gone back through
            self._watch(outputs, recorded, path)

    def _watch(self, outputs: Any, first: int, path: tuple[str, ...]) -> None:
        """Watch the operations that were recorded from number `first` on, and that nobody watches."""
        stack: list[Node | None] = [x.grad_fn for x in tensors_in(outputs)]
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

        def before(gradients: tuple[Tensor, ...]) -> None:
            self._inside[get_ident()] += 1
            begun.append(time.perf_counter())

        def after(gradients: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
            ended, thread = time.perf_counter(), get_ident()
            self._inside[thread] -= 1
            number = torch._C._current_graph_task_id()
            self.atoms[thread].append(Atom(begun.pop(), ended, path, number))

        self._handles += [node.register_prehook(before), node.register_hook(after)]

    def _before_step(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        name = f"{type(optimizer).__name__}.step"
        self._open[get_ident()].append((optimizer, name, time.perf_counter(), 0))

    def _after_step(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        ended, thread = time.perf_counter(), get_ident()
        stack = self._open[thread]
        if stack and stack[-1][0] is optimizer:
            _, name, start, _ = stack.pop()
            self.slices[thread].append(Slice("", "optimizer", name, start, ended))
