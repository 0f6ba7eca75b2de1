"""Settings of `tensor_parallel`: the inputs of all ranks, and the reader's layer or operator in a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional

import minidist as md
from checks.ranks import Case
from checks.support.contributions import tens
from checks.support.words import plural
from minidist import comm

NO_GELU = "That is x @ a @ b: gelu is missing between the two products."
LATE_GELU = "That is gelu(x @ a @ b): gelu belongs between the two products."


def normal(draw: np.random.Generator, *shape: int) -> torch.Tensor:
    """Normal numbers in float64, so that the order of a sum makes no difference to speak of."""
    return torch.from_numpy(draw.normal(size=shape))


def parts(whole: torch.Tensor, ranks: int, dim: int) -> list[torch.Tensor]:
    """Each rank's, contiguous."""
    return [part.contiguous() for part in whole.tensor_split(ranks, dim)]


def powers(count: int) -> torch.Tensor:
    """1, 10, 100, ..."""
    return 10.0 ** torch.arange(count, dtype=torch.float64)


def make_tidy(x: torch.Tensor, c: torch.Tensor, matrices: list[torch.Tensor], ranks: int) -> None:
    """Fill attention's tensors so that rank r's summand of y, and its part of the gradient of x, is 10**r.

    All tokens are alike, so each mean of values is their value, 1, and queries and keys have no gradient.
    """
    (tokens, width), size = x.shape, x.shape[1] // ranks
    x[...], matrices[2][...] = 1 / width, 1
    c[...] = 0
    c[-1, 0] = (
        tokens**2
    )  # y's gradient, of the last token alone, which takes the same part of each token's value
    matrices[3][...] = (powers(ranks) / size).repeat_interleave(size)[:, None]
    x *= tokens
    matrices[2] /= tokens


