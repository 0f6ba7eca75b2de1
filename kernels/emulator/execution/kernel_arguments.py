"""Turn a kernel's arguments into the bytes of its PTX parameters.

Numba flattens arguments (numba-cuda 0.30, `_Kernel._prepare_args`). An array becomes 0, 0, its item count,
item size, address, shape..., strides...; a tuple becomes its items; a complex number two floats; a record the
address of its bytes; an enum member its value; a date or a duration an int64.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..machine.global_memory import GlobalMemory
from ..ptx.dtypes import DTYPES
from ..ptx.fault import EmulatorError
from ..ptx.program import Program


def parameters(
    program: Program, args: Sequence[Any], memory: GlobalMemory, names: Sequence[str]
) -> dict[str, bytes]:
    """Return the bytes of each parameter, and add arrays and records to `memory`; `names` are for faults."""
    flat: list[Any] = []
    for i, arg in enumerate(args):
        flat += _flat(arg, memory, names[i] if i < len(names) else f"argument {i + 1}")
    if len(flat) != len(program.parameters):
        raise EmulatorError(
            f"the kernel takes {len(program.parameters)} parameters, "
            f"and the {len(args)} arguments make {len(flat)}"
        )
    return {
        name: _bits(value, kind, size)
        for (name, (kind, size)), value in zip(program.parameters.items(), flat, strict=True)
    }


def _flat(arg: Any, memory: GlobalMemory, name: str) -> list[Any]:
    if isinstance(arg, np.ndarray):
        dtype = "record" if arg.dtype.names else arg.dtype
        described = f"{name} ({dtype} {arg.shape})"
        return [0, 0, arg.size, arg.itemsize, memory.add(arg, described), *arg.shape, *arg.strides]
    if hasattr(arg, "box_rows"):  # a TensorMap: 128 bytes for the copy engine alone
        address = memory.allocate(np.zeros(128, np.uint8), f"the tensor map {name}", writable=False)
        memory.tensor_maps[address] = arg
        return [0, 0, 128, 1, address, 128, 1]
    if isinstance(arg, tuple):
        return [value for i, item in enumerate(arg) for value in _flat(item, memory, f"{name}[{i}]")]
    if isinstance(arg, np.void):
        # The record's own bytes. They may lie in the array that it was taken from.
        record = np.ndarray((arg.nbytes,), np.uint8, buffer=arg.data)
        return [memory.add(record, f"the record {name}")]
    if isinstance(arg, enum.Enum):
        return _flat(arg.value, memory, name)
    if isinstance(arg, np.datetime64 | np.timedelta64):
        return [int(arg.view(np.int64))]
    if isinstance(arg, complex | np.complexfloating):
        return [arg.real, arg.imag]
    return [arg]


def _bits(value: Any, kind: str, size: int) -> bytes:
    if isinstance(value, float | np.floating):
        as_float = {8: np.float64, 4: np.float32, 2: np.float16}[size]
        return np.array(value, as_float).tobytes()
    if kind in DTYPES and DTYPES[kind].kind == "f":
        return np.array(value, DTYPES[kind]).tobytes()
    return (int(value) % (1 << 8 * size)).to_bytes(size, "little")
