"""Torch tensors as the operands of a rung that takes them: checks, and views as NumPy arrays.

Torch allocates the result. The checks are short, because a GPU may be idle while Python runs them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from .rung import Rung, check_kinds, check_sizes, dtype_name, meets_itself, shared_memory


def operands(torch: Any, a: Any, b: Any, out: Any, rung: Rung) -> tuple[Any, Any, Any]:
    """Return a and b as plain strided 2-D tensors, and `out` or a new tensor for their product.

    Raises what is wrong with one of them.
    """
    check_kinds(a, b)
    a, b = _checked(torch, "a", a, rung), _checked(torch, "b", b, rung)
    if a.dtype is not b.dtype:
        raise TypeError(
            f"a is {a.dtype} and b is {b.dtype}: convert one with .to(), so that both are the same"
        )
    if a.device != b.device:
        raise TypeError(
            f"a is on {a.device} and b is on {b.device}: move one with .to(), so that both are on one"
        )
    if a.device.type not in ("cpu", rung.device):
        raise ValueError(
            f"a is on {a.device}, and rung {rung.name} runs on {rung.device}: "
            f"move it with .to({rung.device!r})"
        )
    check_sizes(a.shape, b.shape)
    if out is None:
        return a, b, torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
    _check_out(torch, a, b, out, rung.sums(dtype_name(a.dtype)))
    return a, b, out


def as_array(torch: Any, x: Any) -> Any:
    """Return a tensor in main memory as the NumPy array that shares it; 2-byte elements as uint16."""
    x = x.detach()
    if x.dtype.itemsize == 2:
        return x.view(torch.int16).numpy().view(np.uint16)
    return x.numpy()


def _checked(torch: Any, name: str, x: Any, rung: Rung) -> Any:
    """Return x as a plain strided 2-D tensor, or raise what is wrong with it."""
    if x.layout is not torch.strided:
        raise TypeError(f"{name} has layout {x.layout}: pass tensor.to_dense()")
    if x.ndim != 2:
        raise ValueError(
            f"{name} has {x.ndim} dimensions, shape {tuple(x.shape)}: reshape it to two, (rows, columns)"
        )
    if dtype_name(x.dtype) not in rung.dtypes:
        raise TypeError(
            f"{name} has dtype {dtype_name(x.dtype)}, and rung {rung.name} takes "
            f"{' or '.join(rung.dtypes)}: convert it with .to(torch.{rung.dtypes[-1]})"
        )
    if x.requires_grad and torch.is_grad_enabled():
        raise TypeError(
            f"{name} requires a gradient, which a rung does not record: "
            "use minidist.model.matmul.matmul, or pass tensor.detach()"
        )
    return x.resolve_neg() if x.is_neg() else x


def _check_out(torch: Any, a: Any, b: Any, out: Any, sums: str) -> None:
    """Raise unless `out` can take a times b, in a's dtype or the one called `sums`."""
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out is a {type(out).__name__}, and a and b are torch tensors: pass a tensor")
    shape = (a.shape[0], b.shape[1])
    if tuple(out.shape) != shape:
        raise ValueError(
            f"out has shape {tuple(out.shape)}, but {tuple(a.shape)} times {tuple(b.shape)} gives {shape}: "
            "pass that shape"
        )
    if out.dtype is not a.dtype and dtype_name(out.dtype) != sums:
        raise TypeError(f"out is {out.dtype}, and a and b are {a.dtype}: pass an out of that dtype")
    if out.device != a.device or out.layout is not torch.strided:
        raise TypeError(
            f"out is {out.layout} on {out.device}, and a is on {a.device}: pass a strided out on that device"
        )
    if out.requires_grad and torch.is_grad_enabled():
        raise TypeError("out requires a gradient, which a rung does not record: pass tensor.detach()")
    if out.is_neg() or meets_itself(out.shape, out.stride()):
        raise ValueError("out is a view in which one element stands for several: pass a tensor of its own")
    for name, x in (("a", a), ("b", b)):
        if _overlap(out, x):
            raise shared_memory(name)


def _overlap(x: Any, y: Any) -> bool:
    """Return whether two tensors have a byte in common."""
    if x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr():
        return False
    # NumPy solves this exactly from addresses and strides, without reading memory.
    if not x.numel() or not y.numel():  # their address is 0, which NumPy 1.26 refuses
        return False
    return bool(np.shares_memory(_addresses(x), _addresses(y)))


def _addresses(x: Any) -> Any:
    """Return an array that covers the tensor's elements at their addresses; nothing is read there."""
    size = x.dtype.itemsize

    interface = {
        "version": 3,
        "typestr": f"|V{size}",
        "data": (x.data_ptr(), True),
        "shape": tuple(x.shape),
        "strides": tuple(stride * size for stride in x.stride()),
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))
