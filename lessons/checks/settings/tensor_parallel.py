"""Settings of `tensor_parallel`: the reader's layer or operator in a rank, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional

import minidist as md
from minidist import comm


def normal(draw: np.random.Generator, *shape: int) -> torch.Tensor:
    """Normal numbers in float64, so that the order of a sum makes no difference to speak of."""
    return torch.from_numpy(draw.normal(size=shape))


def parts(whole: torch.Tensor, ranks: int, dim: int) -> list[torch.Tensor]:
    """Each rank's, contiguous."""
    return [part.contiguous() for part in whole.tensor_split(ranks, dim)]


def tens(count: int) -> torch.Tensor:
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
    matrices[3][...] = (tens(ranks) / size).repeat_interleave(size)[:, None]
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
