"""A forward and a backward pass over units that are there only while they are used.

Hooks say when a unit's call begins and ends, and when the backward pass comes to it and leaves it (see
unit_hooks.py). Each moves this rank along the schedule that all ranks share. A unit that is called several
times is reduced when the backward pass has left all of its calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from minidist.comm.work import Group
from minidist.parallel.sharding.collective_order import expected, own, require_same_call, settle
from minidist.parallel.sharding.unit_gradients import UnitGradients
from minidist.parallel.sharding.unit_hooks import Inputs, ended, needed, tensors_in, watch
from minidist.parallel.sharding.unit_pass import UnitPass
from minidist.parallel.sharding.units import Unit


class UnitRuntime:
    """Runs `units`, the root first, along their schedule."""

    def __init__(self, units: Sequence[Unit], gradients: UnitGradients, group: Group, prefetch: bool) -> None:
        self.units, self.root, self.gradients = units, units[0], gradients
        self._group, self.prefetch = group, prefetch
        self.schedule = expected(units, prefetch)
        self._next = 0  # of the schedule's forward order
        self._clock = 0
        self._pass: UnitPass | None = None  # the running forward pass
        self._backward: UnitPass | None = None  # whose backward pass runs
        self._open = False  # a backward pass has begun and not ended
        self.version = 0  # of the parameters: steps made
        watch(self, [unit for unit in units if unit.flats or unit is self.root])

    # Forward.

    def begin(self, unit: Unit, args: Any, kwargs: Any) -> Any:
        """A unit is called; other inputs for it, or None."""
        if self._in_backward():  # a checkpointed part is computed again
            self._again(unit)
            return None
        if unit is self.root or self._pass is None or self._has_failed(self._pass, unit):
            self._begin_pass(unit)
        of = self._pass
        assert of is not None
        if not unit.calls:
            unit.first = self._clock
        self._clock += 1
        unit.calls += 1
        order = self.schedule.forward if of.units[0] is self.root else ()
        while not unit.present and self._next < len(order):
            order[self._next].gather()
            self._next += 1
        if not unit.present:
            self._gather_again(unit, of)
        if self.prefetch and self._next < len(order):
            order[self._next].gather(ahead=True)
            self._next += 1
        unit.show()
        if not of.trains or unit in of.units or not torch.is_grad_enabled():
            return None
        inputs, hook = Inputs(args, kwargs), ended(self, of, unit, unit.calls)
        for tensor in inputs.seen:
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        return inputs.args, inputs.kwargs

    def _gather_again(self, unit: Unit, of: UnitPass) -> None:
        """A call more than the schedule has; in the first pass it is not known yet how many come."""
        if of.units[0] is self.root:
            require_same_call(unit, self._group)
            self.schedule = replace(self.schedule, settled=False)
        unit.gather()

    def end(self, unit: Unit, inputs: Any, outputs: Any) -> None:
        """A unit has returned."""
        of = self._pass
        if self._in_backward() or of is None:
            return
        unit.last = self._clock
        self._clock += 1
        if of.trains and unit not in of.units and torch.is_grad_enabled():
            hook = needed(self, of, unit)
            passed_on = {id(tensor) for tensor in tensors_in(inputs)}  # another unit's output, it may be
            for tensor in tensors_in(outputs):
                if tensor.requires_grad and id(tensor) not in passed_on:
                    tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        if unit is of.units[0]:
            self._end_pass(of, outputs)
        elif unit not in of.units and unit.calls >= self.schedule.calls[unit.number]:
            unit.free()

    def _has_failed(self, of: UnitPass, unit: Unit) -> bool:
        """Whether a part's pass never ended: it is called again, or a unit is that is none of its."""
        first = of.units[0]
        if first is self.root:
            return False
        return unit is first or all(part is not unit.module for part in first.module.modules())

    def _begin_pass(self, first: Unit) -> None:
        if self._open or self._pass is not None:  # the last one raised
            self.abandon()
        self._check_thawed()
        self._next = self._clock = 0
        around = [] if first is self.root else self._around(first)
        self._pass = UnitPass([first, *around], torch.is_grad_enabled(), self.version)
        for unit in self.units:
            unit.calls = 0
        for unit in around:
            unit.gather()
            unit.show()

    def _around(self, unit: Unit) -> list[Unit]:
        """The units around one, or beside it, that have parameters of it."""
        inside = {id(part) for part in unit.module.modules()}
        needed = {id(parameter) for parameter in unit.module.parameters()}
        return [
            other
            for other in self.units
            if id(other.module) not in inside
            and any(id(parameter) in needed for flat in other.flats for parameter in flat.parameters)
        ]

    def _check_thawed(self) -> None:
        for unit in self.units:
            for flat in unit.flats:
                if not flat.trained and any(parameter.requires_grad for parameter in flat.parameters):
                    raise RuntimeError(
                        f"requires_grad of parameters of {unit} is True, and was False when the FullyShard "
                        "was made, which keeps no gradients of them; thaw parameters before it is made"
                    )

    def _end_pass(self, of: UnitPass, outputs: Any) -> None:
        first = of.units[0]
        # Others may use units that this rank has not.
        for unit in self.schedule.forward[self._next :] if first is self.root else ():
            unit.gather()
            unit.free()
        for unit in self.units:
            if unit not in of.units or not of.trains:
                unit.free()
        if of.trains:
            if first is self.root and not self.schedule.settled and len(self.units) > 1:
                self.schedule = settle(self.units, self.prefetch, self.root.device, self._group)
                self._check_called(outputs)
            whole = first is self.root
            order = self.schedule.backward if whole else own(self.units, of.units, self.prefetch)
            of.close(order, [unit.calls for unit in self.units])
            for tensor in tensors_in(outputs):
                if tensor.requires_grad:
                    tensor.register_hook(needed(self, of, first))  # type: ignore[no-untyped-call]
        self._pass = None

    def _check_called(self, outputs: Any) -> None:
        """Whose unit is never called, and its parameters are used: they are NaN."""
        idle = [unit for unit in self.units if not self.schedule.calls[unit.number]]
        if idle and any(t.is_floating_point() and t.isnan().any() for t in tensors_in(outputs)):
            raise RuntimeError(
                f"outputs are NaN, and {idle[0]} was never called, so that its parameters were not gathered; "
                "if the model uses a part or another method of it, leave it out of units="
            )

    # Backward.

    def need(self, of: UnitPass, unit: Unit) -> None:
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
            if of.units[0] in of.reduced:  # in an earlier backward pass, and its graph was retained
                of.start()
            for each in of.units:
                each.gather()
                each.show()
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

    def ended(self, of: UnitPass, unit: Unit, call: int) -> None:
        """The backward pass has left one of a unit's calls."""
        if of is not self._backward:
            return
        of.leave(unit, call)
        while of.operations and of.operations[0][0] == "reduce" and of.is_over(of.operations[0][1]):
            self._run(of, ahead=self.prefetch)
            self._gather_ahead(of)

    def _gather_ahead(self, of: UnitPass) -> None:
        """Launch the next gather, if it is due: while the unit before it computes."""
        if self.prefetch and of.operations and of.operations[0][0] == "gather":
            self._run(of, ahead=True)

    def _run(self, of: UnitPass, ahead: bool = False) -> None:
        """The next operation of a backward pass."""
        kind, unit = of.operations.popleft()
        if kind == "gather":
            unit.gather(ahead)
        else:
            self.gradients.reduce(unit, ahead)
            of.reduced.add(unit)
            unit.free()

    def _complete(self, of: UnitPass | None) -> None:
        """What this rank's backward pass has not done; others may have."""
        if of is not None:
            while of.operations:
                self._run(of)
            for unit in of.units:
                self.gradients.reduce(unit, ahead=False)
                of.reduced.add(unit)

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
        self._backward, self._pass, self._open = None, None, False
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
        if self._pass is not None or self._open:
            raise RuntimeError("parameters can be summoned before or after a pass, and not inside it")
        for unit in self.units:
            unit.gather()
            unit.show()

    def free_all(self) -> None:
        """Give the memory of all gathered parameters back."""
        for unit in self.units:
            unit.free()
