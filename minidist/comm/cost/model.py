"""Predict the time of a collective from alpha, beta and gamma.

A message of S bytes takes alpha + beta S; combining two tensors of S bytes takes gamma S. An algorithm is
described by a few numbers (`terms`): the rounds of messages, one after the other, the bytes that the busiest
rank passes on in them, and the bytes that it combines. `predict` turns them into seconds.

Ranks of one machine share its cores, and a message keeps cores busy at both ends, so it takes longer when
more ranks send at once. alpha and beta are interpolated between one sender and all ranks.

Source: Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in MPICH",
sections 3 and 4; Hockney 1994 for alpha and beta.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import NamedTuple

from minidist._names import unknown
from minidist.comm.algorithms.proof import run, start
from minidist.comm.algorithms.registry import ALGORITHMS, schedule
from minidist.comm.cost.links import PROFILES, LinkProfile
from minidist.comm.transport import STAGE

SEGMENT = 2**18
"""Bytes of a segment that a chain of ranks passes on at a time: 2^16 elements of float32."""


class Terms(NamedTuple):
    """An algorithm's messages and bytes."""

    rounds: float  # messages, one after the other
    sent: float  # bytes that the busiest rank passes on in them
    reduced: float  # bytes that the busiest rank combines
    messages: float  # messages of all ranks together
    bytes: float  # bytes of all ranks together


Formula = Callable[[float, int], Terms]


def predict(
    operation: str, algorithm: str, size: float, ranks: int, profile: LinkProfile | str = "25gbe"
) -> float:
    """Return the seconds that a collective takes.

    Args:
        operation: "all_reduce", "reduce_scatter", "all_gather", "broadcast" or "all_to_all".
        algorithm: one of `ALGORITHMS` for this operation; "torch", whose backends run rings; or
            "shared_memory".
        size: bytes of the tensor that each rank passes.
        ranks: how many ranks take part.
        profile: what `fit` returned, or the name of one of `PROFILES`.

    Raises:
        ValueError: the operation, algorithm or profile is unknown; or the profile has no shared memory.
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
    cost = terms(operation, algorithm, size, ranks)
    # gloo's all-reduce has its own implementation; its other collectives are messages like ours.
    own = algorithm == "torch" and operation == "all_reduce"
    link = profile.links.get("torch" if own else "messages", profile.links["messages"])
    alpha = _between(link.alpha, link.busy_alpha, cost.messages, cost.rounds, ranks)
    beta = _between(link.beta, link.busy_beta, cost.bytes, cost.sent, ranks)
    return link.call + alpha * cost.rounds + beta * cost.sent + profile.gamma * cost.reduced


def _between(one: float, all_at_once: float | None, total: float, busiest: float, ranks: int) -> float:
    """Interpolate between one sender and all ranks, by the average number of ranks that send at once.

    total: messages or bytes of all ranks; busiest: those of one rank in the same time.
    """
    if all_at_once is None or not busiest:
        return one
    at_once = total / busiest
    return one + (all_at_once - one) * min(1.0, max(0.0, (at_once - 1) / (ranks - 1)))


def crossover(operation: str, small: str, large: str, ranks: int, profile: LinkProfile | str) -> float | None:
    """Return the bytes, a power of two up to 1 GB, from which `large` is faster; None if it never is."""
    sizes = [2.0**exponent for exponent in range(31)]
    slower = [
        predict(operation, large, size, ranks, profile) >= predict(operation, small, size, ranks, profile)
        for size in sizes
    ]
    if slower[-1]:
        return None
    return sizes[max((i + 1 for i, is_slower in enumerate(slower) if is_slower), default=0)]


def terms(operation: str, algorithm: str, size: float, ranks: int) -> Terms:
    """Return an algorithm's numbers for `size` bytes in each of `ranks` ranks.

    Raises:
        ValueError: the operation is unknown, or lacks the algorithm.
    """
    if operation not in FORMULAS:
        raise unknown("operation", operation, FORMULAS)
    formulas = FORMULAS[operation]
    if algorithm == "torch":
        # gloo and NCCL: rings, a tree for broadcasts, all messages of an all-to-all at once.
        own = {"broadcast": "tree", "all_to_all": "direct", "reduce_scatter": "direct"}
        algorithm = own.get(operation, "ring")
    if algorithm in formulas:
        return formulas[algorithm](float(size), ranks)
    if algorithm in ALGORITHMS[operation]:
        return counted(operation, algorithm, size, ranks)
    known = dict.fromkeys((*formulas, *ALGORITHMS[operation], "torch", "shared_memory"))
    raise unknown(f"algorithm of {operation}", algorithm, known)


def counted(operation: str, algorithm: str, size: float, ranks: int) -> Terms:
    """Count an algorithm's numbers in its plan, for few ranks: time grows with their third power."""
    plan = schedule(operation, algorithm, ranks, 16 * ranks)
    # Elements that ranks send, get and combine.
    rounds: dict[int, Counter[tuple[str, int]]] = defaultdict(Counter)
    messages = total = 0
    for each in run(plan, *start(plan)):
        elements, now = each.sent.elements * (each.sender != each.receiver), rounds[each.begins]
        now["sends", each.sender] += elements
        now["gets", each.receiver] += elements
        now["combines", each.receiver] += elements * each.received.reduce
        messages, total = messages + (elements > 0), total + elements

    def busiest(*what: str) -> float:
        return element * sum(max(now[key] for key in now if key[0] in what) for now in rounds.values())

    element = size * (ranks if operation == "all_gather" else 1) / plan.elements
    busy = sum(any(now.values()) for now in rounds.values())
    return Terms(busy, busiest("sends", "gets"), busiest("combines"), messages, element * total)


