"""A unit, a pass over units, and the hooks that show a unit's calls and their backward passes.

A hook on a call's outputs runs just before its backward pass, and a hook on its inputs just after: autograd
goes through what it recorded from last to first, so by then all of the call's gradients have come. The hooks
sit on views of the inputs, which are recorded as the call begins. A parameter would be too early, since its
gradient may come before the others. Another module's output would be too late, since its gradient is complete
only when all of its users are done.

Source: Zhao et al. 2023, "PyTorch FSDP", section 3.2.1 (units) and 4.3 (hooks around them).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from minidist.comm.opaque import opaque
from minidist.parallel.contract.batch import mapped, tensors_in
from minidist.parallel.flat.buckets import Bucket
from minidist.parallel.flat.freed import outside
from minidist.parallel.flat.values import GatheredValues


class Unit:
    """A submodule and the parameters that are gathered with it."""

    def __init__(self, name: str, module: nn.Module, number: int) -> None:
        self.name, self.module, self.number = name, module, number  # the root's name is ""
        self.device = torch.device("cpu")  # where it computes
        self.buckets: list[Bucket[GatheredValues]] = []  # for each dtype, for trained and frozen parameters
        self.present = False  # its parameters are gathered, or on their way
        self.shown = False  # the module sees them
        self.held = False  # they stay: a recorded backward pass used them, and the one through it needs them
        self.recomputed = False  # it lies in a part that the backward pass computes again
        self.calls = 0  # in the running forward pass
        self._versions: list[int] = []  # of the parameters, as they were shown
        self.first, self.last = -1, -1  # when its calls began and ended, among the events of the pass

    def gather(self, ahead: bool = False) -> None:
        """Launch the all-gathers, unless that is done. ahead: while something else computes."""
        if not self.present:
            for bucket in self.buckets:
                bucket.values.gather(blocking=not ahead)
            self.present = True

    def show(self, hold: bool = False) -> None:
        """Gather the parameters if they are missing, and let the module see them. hold: keep them."""
        self.held = self.held or hold
        self.gather()
        if not self.shown:
            for bucket in self.buckets:
                bucket.values.show()
            self.shown, self._versions = True, self._versions_now()

    def free(self, held: bool = False) -> None:
        """Give the memory of gathered parameters back, unless `show` was to hold them. held: even then."""
        self.held = self.held and not held
        if self.present and not self.held:
            for bucket in self.buckets:
                bucket.values.free()
            self.present = self.shown = False

    def _versions_now(self) -> list[int]:
        return [parameter._version for bucket in self.buckets for parameter in bucket.parameters]

    def lasting(self, _: nn.Module, __: Any, outputs: Any) -> Any:
        """A call's outputs, with copies of parameters and their views, whose memory `free` gives back.

        RuntimeError where the call has written to a parameter: the next gather would bring the old value.
        """
        if self.shown and self._versions_now() != self._versions:
            raise RuntimeError(
                f"{self.name or 'the model'} writes to its own parameters in its forward pass, and in ZeRO's "
                "stage 3 they are freed after it; keep what it writes in buffers, or write between steps, "
                "inside summon()"
            )
        own = [bucket.values.flat for bucket in self.buckets]
        return mapped(lambda x: outside(x, own), outputs)

    def __str__(self) -> str:
        return f"the unit {self.name}" if self.name else "the root unit"


UnitCollective = tuple[Literal["gather", "reduce"], Unit]


class UnitPass:
    """One forward pass and the backward pass that may follow, or several if its graph is retained.

    units: the unit that was called, the root or a part by itself, and those around it that have parameters of
        it. They stay gathered for the whole pass.
    trains: whether a backward pass may follow.
    version: of the parameters.
    """

    def __init__(self, units: Sequence[Unit], trains: bool, version: int) -> None:
        self.units, self.trains, self.version = units, trains, version
        self.operations: deque[UnitCollective] = deque()  # what the backward pass still has to do
        self.reduced: set[Unit] = set()  # whose gradients the backward pass has reduced
        self._order: Sequence[UnitCollective] = ()
        self._calls: list[int] = []
        self._left: dict[Unit, set[int]] = {}

    @property
    def is_whole(self) -> bool:
        """Whether it is a pass of the whole model, and not of a part."""
        return self.units[0].number == 0

    def has_failed(self, unit: Unit) -> bool:
        """Whether a part's pass never ended: the part is called again, or a unit outside of it is called."""
        first = self.units[0]
        return not self.is_whole and (unit is first or unit.module not in [*first.module.modules()])

    def close(self, order: Sequence[UnitCollective], calls: list[int]) -> None:
        """End the forward pass: a backward pass does `order`; `calls` is how often each unit was called."""
        self._order, self._calls = order, calls
        self.start()

    def start(self, recorded: bool = False) -> None:
        """Prepare for a backward pass. A recorded one, for derivatives, brings no gradients of parameters."""
        self.operations = deque(each for each in self._order if each[0] == "gather" or not recorded)
        self.reduced.clear()
        self._left.clear()

    def leave(self, unit: Unit, call: int) -> None:
        """Note that the backward pass has left a call."""
        self._left.setdefault(unit, set()).add(call)

    def is_over(self, unit: Unit) -> bool:
        """Whether the backward pass has left all calls of a unit."""
        return len(self._left.get(unit, ())) == self._calls[unit.number]


def sharing(units: Sequence[Unit], unit: Unit) -> list[Unit]:
    """The other units that hold some of a unit's parameters: those around it, and those that share one."""
    inside = {id(part) for part in unit.module.modules()}
    needed = {id(parameter) for parameter in unit.module.parameters()}
    return [
        other
        for other in units
        if id(other.module) not in inside
        and any(id(p) in needed for bucket in other.buckets for p in bucket.parameters)
    ]


class Inputs:
    """The inputs of one call, in which tensors that get gradients have become views of themselves.

    Lists, and whatever else a module may write to, are passed on as they are. The first tensor of `seen` to
    get its gradient shows that the call's backward pass is over.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._views: dict[int, Tensor] = {}  # a tensor that comes twice stays one
        self.args = tuple(map(self._view, args))
        self.kwargs = {key: self._view(value) for key, value in kwargs.items()}
        self.seen = [*self._views.values()]
        if not self.seen:
            self.seen = [t for _, t in tensors_in((args, kwargs)) if t.requires_grad and not t.is_leaf]

    def _view(self, value: Any) -> Any:
        if type(value) is tuple:
            return tuple(map(self._view, value))
        if not isinstance(value, Tensor) or not value.requires_grad or value.layout is not torch.strided:
            return value
        if id(value) not in self._views:
            self._views[id(value)] = value.view_as(value)
        return self._views[id(value)]


def weakly(method: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """A hook that calls `method` with `first` and its own arguments while the method's object lives.

    Modules and graphs may outlive that object, and it must not live on in their hooks.
    """
    alive = weakref.WeakMethod(method)

    def hook(*args: Any, **kwargs: Any) -> Any:
        found = alive()
        return None if found is None else found(*first, *args, **kwargs)

    return opaque(hook)
