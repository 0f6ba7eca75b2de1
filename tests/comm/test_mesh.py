"""The mesh: who is in a group with whom, that groups are made once, and what wrong sizes are told."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import minidist as md
from minidist import comm
from minidist.comm.mesh import AXES, Mesh
from minidist.comm.work import ranks_of

Clusters = Callable[[int], md.Cluster]


def test_tensor_parallel_ranks_are_neighbours(cluster_of: Clusters) -> None:
    def groups() -> dict[str, tuple[int, ...]]:
        mesh = Mesh(pp=2, tp=2)
        return {axis: ranks_of(mesh.group(axis)) for axis in (*AXES, "dp_cp")}

    assert cluster_of(4).run(groups) == [
        {"pp": (0, 2), "dp": (0,), "cp": (0,), "tp": (0, 1), "dp_cp": (0,)},
        {"pp": (1, 3), "dp": (1,), "cp": (1,), "tp": (0, 1), "dp_cp": (1,)},
        {"pp": (0, 2), "dp": (2,), "cp": (2,), "tp": (2, 3), "dp_cp": (2,)},
        {"pp": (1, 3), "dp": (3,), "cp": (3,), "tp": (2, 3), "dp_cp": (3,)},
    ]


def test_data_and_context_are_one_group_too(cluster_of: Clusters) -> None:
    def sums() -> tuple[list[float], tuple[int, int], int]:
        mesh = Mesh(dp=2, cp=2)
        own = float(10 ** md.rank())
        axes = ("dp", "cp", "dp_cp", "pp")
        found = [float(comm.all_reduce(torch.tensor(own), group=mesh.group(axis))) for axis in axes]
        return found, (mesh.size("dp_cp"), mesh.size("cp")), mesh.rank("dp_cp")

    for rank, (found, sizes, place) in enumerate(cluster_of(4).run(sums)):
        same_tokens, same_rows = ((0, 2), (0, 1)), ((0, 1), (2, 3))
        expected = [sum(10.0**r for r in pair) for pair in (same_tokens[0], same_rows[rank // 2])]
        expected[0] *= 10 ** (rank % 2)
        assert found == [*expected, 1111.0, 10.0**rank]
        assert (sizes, place) == ((4, 2), rank)


def test_the_whole_world_is_no_new_group(cluster_of: Clusters) -> None:
    def which() -> list[bool]:
        mesh = Mesh(dp=md.size())
        return [mesh.group(axis) is None for axis in ("dp", "dp_cp", "tp")]

    assert cluster_of(2).run(which) == [[True, True, False]] * 2
    assert Mesh().group("tp") is None  # no world: a world of one
    assert Mesh().device_mesh is None


def test_groups_are_made_once(cluster_of: Clusters) -> None:
    def count() -> tuple[int, bool]:
        made = []
        for _ in range(2):
            for sizes in ({"dp": 2, "tp": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "cp": 2}):
                Mesh(**sizes)
            made.append(len(torch.distributed.distributed_c10d._world.pg_map))
        group = Mesh(dp=2, tp=2).group("tp")  # the meshes are gone, the group is not
        return made[1] - made[0], group is Mesh(pp=2, tp=2).group("tp")

    assert cluster_of(4).run(count) == [(0, True)] * 4


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 0}, "tp is 0; give at least 1"),
        (
            {"dp": 2},
            r"needs 2 ranks \(pp 1 x dp 2 x cp 1 x tp 1\) and the world has 1; .* to dp=1 for",
        ),
        ({"tp": 3}, "to tp=1 for one, or start 3 ranks"),
        ({"tp": 3, "pp": 2}, "the world has 1; change the layout, or start 6 ranks"),
    ],
)
def test_wrong_sizes_name_the_axis(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mesh(**sizes)


def test_a_size_is_a_whole_number_and_an_axis_is_known() -> None:
    with pytest.raises(TypeError, match=r"cp is True \(bool\); give an integer"):
        Mesh(cp=True)
    with pytest.raises(ValueError, match="unknown axis 'ep'"):
        Mesh().group("ep")
