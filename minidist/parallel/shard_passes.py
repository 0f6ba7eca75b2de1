"""A forward and a backward pass over units that are there only while they are used.

Hooks say when a unit's call begins and ends, and when the backward pass comes to it and leaves it (see
shard_hooks.py). Each moves this rank along the schedule that all ranks share. A unit that is called several
times is reduced when the backward pass has left all of its calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from minidist.comm.work import Group
from minidist.parallel.shard_gradients import Gradients
from minidist.parallel.shard_hooks import Inputs, ended, needed, tensors, watch
from minidist.parallel.shard_schedule import Operation, expected, require_same_call, settle
from minidist.parallel.shard_units import Unit


class Pass:
    """One forward pass and the backward pass that may follow, or several where its graph is retained.

    Attributes:
        version: of the parameters.
        calls: of each unit, by its number.
        operations: that the backward pass has before it.
        reduced: units whose gradients it has reduced.
    """

    def __init__(self, version: int) -> None:
        self.version = version
        self.calls: list[int] = []
        self.operations: deque[Operation] = deque()
        self.reduced: set[Unit] = set()
        self._left: dict[Unit, set[int]] = {}

    def start(self, operations: Sequence[Operation]) -> None:
        """A backward pass is to come."""
        self.operations = deque(operations)
        self.reduced.clear()
        self._left.clear()

    def leave(self, unit: Unit, call: int) -> None:
        """The backward pass has left a call."""
        self._left.setdefault(unit, set()).add(call)

    def is_over(self, unit: Unit) -> bool:
        """Whether it has left all calls of a unit."""
        return len(self._left.get(unit, ())) == self.calls[unit.number]


class Passes:
    """Runs `units`, the root first, along their schedule."""

    def __init__(self, units: Sequence[Unit], gradients: Gradients, group: Group, prefetch: bool) -> None:
        self.units, self.root, self.gradients = units, units[0], gradients
        self._group, self.prefetch = group, prefetch
        self.schedule = expected(units, prefetch)
        self.version = 0  # of the parameters: steps made
        self._next = 0  # of the schedule's forward order
        self._clock = 0
        self._forward = False  # a forward pass runs
        self._pass: Pass | None = None  # that of the running forward pass, where gradients will follow
        self._backward: Pass | None = None  # whose backward pass runs
        self._open = False  # a backward pass has begun and not ended
        watch(self, [unit for unit in units if unit.flats or unit is self.root])

    # Forward.

    def begin(self, unit: Unit, args: Any, kwargs: Any) -> Any:
        """A unit is called; other inputs for it, or None."""
        if self._in_backward():  # a checkpointed part is computed again
            self._again(unit)
            return None
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
        if not unit.present:
            self._gather_again(unit)
        if self.prefetch and self._next < len(order):
            order[self._next].gather(ahead=True)
            self._next += 1
        unit.show()
        if self._pass is None or unit is self.root or not torch.is_grad_enabled():
            return None
        inputs, hook = Inputs(args, kwargs), ended(self, self._pass, unit, unit.calls)
        for tensor in inputs.seen:
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        return inputs.args, inputs.kwargs

    def _gather_again(self, unit: Unit) -> None:
        """A call more than the schedule has; in the first pass it is not known yet how many come."""
        require_same_call(unit, self._group)
        unit.gather()
        if self.schedule.settled:
            self.schedule.calls[unit.number] = unit.calls

    def end(self, unit: Unit, inputs: Any, outputs: Any) -> None:
        """A unit has returned."""
        if self._in_backward():
            return
        unit.last = self._clock
        self._clock += 1
        if self._pass is not None and unit is not self.root and torch.is_grad_enabled():
            hook = needed(self, self._pass, unit)
            passed_on = {id(tensor) for tensor in tensors(inputs)}  # another unit's output, it may be
            for tensor in tensors(outputs):
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
        self._pass = Pass(self.version) if torch.is_grad_enabled() else None
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
            self._pass.calls = [unit.calls for unit in self.units]
            self._pass.start(self.schedule.backward)
            for tensor in tensors(outputs):
                if tensor.requires_grad:
                    tensor.register_hook(needed(self, self._pass, self.root))  # type: ignore[no-untyped-call]
        self._forward, self._pass = False, None

    # Backward.

    def need(self, of: Pass, unit: Unit) -> None:
        """The backward pass has come to a unit."""
        if not self._open:
            self._open = True
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        if of.version != self.version:
            raise RuntimeError(
                "backward came to a forward pass from before the optimizer's last step, which computed with "
                "other parameters than there are now; call backward() before step()"
            )
        if self._backward is not of:
            self._complete(self._backward)
            self._backward = of
            if self.root in of.reduced:  # in an earlier backward pass, and its graph was retained
                of.start(self.schedule.backward)
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

    def ended(self, of: Pass, unit: Unit, call: int) -> None:
        """The backward pass has left one of a unit's calls."""
        if of is not self._backward:
            return
        of.leave(unit, call)
        while of.operations and of.operations[0][0] == "reduce" and of.is_over(of.operations[0][1]):
            self._run(of, ahead=self.prefetch)
            self._gather_ahead(of)

    def _gather_ahead(self, of: Pass) -> None:
        """Launch the next gather, if it is due: while the unit before it computes."""
        if self.prefetch and of.operations and of.operations[0][0] == "gather":
            self._run(of, ahead=True)

    def _run(self, of: Pass, ahead: bool = False) -> None:
        """The next operation of a backward pass."""
        kind, unit = of.operations.popleft()
        if kind == "gather":
            unit.gather(ahead)
        else:
            self.gradients.reduce(unit, ahead)
            of.reduced.add(unit)
            unit.free()

    def _complete(self, of: Pass | None) -> None:
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
