"""Functions and results as bytes, for the trip between the caller and its ranks.

cloudpickle sends by value what the other process could not import: functions from a notebook cell, from a
script, or from inside another function.
"""

from __future__ import annotations

import linecache
import os
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle

from minidist.comm.errors import RankError


def pickle_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle a call. TypeError where `function` is not one, or something cannot be pickled."""
    if not callable(function):
        raise TypeError(
            f"function is {function!r}, of type {type(function).__name__}; give the function itself, "
            "without calling it"
        )
    try:
        return bytes(cloudpickle.dumps((function, args, kwargs)))
    except Exception as error:
        name = getattr(function, "__qualname__", repr(function))
        raise TypeError(
            f"{name} or one of its arguments cannot be sent to another process ({error}); "
            "create such objects inside the function"
        ) from error


def unpickle_result(rank: int, value: bytes | RankError) -> Any:
    """Unpickle what a rank returned. A RankError, in the place of a result, is passed on."""
    if isinstance(value, RankError):
        return value
    try:
        return pickle.loads(value)
    except Exception as error:
        raise RankError(
            f"rank {rank} returned a value that this process cannot read ({type(error).__name__}: {error}); "
            "return tensors, arrays or plain Python values",
            rank=rank,
        ) from error


class WithSource:
    """A function together with the source of the notebook cells typed in this process.

    The text of a cell exists only in the notebook's memory. A rank's tracebacks show it.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__qualname__ = getattr(function, "__qualname__", repr(function))
        # linecache notes no modification time for text that came from no file.
        self.texts = {
            name: entry
            for name, entry in list(linecache.cache.items())
            if len(entry) == 4 and entry[1] is None and not os.path.exists(name)
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function, in a rank."""
        linecache.cache.update(self.texts)
        return self.function(*args, **kwargs)
