"""What the benchmark of a slow link predicts from a ledger, by hand for two hosts of two ranks."""

from __future__ import annotations

import pytest

from minidist.benchmarks.harness.slow_link_steps import SLOW_PROFILE, predicted
from minidist.comm.ledgers import Call

S, RANKS = 4_000_000, 4
ALPHA, BETA, GAMMA = 5e-3, 8e-9, SLOW_PROFILE.gamma
EVERYONE = (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("name", "algorithm", "group", "seconds"),
    [
        # 2 (n - 1) rounds, in each of which a quarter crosses.
        ("all_reduce", "torch", EVERYONE, 6 * ALPHA + 1.5 * S * BETA + 0.75 * S * GAMMA),
        ("all_reduce", "ring", EVERYONE, 6 * ALPHA + 1.5 * S * BETA + 0.75 * S * GAMMA),
        # 2 (m - 1) rounds between hosts: each sends half of the tensor twice.
        ("all_reduce", "hierarchical", EVERYONE, 2 * ALPHA + S * BETA + 0.5 * S * GAMMA),
        # A group with a rank on each host; the other ranks do the same at once.
        ("all_reduce", "torch", (1, 3), 2 * ALPHA + 2 * S * BETA + 0.5 * S * GAMMA),
        # Two ranks send two of the other host's a quarter each.
        ("reduce_scatter", "torch", EVERYONE, ALPHA + S * BETA),
        # S is what each rank has: three times that goes round.
        ("all_gather", "torch", EVERYONE, 3 * ALPHA + 3 * S * BETA),
        ("all_reduce", "shared_memory", (2, 3), 0.0),
        ("barrier", "torch", EVERYONE, 0.0),
    ],
)
def test_a_call_costs_what_crosses_the_link(
    name: str, algorithm: str, group: tuple[int, ...], seconds: float
) -> None:
    call = Call(name, algorithm, "float32", (S // 4,), group, 0)
    assert predicted(call, SLOW_PROFILE, RANKS) == pytest.approx(seconds)
