"""What a rank tells the others about a call, and which calls contradict each other or are swapped.

The calls of one round must agree in operation, algorithm, shape, dtype, reduction and root. Calls that agree
may still be swapped: if one rank sums the gradients and then the losses, and another the losses first, both
get wrong numbers. A reducing call is therefore known by its place: the lines of the user's code on the stack,
from the innermost outwards until two places differ. Any call on a model's parameter, or its gradient, is
known by the parameter's name. Calls are swapped if one rank makes A and then B, and another B and then A.

Two lines of one function are no swap, because a loop may choose between them and ranks may take turns, as in
`if rank == step % 2`. Code that orders its calls differently on purpose says so with `comm.unordered`.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from itertools import combinations
from traceback import walk_stack
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from minidist.comm.failures import describe_tensor
from minidist.comm.ledgers import Call

WINDOW = 64
"""Rounds of a group within which a swap is looked for."""
POINT_TO_POINT = ("send", "recv")

_COMM = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_MINIDIST = os.path.dirname(os.path.dirname(_COMM)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep

Stack = tuple[tuple[str, int, int], ...]
"""File, first line of the function and current line of each frame, the innermost first."""


class Record(NamedTuple):
    """One rank's call, as the other ranks get to see it."""

    rank: int  # of the world
    name: str  # "all_reduce"
    algorithm: str
    asked: str  # the algorithm that the caller named; "auto" where none
    dtype: str
    shape: tuple[int, ...]
    group: tuple[int, ...]  # the members, as ranks of the world
    op: str  # "sum"; "" where the operation reduces nothing
    root: int  # source or destination as a rank in the group; -1 where there is none
    rows: tuple[tuple[int, ...], tuple[int, ...]] | None  # an all-to-all's parts: sent to, and got from, each
    stack: Stack  # of the user's code
    label: str  # what the caller calls the tensor: "0.weight.grad", "loss"
    is_parameter: bool  # the label names a parameter of a model, or its gradient
    ordered: bool  # made outside of `comm.unordered`

    def __str__(self) -> str:
        """The call in words, with the line that made it."""
        return self.words(1)

    def words(self, depth: int) -> str:
        """The call in words, with so many lines of the stack."""
        words = [self.name]
        if self.name != "barrier":
            words.append(f"of {describe_tensor(self.dtype, self.shape)}")
        if self.label:
            words.append(f"({self.label})")
        if self.op:
            words.append(f"by {self.op}")
        if self.root >= 0:
            peer = self.group[self.root] if self.root < len(self.group) else self.root
            words.append(f"{'to' if self.name in ('send', 'gather') else 'from'} rank {peer}")
        if self.rows is not None:
            words.append(f"with rows {list(self.rows[0])} out and {list(self.rows[1])} in")
        if self.asked != "auto" or self.algorithm not in ("torch", "shared_memory"):
            words.append(f"by {self.algorithm}")
        if self.name not in POINT_TO_POINT:
            words.append(f"with ranks {', '.join(map(str, self.group))}")
        lines = (f"{path}:{line}" for path, _, line in self.stack[:depth])
        return f"{' '.join(words)} at {', called at '.join(lines)}"

    def contradicts(self, other: Record) -> bool:
        """True where the two cannot be one collective, or one message."""
        if self.name in POINT_TO_POINT:  # the record's key says source, destination and tag
            return (self.dtype, self.shape) != (other.dtype, other.shape)
        if self.kind != other.kind:
            return True
        if self.rows is None or other.rows is None:
            return False
        own, others = self.group.index(self.rank), self.group.index(other.rank)
        return self.rows[0][others] != other.rows[1][own] or self.rows[1][others] != other.rows[0][own]

    @property
    def kind(self) -> tuple[Any, ...]:
        """What has to be the same on all ranks."""
        # The rows of an all-to-all may differ, and so its first dimension.
        shape = self.shape if self.rows is None else self.shape[1:]
        return self.name, self.algorithm, self.dtype, shape, self.op, self.root

    @property
    def places(self) -> list[tuple[Any, ...]]:
        """What tells this call from others of its kind: a parameter, or ever more lines of the stack."""
        if self.is_parameter and self.ordered:
            return [(self.kind, self.label)]
        depths = range(1, len(self.stack) + 1) if self.op and self.ordered else ()
        return [(self.kind, self.stack[:depth]) for depth in depths]


class CallOrder:
    """The latest rounds of a group in which two members were at different places; finds swapped calls."""

    def __init__(self) -> None:
        self._round = 0
        # For two members: where the first was -> where the second was, the round, and the calls of both.
        self._met: dict[tuple[int, int], dict[Any, tuple[Any, int, Record, Record]]] = {}

    def add(self, records: Sequence[Record]) -> list[Record]:
        """Add the members' calls of a round; returns two calls each of two ranks that are swapped."""
        self._round += 1
        for one, other in combinations(records, 2):
            if (one.stack, one.label) == (other.stack, other.label):
                continue
            met = self._met.setdefault((one.rank, other.rank), {})
            for old in [place for place, meeting in met.items() if self._round - meeting[1] >= WINDOW]:
                del met[old]
            for here, there in zip(one.places, other.places, strict=False):
                if here == there:
                    continue
                met[here] = there, self._round, one, other
                # Place A met B, and earlier B met C, and so on: does one of them meet A?
                place, passed = there, {here}
                while place not in passed and place in met:
                    passed.add(place)
                    place, _, _, earlier = met[place]
                    calls = [met[there][2], one, earlier, other]
                    if place == here and not _take_turns(*calls):
                        return calls
        return []


