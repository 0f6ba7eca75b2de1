"""ldmatrix and stmatrix: 8 x 8 matrices of 16-bit elements between shared memory and a warp's registers.

PTX ISA, "Warp-level matrix load instruction: ldmatrix", "stmatrix". Lanes 8 i to 8 i + 7 pass the addresses
of the rows of matrix i, 16 bytes each, which may lie anywhere. `fragments` has the register layout.
"""

from __future__ import annotations

import numpy as np

from ..arithmetic.fragments import load_matrices, store_matrices
from ..base.addresses import whole_warps
from ..base.batch import Batch
from ..base.instruction_registry import Run, unit
from ..machine.machine import Machine
from ..memory.access import Access
from ..memory.loads_and_stores import fetch, put
from ..ptx.dtypes import Array, Mask
from ..ptx.fault import EmulatorError
from .mma import of_all_lanes, of_lanes_that_run

_COUNTS = {"x1": 1, "x2": 2, "x4": 4}


@unit("ldmatrix", order="load")
def ldmatrix(batch: Batch) -> Run:
    """ldmatrix.sync.aligned.m8n8.num{.trans}{.shared}.b16 r, [p]."""
    count, transposed, space = _form(batch)
    address, write = batch.address(1), batch.targets(0, "b32")

    def run(machine: Machine, mask: Mask) -> None:
        lanes = whole_warps(machine, mask)
        addresses, givers = _rows(address(machine), machine, len(batch), lanes, count)
        data = fetch(Access(machine, batch, addresses, 16, givers, "reads"), space)  # (n, rows, 16) uint8
        rows = data.view(np.uint16).reshape(len(batch), -1, count, 8, 8)
        write(machine, of_all_lanes(load_matrices(rows, transposed), machine, lanes), mask)

    return run


@unit("stmatrix", order="store", results=0)
def stmatrix(batch: Batch) -> Run:
    """stmatrix.sync.aligned.m8n8.num{.trans}{.shared}.b16 [p], r."""
    count, transposed, space = _form(batch)
    address, read = batch.address(0), batch.sources(1, "b32")

    def run(machine: Machine, mask: Mask) -> None:
        lanes = whole_warps(machine, mask)
        addresses, givers = _rows(address(machine), machine, len(batch), lanes, count)
        rows = store_matrices(of_lanes_that_run(read(machine), machine, lanes), transposed)
        data = np.ascontiguousarray(rows).view(np.uint8).reshape(len(batch), -1, 16)
        put(Access(machine, batch, addresses, 16, givers, "writes"), space, data)

    return run


def _form(batch: Batch) -> tuple[int, bool, str]:
    """Return the number of matrices, whether they are transposed, and the state space."""
    opcode = batch.first.opcode
    if opcode[3] != "m8n8" or opcode[4] not in _COUNTS or opcode[-1] != "b16":
        raise EmulatorError(f"this form of {opcode[0]} is not emulated: {batch.first.text}")
    space = "shared" if any(word.startswith("shared") for word in opcode) else "generic"
    return _COUNTS[opcode[4]], "trans" in opcode, space


def _rows(
    address: Array, machine: Machine, instructions: int, lanes: Array, count: int
) -> tuple[Array, Array]:
    """Return the rows' addresses, (instructions, warps * 8 * count), and the lanes that pass them."""
    givers = lanes.reshape(-1, 32)[:, : 8 * count].reshape(-1)
    return np.broadcast_to(address, (instructions, machine.lanes))[:, givers], givers
