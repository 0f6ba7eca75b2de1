"""The record that a rank shares of a call; which calls contradict each other, and which are swapped.

Calls that agree are swapped if one rank calls from place A and then from B, and another from B and then from
A. A reducing call's place is the lines of the user's code on the stack, from the innermost outwards until two
places differ. Two lines of one function are no swap: ranks may take turns, as in `if rank == step % 2`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from itertools import combinations
from traceback import walk_stack
from types import FrameType
from typing import Any, NamedTuple

import torch

from minidist.comm.errors import describe_tensor
from minidist.comm.ledgers import Call

_COMM = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = map(os.path.dirname, (_COMM[:-1], torch.__file__, os.__file__))
_LIBRARY = (*(path + os.sep for path in _LIBRARIES), "<frozen", "<string>")

Stack = tuple[tuple[str, int, int], ...]  # file, function's line, current line; innermost frame first


class Record(NamedTuple):
    """One rank's call, as the other ranks get to see it."""

    rank: int  # of the world
    words: str  # "all_reduce of float32[10] by sum with ranks 0, 1"
    kind: tuple[Any, ...]  # what has to be the same on all ranks
    rows: dict[int, tuple[int, int]]  # of an all-to-all: rows sent to and received from each rank
    stack: Stack  # of the user's code
    ordered: bool  # the call reduces, outside of `comm.unordered`
    compared: int = 0  # how many of the group's calls this rank has compared when it sends the record

    def at(self, depth: int = 1) -> str:
        """Describe the call, with the first `depth` lines of the stack."""
        return f"{self.words} at {', called at '.join(f'{path}:{n}' for path, _, n in self.stack[:depth])}"

    def contradicts(self, other: Record) -> bool:
        """Return whether the two cannot be the same collective, or the same message."""
        rows = self.rows.get(other.rank, ()), other.rows.get(self.rank, ())
        return self.kind != other.kind or rows[0] != rows[1][::-1]


def find_swap(rounds: Iterable[dict[int, Record]], now: Iterable[Record]) -> str:
    """Return the error for calls that two ranks made in opposite order, the last of them `now`; else ""."""
    for one, other in combinations(now, 2):
        for earlier in rounds if one.stack != other.stack else ():
            first, other_first = earlier[one.rank], earlier[other.rank]
            depth, in_turn = _difference(first.stack, one.stack)
            if (first.stack, one.stack) == (other.stack, other_first.stack):
                # Both ranks called the same two functions: one that calls them may choose between the two.
                in_turn |= _difference(first.stack[::-1], one.stack[::-1])[1]
            if (
                not in_turn
                and first.kind == one.kind
                and first.stack[:depth] == other.stack[:depth]
                and one.stack[:depth] == other_first.stack[:depth]
                and all(call.ordered for call in (first, one, other_first, other))
            ):
                return (
                    f"the ranks make the same calls in another order: rank {one.rank} {first.at(depth)}, and "
                    f"then {one.at(depth)}; rank {other.rank} {other_first.at(depth)}, and then "
                    f"{other.at(depth)}; make them in one order on all ranks, or put them under "
                    "`with comm.unordered():` if the order is meant"
                )
    return ""


def _difference(one: Stack, other: Stack) -> tuple[int, bool]:
    """Return how many frames tell two places apart, and whether they are in one function, or the same."""
    for depth, (frame, other_frame) in enumerate(zip(one, other, strict=False), 1):
        if frame != other_frame:
            return depth, frame[:2] == other_frame[:2]
    return 0, True


def read_call(rank: int, call: Call, ordered: bool) -> tuple[Record, dict[str, Any]] | None:
    """Return the record of the call that this thread begins, and the local variables of its function.

    None if comm itself makes the call.
    """
    frames = [frame for frame, _ in walk_stack(sys._getframe(1))]
    while frames and frames[0].f_code.co_name != call.name:
        frames.pop(0)
    if len(frames) < 2 or frames[1].f_code.co_filename.startswith(_COMM):
        return None
    given, stack = dict(frames[0].f_locals), user_stack(frames[1])
    op, root, asked = given.get("op"), given.get("source", given.get("destination")), given.get("algorithm")
    words, shape, rows = call.name, call.shape, {}
    if call.name != "barrier":
        words += f" of {describe_tensor(call.dtype, call.shape)}"
    if op:
        words += f" by {op}"
    if root is not None:
        words += f" {'to' if call.name in ('send', 'gather') else 'from'} rank {call.group[root]}"
    if call.name == "all_to_all":
        sends, comes = given["sends"], given["comes"]
        rows = dict(zip(call.group, zip(sends, comes, strict=True), strict=True))
        shape = call.shape[1:]  # the rows may differ, and so the first dimension
        words += f" with rows {list(sends)} out and {list(comes)} in"
    if asked not in (None, "auto") or call.algorithm not in ("torch", "shared_memory"):
        words += f" by {call.algorithm}"
    if call.message is not None:  # the record's key says source, destination and tag
        return Record(rank, words, ("message", call.dtype, shape), rows, stack, ordered=False), given
    words += f" with ranks {', '.join(map(str, call.group))}"
    kind = call.name, call.algorithm, call.dtype, shape, op, root
    return Record(rank, words, kind, rows, stack, bool(op) and ordered), given


def user_stack(frame: FrameType) -> Stack:
    """Return the frames of the user's code; in a thread of autograd, which has none, minidist's own hook."""
    places = [(f.f_code.co_filename, f.f_code.co_firstlineno, line) for f, line in walk_stack(frame)]
    outside = [place for place in places if not place[0].startswith(_COMM)] or places
    return tuple(place for place in outside if not place[0].startswith(_LIBRARY)) or (outside[0],)
