"""The tensors that an answer in buckets is tried on, and the messages that it may send (exercise 10.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from checks.ranks import Run, says
from checks.support.contributions import whose_parts
from checks.support.verdicts import Tally, WrongAnswer, compare, wrong


def greedy(lengths: Sequence[int], limit: int) -> list[int]:
    """Elements of each bucket, where neighbours are joined as long as they fit."""
    buckets: list[int] = []
    for length in lengths:
        if not buckets or buckets[-1] + length > limit:
            buckets.append(0)
        buckets[-1] += length
    return buckets


def runs_of(lengths: Sequence[int]) -> list[list[int]]:
    """All ways to join neighbours: the elements of each message, sorted; empty ones are left out."""
    ways: list[list[int]] = [[]]
    for length in filter(None, lengths):
        ways = [[*way, length] for way in ways] + [[*way[:-1], way[-1] + length] for way in ways if way]
    return [sorted(way) for way in ways]


def bucket_cases(draw: np.random.Generator) -> list[tuple[list[tuple[int, ...]], int]]:
    """Shapes and limits: a single one, some that fit, one that is too large, none left over, random ones."""
    found: list[tuple[list[tuple[int, ...]], int]] = [
        ([(3,)], 8),
        ([(3,), (4,)], 8),
        ([(2, 3), (2,), (5,)], 8),
        ([(4,), (4,), (4,), (4,)], 8),
        ([(2,), (3, 5), (2,)], 8),
        ([(9,), (2,), (6,), (1,)], 8),
        ([(3,), (0,), (4, 1), ()], 5),
    ]
    for _ in range(2):
        shapes = [
            tuple(map(int, draw.integers(1, 5, draw.integers(1, 3)))) for _ in range(draw.integers(3, 9))
        ]
        found.append((shapes, int(draw.integers(4, 24))))
    return found


def whole(draw: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    """Whole numbers, so that sums are exact in any order; none is 0."""
    return torch.from_numpy(draw.integers(1, 100, shape).astype(np.float32)) if shape else torch.tensor(7.0)


def _same_sum(got: Tensor, right: Any, own: Tensor, what: str, moved: bool, ranks: int) -> None:
    is_tidy = ranks > 1 and bool((right == (10**ranks - 1) // 9).all() and (got != own).any())
    try:
        compare(got, right, what, before=own, story=whose_parts(ranks) if is_tidy else None)
    except WrongAnswer as error:
        story = ""
        if moved:
            story = (
                "\n  t.data = ... gives t other memory, and a view of t, or an optimizer, still looks at the "
                "old: use t.copy_(...)."
            )
        elif not got.is_contiguous():
            story = (
                "\n  t.reshape(-1) is a copy where t is not contiguous, and what you write to a copy is lost."
            )
        wrong(str(error) + story)


def check_buckets(run: Run, tally: Tally) -> None:
    """WrongAnswer for a tensor that is not the sum, or a message that is not some neighbours; counts both."""
    tensors, limit = run.case.args[0]
    lengths = [tensor.numel() for tensor in tensors]
    ranks = len(run.calls)
    for rank, (got, moved) in enumerate(run.results):
        for place, tensor in enumerate(got):
            right = sum(run.case.args[each][0][place] for each in range(ranks))
            own, what = run.case.args[rank][0][place], f"On {says(run.case)}: rank {rank}'s tensor {place}"
            _same_sum(tensor, right, own, what, moved[place], ranks)
        sent = [int(np.prod(call.shape)) for call in run.calls[rank]]
        for elements in sent:
            if elements > limit and elements not in lengths:
                wrong(
                    f"On {says(run.case)}: rank {rank} sends a message of {elements} elements, "
                    f"and the limit is {limit}."
                )
        if sorted(filter(None, sent)) not in runs_of(lengths):
            wrong(
                f"On {says(run.case)}: rank {rank} sends messages of {', '.join(map(str, sent))} elements.",
                "  Each should have neighbours of the list, whole and in order, and nothing else.",
            )
        tally.add(
            "Messages by each rank",
            len(sent),
            len(greedy(lengths, limit)),
            "join a tensor to the bucket before it as long as it fits",
        )
        par = 4 * sum(lengths)
        tally.add("Bytes in them", 4 * sum(sent), par, "send each element once")
