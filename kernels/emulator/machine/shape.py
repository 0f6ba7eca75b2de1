"""The lanes and registers of a machine. Machines of one launch with equally many blocks share both."""

from __future__ import annotations

import numpy as np

from ..ptx.dtypes import DTYPES, Array

WARP = 32


class MachineShape:
    """The lanes of `blocks` blocks of (x, y, z) threads. Lanes that never run fill up each last warp."""

    def __init__(self, blocks: int, block: tuple[int, int, int]) -> None:
        self.threads = block[0] * block[1] * block[2]  # of a block
        self.warps_per_block = -(-self.threads // WARP)
        self.lanes_per_block = self.warps_per_block * WARP
        self.warps = blocks * self.warps_per_block
        self.lanes = blocks * self.lanes_per_block
        lane = np.arange(self.lanes)
        self.block_of_lane = lane // self.lanes_per_block
        self.warp_of_lane = lane // WARP
        self.thread_of_lane = lane % self.lanes_per_block  # within its block
        self.is_thread = self.thread_of_lane < self.threads


class Registers:
    """The registers of all lanes: an array (registers, lanes) for each width, and views as other kinds."""

    def __init__(self, rows: dict[str, int], lanes: int) -> None:
        self.rows, self.lanes = rows, lanes
        self.files: dict[str, Array] = {
            file: np.zeros((count, lanes), np.bool_ if file == "pred" else f"u{int(file[1:]) // 8}")
            for file, count in rows.items()
        }
        self.views: dict[tuple[str, str], Array] = {}
        for file, registers in self.files.items():
            for dtype in {registers.dtype, *DTYPES.values()}:
                if dtype.itemsize == registers.dtype.itemsize and (dtype.kind == "b") == (file == "pred"):
                    self.views[file, dtype.str] = registers.view(dtype)
