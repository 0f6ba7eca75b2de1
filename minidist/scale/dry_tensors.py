"""Tensors that hold no data: shapes, dtypes, memory and a graph of gradients, and nothing is computed.

Inside `DryTensors` every operation of torch comes here before it would run. What has to do with a model's
parameters, activations and gradients is not computed: a new tensor gets an address in a range that is
reserved and never touched, so that it takes no memory. Everything else is: a few numbers, such as counts of
rows, that ranks tell each other and that the code decides by. So the same code runs as in training, and
`untyped_storage()`, views, hooks and `data_ptr()` say what they say there.

Where a buffer has both, as gradients and counts of use in one bucket, its bytes are told apart: what was
copied from a tensor without data has none. Shapes of results are what torch's fake tensors say for the same
arguments on a CPU, asked once for each kind of call.
"""

from __future__ import annotations

import math
import mmap
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

LARGE = 2**20
"""Elements from which on nothing is computed with a tensor, whatever it holds."""
RESERVED = 2**46
"""Bytes of addresses, at most: no address is given twice in a run."""
ALIGNMENT = 64
DISTINCT_CALLS = 2**14
"""Kinds of calls whose results are remembered."""

aten = torch.ops.aten
_READS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}


class NoData(RuntimeError):
    """The program asks for the value of a tensor that holds none."""


class DryTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, tensors made by `empty`, and all that follows from them, hold no data.

    >>> with DryTensors() as dry:
    ...     x = dry.empty((4, 1024, 1600))
    ...     y = torch.nn.functional.gelu(x)    # at once, in no memory

    Attributes:
        calls: operations that were not computed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._room = _reserve()
        self._first = _address(self._room)
        self._end = self._first + len(self._room)
        self._next = 0
        self._mixed: dict[int, _Spans] = {}  # for storages elsewhere the bytes that hold no data
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[Any, Any] = {}
        self._kinds: dict[Any, _Kind] = {}
        self.calls = 0

    # Tensors.

    def empty(
        self, shape: Any, dtype: torch.dtype = torch.float32, strides: tuple[int, ...] | None = None
    ) -> Tensor:
        """A tensor without data, of this shape, dense unless strides are given."""
        with torch.utils._python_dispatch._disable_current_modes():
            return self._empty(torch.Size(shape), strides, dtype)

    def _empty(self, shape: torch.Size, strides: tuple[int, ...] | None, dtype: torch.dtype) -> Tensor:
        strides = strides or _dense(shape)
        if not shape.numel():
            return torch.empty_strided(shape, strides, dtype=dtype)
        size = dtype.itemsize * (1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)))
        start, self._next = self._next, self._next + -(-size // ALIGNMENT) * ALIGNMENT
        if self._next > len(self._room):
            raise NoData(
                f"a dry run has {len(self._room):,} bytes of addresses and needs more; take a layout with "
                "more ranks, or a smaller batch"
            )
        held = torch.frombuffer(self._room, dtype=torch.uint8, count=size, offset=start)
        return torch.empty(0, dtype=dtype).set_(held.untyped_storage(), 0, shape, strides)

    def holds_data(self, x: Tensor) -> bool:
        """Whether its values are those of a training."""
        return not self._is_dry(x)

    def _is_dry(self, x: Tensor) -> bool:
        if x.is_meta:
            return False
        if self._first <= x.data_ptr() < self._end:
            return True
        if not self._mixed:
            return False
        spans = self._mixed.get(x.untyped_storage()._cdata)
        return spans is not None and spans.overlaps(*_extent(x))

    def write(self, x: Tensor) -> None:
        """From now on `x`, or what it is a view of there, holds no data: it was copied from such a tensor."""
        if x.is_meta or not x.numel() or self._first <= x.data_ptr() < self._end:
            return
        storage = x.untyped_storage()
        spans = self._mixed.get(storage._cdata)
        if spans is None:
            spans = self._mixed[storage._cdata] = _Spans()
            key, mixed = storage._cdata, self._mixed
            spans.alive = weakref.ref(storage, lambda _: mixed.pop(key, None))
        spans.add(*_extent(x))

    def parts_with_data(self, x: Tensor) -> list[Tensor]:
        """The parts of a contiguous tensor that hold data, as flat views; none of a long one."""
        if self._first <= x.data_ptr() < self._end or not x.numel():
            return []
        spans, (start, stop) = self._mixed.get(x.untyped_storage()._cdata), _extent(x)
        flat, each = x.view(-1), x.element_size()
        gaps = [(start, stop)] if spans is None else spans.gaps(start, stop)
        found = [flat[(low - start) // each : (high - start) // each] for low, high in gaps]
        return [part for part in found if 0 < part.numel() <= LARGE]

    # Operations.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for each operation."""
        kwargs = kwargs or {}
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _Kind(func)
        if kind.is_view:
            return func(*args, **kwargs)
        operands = [*_tensors(args), *_tensors(kwargs.values())]
        if not any(x.numel() > LARGE or self._is_dry(x) for x in operands):
            size = None if operands or kind.size is None else args[kind.size]
            if size is not None and math.prod(size) > LARGE:
                options = {key: kwargs.get(key) for key in ("dtype", "device", "layout")}
                return torch.empty(size, **options)
            return func(*args, **kwargs)
        self.calls += 1
        if func in _READS:
            raise NoData(
                f"the program reads a value ({func}) of a tensor of the model, and a dry run computes none"
            )
        named = {**dict(zip(kind.names, args, strict=False)), **kwargs}
        if kind.written:
            if any(self._is_dry(x) for x in operands):
                for name in kind.written:
                    for x in _tensors([named.get(name)]):
                        self.write(x)
            if not kind.makes:
                returned = [named[name] for name in kind.returned]
                return None if not returned else returned[0] if len(returned) == 1 else tuple(returned)
        return self._made(func, kind, args, kwargs, named)

    def _made(self, func: Any, kind: _Kind, args: Any, kwargs: Any, named: dict[str, Any]) -> Any:
        """New tensors, as the operation would make them."""
        key = func, _signature(args), _signature(tuple(sorted(kwargs.items())))
        found = self._known.get(key)
        if found is None:
            try:
                with self._fake:
                    found = _described(func(*_fakes(args), **_fakes(kwargs)))
            except (RuntimeError, NotImplementedError) as error:
                raise NoData(
                    f"the operation {func} of the model has no shape without values ({_first_line(error)}), "
                    "so that it cannot be run dry"
                ) from error
            if len(self._known) >= DISTINCT_CALLS:
                self._known.clear()
            self._known[key] = found
        results = found if isinstance(found, list) else [found]
        made = [
            named[name] if name is not None else self._new(each)
            for each, name in zip(results, kind.outputs(len(results)), strict=True)
        ]
        if not isinstance(found, list):
            return made[0]
        return made if kind.gives_list else tuple(made)

    def _new(self, described: Any) -> Any:
        if isinstance(described, list):
            return [self._new(each) for each in described]
        if not isinstance(described, _Shape):
            return described
        shape, strides, dtype = described.shape, described.strides, described.dtype
        # One number, such as a loss or a norm, may be looked at: all that is known of it is that it is one.
        if shape.numel() == 1:
            return torch.zeros(shape, dtype=dtype)
        return self._empty(shape, strides, dtype)


class _Shape:
    """What is known of a tensor before it is made."""

    __slots__ = ("dtype", "shape", "strides")

    def __init__(self, x: Tensor) -> None:
        self.shape, self.strides, self.dtype = torch.Size(x.shape), tuple(x.stride()), x.dtype


class _Kind:
    """What an operation does with its arguments, by its schema."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.names = [argument.name for argument in schema.arguments]
        aliases = [each.alias_info for each in schema.returns]
        viewed = any(alias is not None and not alias.is_write for alias in aliases)
        self.is_view = viewed or torch.Tag.inplace_view in func.tags
        writes = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        self.written = [argument.name for argument in writes]
        by_set = {next(iter(a.alias_info.before_set)): a.name for a in writes if a.alias_info.before_set}
        self._outputs = [
            by_set.get(next(iter(alias.before_set))) if alias is not None and alias.before_set else None
            for alias in aliases
        ]
        self.returned = [name for name in self._outputs if name is not None]
        self.makes = len(self.returned) < len(self._outputs)
        self.gives_list = len(schema.returns) == 1 and str(schema.returns[0].type).startswith("List")
        self.size = self.names.index("size") if "size" in self.names else None

    def outputs(self, count: int) -> list[str | None]:
        """For each result the argument that it is; None where it is new."""
        return [None] * count if self.gives_list else self._outputs


class _Spans:
    """Ranges of bytes, joined where they touch, in order."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.stops: list[int] = []
        self.alive: Any = None

    def add(self, start: int, stop: int) -> None:
        low, high = bisect_left(self.stops, start), bisect_right(self.starts, stop)
        if low < high:
            start, stop = min(start, self.starts[low]), max(stop, self.stops[high - 1])
        self.starts[low:high], self.stops[low:high] = [start], [stop]

    def overlaps(self, start: int, stop: int) -> bool:
        place = bisect_right(self.stops, start)
        return place < len(self.starts) and self.starts[place] < stop

    def gaps(self, start: int, stop: int) -> list[tuple[int, int]]:
        """What of a range lies in none of them."""
        found, at = [], start
        for low, high in zip(self.starts, self.stops, strict=True):
            if low > at:
                found.append((at, min(low, stop)))
            at = max(at, high)
        return [(low, high) for low, high in [*found, (at, stop)] if low < min(high, stop)]


def _extent(x: Tensor) -> tuple[int, int]:
    """First byte in its storage, and the first behind it."""
    start = int(x.storage_offset())
    last = start + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return start * x.element_size(), (last + 1) * x.element_size()


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _signature(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, list | tuple):
        return tuple(map(_signature, value))
    return type(value), str(value) if isinstance(value, torch.Generator) else value


def _fakes(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    if isinstance(value, list | tuple):
        return type(value)(map(_fakes, value))
    if isinstance(value, dict):
        return {key: _fakes(each) for key, each in value.items()}
    return value


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Shape(value)
    return [_described(each) for each in value] if isinstance(value, list | tuple) else value


def _dense(shape: torch.Size) -> tuple[int, ...]:
    return tuple(math.prod(max(n, 1) for n in shape[place + 1 :]) for place in range(len(shape)))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


@cache
def _reserve() -> mmap.mmap:
    """Addresses without memory: a page has some once it is written to, and none ever is.

    Every dry run of a process begins with the first again; what is left of earlier ones holds no data either.
    """
    size, flags = RESERVED, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    while True:
        try:
            return mmap.mmap(-1, size, flags=flags)
        except (OSError, ValueError):
            if size <= 2**30:
                raise
            size //= 2


def _address(room: mmap.mmap) -> int:
    return torch.frombuffer(room, dtype=torch.uint8, count=1).data_ptr()
