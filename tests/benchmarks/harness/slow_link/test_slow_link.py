"""What the benchmark of a slow link predicts from a ledger, and what its sharded forms send between hosts.

The prediction is calculated by hand for two hosts of two ranks. The bytes are those of the wire's own counter
between two hosts on this machine, where it can have them.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

import minidist as md
from minidist import comm
from minidist.benchmarks.harness.slow_link.slow_link_steps import (
    HOSTS,
    PROFILES,
    SECONDARY,
    SHARDED,
    SLOW,
    WORK,
    crossing,
    predicted,
    rows_of,
    sharded,
)
from minidist.benchmarks.harness.slow_link.two_hosts import TwoHosts, counter, why_not
from minidist.comm.ledgers import Call
from tests.helpers import ranks_on_hosts
from tests.helpers.clocks import HANG

S, RANKS = 4_000_000, 4
SLOW_PROFILE = PROFILES[SLOW]
ALPHA, BETA, GAMMA = 5e-3, 8e-9, SLOW_PROFILE.gamma
EVERYONE = (0, 1, 2, 3)
SHARES = {1: 1.75, 2: 1.75, 3: 2.5}
"""Bytes from host to host in a step of plain ZeRO, over those of the parameters: the all-to-all of the
reduce-scatter sends 1 and each ring of an all-gather 3/4. The hybrid forms send 2 (m - 1) / m = 1."""


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


@dataclass
class Step:
    """What one rank saw of a step."""

    across: int  # bytes that its host sent to the other, by the counter of the card
    formula: float
    calls: list[Call]


def settled_steps() -> dict[str, Step]:
    """Take two steps of each sharded form; return the second."""
    steps = {}
    for form in SHARDED:
        engine, rows = sharded(form), rows_of(form)
        engine.step(*rows)  # the first one settles the buckets
        before = sent()
        with comm.ledger() as ledger:
            engine.step(*rows)
        steps[form] = Step(sent() - before, crossing(form, engine), ledger.calls)
    return steps


def sent() -> int:
    """Bytes that this host has sent, when all have arrived and no rank goes on."""
    comm.barrier()
    found = counter()
    comm.barrier()
    return found


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Step]]:
    if reason := why_not():
        pytest.skip(f"no two hosts here: {reason}")
    with TwoHosts() as hosts:
        folder = tmp_path_factory.mktemp("ranks")
        results = ranks_on_hosts.run(hosts, RANKS // HOSTS, settled_steps, folder=folder, timeout=HANG)
    assert not [error for _, error, _ in results if error]
    return [value for value, _, _ in results]


@pytest.mark.deep
@pytest.mark.parametrize("form", SHARDED)
def test_a_step_sends_as_many_bytes_between_hosts_as_its_formula(
    steps: list[dict[str, Step]], form: str
) -> None:
    parameters = sum(4 * parameter.numel() for parameter in WORK.build().parameters())
    layout = md.Layout.parse(SHARDED[form])
    share = 1.75 if form == SECONDARY else 1.0 if layout.shard else SHARES[layout.zero]
    for rank in steps:
        # The root unit, with the embeddings, is gathered once; padding adds less than 1/1000.
        assert rank[form].formula == pytest.approx(share * parameters, rel=0.02 if share == 2.5 else 1e-3)
        # The headers of TCP, acknowledgements and the messages of the barrier come on top.
        assert rank[form].formula <= rank[form].across <= 1.01 * rank[form].formula


@pytest.mark.deep
@pytest.mark.parametrize("form", SHARDED)
def test_ranks_of_a_host_talk_in_shared_memory(steps: list[dict[str, Step]], form: str) -> None:
    for rank, found in enumerate(steps):
        host, copies = ((0, 1), (2, 3))[rank // 2], (rank % 2, rank % 2 + 2)
        calls = found[form].calls
        inside = [call for call in calls if call.group == host]
        assert {(call.algorithm, call.bytes_on_wire) for call in inside} <= {("shared_memory", 0)}
        if form == SECONDARY:  # the backward pass gathers all units but the root's
            assert {call.name for call in inside} == {"all_gather"}
        elif "hybrid" not in form:
            assert not inside
        else:
            assert {call.name for call in inside} == {"reduce_scatter", "all_gather"}
            between = [call for call in calls if call.group == copies]
            assert {call.name for call in between} == {"all_reduce"}
            assert HOSTS * sum(call.bytes_on_wire for call in between) == found[form].formula
            # What is left counts rows and used parameters.
            others = [call for call in calls if call.group not in (host, copies)]
            assert sum(call.bytes_on_wire for call in others) < 2000
