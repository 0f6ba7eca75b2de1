"""Functions and results as bytes, for the trip between the caller and its ranks.

cloudpickle sends by value what the other process could not import: functions from a notebook cell, from a
script, or from inside another function. Objects that the ranks keep travel by number.
"""

from __future__ import annotations

import importlib
import io
import itertools
import linecache
import os
import pickle
import sys
from collections.abc import Callable, Collection
from multiprocessing.reduction import ForkingPickler
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle

from minidist.comm.errors import RankError


class Kept:
    """Stands for an object that each rank of a `Cluster` keeps; as an argument it becomes that object."""

    _keys = itertools.count()

    def __init__(self, make: Callable[..., Any]) -> None:
        require_function(make)
        self.key, self.made_by = next(self._keys), _name(make)

    def __repr__(self) -> str:
        return f"Kept(what {self.made_by} returned)"

    def __reduce__(self) -> Any:
        raise TypeError(f"{self} stands for objects in a Cluster's ranks; give it to that Cluster's run")


_kept: dict[int, Any] = {}
"""This rank's kept objects, by key."""


def keep(key: int, make: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
    """Run `make` in a rank, and keep what it returns under a key."""
    _kept[key] = make(*args, **kwargs)


def kept_object(key: int) -> Any:
    """This rank's kept object of a key."""
    return _kept[key]


def forget(keys: Collection[int]) -> None:
    """Let go of this rank's kept objects of these keys."""
    for key in keys:
        _kept.pop(key, None)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A cloudpickle pickler that says which file a function is from: tracebacks name it, and so does `check`.

    From version 3.1.3 on, cloudpickle itself leaves it out.
    """

    def reducer_override(self, value: Any) -> Any:
        """Send a function's code with the name of its file."""
        if isinstance(value, CodeType):
            make, parts = self.dispatch_table[CodeType](value)
            return _code, (value.co_filename, make, *parts)
        return super().reducer_override(value)


def _code(file: str, make: Callable[..., CodeType], *parts: Any) -> CodeType:
    return make(*parts).replace(co_filename=file)


class _CallPickler(_Pickler):
    """A pickler of calls: it also sends kept objects, and modules with a class of their own."""

    def __init__(self, file: io.BytesIO, held: Collection[int]) -> None:
        super().__init__(file)
        self.held, self.lost = held, list[Kept]()

    def reducer_override(self, value: Any) -> Any:
        """Send a handle by its key, and a module such as torch.backends.cudnn by its name."""
        if isinstance(value, Kept):
            if value.key not in self.held:
                self.lost.append(value)
            return kept_object, (value.key,)
        own_class = type(value) is not ModuleType
        if isinstance(value, ModuleType) and own_class and sys.modules.get(value.__name__) is value:
            return importlib.import_module, (value.__name__,)
        step = getattr(value, "__wrapped__", None)
        if isinstance(value, FunctionType) and step is not None and getattr(value, "hooked", False) is True:
            # An optimizer's `step` as torch wraps it, with the hooks of this process; ranks wrap theirs.
            return _itself, (step,)
        return super().reducer_override(value)


def _itself(value: Any) -> Any:
    return value


def send_to_workers() -> None:
    """Let multiprocessing, such as a DataLoader's workers, send classes and functions of the user's script.

    A rank has them by value: neither it nor a worker can find them by their names.
    """
    pickler: Any = ForkingPickler
    pickler.reducer_override = _reduce


def _reduce(pickler: ForkingPickler, value: Any) -> Any:
    if not isinstance(value, type | FunctionType):
        return NotImplemented
    found: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    if found is value:
        return NotImplemented
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return _received, (file.getvalue(),)


def _received(value: bytes) -> Any:
    send_to_workers()  # for what a worker sends back
    return pickle.loads(value)


def _name(function: object) -> str:
    return getattr(function, "__qualname__", repr(function))


def require_function(function: object) -> None:
    """Raise TypeError if `function` is not callable."""
    if not callable(function):
        raise TypeError(
            f"function is {function!r}, of type {type(function).__name__}; give the function itself, "
            "without calling it"
        )


def pickle_call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    held: Collection[int] = (),
    forgotten: Collection[int] = (),
) -> bytes:
    """Pickle a call. TypeError if `function` is not callable, or something cannot be pickled.

    held: keys of the objects that the ranks keep. forgotten: keys of those that they can let go.
    """
    require_function(function)
    file = io.BytesIO()
    try:
        pickler = _CallPickler(file, held)
        pickler.dump((function, args, kwargs, forgotten))
    except Exception as error:
        raise TypeError(
            f"{_name(function)} or one of its arguments cannot be sent to another process ({error}); "
            "create such objects inside the function"
        ) from error
    if pickler.lost:
        raise RuntimeError(
            f"the ranks of this Cluster do not hold {pickler.lost[0]}: another Cluster made it, or a run has "
            "failed since, or caught a CollectiveError, and the ranks are fresh processes; call keep again"
        )
    return file.getvalue()


def unpickle_result(rank: int, value: bytes | RankError) -> Any:
    """Unpickle what a rank returned. A RankError that stands for a result is returned as it is."""
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
        self.__qualname__ = _name(function)
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
