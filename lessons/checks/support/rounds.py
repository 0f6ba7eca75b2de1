"""Rounds of messages: how many of them have to follow one another, because a rank waits before it sends.

Four ranks that all begin to send, and then listen, take one round. Where each listens first, the message of
rank 3 begins only when that of rank 2 has arrived, and so on: four rounds for the same bytes. The order of
calls shows it, on a machine with any number of cores (Lamport 1978, "Time, Clocks, and the Ordering of
Events in a Distributed System").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from minidist.comm import ledgers


class Order:
    """Notes in which order a rank begins to send, and has received: ("send", to), ("recv", from)."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def called(self, call: ledgers.Call, *times: Any) -> None:
        """As `comm` tells of a call that has begun."""
        if call.name == "send" and call.message is not None:
            self.events.append(("send", call.message.destination))

    def waited(self, call: ledgers.Call, *times: Any) -> None:
        """As `comm` tells of a call that is complete."""
        if call.name == "recv" and call.message is not None:
            self.events.append(("recv", call.message.source))


def in_order(function: Callable[..., Any], x: torch.Tensor) -> tuple[Any, bool, list[tuple[str, int]]]:
    """On a rank: the result, whether it lies in the memory of x, and the order of messages."""
    order, before = Order(), x.data_ptr()
    ledgers.watchers.append(order)
    try:
        result = function(x)
    finally:
        ledgers.watchers.remove(order)
    return result, isinstance(result, torch.Tensor) and result.data_ptr() == before != 0, order.events


def rounds_of(orders: Sequence[Sequence[tuple[str, int]]]) -> int:
    """The longest chain of messages of which each begins only after the one before has arrived."""
    here, done, under_way = [0] * len(orders), [0] * len(orders), dict[tuple[int, int], list[int]]()
    moved = True
    while moved:
        moved = False
        for rank, events in enumerate(orders):
            while done[rank] < len(events):
                kind, peer = events[done[rank]]
                if kind == "send":
                    under_way.setdefault((rank, peer), []).append(here[rank] + 1)
                elif under_way.get((peer, rank)):
                    here[rank] = max(here[rank], under_way[peer, rank].pop(0))
                else:
                    break
                done[rank], moved = done[rank] + 1, True
    return max(here)
