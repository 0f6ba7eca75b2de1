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
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from minidist.scale.dry_run.operations import (
    OperationKind,
    TensorShape,
    described,
    fakes,
    signature,
    tensors_in,
)
from minidist.scale.dry_run.storage_spans import Spans, extent

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
        self._mixed: dict[int, Spans] = {}  # for storages elsewhere the bytes that hold no data
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[Any, Any] = {}
        self._kinds: dict[Any, OperationKind] = {}
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
        return spans is not None and spans.overlaps(*extent(x))

    def write(self, x: Tensor) -> None:
        """From now on `x`, or what it is a view of there, holds no data: it was copied from such a tensor."""
        if x.is_meta or not x.numel() or self._first <= x.data_ptr() < self._end:
            return
        storage = x.untyped_storage()
        spans = self._mixed.get(storage._cdata)
        if spans is None:
            spans = self._mixed[storage._cdata] = Spans()
            key, mixed = storage._cdata, self._mixed
            spans.alive = weakref.ref(storage, lambda _: mixed.pop(key, None))
        spans.add(*extent(x))

    def parts_with_data(self, x: Tensor) -> list[Tensor]:
        """The parts of a contiguous tensor that hold data, as flat views; none of a long one."""
        if self._first <= x.data_ptr() < self._end or not x.numel():
            return []
        spans, (start, stop) = self._mixed.get(x.untyped_storage()._cdata), extent(x)
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
            kind = self._kinds[func] = OperationKind(func)
        if kind.is_view:
            return func(*args, **kwargs)
        operands = [*tensors_in(args), *tensors_in(kwargs.values())]
        if not any(x.numel() > LARGE or self._is_dry(x) for x in operands):
            size = () if operands or kind.size is None else args[kind.size]
            if math.prod(size) > LARGE:
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
                    for x in tensors_in([named.get(name)]):
                        self.write(x)
            if not kind.makes:
                returned = [named[name] for name in kind.returned]
                return None if not returned else returned[0] if len(returned) == 1 else tuple(returned)
        return self._made(func, kind, args, kwargs, named)

    def _made(self, func: Any, kind: OperationKind, args: Any, kwargs: Any, named: dict[str, Any]) -> Any:
        """New tensors, as the operation would make them."""
        key = func, signature(args), signature(tuple(sorted(kwargs.items())))
        found = self._known.get(key)
        if found is None:
            try:
                with self._fake:
                    found = described(func(*fakes(args), **fakes(kwargs)))
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
        if not isinstance(described, TensorShape):
            return described
        shape, strides, dtype = described.shape, described.strides, described.dtype
        # One number, such as a loss or a norm, may be looked at: all that is known of it is that it is one.
        if shape.numel() == 1:
            return torch.zeros(shape, dtype=dtype)
        return self._empty(shape, strides, dtype)


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
