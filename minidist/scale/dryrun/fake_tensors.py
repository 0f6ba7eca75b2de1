"""Tensors without data: they have shapes, dtypes, storages and gradients, but nothing is computed.

Inside `DryTensors` every torch operation is intercepted. Operations on a model's parameters, activations and
gradients are not computed: each new tensor gets an address in a reserved range that is never touched, so it
takes no memory. A few small numbers are computed, such as counts of rows, which ranks exchange and on which
the code bases decisions. So the same code runs as in training, and `untyped_storage()`, views, hooks and
`data_ptr()` behave the same.

Tokens choose experts by their values. Here they take them in turns, so that all get as many: `bincount` deals
numbers without data evenly.

A buffer may hold both, such as a bucket with gradients and counts of use. It begins as zeros, and what is
copied from a tensor without data leaves it as it is. Shapes of results come from torch's fake tensors, which
are asked once for each kind of call.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

LARGE = 2**20
"""Nothing is computed with a tensor of more elements, whatever it holds."""
NUMBERS = 2**15
"""Of a larger one, such as a bucket with counts at its end, parts of up to so many elements are computed."""
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
        self._first = torch.frombuffer(self._room, dtype=torch.uint8, count=1).data_ptr()
        self._end = self._first + len(self._room)
        self._next = 0
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[Any, Any] = {}
        self.calls = 0  # operations that were not computed

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch hides each operation from its compiler, which does not run here."""
        return False

    def empty(
        self, shape: Any, dtype: torch.dtype = torch.float32, strides: tuple[int, ...] | None = None
    ) -> Tensor:
        """A tensor without data; dense unless strides are given."""
        with torch.utils._python_dispatch._disable_current_modes():
            return self._empty(torch.Size(shape), strides, dtype)

    def _empty(self, shape: torch.Size, strides: tuple[int, ...] | None, dtype: torch.dtype) -> Tensor:
        strides = strides or torch.empty(shape, device="meta").stride()
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

    def emptied(self, module: nn.Module) -> nn.Module:
        """Replace parameters, and buffers on the meta device, by tensors without data; return the module."""
        made: dict[int, nn.Parameter] = {}  # a tied parameter stays one parameter
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    empty = self.empty(parameter.shape, parameter.dtype)
                    made.setdefault(id(parameter), nn.Parameter(empty, parameter.requires_grad))
                    part._parameters[name] = made[id(parameter)]
            for name, buffer in part._buffers.items():
                if buffer is not None and buffer.is_meta:
                    part._buffers[name] = self.empty(buffer.shape, buffer.dtype)
        return module

    def computes_with(self, *operands: Tensor) -> bool:
        """Whether an operation on these tensors is computed: all have data, none is large or of one."""
        return not any(
            x.numel() > LARGE
            or self._first <= x.data_ptr() < self._end
            or (x.numel() > NUMBERS and x.untyped_storage().nbytes() > LARGE * x.element_size())
            for x in operands
            if not x.is_meta
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run or imitate one operation; torch calls this."""
        kwargs = kwargs or {}
        kind = operation_kind(func)
        if kind.is_view:
            return func(*args, **kwargs)
        operands = tensors_in((*args, *kwargs.values()))
        if str(kwargs.get("device")) == "meta" or any(x.is_meta for x in operands):
            return func(*args, **kwargs)  # takes no memory as it is
        if self.computes_with(*operands):
            size = () if operands or kind.size is None else args[kind.size]
            dtype, is_large = kwargs.get("dtype") or torch.get_default_dtype(), math.prod(size) > LARGE
            if func is aten.empty.memory_format:  # a small one may be read before it is written
                return torch.empty(size, dtype=dtype) if is_large else torch.zeros(size, dtype=dtype)
            if is_large:  # zeros, whose pages take memory only once they are written to
                held = mmap.mmap(-1, math.prod(size) * dtype.itemsize)
                return torch.frombuffer(held, dtype=dtype).view(size)
            return func(*args, **kwargs)
        self.calls += 1
        if func in _READS:
            raise NoData(
                f"the program reads a value ({func}) of one of the model's tensors, which a dry run does not "
                "compute; decide by sizes instead"
            )
        named = {**dict(zip(kind.names, args, strict=False)), **kwargs}
        if func is aten.bincount.default:
            bins, count = named.get("minlength", 0), operands[0].numel()
            return torch.tensor([len(range(number, count, bins)) for number in range(bins)])
        if kind.written and not kind.makes:
            returned = [named[name] for name in kind.returned]
            return None if not returned else returned[0] if len(returned) == 1 else tuple(returned)
        return self._made(func, kind, args, kwargs, named)

    def _made(self, func: Any, kind: OperationKind, args: Any, kwargs: Any, named: dict[str, Any]) -> Any:
        """The results of an operation, as new tensors without data."""
        key = func, signature(args), signature(tuple(sorted(kwargs.items())))
        found = self._known.get(key)
        if found is None:
            try:
                # Its shapes are for bfloat16, and its products not.
                grouped = func is aten._grouped_mm.default
                with self._fake:
                    fakes = tree_map_only(Tensor, partial(_fake, half=grouped), (args, kwargs))
                    made = func(*fakes[0], **fakes[1])
                dtype = args[0].dtype if grouped else None
                found = tree_map_only(
                    Tensor, lambda x: TensorShape(torch.Size(x.shape), x.stride(), dtype or x.dtype), made
                )
            except (RuntimeError, NotImplementedError) as error:
                why = (str(error) or type(error).__name__).splitlines()[0]
                raise NoData(
                    f"the shape of the model's operation {func} depends on values ({why}), so it cannot be "
                    "run dry"
                ) from error
            self._known[key] = found
        several = isinstance(found, list | tuple)
        results = found if several else [found]
        made = [
            named[name] if name is not None else self._new(each)
            for each, name in zip(results, kind.outputs(len(results)), strict=True)
        ]
        return type(found)(made) if several else made[0]

    def _new(self, described: Any) -> Any:
        if isinstance(described, list | tuple):
            return [self._new(each) for each in described]
        if not isinstance(described, TensorShape):
            return described
        # The program may read a single number, such as a loss or a norm; it gets 0.
        if described.shape.numel() == 1:
            return torch.zeros(described.shape, dtype=described.dtype)
        return self._empty(described.shape, described.strides, described.dtype)


# What torch's schemas say about operations, and their arguments as a cache key or as fake tensors.


@dataclass(frozen=True)
class TensorShape:
    """Shape, strides and dtype of a tensor that does not exist yet."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


class OperationKind:
    """Which arguments an operation views, writes or returns, according to its schema."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.names = [argument.name for argument in schema.arguments]
        aliases = [each.alias_info for each in schema.returns]
        viewed = any(alias is not None and not alias.is_write for alias in aliases)
        self.is_view = viewed or torch.Tag.inplace_view in func.tags
        writes = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        self.written = bool(writes)
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
        """For each result the name of the argument that it is; None for a new tensor."""
        return [None] * count if self.gives_list else self._outputs


operation_kind = cache(OperationKind)
"""The kind of an operation, looked up once."""


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among an operation's arguments or results, including those in lists."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(value)
    return found


def signature(value: Any) -> Any:
    """A key for a call's arguments; calls with equal keys have results of equal shapes."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, list | tuple):
        return tuple(map(signature, value))
    return type(value), str(value) if isinstance(value, torch.Generator) else value


def _fake(x: Tensor, half: bool = False) -> Tensor:
    """A fake tensor like `x`, inside torch's fake mode; in bfloat16 instead of any other float if `half`."""
    dtype = torch.bfloat16 if half and x.is_floating_point() else x.dtype
    return torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=x.device)


# Addresses without memory.

RESERVED = 2**46
"""Bytes of addresses to reserve, at most; no address is used twice in a run."""


@cache
def reserve() -> mmap.mmap:
    """Reserve addresses. A page takes memory only once it is written to, and none ever is.

    Every dry run of a process starts from the first address again; earlier tensors hold no data either.
    """
    size, flags = RESERVED, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    while True:
        try:
            return mmap.mmap(-1, size, flags=flags)
        except (OSError, ValueError):
            if size <= 2**30:
                raise
            size //= 2
