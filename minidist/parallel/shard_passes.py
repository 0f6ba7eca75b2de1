"""A forward and a backward pass over units that are there only while they are used.

Hooks say when a unit's forward pass begins and ends, and when its backward pass does: a hook on its outputs
runs just before, one on its inputs just after. Each moves this rank along the schedule that all ranks share.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minidist.comm.work import Group
from minidist.parallel.shard_gradients import Gradients
from minidist.parallel.shard_schedule import Operation, expected, settle
from minidist.parallel.shard_units import Unit


class _Pass:
    """One forward pass and the backward pass that may follow."""

    def __init__(self) -> None:
        self.operations: deque[Operation] = deque()  # that its backward pass has before it
        self.reduced: set[Unit] = set()


class Passes:
    """Runs `units`, the root first, along their schedule."""

    def __init__(self, units: Sequence[Unit], gradients: Gradients, group: Group, prefetch: bool) -> None:
        self.units, self.root, self.gradients = units, units[0], gradients
        self._group, self.prefetch = group, prefetch
        self.schedule = expected(units, prefetch)
        self._next = 0  # of the schedule's forward order
        self._clock = 0
        self._forward = False  # a forward pass runs
        self._pass: _Pass | None = None  # that of the running forward pass, where gradients will follow
        self._backward: _Pass | None = None  # whose backward pass runs
        self._open = False  # a backward pass has begun and not ended
        itself = weakref.ref(self)  # the module may outlive this object, which must not live on in its hooks
        handles = []
        for unit in units:
            if not unit.flats and unit is not self.root:
                continue
            handles += [
                unit.module.register_forward_pre_hook(_before(itself, unit), prepend=True, with_kwargs=True),
                unit.module.register_forward_hook(_after(itself, unit)),
            ]
        self._removal = weakref.finalize(self, _remove, handles)
        self._removal.atexit = False

    # Forward.

    def begin(self, unit: Unit, inputs: Any) -> None:
        """A unit is called."""
        if self._in_backward():  # a checkpointed part is computed again
            self._again(unit)
            return
        if unit is self.root:
            self._begin_pass()
        if not unit.calls:
            unit.first = self._clock
        self._clock += 1
        unit.calls += 1
        order = self.schedule.forward
        while not unit.present and self._next < len(order):
            order[self._next].gather()
            self._next += 1
        unit.gather()  # for one that was freed too early, before it was known how often it is called
        if self.prefetch and self._next < len(order):
            order[self._next].gather(ahead=True)
            self._next += 1
        unit.show()
        if self._pass is not None and unit is not self.root and torch.is_grad_enabled():
            remaining = [t for t in _tensors(inputs) if t.requires_grad]
            if remaining:
                remaining[0].register_hook(_ended(weakref.ref(self), self._pass, unit))  # type: ignore[no-untyped-call]

    def end(self, unit: Unit, inputs: Any, outputs: Any) -> None:
        """A unit has returned."""
        if self._in_backward():
            return
        unit.last = self._clock
        self._clock += 1
        if self._pass is not None and unit is not self.root and torch.is_grad_enabled():
            hook = _needed(weakref.ref(self), self._pass, unit)
            passed_on = {id(tensor) for tensor in _tensors(inputs)}  # another unit's output, it may be
            for tensor in _tensors(outputs):
                if tensor.requires_grad and id(tensor) not in passed_on:
                    tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        if unit is self.root:
            self._end_pass(outputs)
        elif unit.calls >= self.schedule.calls[unit.number]:
            unit.free()

    def _begin_pass(self) -> None:
        if self._open or self._forward:  # the last one raised
            self.abandon()
        self._next = self._clock = 0
        self._forward = True
        self._pass = _Pass() if torch.is_grad_enabled() else None
        for unit in self.units:
            unit.calls = 0

    def _end_pass(self, outputs: Any) -> None:
        # Others may use units that this rank has not.
        for unit in self.schedule.forward[self._next :]:
            unit.gather()
            unit.free()
        for unit in self.units:
            if unit is not self.root or self._pass is None:
                unit.free()
        if self._pass is not None:
            if not self.schedule.settled and len(self.units) > 1:
                self.schedule = settle(self.units, self.prefetch, self.root.device, self._group)
            self._pass.operations.extend(self.schedule.backward)
            for tensor in _tensors(outputs):
                if tensor.requires_grad:
                    tensor.register_hook(_needed(weakref.ref(self), self._pass, self.root))  # type: ignore[no-untyped-call]
        self._forward, self._pass = False, None

    # Backward.

    def need(self, of: _Pass, unit: Unit) -> None:
        """The backward pass has come to a unit."""
        if not self._open:
            self._open = True
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        if self._backward is not of:
            self._complete(self._backward)
            self._backward = of
            self.root.gather()
            self.root.show()
        if unit in of.reduced:
            raise RuntimeError(
                f"backward came back to {unit} after its gradients were reduced, since this pass uses it in "
                "another order than the first; make one unit of the parts whose order changes (units=)"
            )
        while not unit.present:
            self._run(of)
        self._gather_ahead(of)
        unit.show()

    def _again(self, unit: Unit) -> None:
        """A backward pass computes a unit again that it has not come to: its gather overtakes reductions."""
        of = self._backward
        assert of is not None
        if not unit.present and ("gather", unit) in of.operations:
            of.operations.remove(("gather", unit))
        unit.gather()
        unit.show()

    def _in_backward(self) -> bool:
        return self._backward is not None and torch._C._current_graph_task_id() != -1

    def ended(self, of: _Pass, unit: Unit) -> None:
        """The backward pass has left a unit."""
        if of is self._backward and of.operations and of.operations[0] == ("reduce", unit):
            self._run(of, ahead=self.prefetch)
            self._gather_ahead(of)

    def _gather_ahead(self, of: _Pass) -> None:
        """Launch the next gather, if it is due: while the unit before it computes."""
        if self.prefetch and of.operations and of.operations[0][0] == "gather":
            self._run(of, ahead=True)

    def _run(self, of: _Pass, ahead: bool = False) -> None:
        """The next operation of a backward pass."""
        kind, unit = of.operations.popleft()
        if kind == "gather":
            unit.gather(ahead)
        else:
            self.gradients.reduce(unit, ahead)
            of.reduced.add(unit)
            unit.free()

    def _complete(self, of: _Pass | None) -> None:
        """What this rank's backward pass has not done; others may have."""
        if of is not None:
            while of.operations:
                self._run(of)
            self.gradients.reduce(self.root, ahead=False)
            of.reduced.add(self.root)

    def finish(self) -> None:
        """The backward pass is over: the gradients are complete."""
        if not self._open:
            return
        self._complete(self._backward)
        self._backward, self._open = None, False
        self.gradients.complete()
        for unit in self.units:
            unit.free()

    def abandon(self) -> None:
        """After an error: free all, and forget the pass that was under way."""
        self._backward, self._pass = None, None
        self._open = self._forward = False
        self.gradients.complete()
        for unit in self.units:
            unit.free()
            for flat in unit.flats:
                for parameter in flat.parameters:
                    parameter.grad = None

    def gather_all(self) -> None:
        """All parameters at once, outside passes.

        Raises:
            RuntimeError: inside one.
        """
        if self._forward or self._open:
            raise RuntimeError("parameters can be summoned before or after a pass, and not inside it")
        for unit in self.units:
            unit.gather()
            unit.show()

    def free_all(self) -> None:
        """Give the memory of all gathered parameters back."""
        for unit in self.units:
            unit.free()


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a module's arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif hasattr(value, "__dataclass_fields__"):
        yield from _tensors(vars(value))


Owner = weakref.ref[Passes]


def _before(owner: Owner, unit: Unit) -> Callable[..., None]:
    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        passes = owner()
        if passes is not None:
            passes.begin(unit, (args, kwargs) if kwargs else args)

    return before


def _after(owner: Owner, unit: Unit) -> Callable[..., None]:
    def after(_: nn.Module, inputs: Any, outputs: Any) -> None:
        passes = owner()
        if passes is not None:
            passes.end(unit, inputs, outputs)

    return after


def _needed(owner: Owner, of: _Pass, unit: Unit) -> Callable[[Tensor], None]:
    def needed(_: Tensor) -> None:
        passes = owner()
        if passes is not None:
            passes.need(of, unit)

    return needed


def _ended(owner: Owner, of: _Pass, unit: Unit) -> Callable[[Tensor], None]:
    def ended(_: Tensor) -> None:
        passes = owner()
        if passes is not None:
            passes.ended(of, unit)

    return ended


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
