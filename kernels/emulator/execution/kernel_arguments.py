"""A kernel's arguments, as the bytes of its parameters: arrays in place, tuples by their items.

Numba flattens them (numba-cuda 0.30, `_Kernel._prepare_args`). An array becomes nothing, nothing, items,
bytes of an item, address, shape..., strides...; a tuple its items, one after another; a complex number two
floats; a record the address of its bytes; an enumeration's member its value; a date or a duration an int64.
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
    """Return the bytes of each of the kernel's parameters; arrays and records become known to `memory`.

    `names` are the arguments' own, for faults; those that are missing are counted. Raises EmulatorError where
    the arguments are not as many as the kernel takes.
    """
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
        described = f"{name} ({_dtype(arg)} {arg.shape})"
        return [0, 0, arg.size, arg.itemsize, memory.add(arg, described), *arg.shape, *arg.strides]
    if hasattr(arg, "box_rows"):  # a TensorMap: 128 bytes that only the copy engine reads
        address = memory.allocate(np.zeros(128, np.uint8), f"the tensor map {name}", writable=False)
        memory.tensor_maps[address] = arg
        return [0, 0, 128, 1, address, 128, 1]
    if isinstance(arg, tuple):
        return [value for i, item in enumerate(arg) for value in _flat(item, memory, f"{name}[{i}]")]
    if isinstance(arg, np.void):
        # The record's own bytes, which may be those of an array that it was taken from.
        record = np.ndarray((arg.nbytes,), np.uint8, buffer=arg.data)
        return [memory.add(record, f"the record {name}")]
    if isinstance(arg, enum.Enum):
        return _flat(arg.value, memory, name)
    if isinstance(arg, np.datetime64 | np.timedelta64):
        return [int(arg.view(np.int64))]
    if isinstance(arg, complex | np.complexfloating):
        return [arg.real, arg.imag]
    return [arg]


def _dtype(array: np.ndarray[Any, Any]) -> str:
    return "record" if array.dtype.names else str(array.dtype)


def _bits(value: Any, kind: str, size: int) -> bytes:
    if isinstance(value, float | np.floating):
        as_float = {8: np.float64, 4: np.float32, 2: np.float16}[size]
        return np.array(value, as_float).tobytes()
    if kind in DTYPES and DTYPES[kind].kind == "f":
        return np.array(value, DTYPES[kind]).tobytes()
    return (int(value) % (1 << 8 * size)).to_bytes(size, "little")
