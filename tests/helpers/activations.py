"""How many bytes live while operations run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Live(TorchDispatchMode):
    """Tensors that operations make: the bytes alive, at most and now, and elements of the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self.now = self.largest = 0
        self._seen: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            # The ranks exchange tensors in shared memory, which cannot be resized.
            if isinstance(tensor, Tensor) and not tensor.is_meta and tensor.untyped_storage().resizable():
                self.largest = max(self.largest, tensor.numel())
                reference = StorageWeakRef(tensor.untyped_storage())
                self._seen.setdefault(reference.cdata, reference)
        alive = [torch.UntypedStorage._new_with_weak_ptr(key) for key in self._seen]
        self._seen = {
            k: v for (k, v), each in zip(self._seen.items(), alive, strict=True) if each is not None
        }
        self.now = sum(each.nbytes() for each in alive if each is not None)
        self.most = max(self.most, self.now)
        return result
