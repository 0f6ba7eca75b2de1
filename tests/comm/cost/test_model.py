"""The cost model: its formulas against the algorithms' own schedules, its fit, its profiles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minidist.comm import cost
from minidist.comm.algorithms import ALGORITHMS
from minidist.comm.cost.links import Link, LinkProfile, SharedMemoryCost
from minidist.comm.cost.model import counted
from tests.conftest import Clusters
from tests.helpers.refusals import refuses

LINKS = LinkProfile("test", "made up", {"messages": Link(1e-5, 1e-9)}, gamma=1e-10)
CASES = [
    (operation, name)
    for operation, formulas in cost.FORMULAS.items()
    for name in formulas
    if name != "direct"  # only torch has it
]
ALL = {(operation, name) for operation, names in ALGORITHMS.items() for name in names}


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7, 8, 16])
@pytest.mark.parametrize(("operation", "name"), CASES)
def test_the_formulas_are_the_algorithms(operation: str, name: str, ranks: int) -> None:
    """Rounds, bytes and messages are those counted in the schedule."""
    assert cost.terms(operation, name, 960.0, ranks) == pytest.approx(counted(operation, name, 960.0, ranks))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
def test_algorithms_without_a_formula_are_counted(ranks: int) -> None:
    levels = 2 * (ranks - 1).bit_length()
    found = {key: cost.terms(*key, 960.0, ranks) for key in ALL - {*CASES}}
    assert {key: each.rounds for key, each in found.items()} == {
        ("all_reduce", "hierarchical"): 2 * (ranks - 1),
        ("reduce_scatter", "tree"): levels,
        ("all_gather", "tree"): levels,
    }
    ring = cost.terms("all_reduce", "ring", 960.0, ranks)  # as the hierarchy is, with all ranks on one host
    assert found["all_reduce", "hierarchical"] == pytest.approx(ring)


def test_a_ring_costs_what_the_textbook_says() -> None:
    n, size = 8, 1e6
    wanted = 14 * 1e-5 + 14 / 8 * size * 1e-9 + 7 / 8 * size * 1e-10
    assert cost.predict("all_reduce", "ring", size, n, LINKS) == pytest.approx(wanted)
    assert cost.predict("all_reduce", "torch", size, n, LINKS) == pytest.approx(wanted)


def test_ranks_of_one_machine_slow_each_other() -> None:
    """All ranks of a ring send at once; fewer ranks of a tree do."""
    busy = LinkProfile("busy", "made up", {"messages": Link(1e-5, 1e-9, 4e-5, 4e-9)}, gamma=0.0)
    alone = replace(busy, links={"messages": Link(1e-5, 1e-9)})
    ratios = {
        name: cost.predict("all_reduce", name, 1e6, 8, busy) / cost.predict("all_reduce", name, 1e6, 8, alone)
        for name in ("ring", "tree", "naive")
    }
    assert ratios["ring"] == pytest.approx(4)
    assert 1 < ratios["tree"] < 3
    assert 1 <= ratios["naive"] < 1.1  # the root's link is the only one in use


@pytest.mark.parametrize("profile", sorted(cost.PROFILES))
def test_profiles_have_sources_and_crossovers(profile: str) -> None:
    assert cost.PROFILES[profile].source
    size = cost.crossover("all_reduce", "tree", "ring", 16, profile)
    assert size is not None
    assert 2**8 < size < 2**26
    smaller = [cost.predict("all_reduce", name, size / 4, 16, profile) for name in ("tree", "ring")]
    larger = [cost.predict("all_reduce", name, size * 4, 16, profile) for name in ("tree", "ring")]
    assert smaller[0] < smaller[1]
    assert larger[0] > larger[1]


def test_there_may_be_no_crossover() -> None:
    assert cost.crossover("all_reduce", "ring", "naive", 4, LINKS) is None


def test_one_rank_sends_nothing_and_shared_memory_is_faster() -> None:
    profile = replace(LINKS, memory=SharedMemoryCost(1e-6, 1e-10, 1e-10, 1e-10))
    assert cost.predict("all_reduce", "ring", 1e6, 1, LINKS) == 0
    for operation in cost.FORMULAS:
        ours = cost.predict(operation, "shared_memory", 1e6, 4, profile)
        assert 0 < ours < cost.predict(operation, "torch", 1e6, 4, profile)


test_wrong_arguments = refuses(
    lambda arguments: cost.predict(*arguments),
    (("all_reduce", "rign", 1, 2, LINKS), "unknown algorithm of all_reduce 'rign': did you mean 'ring'"),
    (("allreduce", "ring", 1, 2, LINKS), "did you mean 'all_reduce'"),
    (("allreduce", "shared_memory", 1, 2, LINKS), "did you mean 'all_reduce'"),
    (("all_reduce", "ring", 1, 2, "25gb"), "unknown profile '25gb': did you mean '25gbe'"),
    (("all_reduce", "ring", -1, 2, LINKS), "size is -1 bytes and ranks 2"),
    (("all_reduce", "shared_memory", 1, 2, "25gbe"), "the profile '25gbe' has no shared memory"),
)


def test_fit_measures_between_the_ranks(cluster_of: Clusters) -> None:
    def measure() -> LinkProfile:
        return cost.fit(rounds=3)

    profiles = cluster_of(3).run(measure)
    assert profiles[1:] == profiles[:-1]
    profile = profiles[0]
    link, memory = profile.links["messages"], profile.memory
    assert profile.ranks == 3
    assert 1e-6 < link.alpha < 1e-1
    assert 1e-12 < link.beta < 1e-6
    assert link.busy_alpha is not None
    assert 1e-6 < link.busy_alpha < 1e-1
    assert memory is not None
    assert 0 < memory.meet < 1e-1
    assert 1e-12 < memory.put < 1e-7
    assert 0 <= memory.take < 1e-7
    assert 0 <= memory.combine < 1e-7


def test_fit_needs_links() -> None:
    with pytest.raises(ValueError, match="the group has one"):
        cost.fit()
