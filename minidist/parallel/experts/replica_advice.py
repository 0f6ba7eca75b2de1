"""Which experts to hold more than once, and on which ranks, so that an uneven load becomes even.

Some experts get many more tokens than others. A rank has room for a number of experts. Where there is more
room than experts, those with the most tokens get replicas, which share their tokens evenly. Then the heaviest
replica goes to the lightest rank that has room and does not hold that expert yet. This is advice: training
gives each rank as many experts as any other, once (`share_experts`).

Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.4 (redundant experts).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from minidist._arguments import check_whole


def place_experts(load: Sequence[float], ranks: int, slots: int | None = None) -> list[list[int]]:
    """Return the experts of each rank, in ascending order.

    >>> place_experts([9, 1, 1, 1], ranks=2, slots=3)
    [[0, 1, 2], [0, 1, 3]]

    Args:
        load: tokens of each expert, of any unit.
        ranks: how many ranks hold the experts.
        slots: how many experts a rank has room for; None for one more than an even share.

    Raises:
        ValueError: the experts do not fit, or a load is negative.
    """
    check_whole("ranks", ranks, 1)
    experts = len(load)
    slots = -(-experts // ranks) + 1 if slots is None else slots
    if slots * ranks < experts:
        raise ValueError(f"{ranks} ranks with {slots} slots each cannot hold {experts} experts; give more")
    if min(load, default=0) < 0:
        raise ValueError(f"the load of an expert is {min(load)}; give numbers of at least 0")
    replicas = [1] * experts
    heaviest = [(-each, expert) for expert, each in enumerate(load)]
    heapq.heapify(heaviest)
    for _ in range(slots * ranks - experts):
        while heaviest and replicas[heaviest[0][1]] == ranks:
            heapq.heappop(heaviest)  # it is everywhere
        if not heaviest or not heaviest[0][0]:
            break
        expert = heaviest[0][1]
        replicas[expert] += 1
        heapq.heapreplace(heaviest, (-load[expert] / replicas[expert], expert))
    share = [each / count for each, count in zip(load, replicas, strict=True)]  # of a replica
    placed: list[list[int]] = [[] for _ in range(ranks)]

    def carried(rank: int) -> tuple[float, int]:
        return sum(share[e] for e in placed[rank]), len(placed[rank])

    for expert in sorted(range(experts), key=lambda e: -share[e]):
        for _ in range(replicas[expert]):
            others = [rank for rank in range(ranks) if expert not in placed[rank]]
            lightest = min(others, key=lambda rank: (len(placed[rank]) == slots, *carried(rank)))
            if len(placed[lightest]) == slots:  # only ranks with this expert have room: one takes another
                roomy = min((rank for rank in range(ranks) if len(placed[rank]) < slots), key=carried)
                moved = min({*placed[lightest]} - {*placed[roomy]}, key=lambda e: share[e])
                placed[lightest].remove(moved)
                placed[roomy].append(moved)
            placed[lightest].append(expert)
    return [sorted(each) for each in placed]