def plain(function: Callable[..., Any], x: torch.Tensor, *others: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """The result, and x as it is afterwards."""
    return function(x, *others), x


def there_and_back(
    function: Callable[..., Any], x: torch.Tensor, w: torch.Tensor, c: torch.Tensor
) -> tuple[Any, ...]:
    """The gradient that arrives is c, and another tensor gets the same one, later."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    other = 2 * w
    with comm.ledger() as ledger:
        y = function(x)
    if not isinstance(y, torch.Tensor) or y.shape != c.shape:
        return y, None, None, 0, x.detach()
    forward = ledger.bytes_sent
    seen = y.detach().clone()
    ((y + other) * c).sum().backward()
    gradient = torch.zeros_like(x) if x.grad is None else x.grad
    return seen, gradient, w.grad, forward, x.detach()


def whole_attention(
    x: torch.Tensor, matrices: list[torch.Tensor], head_size: int, c: torch.Tensor, causal: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """In one process: y, and the gradients of x and of the queries' matrix where that of y is c."""
    x, query = x.clone().requires_grad_(), matrices[0].clone().requires_grad_()
    heads = [(x @ w).unflatten(1, (-1, head_size)).transpose(0, 1) for w in (query, matrices[1], matrices[2])]
    mixed = functional.scaled_dot_product_attention(*heads, is_causal=causal)
    y = mixed.transpose(0, 1).flatten(1) @ matrices[3]
    of_x, of_query = torch.autograd.grad((y * c).sum(), (x, query))
    return y.detach(), of_x, of_query


def attention(function: Callable[..., Any], x: torch.Tensor, *others: Any) -> tuple[Any, ...]:
    """y, and the gradients of x and of the queries' matrix where that of y is c."""
    *matrices, head_size, c = others
    x, query = x.clone().requires_grad_(), matrices[0].clone().requires_grad_()
    y = function(x, query, *matrices[1:], head_size)
    if not isinstance(y, torch.Tensor) or y.shape != c.shape or not y.requires_grad:
        return (y.detach() if isinstance(y, torch.Tensor) else y), None, None
    (y * c).sum().backward()
    return y.detach(), x.grad, query.grad


def loss(function: Callable[..., Any], logits: torch.Tensor, targets: torch.Tensor) -> Any:
    """The result, and whether logits and targets are as they were."""
    mine = logits.clone(), targets.clone()
    result = function(*mine)
    return result, [torch.equal(*pair) for pair in zip(mine, (logits, targets), strict=True)]


def gathered(function: Callable[..., Any], x: torch.Tensor, c: torch.Tensor) -> tuple[Any, Any, int]:
    """y, the gradient of x where that of y is c, and the bytes that forward sent."""
    x = x.clone().requires_grad_()
    with comm.ledger() as ledger:
        y = function(x)
    if not isinstance(y, torch.Tensor) or y.shape != (len(x) * md.size(), x.shape[1]):
        return y, None, 0
    if y.requires_grad:
        (y * c).sum().backward()
    return y.detach(), torch.zeros_like(x) if x.grad is None else x.grad, ledger.bytes_sent


def mlp_cases(draw: np.random.Generator, ranks: int) -> tuple[list[Case], list[tuple[Any, ...]]]:
    """Each rank's part of an MLP, first with tidy summands; y, and what `wrongs` of gelu give."""
    cases, rights = [], []
    sizes_of = ((2, 2, ranks), (2, 3, 2 * ranks), (5, 4, 3 * ranks), (1, 1, ranks), (0, 2, ranks))
    for number, (tokens, width, middle) in enumerate(sizes_of):
        x, a, b = (
            normal(draw, tokens, width),
            normal(draw, width, middle),
            normal(draw, middle, width),
        )
        if not number:  # gelu(16) is 16
            x[...], a[...], b[...] = 8, 1, powers(middle)[:, None] / 16
        args = list(zip([x] * ranks, parts(a, ranks, 1), parts(b, ranks, 0), strict=True))
        sizes = f"x {(tokens, width)}, a {(width, middle)} and b {(middle, width)}"
        summands = f", and summands of {tens(ranks)}" * (not number)
        cases.append(Case(args, f"{plural(ranks, 'rank')} with {sizes}{summands}"))
        gelu = functional.gelu
        wrongs = {NO_GELU: x @ a @ b, LATE_GELU: gelu(x @ a @ b)}
        rights.append((gelu(x @ a) @ b, wrongs))
    return cases, rights


def operator_cases(draw: np.random.Generator, ranks: int) -> list[Case]:
    """x, another tensor and the gradient of both, which is first tidy."""
    cases = []
    for number, shape in enumerate(((2, 3), (1,), (4, 2), (0,))):
        x, w = normal(draw, *shape), normal(draw, *shape)
        args = [(x, w, normal(draw, *shape)) for _ in range(ranks)]
        text = f"{plural(ranks, 'rank')} with x of shape {shape}"
        if not number:
            args = [(x, w, torch.full(shape, 10.0**rank, dtype=x.dtype)) for rank in range(ranks)]
            text += f" and gradients of {tens(ranks)}"
        cases.append(Case(args, text))
    return cases


def attention_cases(draw: np.random.Generator, ranks: int) -> tuple[list[Case], list[tuple[Any, ...]]]:
    """Each rank's heads, first with tidy summands; y, the gradients of x and query, y without a mask."""
    cases, rights = [], []
    sizes = ((2, 1, 2), (3, 1, 2), (4, 2, 3), (1, 1, 1), (int(draw.integers(5, 9)), 3, 2))
    for number, (tokens, heads, head_size) in enumerate(sizes):
        width = ranks * heads * head_size
        x, c = normal(draw, tokens, width), normal(draw, tokens, width)
        matrices = [normal(draw, width, width) / width**0.5 for _ in range(4)]
        if not number:
            make_tidy(x, c, matrices, ranks)
        cut = [parts(w, ranks, 1) for w in matrices[:3]] + [parts(matrices[3], ranks, 0)]
        args = [(x, *own, head_size, c) for own in zip(*cut, strict=True)]
        text = (
            f"{plural(ranks, 'rank')} with {plural(tokens, 'token')} and {ranks * heads} heads "
            f"of size {head_size}" + f", and summands of {tens(ranks)}" * (not number)
        )
        cases.append(Case(args, text))
        free = whole_attention(x, matrices, head_size, c, causal=False)[0]
        rights.append((*whole_attention(x, matrices, head_size, c), free))
    return cases, rights


def loss_cases(draw: np.random.Generator, ranks: int) -> tuple[list[Case], list[tuple[Any, ...]]]:
    """Each rank's logits, and the targets; the loss and its gradient."""
    cases, rights = [], []
    last = int(draw.integers(5, 20))
    for rows, columns, shift in ((2, 2, 0), (1, 1, 0), (1, 2, 0), (4, 3, 0), (last, 5, 1000)):
        vocabulary = ranks * columns
        # Far from 0 the exponentials of the bare logits are infinite, or all 0: in turns, row by row.
        sign = 1 - 2 * (torch.arange(rows)[:, None] % 2)
        logits = 3 * normal(draw, rows, vocabulary) + shift * sign * (1 + normal(draw, rows, 1).abs())
        targets = torch.from_numpy(draw.integers(0, vocabulary, rows))
        if rows == 2:
            targets[:] = torch.tensor([vocabulary - 1, 0])
        if rows == 1:  # the last rank's, then the first's, and likely: no mistake hides behind a 0
            targets[0] = vocabulary - 1 if columns == 1 else 0
            logits[0, targets[0]] = logits.max() + 1
        args = [(own, targets) for own in parts(logits, ranks, 1)]
        text = f"{plural(ranks, 'rank')} with {plural(rows, 'row')} and a vocabulary of {vocabulary}"
        cases.append(Case(args, text + (", logits far from 0" if shift else "")))
        whole = logits.clone().requires_grad_()
        loss = functional.cross_entropy(whole, targets)
        loss.backward()
        rights.append((loss.detach(), whole.grad))
    return cases, rights


def token_cases(draw: np.random.Generator, ranks: int) -> list[Case]:
    """Each rank's tokens, and the gradient of all; first both are tidy."""
    cases = []
    for number, (tokens, width) in enumerate(((2, 3), (1, 1), (3, 2), (int(draw.integers(4, 8)), 5))):
        args = [(normal(draw, tokens, width), normal(draw, tokens * ranks, width)) for _ in range(ranks)]
        text = f"{plural(ranks, 'rank')} with {tokens} of {tokens * ranks} tokens each, {width} wide"
        if not number:
            for rank, pair in enumerate(args):
                for each in pair:
                    each[...] = 10.0**rank
            text += f", all numbers and gradients {tens(ranks)}"
        cases.append(Case(args, text))
    return cases
