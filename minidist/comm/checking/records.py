"""What ranks tell each other of a call when the world is checked, and what two such records contradict.

Calls of one group have to be equal in pairs: the operation, how it is done, shape, dtype, reduction, root.
Equal calls may still be swapped. Which tensor a call means is known by its label, and labels alone may differ
between ranks (`all_reduce(x)` in the one branch of an `if` and `all_reduce(y)` in the other). A swap is told
from that by two signs: labels A and B come in the one order on one rank and in the other order on another,
and either both are parameters of a model, or the calls reduce, and one branch of one test led to both calls
of the one rank and the other branch to both calls of the other. A rank that leads in turn, as in
`if rank == step % 2`, is thus no swap, nor is it one that each rank broadcasts what is its own.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from minidist.comm.checking.callsite import PARAMETER, Callsite
from minidist.comm.ledgers import Call

WINDOW = 64
"""Calls of a group among which a swap is looked for."""
POINT_TO_POINT = ("send", "recv")


@dataclass(frozen=True)
class Record:
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
    place: str  # "train.py:12"
    label: str  # what the caller calls the tensor
    scope: str  # see `Callsite`
    choices: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, rank: int, call: Call, site: Callsite) -> Record:
        """The record of a call that is about to begin."""
        given = site.arguments
        root = given.get("source", given.get("destination", -1))
        rows = _rows(call, given) if call.name == "all_to_all" else None
        return cls(
            rank=rank,
            name=call.name,
            algorithm=call.algorithm,
            asked=given.get("algorithm", "auto"),
            dtype=call.dtype,
            shape=call.shape,
            group=call.group,
            op=given.get("op", ""),
            root=root,
            rows=rows,
            place=site.place,
            label=site.label,
            scope=site.scope,
            choices=site.choices,
        )

    def to_json(self) -> str:
        """As text, for the store."""
        return json.dumps([getattr(self, name) for name in self.__dataclass_fields__])

    @classmethod
    def from_json(cls, text: bytes) -> Record:
        """The record that `to_json` wrote."""
        return cls(*(_tuples(value) for value in json.loads(text)))

    def __str__(self) -> str:
        """The call in words, from the operation to the line."""
        words = [self.name]
        if self.name != "barrier":
            words.append(f"of {self.dtype}[{'x'.join(map(str, self.shape)) or 'scalar'}]")
        if self.label:
            words.append(f"({self.label})")
        if self.op:
            words.append(f"by {self.op}")
        if self.root >= 0:
            words.append(f"{'to' if self.name in ('send', 'gather') else 'from'} {self._peer}")
        if self.rows is not None:
            words.append(f"with rows {list(self.rows[0])} out and {list(self.rows[1])} in")
        if self.asked != "auto" or self.algorithm not in ("torch", "shared_memory"):
            words.append(f"by {self.algorithm}")
        if self.name not in POINT_TO_POINT:
            words.append(f"with ranks {', '.join(map(str, self.group))}")
        return f"{' '.join(words)} at {self.place}"

    @property
    def _peer(self) -> str:
        own = self.group[self.root] if self.root < len(self.group) else self.root
        return f"rank {own}"

    def contradicts(self, other: Record) -> bool:
        """True where the two cannot be one collective, or one message."""
        if self.name in POINT_TO_POINT:
            return (self.dtype, self.shape) != (other.dtype, other.shape)  # whose it is was in the key
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
    def tensor(self) -> tuple[Any, ...] | None:
        """What tells the tensor from others on all ranks; None where nothing does."""
        return (self.scope, self.label) if self.scope else None


class CallOrder:
    """The last calls of a group, as all its members made them: finds two that are in opposite order."""

    def __init__(self) -> None:
        # For each call and member: what it was about, the how manieth call about that, and the call.
        self._calls: deque[list[tuple[tuple[Any, ...] | None, int, Record]]] = deque(maxlen=WINDOW)
        self._counts: dict[int, Counter[tuple[Any, ...]]] = {}

    def add(self, records: Sequence[Record]) -> list[Record]:
        """Take in the members' next call; two calls of one rank and two of another where they are swapped."""
        row = []
        for member, record in enumerate(records):
            about = record.tensor
            counts = self._counts.setdefault(member, Counter())
            if about is not None:
                counts[about] += 1
            row.append((about, counts[about] if about is not None else 0, record))
        self._calls.append(row)
        for first, second in combinations(range(len(row)), 2):
            for one, other in ((first, second), (second, first)):
                found = self._swapped(one, other)
                if found:
                    return found
        return []

    def _swapped(self, one: int, other: int) -> list[Record]:
        """Two calls of `one`, and the same two of `other`, whose newest is the first of them on `one`."""
        about, count, late = self._calls[-1][other]
        if about is None or self._calls[-1][one][0] == about:
            return []
        before: dict[Any, Record] = {row[other][:2]: row[other][2] for row in list(self._calls)[:-1]}
        early: Record | None = None
        for row in self._calls:
            key, number, record = row[one]
            if (key, number) == (about, count):
                early = record
            elif early is not None and key is not None and (key, number) in before:
                calls = [early, record, before[key, number], late]
                # Two broadcasts by different ranks, say, are no swap: each has its own source.
                if early.kind == record.kind and (key[0] == PARAMETER or _in_two_branches(calls)):
                    return calls
        return []


def _in_two_branches(calls: Sequence[Record]) -> bool:
    """True where one branch of a choice led to the first two calls and another to the last two."""
    if len({call.scope for call in calls}) > 1:  # other functions, whose tests say nothing of each other
        return False
    if not calls[0].op:  # what is gathered, or overwritten, may well have another name on each rank
        return False
    taken = [dict(call.choices) for call in calls]
    for test in taken[0].keys() & taken[1].keys() & taken[2].keys() & taken[3].keys():
        a, b, c, d = (choice[test] for choice in taken)
        if a == b != c == d:
            return True
    return False


def _rows(call: Call, given: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    ranks = len(call.group)
    equal = [call.shape[0] // ranks] * ranks
    sends, comes = given.get("input_rows"), given.get("output_rows")
    return tuple(equal if sends is None else sends), tuple(equal if comes is None else comes)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
