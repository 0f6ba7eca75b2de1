"""Tensors without data: they have shapes, dtypes, storages and gradients, but nothing is computed.

Inside `DryTensors` every torch operation is intercepted. Operations on a model's parameters, activations and
gradients are not computed: each new tensor gets an address in a reserved range that is never touched, so it
takes no memory. A few small numbers are computed, such as counts of rows, which ranks exchange and on which
the code bases decisions. So the same code runs as in training, and `untyped_storage()`, views, hooks and
`data_ptr()` behave the same.

A buffer may hold both, such as a bucket with gradients and counts of use. Then its bytes are tracked: those
copied from a tensor without data have none. Shapes of results come from torch's fake tensors, which are asked
once for each kind of call.
"""

from __future__ import annotations

import math
import weakref
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
from minidist.scale.dry_run.storage import Spans, address, extent, reserve

LARGE = 2**20
"""Nothing is computed with a tensor of more elements, whatever it holds."""
ALIGNMENT = 64

aten = torch.ops.aten
_READS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}


class NoData(RuntimeError):
    """The program reads the value of a tensor without data."""


class DryTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which tensors from `empty`, and all tensors computed from them, hold no data.

    >>> with DryTensors() as dry:
    ...     x = dry.empty((4, 1024, 1600))
    ...     y = torch.nn.functional.gelu(x)    # immediate, takes no memory
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._room = reserve()
        self._first = address(self._room)
        self._end = self._first + len(self._room)
        self._next = 0
        self._mixed: dict[int, Spans] = {}  # bytes without data, in other storages
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[Any, Any] = {}
        self._kinds: dict[Any, OperationKind] = {}
        self.calls = 0  # operations that were not computed

    def empty(
        self, shape: Any, dtype: torch.dtype = torch.float32, strides: tuple[int, ...] | None = None
    ) -> Tensor:
        """A tensor without data; dense unless strides are given."""
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

    def lacks_data(self, x: Tensor) -> bool:
        """Whether some of a tensor's values are not those that training would compute."""
        if x.is_meta:
            return False
        if self._first <= x.data_ptr() < self._end:
            return True
        spans = self._mixed.get(x.untyped_storage()._cdata) if self._mixed else None
        return spans is not None and spans.overlaps(*extent(x))

    def write(self, x: Tensor) -> None:
        """Record that the bytes of `x` hold no data, since they were copied from such a tensor."""
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
        """The parts of a contiguous tensor that hold data, as flat views; parts above LARGE are left out."""
        if self._first <= x.data_ptr() < self._end or not x.numel():
            return []
        spans, (start, stop) = self._mixed.get(x.untyped_storage()._cdata), extent(x)
        flat, each = x.view(-1), x.element_size()
        gaps = [(start, stop)] if spans is None else spans.gaps(start, stop)
        found = [flat[(low - start) // each : (high - start) // each] for low, high in gaps]
        return [part for part in found if 0 < part.numel() <= LARGE]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run or imitate one operation; torch calls this."""
        kwargs = kwargs or {}
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = OperationKind(func)
        if kind.is_view:
            return func(*args, **kwargs)
        operands = [*tensors_in(args), *tensors_in(kwargs.values())]
        if str(kwargs.get("device")) == "meta" or any(x.is_meta for x in operands):
            return func(*args, **kwargs)  # takes no memory as it is
        if not any(x.numel() > LARGE or self.lacks_data(x) for x in operands):
            size = () if operands or kind.size is None else args[kind.size]
            if math.prod(size) > LARGE:
                options = {key: kwargs.get(key) for key in ("dtype", "device", "layout")}
                return torch.empty(size, **options)
            return func(*args, **kwargs)
        self.calls += 1
        if func in _READS:
            raise NoData(
                f"the program reads a value ({func}) of one of the model's tensors, which a dry run does not "
                "compute; decide by sizes instead"
            )
        named = {**dict(zip(kind.names, args, strict=False)), **kwargs}
        if kind.written:
            if any(self.lacks_data(x) for x in operands):
                for name in kind.written:
                    for x in tensors_in([named.get(name)]):
                        self.write(x)
            if not kind.makes:
                returned = [named[name] for name in kind.returned]
                return None if not returned else returned[0] if len(returned) == 1 else tuple(returned)
        return self._made(func, kind, args, kwargs, named)

    def _made(self, func: Any, kind: OperationKind, args: Any, kwargs: Any, named: dict[str, Any]) -> Any:
        """The results of an operation, as new tensors without data."""
        key = func, signature(args), signature(tuple(sorted(kwargs.items())))
        found = self._known.get(key)
        if found is None:
            try:
                with self._fake:
                    found = described(func(*fakes(args), **fakes(kwargs)))
            except (RuntimeError, NotImplementedError) as error:
                raise NoData(
                    f"the shape of the model's operation {func} depends on values ({_first_line(error)}), "
                    "so it cannot be run dry"
                ) from error
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
        shape, strides, dtype = described
        # The program may read a single number, such as a loss or a norm; it gets 0.
        if shape.numel() == 1:
            return torch.zeros(shape, dtype=dtype)
        return self._empty(shape, strides, dtype)


def _dense(shape: torch.Size) -> tuple[int, ...]:
    return tuple(math.prod(max(n, 1) for n in shape[i + 1 :]) for i in range(len(shape)))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
