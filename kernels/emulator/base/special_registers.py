"""The special registers: %tid, %ctaid, %laneid and so on (PTX ISA manual, "Special Registers")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..machine.machine import Machine
from ..ptx.dtypes import Array
from ..ptx.fault import EmulatorError


def special(machine: Machine, name: str) -> Any:
    """Return special register `name`: one number for each lane, or one for all. Raises EmulatorError."""
    word, _, axis = name.partition(".")
    if axis in ("x", "y", "z") and word in ALONG_AXES:
        return ALONG_AXES[word](machine, "xyz".index(axis))
    if name in OTHERS:
        return OTHERS[name](machine)
    raise EmulatorError(f"the emulator has no special register {name}")


def _thread(machine: Machine, i: int) -> Array:
    below = int(np.prod(machine.block[:i]))
    found: Array = machine.thread_of_lane[: machine.lanes_per_block] // below % machine.block[i]
    return np.tile(found, machine.blocks)


def _blocks(machine: Machine) -> Array:
    return machine.first + np.arange(machine.blocks)


def _block(machine: Machine, i: int) -> Array:
    """Return each block's index in the grid along axis i."""
    across = int(np.prod(machine.grid[:i]))
    return _blocks(machine) // across % machine.grid[i]


def _cluster(machine: Machine, i: int) -> int:
    return machine.cluster if i == 0 else 1


def _each(machine: Machine, of_blocks: Array) -> Array:
    return np.repeat(of_blocks, machine.lanes_per_block)


def _lane(machine: Machine) -> Array:
    return machine.thread_of_lane % 32


def _bit(machine: Machine) -> Array:
    return np.uint64(1) << _lane(machine).astype(np.uint64)


ALONG_AXES: dict[str, Callable[[Machine, int], Any]] = {
    "%tid": _thread,
    "%ntid": lambda machine, i: machine.block[i],
    "%ctaid": lambda machine, i: _each(machine, _block(machine, i)),
    "%nctaid": lambda machine, i: machine.grid[i],
    "%cluster_ctaid": lambda machine, i: _each(machine, _block(machine, i) % _cluster(machine, i)),
    "%cluster_nctaid": _cluster,
    "%clusterid": lambda machine, i: _each(machine, _block(machine, i) // _cluster(machine, i)),
    "%nclusterid": lambda machine, i: machine.grid[i] // _cluster(machine, i),
}
OTHERS: dict[str, Callable[[Machine], Any]] = {
    "%laneid": _lane,
    "%warpid": lambda machine: machine.thread_of_lane // 32,
    "%nwarpid": lambda machine: machine.warps_per_block,
    "%cluster_ctarank": lambda machine: _each(machine, _blocks(machine) % machine.cluster),
    "%cluster_nctarank": lambda machine: machine.cluster,
    "%is_explicit_cluster": lambda machine: machine.cluster > 1,
    "%smid": lambda machine: _each(machine, _blocks(machine)),  # as if each block had its own multiprocessor
    "%nsmid": lambda machine: int(np.prod(machine.grid)),
    "%gridid": lambda machine: 0,
    "%dynamic_smem_size": lambda machine: machine.launch.shared,
    "%total_smem_size": lambda machine: machine.shared_size,
    "WARP_SZ": lambda machine: 32,
    "%lanemask_eq": _bit,
    "%lanemask_lt": lambda machine: _bit(machine) - np.uint64(1),
    "%lanemask_le": lambda machine: 2 * _bit(machine) - np.uint64(1),
    "%lanemask_gt": lambda machine: ~(2 * _bit(machine) - np.uint64(1)),
    "%lanemask_ge": lambda machine: ~(_bit(machine) - np.uint64(1)),
}
