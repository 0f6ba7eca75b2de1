"""The mesh: ranks in a grid, one axis for each way in which they share the work.

A rank's place in the grid says which pipeline stage it has, which rows, which part of each row and which part
of each matrix. Tensor parallelism talks most, in each layer, so its ranks are neighbours, on one host where
that is possible; then come context, data and, with the fewest bytes, pipeline parallelism. All ranks that
differ in one coordinate alone are a group, in which the collectives of that axis run.

Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", section 3.
"""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from minidist._names import unknown
from minidist.comm import world
from minidist.comm.work import Group, limit_of, subgroups

AXES = ("pp", "dp", "cp", "tp")
"""Outermost first: neighbouring ranks differ in the last."""
TOGETHER = {"dp_cp": ("dp", "cp")}
"""Axes that are one group, too: gradients are summed over ranks that have other rows or other tokens."""


class Mesh:
    """The ranks of the world in a grid of pp x dp x cp x tp. Every rank makes it; a collective where new.

    >>> mesh = Mesh(dp=2, tp=2)
    >>> comm.all_reduce(x, group=mesh.group("tp"))

    Attributes:
        device_mesh: torch's `DeviceMesh` of the same groups, for what else works with one; None in a process
            that has joined no world.

    Raises:
        TypeError: an axis is no whole number.
        ValueError: an axis is below 1, or the mesh has other ranks than the world.
    """

    def __init__(self, pp: int = 1, dp: int = 1, cp: int = 1, tp: int = 1) -> None:
        self.sizes = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
        for axis, size in self.sizes.items():
            if isinstance(size, bool) or not isinstance(size, int):
                raise TypeError(f"{axis} is {size!r}; give a whole number of ranks")
            if size < 1:
                raise ValueError(f"{axis} is {size}; give at least 1")
        check_ranks(self.sizes, world.size())
        self.grid = torch.arange(world.size()).view(pp, dp, cp, tp)
        place = (self.grid == world.rank()).nonzero()[0].tolist()
        self._places = dict(zip(AXES, place, strict=True))
        # In the same order on all ranks: making a group waits for its members.
        self._groups = {axis: self._group(axis) for axis in (*AXES, *TOGETHER)}
        self.device_mesh: DeviceMesh | None = None
        if dist.is_initialized():
            everyone = dist.group.WORLD
            assert everyone is not None
            groups = [self._groups[axis] or everyone for axis in AXES]
            kind = world.device().type
            self.device_mesh = DeviceMesh.from_group(groups, kind, self.grid, mesh_dim_names=AXES)

    def group(self, axis: str) -> Group:
        """This rank's group along an axis, or along "dp_cp"; None where that is the whole world.

        A group of one rank is there, too; its collectives send nothing.
        """
        self._check(axis)
        return self._groups[axis]

    def size(self, axis: str) -> int:
        """Ranks in the group along an axis."""
        self._check(axis)
        return math.prod(self.sizes[each] for each in _parts(axis))

    def rank(self, axis: str) -> int:
        """This rank's place in the group along an axis."""
        self._check(axis)
        place = 0
        for each in _parts(axis):
            place = place * self.sizes[each] + self._places[each]
        return place

    def ranks(self, axis: str) -> tuple[int, ...]:
        """The group along an axis, as ranks of the world."""
        self._check(axis)
        parts = _parts(axis)
        index: tuple[Any, ...] = tuple(slice(None) if a in parts else self._places[a] for a in AXES)
        return tuple(self.grid[index].flatten().tolist())

    def __repr__(self) -> str:
        """The sizes of the axes."""
        return f"Mesh({', '.join(f'{axis}={size}' for axis, size in self.sizes.items())})"

    def _group(self, axis: str) -> Group:
        members = self.ranks(axis)
        if len(members) == world.size():
            return None
        everyone = dist.group.WORLD
        assert everyone is not None
        made = subgroups.setdefault(everyone, {})
        if members not in made:
            # A new group's limit is 30 minutes unless it is told; each waits as long as the world does.
            limit = timedelta(seconds=limit_of(None))
            # torch numbers groups: each rank makes those of the others, too, which takes it no message.
            dims = [AXES.index(each) for each in _parts(axis)]
            others = [dim for dim in range(len(AXES)) if dim not in dims]
            for row in self.grid.permute(*others, *dims).reshape(-1, len(members)).tolist():
                group = dist.new_group(row, timeout=limit)
                if tuple(row) == members:
                    made[members] = group
        return made[members]

    def _check(self, axis: str) -> None:
        if axis not in (*AXES, *TOGETHER):
            raise unknown("axis", axis, (*AXES, *TOGETHER))


def _parts(axis: str) -> tuple[str, ...]:
    return TOGETHER.get(axis, (axis,))


def check_ranks(sizes: dict[str, int], ranks: int) -> None:
    """ValueError where axes of these sizes do not make up so many ranks; names the axis that could."""
    needed = math.prod(sizes.values())
    if needed == ranks:
        return
    product = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    remedy = f"change the layout, or start {needed} ranks"
    for axis in ("dp", "pp", "cp", "tp"):  # data parallelism is what fits any model
        others = needed // sizes[axis]
        if ranks % others == 0:
            remedy = f"change the layout, to {axis}={ranks // others} for one, or start {needed} ranks"
            break
    raise ValueError(f"the layout needs {needed} ranks ({product}) and the world has {ranks}; {remedy}")
