"""A rung of the CUDA ladder: takes NumPy arrays or torch tensors, and gives its kernels matrices.

    RUNG = CudaRung.of_file(__name__, idea="...", dtypes=("float32",), compute=compute)

`compute(a, b, c)` gets three `Matrix` objects in the memory of the back end, and enqueues its kernels. What
all rungs need is here: checks, sizes of 0, strides that kernels don't take, copies to a GPU and back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from .. import torch_tensors
from ..rung import Array, Rung, Step, dtype_name, torch_of
from .runtime import gpu_driver
from .runtime.device import architecture_on, backend, capability
from .runtime.gpu_driver import download, on_device, upload
from .runtime.matrix import Matrix, device_matrix, host_matrix
from .tiling.packing import scratch

PITCH = 16  # bytes; each row of an uploaded matrix begins on a multiple
Typed = Sequence[tuple[Array, str]]  # arrays, and what their elements are


@dataclass(frozen=True)
class CudaStep(Step):
    """A step of either CUDA ladder: its record. `device.backend()` says where its kernels run."""

    place: ClassVar[Literal["cpu", "cuda"]] = "cuda"
    architecture: str = "sm_75"  # the oldest on which its kernels run; "sm_90a" is Hopper alone

    def __post_init__(self) -> None:
        super().__post_init__()
        capability(self.architecture)
        if self.device != "cuda":
            raise ValueError(f"device is {self.device!r}: a CudaRung runs on 'cuda'")

    def _on_gpu(self) -> bool:
        """Return whether it runs on a GPU now; RuntimeError if this GPU can't run it."""
        if backend() != "gpu":
            return False
        found = gpu_driver.get().here()
        architecture_on(self.architecture, found.capability, f"rung {self.name}", found.name)
        return True

    def _run_on_arrays(self, run: Callable[..., None], given: Typed, results: Typed, *more: int) -> None:
        """Call run(*matrices, *more) for 2-D host arrays, none empty; 2-byte elements may come as uint16."""
        if self._on_gpu():
            there = [uploaded(x, dtype) for x, dtype in given]
            made = [self._room(x, dtype) for x, dtype in results]
            run(*there, *made, *more)
            for (x, _), c in zip(results, made, strict=True):
                rows = c.order == "rows"
                download(c.data, c.row_stride if rows else c.column_stride, x if rows else x.T)
            return
        made = [host_matrix(x, dtype) for x, dtype in results]
        run(*(host_matrix(x, dtype) for x, dtype in given), *made, *more)
        for (x, _), c in zip(results, made, strict=True):
            if not np.may_share_memory(c.data, x):  # because kernels don't take a stride of x
                x[...] = c.view2d().view(x.dtype)

    def _room(self, x: Array, dtype: str) -> Matrix:
        """Return a matrix in the GPU's memory for a result like x."""
        return scratch(x.shape[0], x.shape[1], dtype, PITCH // x.itemsize)


@dataclass(frozen=True)
class CudaRung(CudaStep, Rung):
    """One step of the CUDA ladder of matrix multiplications."""

    def matmul(self, a: Any, b: Any, out: Any = None) -> Any:
        """Multiply a (m, k) by b (k, n), and return c (m, n): NumPy arrays, or torch tensors on any device.

        As `Rung.matmul`: any size, any strides, the same errors. The result has the kind and device of the
        inputs. CUDA tensors are multiplied in place, on torch's current stream, without waiting for the
        result. NumPy arrays and CPU tensors are copied to the GPU and back, or multiplied by the emulator
        without a copy. bfloat16 arrays are ml_dtypes'. c has the dtype of a and b; for float16 and bfloat16
        `out` may be float32, as the sums are. Gradients are not recorded.

        Also raises TypeError for a tensor mixed with an array, for tensors on different devices, and for a
        tensor that requires a gradient (minidist.model.matmul computes it); RuntimeError if this GPU is too
        old for the rung.
        """
        torch = torch_of(a, b)
        if torch is None:
            return super().matmul(a, b, out)
        a, b, out = torch_tensors.operands(torch, a, b, out, self)
        if 0 in (a.shape[1], *out.shape):
            out.zero_()  # an empty sum, or nothing
        elif a.device.type == "cpu":
            x, y, c = (torch_tensors.as_array(torch, tensor) for tensor in (a, b, out))
            dtype = dtype_name(a.dtype)
            self._run_on_arrays(self.compute, [(x, dtype), (y, dtype)], [(c, dtype_name(out.dtype))])
        elif backend() == "gpu":
            with on_device(torch, a.device.index):
                self._fill_tensors(torch, a, b, out)
        else:  # the emulator was asked for on a machine with a GPU; it works in main memory
            out.copy_(self.matmul(a.cpu(), b.cpu(), torch.empty_like(out, device="cpu")))
        return out

    def _fill_tensors(self, torch: Any, a: Any, b: Any, out: Any) -> None:
        """Fill `out` with the product of tensors in the GPU's memory, none of them empty."""
        self._on_gpu()
        c = device_matrix(out)
        if c is None:  # strides that kernels don't take
            fresh = torch.empty(out.shape, dtype=out.dtype, device=out.device)
            self._fill_tensors(torch, a, b, fresh)
            out.copy_(fresh)
            return
        self.compute(
            device_matrix(a) or device_matrix(a.contiguous()),
            device_matrix(b) or device_matrix(b.contiguous()),
            c,
        )

    def sums(self, dtype: str) -> str:
        """Return the name of the dtype in which this rung adds products of factors of `dtype`."""
        return "float32" if dtype in ("float16", "bfloat16") else dtype

    def _fill(self, a: Array, b: Array, out: Array) -> None:
        given = [(a, a.dtype.name), (b, b.dtype.name)]
        self._run_on_arrays(self.compute, given, [(out, out.dtype.name)])

    def _takes_out(self, dtype: str, out: str) -> bool:
        return out == self.sums(dtype)


def uploaded(x: Array, dtype: str) -> Matrix:
    """Return a copy of x in the GPU's memory, in rows or in columns as x is, with a pitch of 16 bytes."""
    if x.shape[0] > 1 and (x.shape[1] == 1 or x.strides[0] < x.strides[1]):
        return uploaded(x.T, dtype).T
    there = scratch(x.shape[0], x.shape[1], dtype, PITCH // x.itemsize)
    if not x.flags.c_contiguous or x.shape[1] != there.row_stride:
        given, x = x, np.zeros((x.shape[0], there.row_stride), x.dtype)
        x[:, : given.shape[1]] = given
    upload(x, there.data)
    # The driver may read main memory after it has returned (CUDA Driver API, "API synchronization behavior").
    there.data.owner = there.data.owner, x
    return there
