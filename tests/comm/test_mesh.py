"""The mesh: who is in a group with whom, that groups are made once, and what wrong sizes are told."""

from __future__ import annotations

from typing import Any

import torch

import minidist as md
from minidist import comm
from minidist.comm.mesh import AXES, Mesh
from minidist.comm.work import ranks_of
from tests.conftest import Clusters
from tests.helpers.on_ranks import on_ranks
from tests.helpers.refusals import refuses

BY_STAGE = {"pp": ((0, 2), (1, 3)), "tp": ((0, 1), (2, 3))}
BY_TOKENS = {"dp": ((0, 2), (1, 3)), "cp": ((0, 1), (2, 3)), "dp_cp": ((0, 1, 2, 3),)}


@on_ranks(4, rows=(BY_STAGE, BY_TOKENS))
def test_who_is_in_a_group_with_whom(rows: dict[str, Any]) -> None:
    """Neighbours are tensor-parallel. Data and context parallelism have a group together, too."""
    rank, mesh = md.rank(), Mesh(**{axis: 2 for axis in rows if axis != "dp_cp"})
    for axis in (*AXES, "dp_cp"):
        members = ranks_of(mesh.group(axis))
        wanted = next(row for row in rows.get(axis, [(rank,)]) if rank in row)
        assert (members, mesh.size(axis), members[mesh.rank(axis)]) == (wanted, len(wanted), rank)
        total = comm.all_reduce(torch.tensor(10.0**rank), group=mesh.group(axis))
        assert total == sum(10.0**each for each in wanted)


def test_the_whole_world_is_no_new_group(cluster_of: Clusters) -> None:
    def which() -> list[bool]:
        mesh = Mesh(dp=md.size())
        return [mesh.group(axis) is None for axis in ("dp", "dp_cp", "tp")]

    assert cluster_of(2).run(which) == [[True, True, False]] * 2
    assert Mesh().group("tp") is None  # no world: a world of one
    assert Mesh().device_mesh is None


@on_ranks(4)
def test_groups_are_made_once() -> None:
    made = []
    for _ in range(2):
        for sizes in ({"dp": 2, "tp": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "cp": 2}):
            Mesh(**sizes)
        made.append(len(torch.distributed.distributed_c10d._world.pg_map))
    group = Mesh(dp=2, tp=2).group("tp")  # the meshes are gone, the group is not
    assert made[1] == made[0]
    assert group is Mesh(pp=2, tp=2).group("tp")


test_wrong_sizes_name_the_axis = refuses(
    Mesh,
    ({"tp": 0}, "tp is 0; give at least 1"),
    ({"dp": 2}, r"needs 2 ranks \(pp 1 x dp 2 x cp 1 x tp 1\) and the world has 1; .* to dp=1 for"),
    ({"tp": 3}, "to tp=1 for one, or start 3 ranks"),
    ({"tp": 3, "pp": 2}, "the world has 1; change the layout, or start 6 ranks"),
    ({"cp": True}, TypeError, r"cp is True \(bool\); give an integer"),
)
test_an_axis_is_known = refuses(Mesh().group, ("ep", "unknown axis 'ep'"))
