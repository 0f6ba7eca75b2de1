"""`GroupTable`: what is known of process groups, each entry for as long as its group lives."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch.distributed as dist

Value = TypeVar("Value")


class GroupTable(Generic[Value]):
    """A dictionary by process group that keeps no group alive.

    A group that was destroyed would otherwise keep its threads, sockets and memory. A value must not hold its
    group. Like `weakref.WeakKeyDictionary`, but every call of the communication API looks here several
    times, and this takes a quarter of the time.
    """

    def __init__(self) -> None:
        self._values: dict[int, Value] = {}

    def get(self, group: dist.ProcessGroup) -> Value | None:
        """Return the group's value; None if it has none."""
        return self._values.get(id(group))

    def put(self, group: dist.ProcessGroup, value: Value) -> Value:
        """Set the group's value, and return it."""
        self._values[id(group)] = value
        # The group's id may name another object only after this has run.
        weakref.finalize(group, self._values.pop, id(group), None).atexit = False
        return value

    def values(self) -> list[Value]:
        """Return all values."""
        return list(self._values.values())

    def clear(self) -> None:
        """Forget all groups."""
        self._values.clear()

    def __contains__(self, group: dist.ProcessGroup) -> bool:
        return id(group) in self._values

    def __len__(self) -> int:
        return len(self._values)


is_alone = False


@contextmanager
def alone() -> Iterator[None]:
    """Inside, every group has this rank alone, as in a single process: collectives move nothing."""
    global is_alone
    is_alone = True
    try:
        yield
    finally:
        is_alone = False
