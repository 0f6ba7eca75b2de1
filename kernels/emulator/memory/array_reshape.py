"""`array.reshape` in a kernel: Numba calls a C function that computes the new strides.

`int numba_attempt_nocopy_reshape(nd, dims, strides, newnd, newdims, newstrides, itemsize, is_f_order)`, with
pointers to arrays of int64, writes the new strides and returns 1, or returns 0 if the reshape needs a copy.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ..base.addresses import lanes_of
from ..base.batch import Batch
from ..base.instruction_registry import Run, unit
from ..machine.machine import Machine
from ..ptx.dtypes import Array, Mask
from ..ptx.operands import Symbol
from .access import Access
from .loads_and_stores import fetch, put


@unit("call.numba_attempt_nocopy_reshape", order="fence", results=0)
def reshape(batch: Batch) -> Run:
    """Find the strides for a new shape, once for all lanes with the same arguments."""
    at = [operand.offset for operand in batch.first.operands if isinstance(operand, Symbol)]
    status = at[0]

    def run(machine: Machine, mask: Mask) -> None:
        lanes = lanes_of(machine, mask)
        nd, dims, strides, newnd, newdims, newstrides, itemsize = (
            np.ascontiguousarray(machine.local[lanes, offset : offset + 8]).view(np.int64)[:, 0]
            for offset in at[1:8]
        )
        in_f_order = machine.local[lanes, at[8]] != 0

        def items(pointer: Array, count: int) -> Array:
            """Return the arrays behind a pointer, (lanes, count)."""
            places = [(pointer + 8 * i)[None] for i in range(count)]
            reads = [Access(machine, batch, place, 8, lanes, "reads") for place in places]
            columns = [fetch(read, "generic").view(np.int64)[0, :, 0] for read in reads]
            return np.stack(columns, axis=1) if columns else empty

        empty = np.empty((lanes.size, 0), np.int64)
        old, new = int(nd[0]), int(newnd[0])  # of the arrays' types
        wanted = items(newdims, new)
        asked = np.column_stack([items(dims, old), items(strides, old), wanted, itemsize, in_f_order])
        cases, case_of = np.unique(asked, axis=0, return_inverse=True)
        answers = [
            _strides(case[:old], case[old : 2 * old], case[2 * old : -2], *case[-2:]) for case in cases
        ]
        found = np.array([answer is not None for answer in answers])[case_of.reshape(-1)]
        for i in range(new):
            stride = np.array([0 if one is None else one[i] for one in answers], np.int64)[
                case_of.reshape(-1)
            ]
            if found.any():
                data = stride[found][None, :, None].view(np.uint8)
                places = (newstrides + 8 * i)[None, found]
                put(Access(machine, batch, places, 8, lanes[found], "writes"), "generic", data)
        machine.local[lanes, status : status + 4] = found.astype(np.int32)[:, None].view(np.uint8)

    return run


def _strides(
    shape: Array, strides: Array, wanted: Array, itemsize: int, in_f_order: bool
) -> tuple[int, ...] | None:
    """Return the strides of a reshaped array, None if it needs a copy."""
    if int(np.prod(shape)) != int(np.prod(wanted)):
        return None
    # Nothing reads the array: only the layout of its items matters.
    item = np.empty(1, f"V{itemsize}")
    array = as_strided(item, tuple(shape.tolist()), tuple(strides.tolist()), writeable=False)
    # Fortran order is the same with the axes reversed.
    step = -1 if in_f_order else 1
    array = array.transpose() if in_f_order else array
    try:
        array.shape = tuple(wanted.tolist())[::step]
    except AttributeError:  # "incompatible shape for in-place modification"
        return None
    return array.strides[::step]
