"""The ledger: what every collective sent and how long it took, so that communication is measured.

>>> with comm.ledger() as ledger:
...     engine.step(inputs, targets)
>>> ledger.bytes_sent      # by this rank, in that step
>>> print(ledger.table())
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


class MessageIdentity(NamedTuple):
    """What both sides of a message know it by. Equal ones arrive in the order in which they are sent."""

    source: int  # ranks of the world
    destination: int
    tag: int
    group: int  # a number that its ranks know it by


@dataclass
class Call:
    """One call through the door, as this rank made it."""

    name: str  # "all_reduce"
    algorithm: str  # "torch"
    dtype: str  # "float32"
    shape: tuple[int, ...]  # of the tensor that was passed
    group: tuple[int, ...]  # the group's members, as ranks of the world
    bytes_sent: int  # what the other ranks got from this one
    bytes_on_wire: int = 0  # of these, through sockets and not through shared memory
    seconds: float = 0.0  # from the call to its completion, as far as this rank saw it
    waited: float = 0.0  # of these, how long this rank was held up
    message: MessageIdentity | None = field(default=None, compare=False)  # of a send or a receive alone


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
        """Of these, what went through sockets: not what ranks of one host read in each other's memory."""
        return sum(call.bytes_on_wire for call in self.calls)

    @property
    def seconds(self) -> float:
        """Seconds in collectives, from call to completion; overlapping calls are counted each."""
        return sum(call.seconds for call in self.calls)

    @property
    def comm_overlap(self) -> float:
        """Share of the communication's time that was hidden: in which this rank did something else, 0 to 1.

        A handle of torch's does not say when it was complete: such a call counts until its `wait` returned.
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


_open: list[Ledger] = []
"""The ledgers that are open in this process. Not a context variable: hooks of a backward pass run in
autograd's threads, and their calls count too."""


class Watcher(Protocol):
    """Is told of calls with their times, in seconds of `time.perf_counter`, in the thread that makes them."""

    def called(self, call: Call, begun: float, returned: float, at_once: bool, complete: bool) -> None:
        """A call has begun; with `at_once` its caller goes on, and else waits for it now."""

    def waited(
        self, call: Call, begun: float, ended: float, began: float | None, completed: float | None
    ) -> None:
        """Its caller has waited for it. In a thread of its own it ran between the last two."""


watchers: list[Watcher] = []
"""Who is told of every call: the traces that are open."""


@contextmanager
def ledger() -> Iterator[Ledger]:
    """Count what goes through the door inside the `with`; ledgers nest, and each counts."""
    new = Ledger()
    _open.append(new)
    try:
        yield new
    finally:
        # By identity: two ledgers with the same calls are equal.
        del _open[next(i for i, opened in enumerate(_open) if opened is new)]


def enter(call: Call) -> None:
    """Write a call into every open ledger; the door does, when the call starts."""
    for opened in _open:
        opened.calls.append(call)
