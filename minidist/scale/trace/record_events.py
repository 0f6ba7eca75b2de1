"""What one rank records: slices of time in which its modules computed and its calls ran.

Hooks on the modules record forward passes. The operations that a forward pass leaves for the backward pass
belong to the innermost module that it runs in; hooks on these operations record its backward pass, and do not
change the graph. Hooks cost some microseconds per operation. The communication API tells its watchers when a
call begins, is waited for, and ends; on a GPU, by the GPU's own clock.

Source: Paszke et al. 2017, "Automatic differentiation in PyTorch" (the graph of operations).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from minidist.comm import ledgers, stream_times
from minidist.comm.ledgers import Call
from minidist.parallel.contract.batch import tensors_in

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
KEY = "minidist.trace"
"""The key under which an operation's metadata names the trace that records it."""
MESSAGES = ("send", "recv")
FACTS = ("algorithm", "dtype", "shape", "group", "bytes_sent", "bytes_on_wire")
"""What a slice tells of its call."""


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


def lanes(slices: Iterable[Slice], name: str) -> None:
    """Put slices that overlap on different lanes: "background", "background 2", ..."""
    ends: list[float] = []
    for each in sorted(slices, key=lambda each: (each.start, each.end)):
        number = next((i for i, end in enumerate(ends) if end <= each.start), len(ends))
        ends[number:] = [each.end, *ends[number + 1 :]]
        each.lane = name if number == 0 else f"{name} {number + 1}"


# Modules.


class Modules:
    """Records the named modules, and all optimizers of this process, between `open` and `close`."""

    def __init__(self, named: Sequence[tuple[str, nn.Module]]) -> None:
        first = {id(module): (name, module) for name, module in reversed(named)}
        self._named = [*reversed(first.values())]  # each module once, by its first name
        self.slices: dict[int, list[Slice]] = defaultdict(list)  # by thread; all but backward passes
        self.atoms: dict[int, list[Atom]] = defaultdict(list)  # by thread; operations of backward passes
        self._open: dict[int, list[tuple[object, str, float, int]]] = defaultdict(list)
        self._inside: dict[int, int] = defaultdict(int)  # operations of a backward pass in progress
        self._mark = object()  # identifies this trace, since an operation may outlive it
        self._handles: list[Any] = []

    def open(self) -> None:
        """Start recording."""
        for name, module in self._named:
            self._handles += [
                module.register_forward_pre_hook(partial(self._begin, name), prepend=True),
                # Call it on errors as well: recomputation raises one once it has all that it needs.
                module.register_forward_hook(self._end, always_call=True),
            ]
        self._handles += [
            register_optimizer_step_pre_hook(partial(self._begin, "")),
            register_optimizer_step_post_hook(self._end),
        ]

    def close(self) -> None:
        """Stop recording and remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _begin(self, name: str, owner: object, *arguments: Any) -> None:
        """A module's forward pass begins, or an optimizer's step."""
        recorded = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        name = name or f"{type(owner).__name__}.step"
        self._open[get_ident()].append((owner, name, time.perf_counter(), recorded))

    def _end(self, ended: object, arguments: Any, outputs: Any) -> None:
        """A pass or a step ends. What began after it and is still open was left by an error: it ends too."""
        now, thread = time.perf_counter(), get_ident()
        stack, again = self._open[thread], self._inside[thread] > 0
        if not any(owner is ended for owner, *_ in stack):  # it began before the trace
            return
        path = tuple(name for _, name, *_ in stack)
        owner: object = None
        while owner is not ended:
            owner, name, start, recorded = stack.pop()
            kind = "optimizer" if isinstance(owner, Optimizer) else "recompute" if again else "forward"
            self.slices[thread].append(Slice("", kind, name, start, now))
        if kind == "forward":  # no backward pass goes through recomputed operations
            self._watch(outputs, recorded, path)

    def _watch(self, outputs: Any, first: int, path: tuple[str, ...]) -> None:
        """Put hooks on the operations recorded from number `first` on that have none yet."""
        stack: list[Node | None] = [x.grad_fn for _, x in tensors_in(outputs)]
        while stack:
            node = stack.pop()
            if node is None or node._sequence_nr() < first:
                continue
            notes: Any = node.metadata
            if notes.get(KEY) is self._mark:
                continue
            notes[KEY] = self._mark
            self._time(node, path)
            stack += [below for below, _ in node.next_functions]

    def _time(self, node: Node, path: tuple[str, ...]) -> None:
        begun: list[float] = []

        def before(gradients: Any) -> None:
            self._inside[get_ident()] += 1
            begun.append(time.perf_counter())

        def after(gradients: Any, outputs: Any) -> None:
            ended, thread = time.perf_counter(), get_ident()
            self._inside[thread] -= 1
            number = torch._C._current_graph_task_id()
            self.atoms[thread].append(Atom(begun.pop(), ended, path, number))

        self._handles += [node.register_prehook(before), node.register_hook(after)]


def named_parts(module: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    """A module and its submodules with their names, except compiled modules and what they contain."""
    found, compiled = [], list[nn.Module]()
    for name, part in module.named_modules():
        if part._compiled_call_impl is not None or "_orig_mod" in part._modules:
            compiled += part.modules()
        if not any(part is each for each in compiled):
            found.append((prefix + (name or type(part).__name__), part))
    return found


# Backward passes, from the operations that were recorded.


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


# Calls of the communication API.


@dataclass
class Noted:
    """A call with its times."""

    call: Call
    thread: int
    begun: float
    returned: float
    at_once: bool  # asynchronous: the caller went on
    complete: bool  # when the call returned
    waits: list[tuple[int, float, float]] = field(default_factory=list)  # thread, from, until
    ran: tuple[float | None, float | None] = (None, None)  # from, until, if it ran in its own thread
    stream_times: Any = None  # of a call on CUDA tensors

    def slice(self, number: int, anchor: Any, anchored: float, closed: float) -> tuple[Slice, bool]:
        """The call's slice, and whether it ran in the background while its caller did something else."""
        call, start, end, more = self.call, self.begun, self.returned, {}
        background = self.stream_times is not None and anchor is not None
        if background:
            start, end = (anchored + t for t in self.stream_times.since(anchor))
        elif self.at_once and not self.complete:
            background, (began, completed) = True, self.ran
            start = start if began is None else began
            end = self.waits[-1][2] if self.waits else closed
            if completed is None:
                more = {"end": "when it was waited for" if self.waits else "not within the trace"}
            else:
                end = completed
        elif self.waits and not self.at_once:
            end = self.waits[0][2]
        args = {"number": number, "called": self.begun, **{name: getattr(call, name) for name in FACTS}}
        args |= {"waited_us": round(call.waited * 1e6, 3), **more}
        if call.message is not None:
            args["message"] = [*call.message]
        kind = call.name if call.name in MESSAGES else CALLS[0]
        return Slice("", kind, call.name, start, end, args), background