def _take_turns(first: Record, then: Record, other_first: Record, other_then: Record) -> bool:
    """True where one function chose between two of its lines, as each rank may in its own order."""
    if first.is_parameter:
        return False
    alike = (first.stack, then.stack) == (other_then.stack, other_first.stack)
    # From the innermost frame outwards; and from the outermost inwards, if both ranks chose the same two.
    ways = [(first.stack, then.stack)] + [(first.stack[::-1], then.stack[::-1])] * alike
    return any(next((a[:2] == b[:2] for a, b in zip(*way, strict=False) if a != b), False) for way in ways)


def describe_swap(first: Record, then: Record, other_first: Record, other_then: Record) -> str:
    """The error for swapped calls; it names as many lines of the stack as two places need to differ."""
    pairs = enumerate(zip(first.stack, then.stack, strict=False), 1)
    depth = 1 if first.is_parameter else next((depth for depth, (a, b) in pairs if a != b), 1)
    return (
        f"the ranks make the same calls in another order: rank {first.rank} {first.words(depth)}, and then "
        f"{then.words(depth)}; rank {other_first.rank} {other_first.words(depth)}, and then "
        f"{other_then.words(depth)}; make them in one order on all ranks, or put them under "
        "`with comm.unordered():` if the order is meant"
    )


def read_call(rank: int, call: Call, ordered: bool) -> tuple[Record, dict[str, Any]] | None:
    """The record of a call that this thread is about to begin, and the arguments of the collective.

    Both are read from the stack: the collectives carry nothing for the check. None where minidist.comm itself
    is the caller.
    """
    frames = [frame for frame, _ in walk_stack(sys._getframe(1))]
    while frames and frames[0].f_code.co_name != call.name:
        frames.pop(0)
    if len(frames) < 2 or frames[1].f_code.co_filename.startswith(_COMM):
        return None
    given, callers, rows = dict(frames[0].f_locals), frames[1:], None
    tensor = given.get("out" if call.name == "scatter" else "x")
    if call.name == "all_to_all":
        equal = [call.shape[0] // len(call.group)] * len(call.group)
        sends, comes = given["input_rows"], given["output_rows"]
        rows = tuple(equal if sends is None else sends), tuple(equal if comes is None else comes)
    parameter = _parameter(tensor, callers)
    names = [name for name, value in callers[0].f_locals.items() if value is tensor is not None]
    record = Record(
        rank=rank,
        name=call.name,
        algorithm=call.algorithm,
        asked=given.get("algorithm", "auto"),
        dtype=call.dtype,
        shape=call.shape,
        group=call.group,
        op=given.get("op", ""),
        root=given.get("source", given.get("destination", -1)),
        rows=rows,
        stack=_user_stack(callers),
        label=parameter or (names[0] if len(names) == 1 else ""),
        is_parameter=bool(parameter),
        ordered=ordered,
    )
    return record, given


def place_of_thread(ident: int) -> str:
    """Where another thread of this process is, as "file:line"; "" where it is gone."""
    frame = sys._current_frames().get(ident)
    stack = _user_stack([above for above, _ in walk_stack(frame)]) if frame is not None else ()
    return "".join(f"{path}:{line}" for path, _, line in stack[:1])


def _user_stack(frames: list[FrameType]) -> Stack:
    """The frames that are neither minidist's, torch's nor Python's own; where there are none, the first."""
    # In one of autograd's own threads there are none: the hook that minidist registered is the best there is.
    outside = [frame for frame in frames if not frame.f_code.co_filename.startswith(_COMM)]
    chosen = [frame for frame in outside if not _is_library(frame.f_code.co_filename)] or (outside or frames)[
        :1
    ]
    return tuple((frame.f_code.co_filename, frame.f_code.co_firstlineno, frame.f_lineno) for frame in chosen)


def _is_library(path: str) -> bool:
    if path.startswith((_MINIDIST, _TORCH, "<frozen", "<string>")):
        return True
    return path.startswith(_STANDARD) and "-packages" not in path


def _parameter(tensor: object, callers: list[FrameType]) -> str:
    """The name of the parameter that a tensor is, or is the gradient of, in a module that a caller holds."""
    if not isinstance(tensor, torch.Tensor) or not tensor.numel():
        return ""
    modules: dict[int, nn.Module] = {}
    for frame in reversed(callers):  # the outermost function holds the whole model
        if not frame.f_code.co_filename.startswith((_COMM, _TORCH)):
            # A function's globals are many: only those that it names.
            for value in (*frame.f_locals.values(), *map(frame.f_globals.get, frame.f_code.co_names)):
                if issubclass(type(value), nn.Module):  # isinstance would ask a proxy, which may raise
                    modules[id(value)] = value
    address = tensor.data_ptr()
    for module in modules.values():
        with suppress(Exception):  # a module that is half made, or lazy, or refuses
            for name, parameter in nn.Module.named_parameters(module):
                for held, suffix in ((parameter, ""), (parameter.grad, ".grad")):
                    if held is not None and held.shape == tensor.shape and held.data_ptr() == address:
                        return name + suffix
    return ""
