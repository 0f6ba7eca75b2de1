"""Checks of lesson 13: products that ranks share, the operators at both ends, a loss, and shared tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from checks.ranks import Run, says
from checks.settings import driven
from checks.settings import tensor_parallel as shared
from checks.settings.tensor_parallel import parts
from checks.support.contributions import whose_parts
from checks.support.exercises import Answer, Lesson
from checks.support.verdicts import Right, Tally, compare, wrong
from checks.your_own_network import infinite

lesson = Lesson(13, "tensor_parallel")
check, hint, or_solution = lesson.check, lesson.hint, lesson.or_solution

RANKS = (2, 3, 4, 1)
NOT_CAUSAL = "That is attention without is_causal=True: a token sees the tokens that come after it."


def all_reduce_bytes(size: int, ranks: int) -> int:
    """What a rank sends in an all-reduce."""
    return 2 * (ranks - 1) * size // ranks


def same(
    got: Any, right: torch.Tensor, what: str, tidy: int = 0, wrongs: Mapping[str, Any] | None = None
) -> None:
    """`compare`, as closely as float64 allows; `tidy` ranks have made a sum of 1, 10, 100, ..."""
    story = whose_parts(tidy) if tidy else None
    compare(got, right, what, rtol=1e-9, atol=1e-11, story=story, wrongs=wrongs)


@lesson.exercise(
    "13.1",
    hints=(
        "Forget the other ranks at first: with your columns of a, which columns of gelu(x @ a) do you have? "
        "And which rows of b do they meet?",
        "hidden = functional.gelu(x @ a) are your columns of the middle, and hidden @ b is one summand of y.",
        "return comm.all_reduce(functional.gelu(x @ a) @ b)",
    ),
)
def shared_mlp_forward(answer: Answer, draw: np.random.Generator) -> Right:
    """Two products with one message."""
    tally, tried = Tally(), 0
    for ranks in RANKS:
        cases, rights = shared.mlp_cases(draw, ranks)
        for run, (right, wrongs) in zip(driven(answer, shared.plain, cases), rights, strict=True):
            for rank in range(ranks):
                y, x_after = run.results[rank]
                tidy = ranks if "summands" in says(run.case) else 0
                same(y, right, f"On {says(run.case)}, rank {rank}'s y", tidy, wrongs)
                own = run.case.args[rank][0]
                same(x_after, own, f"On {says(run.case)}, rank {rank}'s x, which should stay as it was,")
                _bytes(tally, run, rank, all_reduce_bytes(right.nbytes, ranks))
            tried += 1
    return Right(tried, tally.scores)


def _bytes(
    tally: Tally,
    run: Run,
    rank: int,
    par: int,
    idea: str = "one all-reduce of y is all that has to be sent",
) -> None:
    tally.add("Bytes sent by a rank", run.sent(rank), par, idea)


@lesson.exercise(
    "13.2",
    hints=(
        "Both methods are a line. Look at leave, and let forward and backward change places.",
        "forward returns x.view_as(x). backward returns a sum over the ranks, of a copy: the gradient may be "
        "another operator's, too.",
        "forward: return x.view_as(x). backward: return comm.all_reduce(gradient.clone()).",
    ),
)
def enter(answer: Answer, draw: np.random.Generator) -> Right:
    """The identity whose gradient is an all-reduce."""
    tally, tried = Tally(), 0
    for ranks in RANKS:
        cases = shared.operator_cases(draw, ranks)
        for run in driven(answer, shared.there_and_back, cases):
            total = sum(args[2] for args in run.case.args)
            for rank, (x, _, c) in enumerate(run.case.args):
                y, gradient, beside, forward, after = run.results[rank]
                where = f"On {says(run.case)}, rank {rank}'s"
                same(y, x, f"{where} result")
                same(gradient, total, f"{where} gradient of x", ranks if "gradients" in says(run.case) else 0)
                hint = "your backward changed the gradient it was given; all-reduce a clone"
                same(beside, 2 * c, f"On {says(run.case)}, {hint}: rank {rank}'s gradient of another tensor")
                same(after, x, f"{where} x, which should stay as it was,")
                tally.add("Bytes sent forward", forward, 0, "forward sends nothing")
                tally.add("Bytes sent backward", run.sent(rank) - forward, all_reduce_bytes(x.nbytes, ranks))
            tried += 1
    return Right(tried, tally.scores)


@lesson.exercise(
    "13.3",
    hints=(
        "The MLP again: enter, products with your columns, something in the middle that looks at your part "
        "alone, the product with your rows, leave.",
        "inside = enter(x), once, and inside @ query, inside @ key, inside @ value, each as (heads, tokens, "
        "head_size). What attention returns goes back to (tokens, columns), and through output.",
        "q, k, v = ((inside @ w).unflatten(1, (-1, head_size)).transpose(0, 1) for w in (query, key, "
        "value)); mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True); return "
        "leave(mixed.transpose(0, 1).flatten(1) @ output).",
    ),
)
def shared_attention(answer: Answer, draw: np.random.Generator) -> Right:
    """Attention whose heads are shared by ranks, forward and backward."""
    tally, tried = Tally(), 0
    for ranks in RANKS:
        cases, rights = shared.attention_cases(draw, ranks)
        runs = driven(answer, shared.attention, cases)
        for run, (y, of_x, of_query, free) in zip(runs, rights, strict=True):
            for rank in range(ranks):
                where = f"On {says(run.case)}, rank {rank}'s"
                tidy = ranks if "summands" in says(run.case) else 0
                same(run.results[rank][0], y, f"{where} y", tidy, {NOT_CAUSAL: free})
                own = parts(of_query, ranks, 1)[rank]
                for name, got, right in zip(("x", "query"), run.results[rank][1:], (of_x, own), strict=True):
                    if got is None:
                        wrong(f"{where} gradient of {name} is None: backward does not come to it.")
                    same(got, right, f"{where} gradient of {name}", tidy if name == "x" else 0)
                par = 2 * all_reduce_bytes(y.nbytes, ranks)
                _bytes(tally, run, rank, par, "enter x once, and use it three times")
            tried += 1
    return Right(tried, tally.scores)


@lesson.exercise(
    "13.4",
    hints=(
        "Do it in this order: the row's largest logit over all ranks; exponentials of the logits less that; "
        "their sum over this rank's part, and over all ranks; the target's logit, which one rank has and the "
        "others count as 0.",
        "local = targets - md.rank() * columns is the target's column here, and mine = (local >= 0) & (local "
        "< columns) says whether it is one at all. For rows that are not mine use any column and multiply by "
        "0. One all-reduce of torch.stack([sums, scores]) does for both.",
        "largest = comm.all_reduce(logits.amax(1), 'max'); e = (logits - largest[:, None]).exp(); local = "
        "local.clamp(0, columns - 1); score = (logits.gather(1, local[:, None])[:, 0] - largest) * mine; "
        "total, score = comm.all_reduce(torch.stack([e.sum(1), score])); loss = (total.log() - "
        "score).mean(); the gradient is e / total[:, None], less 1 at [row, local] where mine, over the "
        "number of rows.",
    ),
)
def vocabulary_loss(answer: Answer, draw: np.random.Generator) -> Right:
    """Cross-entropy of logits that ranks have in parts."""
    tally, tried = Tally(), 0
    for ranks in RANKS:
        cases, rights = shared.loss_cases(draw, ranks)
        for run, (loss, gradient) in zip(driven(answer, shared.loss, cases), rights, strict=True):
            for rank in range(ranks):
                (got, kept), where = run.results[rank], f"On {says(run.case)}, rank {rank}'s"
                if not isinstance(got, tuple | list) or len(got) != 2:
                    wrong(f"{where} result should be two: the loss, and the gradient of its logits.")
                compare(
                    got[0],
                    loss,
                    f"{where} loss",
                    rtol=1e-6,
                    atol=1e-9,
                    story=infinite,
                    wrongs=_own_largest(run),
                )
                own = parts(gradient, ranks, 1)[rank]
                compare(got[1], own, f"{where} gradient", rtol=1e-6, atol=1e-9)
                if not all(kept):
                    name = "targets" if kept[0] else "logits"
                    wrong(f"{where} {name} are changed, and are the caller's: work on a new tensor.")
                rows = len(run.case.args[0][1])
                par = 3 * 2 * (ranks - 1) * 8 * rows / ranks
                _bytes(tally, run, rank, round(par), "three numbers a row: the largest, the sum, the score")
            tried += 1
    return Right(tried, tally.scores)


def _own_largest(run: Run) -> dict[str, torch.Tensor]:
    """The loss where each rank subtracts its own largest logit."""
    shifted = [logits - logits.amax(1, keepdim=True) for logits, _ in run.case.args]
    scores = torch.cat(shifted, 1).gather(1, run.case.args[0][1][:, None])[:, 0]
    loss = (sum(each.exp().sum(1) for each in shifted).log() - scores).mean()  # type: ignore[union-attr]
    return {"That subtracts each rank's own largest logit: take the largest over all ranks.": loss}


@lesson.exercise(
    "13.5",
    hints=(
        "Forward is one call of comm's. Backward: rank 1's gradient for token 0 belongs to rank 0, and so "
        "does rank 2's. What sums over ranks and leaves each its own part?",
        "The mirror image of an all-gather is a reduce-scatter.",
        "forward: return comm.all_gather(x). backward: return comm.reduce_scatter(gradient).",
    ),
)
def gather_tokens(answer: Answer, draw: np.random.Generator) -> Right:
    """An all-gather whose gradient is a reduce-scatter."""
    tally, tried = Tally(), 0
    for ranks in RANKS:
        cases = shared.token_cases(draw, ranks)
        for run in driven(answer, shared.gathered, cases):
            whole = torch.cat([args[0] for args in run.case.args])
            total = sum(args[1] for args in run.case.args)
            for rank, (x, _) in enumerate(run.case.args):
                y, gradient, forward = run.results[rank]
                where = f"On {says(run.case)}, rank {rank}'s"
                same(y, whole, f"{where} result")
                tidy = ranks if "gradients" in says(run.case) else 0
                same(gradient, parts(total, ranks, 0)[rank], f"{where} gradient of x", tidy)
                par = (ranks - 1) * x.nbytes
                tally.add("Bytes sent forward", forward, par)
                idea = "each rank needs the sum for its own tokens only, which is a reduce-scatter"
                tally.add("Bytes sent backward", run.sent(rank) - forward, par, idea)
            tried += 1
    return Right(tried, tally.scores)
