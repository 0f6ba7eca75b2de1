"""Runs a forward and a backward pass over units that are gathered only while they are used.

Hooks show when a unit's call begins and ends, and when the backward pass comes to it and leaves it (see
units.py). Each moves this rank along the order of collectives that all ranks share. A unit that is
called several times is reduced when the backward pass has left all of its calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minidist.comm.opaque import refuse_transforms
from minidist.comm.work import Group
from minidist.parallel.contract.batch import tensors_in
from minidist.parallel.sharding.units.collective_order import (
    backward_order,
    expected,
    require_called,
    require_same_call,
    settle,
)
from minidist.parallel.sharding.units.units import Inputs, Unit, UnitPass, sharing, weakly


class UnitRuntime:
    """Runs `units`, the root first, along the order of their collectives.

    reduce: reduces a unit's gradients; its second argument says whether something else computes meanwhile.
    complete: waits for the reductions. follow_changes: makes room for the gradients of parameters that were
    frozen in the pass before.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        reduce: Callable[[Unit, bool], None],
        complete: Callable[[], None],
        follow_changes: Callable[[], None],
        group: Group,
        prefetch: bool,
    ) -> None:
        self.units, self.root, self._group, self.prefetch = units, units[0], group, prefetch
        self._reduce, self._complete_reductions, self._follow_changes = reduce, complete, follow_changes
        self.order = expected(units)
        self._next, self._clock, self.version = 0, 0, 0  # in the forward order; in a pass; steps so far
        self._pass: UnitPass | None = None  # the running forward pass
        self._backward: UnitPass | None = None  # the pass whose backward pass runs
        self._open, self._recorded = False, False  # a backward pass has begun and not ended; it is recorded
        handles: list[Any] = []
        for unit in units:
            if unit.buckets or unit is self.root:
                begin, end = weakly(self.begin, unit), weakly(self.end, unit)
                handles.append(unit.module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True))
                handles.append(unit.module.register_forward_hook(weakly(unit.lasting)))
                handles.append(unit.module.register_forward_hook(end, with_kwargs=True))
        weakref.finalize(self, lambda: [handle.remove() for handle in handles]).atexit = False

    def begin(self, unit: Unit, _: nn.Module, args: Any, kwargs: Any) -> Any:
        """A unit is called. Returns other inputs for it, or None."""
        refuse_transforms("zero=3")
        if self._backward is not None and self.in_backward():  # a checkpointed part is computed again
            self._again(self._backward, unit)
            return None
        if unit is self.root or self._pass is None or self._pass.has_failed(unit):
            self._begin_pass(unit)
        assert self._pass is not None
        of = self._pass
        of.trains = of.trains or torch.is_grad_enabled()
        unit.first = unit.first if unit.calls else self._clock
        self._clock, unit.calls = self._clock + 1, unit.calls + 1
        order = self.order.forward if of.is_whole else ()
        while not unit.present and self._next < len(order):
            order[self._next].gather()
            self._next += 1
        if not unit.present:
            if of.is_whole:  # one more call than the order has; the first pass does not know them all
                require_same_call(unit, self._group)
                self.order = self.order._replace(settled=False)
            unit.gather()
        if self.prefetch and self._next < len(order):
            order[self._next].gather(ahead=True)
            self._next += 1
        unit.show()
        if unit in of.units or not torch.is_grad_enabled():
            return None
        inputs, hook = Inputs(args, kwargs), weakly(self.after_backward, of, unit, unit.calls)
        for tensor in inputs.seen:
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]
        return inputs.args, inputs.kwargs

    def end(self, unit: Unit, _: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        """A unit has returned."""
        of = self._pass
        if self.in_backward() or of is None:
            return
        unit.last = self._clock
        self._clock += 1
        if of.trains and unit not in of.units and torch.is_grad_enabled():
            # An input that is passed on may be another unit's output.
            self._watch(of, unit, outputs, {id(tensor) for _, tensor in tensors_in((args, kwargs))})
        if unit is of.units[0]:
            self._end_pass(of, outputs)
        elif unit not in of.units and unit.calls >= self.order.calls[unit.number]:
            unit.free()

    def _watch(self, of: UnitPass, unit: Unit, outputs: Any, passed_on: set[int]) -> None:
        """Have the backward pass call `before_backward` when it comes to these outputs."""
        hook = weakly(self.before_backward, of, unit)
        for _, tensor in tensors_in(outputs):
            if tensor.requires_grad and id(tensor) not in passed_on:
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _begin_pass(self, first: Unit) -> None:
        if self._open or self._pass is not None:  # the last one raised
            self.abandon()
        self._next = self._clock = 0
        self._follow_changes()
        around = [] if first is self.root else sharing(self.units, first)
        self._pass = UnitPass([first, *around], torch.is_grad_enabled(), self.version)
        if not self._pass.trains:
            self.forget_copies()
        for unit in self.units:
            unit.calls = 0
        for unit in around:
            unit.show()

    def _end_pass(self, of: UnitPass, outputs: Any) -> None:
        for unit in self.order.forward[self._next :] if of.is_whole else ():  # other ranks may use them
            unit.gather()
            unit.free()
        for unit in self.units:
            if unit not in of.units or not of.trains:
                unit.free()
        self._pass = None
        if not of.trains:
            self.forget_copies()
            return
        if of.is_whole and not self.order.settled and len(self.units) > 1:
            self.order = settle(self.units, self.prefetch, self.root.device, self._group)
            require_called(self.units, self.order, [tensor for _, tensor in tensors_in(outputs)])
        order = self.order.backward if of.is_whole else backward_order(self.units, of.units, self.prefetch)
        of.close(order, [unit.calls for unit in self.units])
        self._watch(of, of.units[0], outputs, set())

    def before_backward(self, of: UnitPass, unit: Unit, _: Tensor | None = None) -> None:
        """The backward pass has come to a unit."""
        if not self._open:
            self._open, self._recorded = True, torch.is_grad_enabled()
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        if of.version != self.version:
            raise RuntimeError(
                "backward came to a forward pass from before the optimizer's last step, which computed with "
                "other parameters than there are now; call backward() before step()"
            )
        if self._backward is not of:
            self._complete(self._backward)
            self._backward = of
            of.start(self._recorded)
            for each in of.units:
                each.show(self._recorded)
        if unit in of.reduced:
            raise RuntimeError(
                f"backward came back to {unit} after its gradients were reduced, since this pass uses it in "
                "another order than the first; make one unit of the parts whose order changes (units=)"
            )
        while not unit.present and of.operations:  # none are left while the forward pass still runs
            self._run(of)
        self._gather_ahead(of)
        unit.show(self._recorded)

    def _again(self, of: UnitPass, unit: Unit) -> None:
        """Gather a unit that is computed again: in its turn, or at once in a checkpoint of torch."""
        if not unit.recomputed and ("gather", unit) in of.operations:
            of.operations.remove(("gather", unit))
        while ("gather", unit) in of.operations:
            self._run(of)
        unit.show()

    def in_backward(self) -> bool:
        """Whether this runs inside the backward pass of one of its passes."""
        return self._backward is not None and torch._C._current_graph_task_id() != -1

    def after_backward(self, of: UnitPass, unit: Unit, call: int, _: Tensor | None = None) -> None:
        """The backward pass has left one of a unit's calls."""
        if of is not self._backward:
            return
        of.leave(unit, call)
        while of.operations and of.operations[0][0] == "reduce" and of.is_over(of.operations[0][1]):
            self._run(of, ahead=self.prefetch)
            self._gather_ahead(of)

    def _gather_ahead(self, of: UnitPass) -> None:
        """Launch the next gather if it is due, while the unit before it computes."""
        if self.prefetch and of.operations and of.operations[0][0] == "gather":
            self._run(of, ahead=True)

    def _run(self, of: UnitPass, ahead: bool = False) -> None:
        """Run the next operation of a backward pass."""
        kind, unit = of.operations.popleft()
        if kind == "gather":
            unit.gather(ahead)
        else:
            self._reduce(unit, ahead)
            of.reduced.add(unit)
            unit.free()

    def _complete(self, of: UnitPass | None) -> None:
        """Run what this rank's backward pass has left out; other ranks may have run it."""
        if of is not None:
            while of.operations:
                self._run(of)
            for unit in of.units if not self._recorded else ():
                self._reduce(unit, False)
                of.reduced.add(unit)

    def finish(self) -> None:
        """The backward pass is over: complete the gradients, also where it went through a recorded one."""
        self._complete(self._backward)
        for unit in self.units if any(p.grad is not None for p in self.root.module.parameters()) else ():
            self._reduce(unit, False)
        self._reset()

    def abandon(self) -> None:
        """After an error: free everything, and forget the pass that was under way."""
        self._pass, self._recorded = None, False
        self._reset()
        nn.Module.zero_grad(self.root.module)

    def _reset(self) -> None:
        self._complete_reductions()
        for unit in self.units if self._pass is None else ():
            unit.free(held=not self._recorded)
        self._backward, self._open, self._recorded = None, False, False

    def changed(self) -> None:
        """The shards have other values now."""
        self.version += 1
        self._reset()
        self.forget_copies()

    def forget_copies(self) -> None:
        """Gather from the shards, which may have changed since the secondary shares were filled."""
        for bucket in (bucket for unit in self.units for bucket in unit.buckets):
            bucket.values.forget_copy()

    def gather_all(self) -> None:
        """Gather all parameters at once, outside passes; RuntimeError inside one."""
        if self._open and not self.in_backward():  # the backward pass has raised
            self.abandon()
        if self._pass is not None or self._open:
            raise RuntimeError("parameters can be summoned before or after a pass, and not inside it")
        for unit in self.units:
            unit.show()
