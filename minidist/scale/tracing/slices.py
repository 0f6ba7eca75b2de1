"""Slices of time on lanes, of which a trace consists, and how to build them from recorded operations."""

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
| `forward`, `recompute`, `backward` | a module's pass; `recompute` repeats a forward pass |
| `optimizer` | an optimizer's step |
| `collective`, `send`, `recv` | a call of the communication API; one slice for each call in the ledger |
| `wait` | wait for a call that began earlier |
| `message` | the part of a `recv` after the message was sent |
| `instruction` | an instruction of a pipeline's schedule |
| `span` | what the user named; "step" is everything that was traced |
"""
MAIN = "main"
AUTOGRAD = "autograd"
"""The lanes of the threads in which modules compute."""


@dataclass
class Slice:
    """A stretch of time in which a rank did one thing."""

    lane: str
    kind: str  # one of KINDS
    name: str
    start: float  # seconds
    end: float
    args: dict[str, Any] = field(default_factory=dict)  # JSON values

    @property
    def on_thread(self) -> bool:
        """Whether it occupied the thread that called it; otherwise it ran in the background."""
        return self.lane in (MAIN, AUTOGRAD) or self.lane.startswith("thread")


@dataclass(frozen=True)
class Atom:
    """One operation of a backward pass."""

    start: float
    end: float
    path: tuple[str, ...]  # names of the modules that it belongs to, outermost first
    pass_: int  # number of the backward pass


def passes(lane: str, atoms: Iterable[Atom], around: Sequence[Slice]) -> list[Slice]:
    """The backward passes of modules, built from the operations of one thread.

    Consecutive operations of one module become one slice. No slice extends over the start or the end of one
    of the thread's other slices, `around`.
    """
    found: list[Slice] = []
    ordered = sorted(atoms, key=lambda atom: atom.start)
    open_: list[Slice] = []  # outermost first
    before: tuple[int, int] | None = None
    for atom, container in zip(ordered, _containers(ordered, around), strict=True):
        # Where gradients of weights come last, an instruction has one backward pass per operation.
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
    """For each atom the innermost slice that contains it."""
    waiting = sorted(around, key=lambda each: (-each.start, each.end))  # the earliest comes last
    open_: list[Slice] = []  # in the order of their starts
    found: list[Slice | None] = []
    for atom in atoms:
        while waiting and waiting[-1].start <= atom.start:
            open_.append(waiting.pop())
        open_ = [each for each in open_ if each.end >= atom.end]
        found.append(open_[-1] if open_ else None)
    return found


def lanes(slices: Iterable[Slice], name: str) -> None:
    """Put slices that overlap on different lanes: "background", "background 2", ..."""
    ends: list[float] = []
    for each in sorted(slices, key=lambda each: (each.start, each.end)):
        number = next((i for i, end in enumerate(ends) if end <= each.start), len(ends))
        ends[number:] = [each.end, *ends[number + 1 :]]
        each.lane = name if number == 0 else f"{name} {number + 1}"
