"""Count the bytes of the tensors that a piece of a program holds at a time.

    with Live() as live:
        zero_3_pass(...)
    live.peak

Every operation of torch passes through the mode below, which sees the tensors that it makes; a finalizer on
each one's memory says when that is freed.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Live(TorchDispatchMode):
    """Inside its `with`, counts the bytes of the tensors that are made there and not yet freed.

    A view is no new tensor, and memory that ranks share counts for none of them.

    Args:
        least: bytes; smaller tensors are not counted.

    Attributes:
        now, peak: bytes that are there, and the most that were.
    """

    def __init__(self, least: int = 0) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._least, self._counted = least, set[int]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called for each operation of torch's."""
        made = function(*args, **(kwargs or {}))
        if all(result.alias_info is None for result in function._schema.returns):
            for tensor in tree_iter(made):
                if isinstance(tensor, torch.Tensor):
                    self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._counted or size < max(self._least, 1):
            return
        _renew_copies_of_variables()
        self._counted.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, key, size).atexit = False

    def _freed(self, key: int, size: int) -> None:
        self._counted.discard(key)
        self.now -= size


def _renew_copies_of_variables() -> None:
    """Before Python 3.13 whoever asks for a function's variables, as check=True does, leaves a copy of them.

    A tensor would live on in it until somebody asks again.
    """
    frame = sys._getframe(1)
    while frame is not None:
        frame.f_locals  # noqa: B018
        frame = frame.f_back
