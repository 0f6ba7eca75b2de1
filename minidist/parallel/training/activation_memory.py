"""Count activations: the bytes that the forward pass keeps for the backward pass.

Autograd calls a hook for every tensor that it saves for a gradient, and drops the tensor once that gradient
is computed. The counter counts the storages of these tensors: each storage once, however many tensors share
it, from when the first is saved until the last is dropped. Parameters and buffers are not activations. The
counter includes what formulas for a transformer layer leave out, such as the statistics of norms.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.1.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.autograd.graph import saved_tensors_hooks

from minidist.comm.opaque import opaque


class ActivationCounter:
    """Counts what the passes inside its `with` keep; it may be entered many times.

    >>> with ActivationCounter(model) as counter:
    ...     loss = cross_entropy(model(inputs), targets)
    ...     loss.backward()
    >>> counter.peak

    The model's inputs count if an operation saves them. A view counts as its whole storage. Counting takes
    some microseconds for each saved tensor. Parameters do not count, nor the buffers of `module`, nor the
    storages of `others`, such as a batch that its owner keeps anyway, nor what torch.func keeps.
    """

    def __init__(self, module: nn.Module | None = None, others: Iterable[Tensor] = ()) -> None:
        self.saved = 0  # bytes that are kept now
        self.peak = 0  # the most at one time; set it to `saved` to start afresh
        self._module, self._others = module, [*others]
        self._excluded: set[int] = set()
        self._live: dict[int, list[int]] = {}  # storage -> [tensors that hold it, bytes]
        self._entered: list[ExitStack] = []

    def __enter__(self) -> ActivationCounter:
        tensors = self._others
        if self._module is not None:
            tensors = [*tensors, *self._module.parameters(), *self._module.buffers()]
        self._excluded = {tensor.untyped_storage()._cdata for tensor in tensors}
        self._entered.append(ExitStack())
        hooks = saved_tensors_hooks(self.pack, self.unpack)
        self._entered[-1].enter_context(hooks)
        self._entered[-1].enter_context(_aside(hooks))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.pop().__exit__(kind, error, trace)

    @opaque
    def pack(self, tensor: Tensor) -> Tensor | _Kept:
        """Autograd calls this when it saves a tensor."""
        if not self._counts(tensor):
            return tensor
        return _Kept(self, tensor.detach() if tensor.requires_grad else tensor)

    @opaque
    def unpack(self, kept: Tensor | _Kept) -> Tensor:
        """Autograd calls this when it needs the tensor."""
        return kept.tensor if isinstance(kept, _Kept) else kept

    @staticmethod
    def active() -> ActivationCounter | None:
        """Return the counter that counts now, or None."""
        pack, _ = _current_hooks()
        hooks = getattr(pack, "__self__", None)
        if isinstance(hooks, _CountingHooks):
            return hooks.counter
        return hooks if isinstance(hooks, ActivationCounter) else None

    @contextmanager
    def with_other_hooks(self) -> Iterator[None]:
        """Inside, also count what other hooks keep, which autograd calls instead of this counter's.

        Other hooks do not report when they drop a tensor, so it counts until its memory is freed. Use this
        for tensors that nothing else keeps, such as those that recomputation makes.
        """
        hooks = _CountingHooks(self, *_current_hooks())
        with saved_tensors_hooks(hooks.pack, hooks.unpack):
            yield

    def _watch(self, tensor: Tensor) -> None:
        """Count a tensor's storage until it is freed, unless it is counted already."""
        storage = tensor.untyped_storage() if self._counts(tensor) else None
        if storage is not None and storage._cdata not in self._live:
            self._hold(storage._cdata, storage.nbytes())
            weakref.finalize(storage, self._release, storage._cdata).atexit = False

    def _counts(self, tensor: Tensor) -> bool:
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return False
        return tensor.layout == torch.strided and tensor.untyped_storage()._cdata not in self._excluded

    def _hold(self, key: int, size: int) -> None:
        entry = self._live.setdefault(key, [0, size])
        if not entry[0]:
            self.saved += size
            self.peak = max(self.peak, self.saved)
        entry[0] += 1

    def _release(self, key: int) -> None:
        entry = self._live[key]
        entry[0] -= 1
        if not entry[0]:
            self.saved -= entry[1]
            del self._live[key]


class _Kept:
    """A saved tensor, counted for as long as the graph holds this object."""

    __slots__ = ("counter", "key", "tensor")

    def __init__(self, counter: ActivationCounter, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.counter, self.key, self.tensor = counter, storage._cdata, tensor
        counter._hold(self.key, storage.nbytes())

    def __del__(self) -> None:
        self.counter._release(self.key)


class _CountingHooks:
    """Hooks that count a tensor, then call other hooks."""

    def __init__(self, counter: ActivationCounter, pack: Any, unpack: Any) -> None:
        self.counter, self._pack, self._unpack = counter, pack, unpack

    def pack(self, tensor: Tensor) -> Any:
        self.counter._watch(tensor)
        return self._pack(tensor)

    def unpack(self, kept: Any) -> Tensor:
        tensor: Tensor = self._unpack(kept)
        return tensor


@contextmanager
def _aside(hooks: saved_tensors_hooks) -> Iterator[None]:
    """Take hooks off while torch.func computes, which refuses to work with any."""
    disable: Any = graph.disable_saved_tensors_hooks

    @contextmanager
    def disabled(message: str) -> Iterator[None]:
        with ExitStack() as stack:
            if _current_hooks()[0] == hooks.pack_hook:
                hooks.__exit__()
                stack.callback(hooks.__enter__)
            with disable(message):
                yield

    graph.disable_saved_tensors_hooks = disabled  # type: ignore[assignment]
    try:
        yield
    finally:
        graph.disable_saved_tensors_hooks = disable


def _current_hooks() -> tuple[Any, Any]:
    """The functions that autograd calls to save a tensor and to get it back, or (None, None)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) or (None, None)
