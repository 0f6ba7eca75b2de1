"""The types of a function that returns its result, or with `async_op=True` a `Work` at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, cast, overload

from minidist.comm.opaque import opaque
from minidist.comm.work import Work

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned", covariant=True)


class MaybeAsync(Protocol[Arguments, Returned]):
    """A function of these arguments, one of which is `async_op`."""

    @overload
    def __call__(self, *args: Any, async_op: Literal[True], **kwargs: Any) -> Work: ...
    @overload
    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned: ...


def may_be_async(function: Callable[Arguments, Returned]) -> MaybeAsync[Arguments, Returned]:
    """Give a function both types, and keep torch.compile out of it.

    The function stays itself, so that a call costs nothing more and `help` shows it.
    """
    return cast("MaybeAsync[Arguments, Returned]", opaque(function))
