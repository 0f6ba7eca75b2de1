"""A link for each rank, whose messages take as long as they are told (lessons 8 and 10).

Ranks of one machine copy messages with the cores that they share: eight ranks on two cores take turns, and a
clock shows the cores. A rank that sleeps takes no core, so that a message lasts alpha + beta b seconds on any
machine, however many ranks there are (Hockney 1994). A busy machine wakes a sleeping rank too late. The link
notes by how much, and counts the rank's next message from the time at which it should have woken. Otherwise
the delays of all messages would add up, 14 of them in a ring of 8 ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from minidist import comm


class Link:
    """Inside its `with`, messages of this rank travel over a link of its own, one after the other each way.

    >>> with Link(alpha=0.015, beta=50e-9):
    ...     ring_all_reduce(x)

    All ranks have to be inside. The tensors themselves are sent as ever, each with the time of its arrival.
    If all ranks begin it together, `comm.all_reduce` lasts as long as a ring: 2 (n - 1) messages, each with
    an n-th of the bytes.

    Args:
        alpha: seconds that a message takes however small it is.
        beta: seconds more for each byte.
    """

    def __init__(self, alpha: float, beta: float) -> None:
        self.alpha, self.beta = alpha, beta
        self._out = self._in = 0.0  # when either direction is free again
        self._behind = 0.0  # seconds by which this rank woke too late
        self._plain: tuple[Callable[..., Any], ...] = ()

    def __enter__(self) -> Link:
        self._plain = comm.send, comm.recv, comm.all_reduce
        comm.send, comm.recv, comm.all_reduce = self.send, self.recv, self.all_reduce  # type: ignore[assignment]
        return self

    def __exit__(self, *error: object) -> None:
        comm.send, comm.recv, comm.all_reduce = self._plain

    def send(self, x: torch.Tensor, destination: int, async_op: bool = False) -> Any:
        """As comm.send."""
        send, *_ = self._plain
        self._out = max(self.now(), self._out) + self._lasts(x)
        stamp = torch.tensor([self._out], dtype=torch.float64)
        works = [send(each, destination, async_op=True) for each in (stamp, x)]
        work = _UnderWay(self, works, self._out, x)
        return work if async_op else work.wait()

    def recv(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """As comm.recv."""
        _, recv, _ = self._plain
        began = self.now()
        arrives = float(recv(torch.empty(1, dtype=torch.float64), source))
        recv(x, source)
        self._in = max(arrives, self._in + self._lasts(x))
        self.sleep_until(max(began, self._in))
        return x

    def all_reduce(self, x: torch.Tensor, op: str = "sum", group: Any = None) -> torch.Tensor:
        """As comm.all_reduce."""
        *_, all_reduce = self._plain
        began = self.now()
        result, n = all_reduce(x, op, group=group), dist.get_world_size(group)
        self.sleep_until(began + 2 * (n - 1) * (self.alpha + self.beta * x.nbytes / n))
        return result

    def now(self) -> float:
        """The time, had this rank woken in time."""
        return time.perf_counter() - self._behind

    def sleep_until(self, then: float) -> None:
        """Sleep, and note how much too late this rank wakes."""
        time.sleep(max(0.0, then - time.perf_counter()))
        self._behind = time.perf_counter() - then

    def _lasts(self, x: torch.Tensor) -> float:
        return self.alpha + self.beta * x.nbytes


class _UnderWay:
    """A send that was begun with async_op=True."""

    def __init__(self, link: Link, works: Sequence[Any], arrives: float, x: torch.Tensor) -> None:
        self._link, self._works, self._arrives, self._x = link, works, arrives, x

    def wait(self) -> torch.Tensor:
        """Until it has arrived."""
        began = self._link.now()
        for work in self._works:
            work.wait()
        self._link.sleep_until(max(began, self._arrives))
        return self._x
