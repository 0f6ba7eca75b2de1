"""Torch tensors as a CUDA rung's operands: checks, and views as matrices or NumPy arrays.

Torch allocates the result and keeps the order of work: kernels go to its current stream, and nothing here
waits for them. The checks are short, because the GPU may be idle while Python runs them.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np

from ...rung import dtype_name, shared_memory
from .gpu_driver import ITEMSIZE, DeviceArray
from .matrix import Matrix, element_strides


def device_matrix(x: Any) -> Matrix | None:
    """Return the matrix of a CUDA tensor, in its own memory; None if one element stands for several."""
    rows, columns = x.shape
    row_stride, column_stride = x.stride()
    if rows == 1 or columns == 1 or not row_stride or not column_stride:
        if (row_stride == 0 and rows > 1) or (column_stride == 0 and columns > 1):
            return None
        row_stride, column_stride = element_strides(rows, columns, row_stride, column_stride)
    dtype = dtype_name(x.dtype)
    size = ITEMSIZE[dtype]
    length = 1 + (rows - 1) * row_stride + (columns - 1) * column_stride
    data = DeviceArray(x.data_ptr(), "uint16" if size == 2 else dtype, (length,), (size,), x)
    return Matrix(data, rows, columns, row_stride, column_stride, dtype)


def as_array(torch: Any, x: Any) -> Any:
    """Return a tensor in main memory as the NumPy array that shares it; 2-byte elements as uint16."""
    x = x.detach()
    if x.dtype.itemsize == 2:
        return x.view(torch.int16).numpy().view(np.uint16)
    return x.numpy()


def checked(torch: Any, name: str, x: Any, rung: str, dtypes: tuple[str, ...]) -> Any:
    """Return x as a plain strided 2-D tensor, or raise what is wrong with it."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(
            f"{name} is a {type(x).__name__} and the other a torch tensor: pass torch.as_tensor({name})"
        )
    if x.layout is not torch.strided:
        raise TypeError(f"{name} has layout {x.layout}: pass tensor.to_dense()")
    if x.ndim != 2:
        raise ValueError(
            f"{name} has {x.ndim} dimensions, shape {tuple(x.shape)}: reshape it to two, (rows, columns)"
        )
    if dtype_name(x.dtype) not in dtypes:
        raise TypeError(
            f"{name} has dtype {dtype_name(x.dtype)}, and rung {rung} takes "
            f"{' or '.join(dtypes)}: convert it with .to(torch.{dtypes[-1]})"
        )
    if x.requires_grad and torch.is_grad_enabled():
        raise TypeError(
            f"{name} requires a gradient, which a rung does not record: "
            "use minidist.model.matmul.matmul, or pass tensor.detach()"
        )
    return x.resolve_neg() if x.is_neg() else x


def check_out(torch: Any, a: Any, b: Any, out: Any, sums: str) -> None:
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
    strides = [(n, s) for n, s in zip(out.shape, out.stride(), strict=True) if n > 1]
    if out.is_neg() or any(s == 0 for _, s in strides):
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


def on_device(torch: Any, index: int) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which the GPU with this number is torch's current one."""
    if index == torch.cuda.current_device():
        return contextlib.nullcontext()
    device: contextlib.AbstractContextManager[Any] = torch.cuda.device(index)
    return device
