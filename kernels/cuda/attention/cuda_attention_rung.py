"""A rung of the CUDA ladder of attention: takes NumPy arrays or torch tensors, and gives kernels matrices.

    RUNG = CudaAttentionRung.of_file(__name__, idea="...", dtypes=("float32",), compute=compute)

`compute(q, k, v, out, logs, heads, causal)` and `gradients(q, k, v, out, logs, d_out, dq, dk, dv, heads,
causal)` get `Matrix` objects in the memory of the back end, (heads x positions, width) with a column stride
of 1 and any row stride, and enqueue their kernels. `logs` has one column, and element i is `logs.data[i]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...attention_rung import AttentionRung, as_rows, logs_dtype
from ...rung import Array, dtype_name, torch_of
from ...torch_tensors import as_array
from ..cuda_rung import CudaStep
from ..runtime.gpu_driver import on_device
from ..runtime.matrix import Matrix, device_matrix
from ..tiling.packing import scratch


@dataclass(frozen=True)
class CudaAttentionRung(CudaStep, AttentionRung):
    """One step of the CUDA ladder of attention. Its kernels run where `device.backend()` says.

    CUDA tensors are used where they lie, on torch's current stream, without waiting for the result. NumPy
    arrays and CPU tensors are copied to the GPU and back, or used by the emulator in place. float16 and
    bfloat16 (ml_dtypes' in NumPy) are summed in float32, and `logs` are float32.
    """

    # By kernel: the most registers of a thread, the blocks that share a multiprocessor's 65536, and bytes of
    # shared memory for each 64 columns. Tests hold what the assembler reports to it.
    room: Mapping[str, tuple[int, int, int]] = field(default_factory=dict, compare=False)

    def _kind(self, q: Any) -> tuple[Any, str, str]:
        torch = torch_of(q)
        if torch is None:
            return super()._kind(q)
        return torch.Tensor, "a torch tensor, as q is: pass torch.as_tensor() of it", ".to(torch.{})"

    def _check(self, causal: bool, **arrays: Any) -> None:
        super()._check(causal, **arrays)
        q = arrays["q"]
        torch = torch_of(q)
        if torch is None:
            return
        for name, x in arrays.items():
            if x.device != q.device:
                raise TypeError(f"{name} is on {x.device} and q on {q.device}: move one with .to()")
            if x.requires_grad and torch.is_grad_enabled():
                raise TypeError(
                    f"{name} requires a gradient, which a rung does not record: pass tensor.detach()"
                )

    def _full(self, like: Any, shape: tuple[int, ...], value: float, logs: bool = False) -> Any:
        torch = torch_of(like)
        if torch is None:
            return super()._full(like, shape, value, logs)
        dtype = getattr(torch, logs_dtype(like)) if logs else like.dtype
        return torch.full(tuple(shape), value, dtype=dtype, device=like.device)

    def _run(
        self, function: Callable[..., None], given: tuple[Any, ...], results: tuple[Any, ...], causal: bool
    ) -> None:
        torch = torch_of(given[0])
        heads, count = math.prod(given[0].shape[:-2]), len(given)
        every = (*given, *results)
        names = [dtype_name(x.dtype) for x in every]
        if torch is None:
            arrays = [as_rows(x) for x in every]
        else:
            every = tuple(x.contiguous().reshape(-1, x.shape[-1]) for x in every)
            if every[0].is_cuda and self._on_gpu():
                with on_device(torch, every[0].device.index):
                    function(*map(device_matrix, every), heads, int(causal))
                return
            if every[0].device.type != "cpu":
                raise ValueError(f"q is on {every[0].device}, where rung {self.name} can't run: pass q.cpu()")
            arrays = [as_array(torch, x) for x in every]
        pairs = list(zip(arrays, names, strict=True))
        self._run_on_arrays(function, pairs[:count], pairs[count:], heads, int(causal))

    def _room(self, x: Array, dtype: str) -> Matrix:
        return scratch(1, len(x), dtype, 1).T if x.shape[1] == 1 else super()._room(x, dtype)
