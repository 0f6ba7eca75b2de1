"""Functions into which torch cannot see: `opaque` has torch.compile call one as it is. And their types.

Dynamo reads Python once and replays the tensor operations that it saw. A collective also waits for other
ranks, and writes to memory that torch does not know of: a replay of it gives wrong numbers. A compiled model
therefore leaves its graph at an opaque function, and enters the next graph after it. Autograd would take a
gradient that a collective computes for a constant: `refuse_recorded` ends a pass that is to differentiate it.
torch.func's transforms see no other ranks: `refuse_transforms` ends a call inside one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Protocol, TypeVar, cast, overload

import torch

if TYPE_CHECKING:
    from minidist.comm.work import Work

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned", covariant=True)
Function = TypeVar("Function", bound=Callable[..., Any])


def opaque(function: Function) -> Function:
    """Mark a function, and everything that it calls, as not to be compiled; it stays itself, and as fast.

    `torch.compiler.disable` does the same with a wrapper around each call, and imports Dynamo for it, which
    takes a second.
    """
    dynamo: Any = torch._C._dynamo.eval_frame
    try:
        skip = dynamo._FrameAction.SKIP
        dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(skip, skip))
    except AttributeError:  # these names are torch's own, and another version may lack them
        disabled: Function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return disabled
    function._torchdynamo_disable = True  # type: ignore[attr-defined] # a call inside a graph ends the graph
    return function


def refuse_recorded(what: str, remedy: str) -> None:
    """Raise NotImplementedError in a recorded backward pass through a function that has only the first."""
    if torch.is_grad_enabled():
        raise NotImplementedError(
            f"this backward pass is recorded for second derivatives (create_graph=True), and {what} has "
            f"none; {remedy}"
        )


def refuse_transforms(what: str) -> None:
    """Raise NotImplementedError inside torch.func's transforms, which do not see other ranks."""
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            f"torch.func (grad, hessian, vmap, ...) is at work, and {what} does not work inside it; use "
            "torch.autograd.grad(outputs, inputs, create_graph=True), or dp with zero=0, 1 or 2"
        )


class MaybeAsync(Protocol[Arguments, Returned]):
    """A function of these arguments, one of which is `async_op`: with `async_op=True` it returns a `Work`."""

    @overload
    def __call__(self, *args: Any, async_op: Literal[True], **kwargs: Any) -> Work: ...
    @overload
    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned: ...


def may_be_async(function: Callable[Arguments, Returned]) -> MaybeAsync[Arguments, Returned]:
    """Give a function both types, and keep torch.compile out of it.

    The function stays itself, so that a call costs nothing more and `help` shows it.
    """
    return cast("MaybeAsync[Arguments, Returned]", opaque(function))