def _halving_doubling(size: float, n: int) -> Terms:
    power = 2 ** math.floor(math.log2(n))
    steps, surplus = math.log2(power), n - power  # surplus ranks send theirs to others, and get the result
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


def _ring(size: float, n: int) -> Terms:
    sent = 2 * (n - 1) / n * size
    return Terms(2 * (n - 1), sent, sent / 2, 2 * n * (n - 1), n * sent)


def _tree(size: float, n: int) -> Terms:
    levels = _levels(n)
    return Terms(2 * levels, 2 * levels * size, levels * size, 2 * (n - 1), 2 * (n - 1) * size)


def _naive(size: float, n: int) -> Terms:
    # The root receives n - 1 messages at once, and sends n - 1 at once.
    return Terms(2, 2 * (n - 1) * size, (n - 1) * size, 2 * (n - 1), 2 * (n - 1) * size)


def _half_ring(size: float, n: int) -> Terms:
    sent = (n - 1) / n * size
    return Terms(n - 1, sent, sent, n * (n - 1), n * sent)


def _direct(size: float, n: int) -> Terms:
    return _half_ring(size, n)._replace(rounds=1)


def _exchange(size: float, n: int) -> Terms:
    return _half_ring(size, n)._replace(reduced=0)


def _gather_ring(size: float, n: int) -> Terms:
    return Terms(n - 1, (n - 1) * size, 0, n * (n - 1), n * (n - 1) * size)


def _chain(size: float, n: int) -> Terms:
    segments = max(1, math.ceil(size / SEGMENT))
    rounds = n - 2 + segments
    return Terms(rounds, rounds * size / segments, 0, (n - 1) * segments, (n - 1) * size)


def _broadcast_tree(size: float, n: int) -> Terms:
    return Terms(_levels(n), _levels(n) * size, 0, n - 1, (n - 1) * size)


FORMULAS: dict[str, dict[str, Formula]] = {
    "all_reduce": {"ring": _ring, "tree": _tree, "halving_doubling": _halving_doubling, "naive": _naive},
    "reduce_scatter": {"ring": _half_ring, "direct": _direct},
    "all_gather": {"ring": _gather_ring},
    "broadcast": {"ring": _chain, "tree": _broadcast_tree},
    "all_to_all": {"pairwise": _exchange, "direct": lambda s, n: _direct(s, n)._replace(reduced=0)},
}
"""Operation -> algorithm -> its terms, from the bytes S that each rank passes and n ranks.

Other algorithms are `counted` in their plans.
"""


def _through_memory(operation: str, size: float, n: int, profile: LinkProfile) -> float:
    """Predict a collective in shared memory, by chunks of `STAGE` bytes: copy in, combine, copy out."""
    if operation not in FORMULAS:
        raise unknown("operation", operation, FORMULAS)
    memory = profile.memory
    if memory is None:
        raise ValueError(f"the profile {profile.name!r} has no shared memory: its ranks are on several hosts")
    chunks = max(1, math.ceil(size / STAGE))
    barriers, put, combined, taken = {
        "all_reduce": (chunks + 1, size, (n - 1) / n * size, size),
        "reduce_scatter": (chunks, size, (n - 1) / n * size, 0.0),
        "all_gather": (chunks, size, 0.0, (n - 1) * size),
        "broadcast": (chunks, 0.0, 0.0, size),  # chunk i is copied out while chunk i + 1 is copied in
        "all_to_all": (chunks, size, 0.0, size),
    }[operation]
    moved = memory.put * put + memory.combine * combined + memory.take * taken
    return memory.call + memory.meet * barriers + moved