class Calls:
    """Records the communication API's calls between `open` and `close`, as a `ledgers.Watcher`."""

    def __init__(self) -> None:
        self.noted: list[Noted] = []
        self._by_call: dict[int, Noted] = {}
        self._earlier: list[tuple[int, Slice]] = []  # by thread, waits for calls from before `open`
        self._closed = 0.0
        self._anchor: Any = None  # an event of the GPU's clock, at the time `_anchored`
        self._anchored = 0.0

    def open(self) -> None:
        """Start recording."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._anchor, self._anchored = stream_times.anchor(), time.perf_counter()
        ledgers.watchers.append(self)

    def close(self) -> None:
        """Stop recording."""
        ledgers.watchers.remove(self)
        self._closed = time.perf_counter()

    def called(self, call: Call, begun: float, returned: float, at_once: bool, complete: bool) -> None:
        """Record a call that has returned."""
        noted = Noted(call, get_ident(), begun, returned, at_once, complete)
        self.noted.append(noted)
        self._by_call[id(call)] = noted  # `noted` keeps the call alive, so the id stays unique

    def waited(
        self, call: Call, begun: float, ended: float, began: float | None, completed: float | None
    ) -> None:
        """Record a wait for an asynchronous call, and when that call ran."""
        noted = self._by_call.get(id(call))
        if noted is None:
            before = {"of": "a call from before"}
            self._earlier.append(
                (get_ident(), Slice("", "wait", f"wait for {call.name}", begun, ended, before))
            )
        else:
            noted.waits.append((get_ident(), begun, ended))
            noted.ran = began, completed
            noted.stream_times = call.stream_times

    def slices(self) -> tuple[dict[int, list[Slice]], list[Slice], list[Slice]]:
        """The slices in which each thread waited, and the collectives and messages in the background."""
        held: dict[int, list[Slice]] = defaultdict(list)
        background: tuple[list[Slice], list[Slice]] = [], []
        for number, each in enumerate(self.noted):
            own, in_background = each.slice(number, self._anchor, self._anchored, self._closed)
            (background[own.kind in MESSAGES] if in_background else held[each.thread]).append(own)
            if in_background and (each.stream_times is None or self._anchor is None):
                for thread, begun, ended in each.waits:
                    name, args = f"wait for {own.name}", {"number": number}
                    held[thread].append(Slice("", "wait", name, begun, ended, args))
        for thread, wait in self._earlier:
            held[thread].append(wait)
        return held, *background
