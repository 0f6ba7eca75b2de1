"""The ledger: how many bytes every call sent, and how long it took.

>>> with comm.ledger() as ledger:
...     engine.step(inputs, targets)
>>> ledger.bytes_sent      # by this rank, in that step
>>> print(ledger.table())
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol


class MessageIdentity(NamedTuple):
    """How both sides of a message know it. Messages of equal identity arrive in the order of sending."""

    source: int  # ranks of the world
    destination: int
    tag: int
    group: int  # a number by which its ranks know it


@dataclass
class Call:
    """One call of the communication API, as this rank made it."""

    name: str  # "all_reduce"
    algorithm: str  # "torch"
    dtype: str  # "float32"
    shape: tuple[int, ...]  # of the tensor that was passed
    group: tuple[int, ...]  # the group's members, as ranks of the world
    bytes_sent: int  # what the other ranks got from this one
    bytes_on_wire: int = 0  # the part of them that went through sockets, not through shared memory
    seconds: float = 0.0  # from the call to its completion, as far as this rank saw it
    waited: float = 0.0  # the part of them in which this rank could do nothing else
    message: MessageIdentity | None = field(default=None, compare=False)  # only of a send or a receive
    on_gpu: bool = field(default=False, compare=False)  # whether its tensors are CUDA tensors
    stream_times: Any = field(default=None, compare=False, repr=False)  # of a GPU's call, until `settle`

    def settle(self) -> None:
        """Wait until the GPU has done the call and take its times. Calls on the CPU have theirs."""
        if self.stream_times is not None:
            self.seconds, self.waited = self.stream_times.seconds()
            self.stream_times = None


@dataclass
class Ledger:
    """The calls made while it was open, in order."""

    calls: list[Call] = field(default_factory=list)

    @property
    def bytes_sent(self) -> int:
        """Bytes that the other ranks got from this one."""
        return sum(call.bytes_sent for call in self.calls)

    @property
    def bytes_on_wire(self) -> int:
        """The part of them that went through sockets; ranks of one host read each other's memory instead."""
        return sum(call.bytes_on_wire for call in self.calls)

    @property
    def seconds(self) -> float:
        """Seconds in collectives, from call to completion; overlapping calls are counted each."""
        for call in self.calls:
            call.settle()
        return sum(call.seconds for call in self.calls)

    @property
    def comm_overlap(self) -> float:
        """Share of the communication's time, 0 to 1, in which this rank did something else.

        A handle of torch does not say when it completed, so its call counts until its `wait` returned.
        """
        seconds = self.seconds
        return 1 - sum(call.waited for call in self.calls) / seconds if seconds else 0.0

    def table(self) -> str:
        """A text table: one line for each kind of call, and the total."""
        kinds: dict[tuple[str, str, str, int], list[Call]] = {}
        for call in self.calls:
            kinds.setdefault((call.name, call.algorithm, call.dtype, len(call.group)), []).append(call)
        lines = [
            f"{'collective':<16}{'algorithm':<18}{'dtype':<10}{'ranks':>6}{'calls':>8}"
            f"{'bytes sent':>16}{'ms':>10}"
        ]
        for (name, algorithm, dtype, ranks), calls in kinds.items():
            part = Ledger(calls)
            lines.append(
                f"{name:<16}{algorithm:<18}{dtype:<10}{ranks:>6}{len(calls):>8}"
                f"{part.bytes_sent:>16,}{part.seconds * 1e3:>10.2f}"
            )
        lines.append(f"{'total':<50}{len(self.calls):>8}{self.bytes_sent:>16,}{self.seconds * 1e3:>10.2f}")
        return "\n".join(lines)


opened: list[Ledger] = []
"""The ledgers that are open in this process. Not a context variable, because hooks of a backward pass run in
autograd's threads, and their calls count too."""


class Watcher(Protocol):
    """An observer of calls; times are seconds of `time.perf_counter`. It runs in the thread of the call."""

    def called(self, call: Call, begun: float, returned: float, at_once: bool, complete: bool) -> None:
        """A call has begun. With `at_once` its caller goes on, otherwise it waits now."""

    def waited(
        self, call: Call, begun: float, ended: float, began: float | None, completed: float | None
    ) -> None:
        """The caller has waited for it. A call in a thread of its own ran from `began` to `completed`."""


watchers: list[Watcher] = []
"""The traces that are open, which observe every call."""


@contextmanager
def ledger() -> Iterator[Ledger]:
    """Count the calls inside the `with`. Ledgers nest, and each of them counts."""
    new = Ledger()
    opened.append(new)
    try:
        yield new
    finally:
        for call in new.calls:
            call.settle()
        # By identity: two ledgers with the same calls are equal.
        del opened[next(i for i, one in enumerate(opened) if one is new)]


def count(*calls: Call) -> None:
    """Write calls into every open ledger."""
    for ledger in opened:
        for call in calls:
            ledger.calls.append(call)  # which a dry run's list overrides


@contextmanager
def held_back() -> Iterator[Ledger]:
    """Keep the calls inside from the ledgers that are open; `count` writes them there later."""
    outside, calls = [*opened], Ledger()
    opened[:] = [calls]
    try:
        yield calls
    finally:
        opened[:] = outside
