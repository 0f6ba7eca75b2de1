"""The mesh: ranks in a grid, with one axis for each way in which they share the work.

A rank's coordinates say which pipeline stage it has, which rows, which part of each row and which part of
each matrix. Tensor parallelism communicates most, in every layer, so its ranks are neighbours, on one host
where possible; then come context, data and, with the fewest bytes, pipeline parallelism. Ranks that differ in
one coordinate alone form a group, in which the collectives of that axis run.

Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", section 3.
"""

from __future__ import annotations

import math
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from minidist._arguments import check_whole
from minidist._names import unknown
from minidist.comm import world
from minidist.comm.work import Group, known, limit_of, process_group, ranks_of

AXES = ("pp", "dp", "cp", "tp")
"""Outermost first: neighbouring ranks differ in the last."""
TOGETHER = {"dp_cp": ("dp", "cp")}
"""Axes that form a group together: gradients are summed over ranks with other rows or other tokens."""


class Mesh:
    """The ranks of the world in a grid of pp x dp x cp x tp. Every rank makes it: new groups need them all.

    >>> mesh = Mesh(dp=2, tp=2)
    >>> comm.all_reduce(x, group=mesh.group("tp"))

    Attributes:
        device_mesh: torch's `DeviceMesh` of the same groups, for other libraries; None in a process that has
            joined no world.

    Raises:
        TypeError: an axis is not a whole number.
        ValueError: an axis is below 1, or the mesh does not have as many ranks as the world.
    """

    def __init__(self, pp: int = 1, dp: int = 1, cp: int = 1, tp: int = 1) -> None:
        self.sizes = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
        for axis, size in self.sizes.items():
            check_whole(axis, size, 1)
        check_ranks(self.sizes, world.size())
        self.grid = torch.arange(world.size()).view(pp, dp, cp, tp)
        self._own = world.rank()
        self._ranks = {
            axis: next(tuple(row) for row in self._rows(axis) if self._own in row)
            for axis in (*AXES, *TOGETHER)
        }
        # In the same order on all ranks, because making a group waits for its members.
        self._groups = {axis: self._made(self._rows(axis)) for axis in self._ranks}
        self.device_mesh: DeviceMesh | None = None
        if dist.is_initialized():
            groups = [process_group(self._groups[axis]) for axis in AXES]
            kind = world.device().type
            self.device_mesh = DeviceMesh.from_group(groups, kind, self.grid, mesh_dim_names=AXES)

    def group(self, axis: str) -> Group:
        """This rank's group along an axis, or along "dp_cp"; None where that is the whole world.

        The group may have one rank; its collectives then send nothing.
        """
        self.ranks(axis)  # an error for an unknown axis
        return self._groups[axis]

    def blocks(self, axis: str, size: int, again: bool = False) -> tuple[Group, Group]:
        """Cut an axis into blocks of neighbours; every rank of the world calls it.

        Returns this rank's block, of `size` ranks, and the ranks with the same place in the other blocks.
        again: other groups of these ranks, as for `duplicate`.
        """
        blocks, copies = [], []
        for row in self._rows(axis):
            inside = torch.tensor(row).view(-1, size)
            blocks += inside.tolist()
            copies += inside.t().tolist()
        return self._made(blocks, again), self._made(copies, again)

    def duplicate(self, axis: str) -> Group:
        """Another group of the ranks along an axis, for messages that must not wait for each other's.

        Every rank of the world calls it.
        """
        return self._groups[axis] if self.size(axis) == 1 else self._made(self._rows(axis), again=True)

    def size(self, axis: str) -> int:
        """Ranks in the group along an axis."""
        return len(self.ranks(axis))

    def rank(self, axis: str) -> int:
        """This rank's number in the group along an axis."""
        return self.ranks(axis).index(self._own)

    def ranks(self, axis: str) -> tuple[int, ...]:
        """The group along an axis, as ranks of the world."""
        if axis not in [*self._ranks]:  # a list, since an axis may be of any type, also one without a hash
            raise unknown("axis", axis, self._ranks)
        return self._ranks[axis]

    def __repr__(self) -> str:
        """The sizes of the axes."""
        return f"Mesh({', '.join(f'{axis}={size}' for axis, size in self.sizes.items())})"

    def _rows(self, axis: str) -> list[list[int]]:
        """The groups of all ranks along an axis."""
        dims = [AXES.index(each) for each in TOGETHER.get(axis, (axis,))]
        others = [dim for dim in range(len(AXES)) if dim not in dims]
        rows: list[list[int]] = self.grid.permute(*others, *dims).flatten(len(others)).flatten(0, -2).tolist()
        return rows

    def _made(self, rows: list[list[int]], again: bool = False) -> Group:
        """This rank's group among `rows`, made once; `again`: another one, also made once."""
        members = next(tuple(row) for row in rows if self._own in row)
        if len(members) == world.size() and not again:
            return None
        # Meshes of different shapes share groups. torch keeps each until it is destroyed.
        made, key = known(None).subgroups, (*members, again)
        found = made.get(key)
        if found is None:
            # A new group would wait for 30 minutes; this one waits as long as the world does.
            limit = timedelta(seconds=limit_of(None))
            for row in rows:  # torch numbers groups, so each rank also makes those of the others
                group = dist.new_group(row, timeout=limit)
                if tuple(row) == members:
                    found = made[key] = group
        return found


def check_ranks(sizes: dict[str, int], ranks: int) -> None:
    """ValueError where axes of these sizes do not multiply to `ranks`; suggests a size that would."""
    needed = math.prod(sizes.values())
    if needed == ranks:
        return
    product = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    remedy = f"change the layout, or start {needed} ranks"
    for axis in ("dp", "pp", "cp", "tp"):  # data parallelism first: it fits any model
        others = needed // sizes[axis]
        if ranks % others == 0:
            remedy = f"change the layout, to {axis}={ranks // others} for one, or start {needed} ranks"
            break
    raise ValueError(f"the layout needs {needed} ranks ({product}) and the world has {ranks}; {remedy}")


def duplicate_group(group: Group) -> Group:
    """Make another group of the same ranks in the same order. All of them call it, and no others.

    Its messages do not wait for those of the first one. Over NCCL, two ranks of a group exchange all their
    messages in the order in which each of them made its calls. If both send first, or one posts a receive
    before a send, they wait for ever; with a group for each direction they do not. gloo needs none: there
    each message travels by itself.

    Connections are made when they are first used. A group of one rank is returned as it is.
    """
    ranks = ranks_of(group)
    if len(ranks) == 1:
        return group
    limit = timedelta(seconds=limit_of(group))
    made: Group = dist.new_group(list(ranks), timeout=limit, use_local_synchronization=True)
    return made
