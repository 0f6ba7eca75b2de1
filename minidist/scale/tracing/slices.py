"""What a trace consists of: slices of time on lanes, in the order and the nesting in which they ran."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

COMPUTE = ("forward", "recompute", "backward", "optimizer")
CALLS = ("collective", "send", "recv")
KINDS = (*COMPUTE, *CALLS, "wait", "message", "instruction", "span")
"""
| Kind | What the rank does |
|---|---|
| `forward`, `recompute`, `backward` | a module's pass; a forward pass once more, for the backward pass |
| `optimizer` | an optimizer's step |
| `collective`, `send`, `recv` | a call through the door, one slice for each call in the ledger |
| `wait` | waits for a call that was begun before |
| `message` | the part of a `recv` in which the message is under way: it has been sent |
| `instruction` | one of a pipeline's schedule |
| `span` | what the user named; "step" is all that was traced |
"""
MAIN = "main"
AUTOGRAD = "autograd"
"""The lanes of threads in which modules compute."""


@dataclass
class Slice:
    """Something that a rank did."""

    lane: str
    kind: str  # one of KINDS
    name: str
    start: float  # seconds
    end: float
    args: dict[str, Any] = field(default_factory=dict)  # what JSON can say

    @property
    def on_thread(self) -> bool:
        """Whether it held up the thread that called it; else it ran in the background."""
        return self.lane in (MAIN, AUTOGRAD) or self.lane.startswith("thread")


@dataclass(frozen=True)
class Atom:
    """One operation of a backward pass."""

    start: float
    end: float
    path: tuple[str, ...]  # names of the modules that it belongs to, outermost first
    pass_: int  # which backward pass


def passes(lane: str, atoms: Iterable[Atom], around: Sequence[Slice]) -> list[Slice]:
    """The backward passes of modules, from their operations, which run one after the other in one thread.

    Operations that follow each other and belong to one module are one slice, with what is between them.

    Args:
        lane: the thread's.
        atoms: the operations.
        around: the other slices of that thread. None of these passes crosses the border of one.
    """
    found: list[Slice] = []
    ordered = sorted(atoms, key=lambda atom: atom.start)
    open_: list[Slice] = []  # outermost first
    before: tuple[int, int] | None = None
    for atom, container in zip(ordered, _containers(ordered, around), strict=True):
        # A schedule's instruction may have many passes, one an operation, where weights come last.
        within = -1 if container is None else id(container)
        whole = container is not None and container.kind == "instruction"
        now = within, 0 if whole else atom.pass_
        if now != before:
            open_.clear()
        before = now
        same = 0
        while same < min(len(open_), len(atom.path)) and open_[same].name == atom.path[same]:
            same += 1
        del open_[same:]
        for name in atom.path[same:]:
            open_.append(Slice(lane, "backward", name, atom.start, atom.end))
            found.append(open_[-1])
        for each in open_:
            each.end = atom.end
    return found


def _containers(atoms: Sequence[Atom], around: Sequence[Slice]) -> list[Slice | None]:
    """For each atom the innermost slice that it lies in."""
    waiting = sorted(around, key=lambda each: (each.start, -each.end))
    open_: list[Slice] = []
    found: list[Slice | None] = []
    place = 0
    for atom in atoms:
        while place < len(waiting) and waiting[place].start <= atom.start:
            open_.append(waiting[place])
            place += 1
        # In the order of their starts; those that have ended are never looked at again.
        open_ = [each for each in open_ if each.end >= atom.end]
        found.append(open_[-1] if open_ else None)
    return found


def lanes(slices: Iterable[Slice], name: str) -> None:
    """Put slices that overlap on lanes of their own: "background", "background 2", ..."""
    ends: list[float] = []
    for each in sorted(slices, key=lambda each: (each.start, each.end)):
        number = next((i for i, end in enumerate(ends) if end <= each.start), len(ends))
        ends[number:] = [each.end, *ends[number + 1 :]]
        each.lane = name if number == 0 else f"{name} {number + 1}"
