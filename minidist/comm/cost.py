"""What a collective costs: alpha, beta and gamma, and the time that they predict.

A message of S bytes takes alpha + beta S; combining two tensors of S bytes takes gamma S. An algorithm is
then a few numbers (`terms`): rounds of messages one after the other, bytes that one rank has to pass on in
them, bytes that it combines. `fit` measures alpha, beta and gamma between the ranks that run; `PROFILES` has
those of networks that are not at hand; `predict` gives seconds for any of them.

Ranks of one machine share its cores, and a message keeps cores busy at both ends. What all ranks send
together is therefore a second bound: such a machine carries only so many messages at a time (`lanes`).

Source: Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in MPICH",
sections 3 and 4; Hockney 1994 for alpha and beta.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from minidist._names import unknown
from minidist.comm.cost_fit import fit as fit
from minidist.comm.cost_profiles import PROFILES as PROFILES
from minidist.comm.cost_profiles import Profile as Profile
from minidist.comm.shared_memory import STAGE


class Terms(NamedTuple):
    """What an algorithm does."""

    rounds: float  # messages one after the other
    sent: float  # bytes that the busiest rank passes on in them
    reduced: float  # bytes that it combines
    messages: float  # of all ranks together
    bytes: float  # of all ranks together


Formula = Callable[[float, int], Terms]


def predict(
    operation: str, algorithm: str, size: float, ranks: int, profile: Profile | str = "25gbe"
) -> float:
    """Seconds that a collective takes.

    Args:
        operation: "all_reduce", "reduce_scatter", "all_gather", "broadcast" or "all_to_all".
        algorithm: "ring", "tree", "halving_doubling", "naive" or "pairwise", as far as the operation has
            them; "torch", whose backends run rings; or "shared_memory".
        size: bytes of the tensor that each rank passes.
        ranks: how many take part.
        profile: what `fit` returned, or the name of one of `PROFILES`.

    Raises:
        ValueError: an unknown operation, algorithm or profile; shared memory in a profile without it.
    """
    if isinstance(profile, str):
        if profile not in PROFILES:
            raise unknown("profile", profile, PROFILES)
        profile = PROFILES[profile]
    if ranks < 1 or size < 0:
        raise ValueError(f"size is {size} bytes and ranks {ranks}; give at least 0 and 1")
    if ranks == 1:
        return 0.0
    if algorithm == "shared_memory":
        return _through_memory(operation, size, ranks, profile)
    cost, lanes = terms(operation, algorithm, size, ranks), profile.lanes or math.inf
    link = profile.links.get(algorithm) or profile.links["messages"]
    return (
        link.call
        + link.alpha * max(cost.rounds, cost.messages / lanes)
        + link.beta * max(cost.sent, cost.bytes / lanes)
        + profile.gamma * cost.reduced
    )


def crossover(operation: str, small: str, large: str, ranks: int, profile: Profile | str) -> float | None:
    """Bytes, a power of two up to 1 GB, from which on `large` is the faster; None where it never is."""
    sizes = [2.0**exponent for exponent in range(31)]
    slower = [
        predict(operation, large, size, ranks, profile) >= predict(operation, small, size, ranks, profile)
        for size in sizes
    ]
    if slower[-1]:
        return None
    return sizes[max((i + 1 for i, is_slower in enumerate(slower) if is_slower), default=0)]


def terms(operation: str, algorithm: str, size: float, ranks: int) -> Terms:
    """An algorithm's numbers for `size` bytes in each of `ranks` ranks.

    Raises:
        ValueError: an unknown operation, or an algorithm that it does not have.
    """
    if operation not in FORMULAS:
        raise unknown("operation", operation, FORMULAS)
    formulas = FORMULAS[operation]
    if algorithm == "torch":  # gloo and NCCL: rings, a tree to broadcast, pairs for an all-to-all
        algorithm = {"broadcast": "tree", "all_to_all": "pairwise"}.get(operation, "ring")
    if algorithm not in formulas:
        raise unknown(f"algorithm of {operation}", algorithm, (*formulas, "torch", "shared_memory"))
    return formulas[algorithm](float(size), ranks)


def _halving_doubling(size: float, n: int) -> Terms:
    power = 2 ** math.floor(math.log2(n))
    steps, surplus = math.log2(power), n - power  # surplus ranks hand theirs over, and get the result
    sent = 2 * (power - 1) / power * size
    folds = 2 if surplus else 0
    return Terms(
        rounds=2 * steps + folds,
        sent=sent + folds * size,
        reduced=sent / 2 + (size if surplus else 0),
        messages=2 * power * steps + 2 * surplus,
        bytes=power * sent + 2 * surplus * size,
    )


def _levels(n: int) -> int:
    return math.ceil(math.log2(n))


FORMULAS: dict[str, dict[str, Formula]] = {
    "all_reduce": {
        "ring": lambda s, n: Terms(
            2 * (n - 1), 2 * (n - 1) / n * s, (n - 1) / n * s, 2 * n * (n - 1), 2 * (n - 1) * s
        ),
        "tree": lambda s, n: Terms(
            2 * _levels(n), 2 * _levels(n) * s, _levels(n) * s, 2 * (n - 1), 2 * (n - 1) * s
        ),
        "halving_doubling": _halving_doubling,
        "naive": lambda s, n: Terms(2 * (n - 1), 2 * (n - 1) * s, (n - 1) * s, 2 * (n - 1), 2 * (n - 1) * s),
    },
    "reduce_scatter": {
        "ring": lambda s, n: Terms(n - 1, (n - 1) / n * s, (n - 1) / n * s, n * (n - 1), (n - 1) * s),
    },
    "all_gather": {"ring": lambda s, n: Terms(n - 1, (n - 1) * s, 0, n * (n - 1), n * (n - 1) * s)},
    "broadcast": {
        "ring": lambda s, n: Terms(n - 1, s, 0, n - 1, (n - 1) * s),
        "tree": lambda s, n: Terms(_levels(n), _levels(n) * s, 0, n - 1, (n - 1) * s),
    },
    "all_to_all": {"pairwise": lambda s, n: Terms(n - 1, (n - 1) / n * s, 0, n * (n - 1), (n - 1) * s)},
}
"""Operation -> algorithm -> its terms, from S, the bytes that each rank passes, and n ranks."""


def _through_memory(operation: str, size: float, n: int, profile: Profile) -> float:
    """Chunks of `STAGE` bytes: copied in, met for, combined where they lie, and copied out."""
    if operation not in FORMULAS:
        raise unknown("operation", operation, FORMULAS)
    memory = profile.memory
    if memory is None:
        raise ValueError(f"the profile {profile.name!r} has no shared memory: its ranks are on several hosts")
    chunks = math.ceil(size / STAGE)
    meetings, copied, reduced = {
        "all_reduce": (chunks + 1, 2 * size, (n - 1) / n * size),
        "reduce_scatter": (chunks, size, (n - 1) / n * size),
        "all_gather": (chunks, n * size, 0.0),
        "broadcast": (chunks, size, 0.0),  # chunk i is read while chunk i + 1 is written
        "all_to_all": (chunks, 2 * size, 0.0),
    }[operation]
    return memory.call + memory.meet * max(1, meetings) + memory.copy * copied + memory.combine * reduced
