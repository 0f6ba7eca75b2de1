"""Solutions of lesson 13.

The cuts and the operators f and g are from Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion
Parameter Language Models Using Model Parallelism", section 3; gathering tokens in place of f is from
Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.
"""

from __future__ import annotations

import torch
from torch.nn import functional

import minidist as md
from minidist import comm


def shared_mlp_forward(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """y of gelu(x @ a) @ b, from this rank's columns of a and rows of b."""
    hidden = functional.gelu(x @ a)  # this rank's columns of it
    return comm.all_reduce(hidden @ b)


def leave(x: torch.Tensor) -> torch.Tensor:
    """The sum over the ranks; its gradient goes on as it is (g). The lesson gives it."""

    class Leave(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return comm.all_reduce(x.clone())

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    return Leave.apply(x)


def enter(x: torch.Tensor) -> torch.Tensor:
    """x itself; its gradient is summed over the ranks (f)."""

    class Enter(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            return comm.all_reduce(gradient.clone())  # a copy: others may hold the same tensor

    return Enter.apply(x)


def shared_attention(
    x: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    head_size: int,
) -> torch.Tensor:
    """Causal attention with this rank's heads; y on all ranks."""
    inside = enter(x)  # once: its gradient is then one message, not three
    heads = [(inside @ w).unflatten(1, (-1, head_size)).transpose(0, 1) for w in (query, key, value)]
    mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
    return leave(mixed.transpose(0, 1).flatten(1) @ output)


def vocabulary_loss(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean loss, its gradient for this rank's logits), without gathering logits."""
    rows, columns = logits.shape
    local = targets - md.rank() * columns
    mine = (local >= 0) & (local < columns)
    local = local.clamp(0, columns - 1)  # where it is not mine, any column
    largest = comm.all_reduce(logits.amax(1), "max")
    exponentials = (logits - largest[:, None]).exp()
    scores = (logits.gather(1, local[:, None])[:, 0] - largest) * mine
    total, score = comm.all_reduce(torch.stack([exponentials.sum(1), scores]))
    gradient = exponentials / total[:, None]
    gradient[torch.arange(rows), local] -= mine.to(logits.dtype)
    return (total.log() - score).mean(), gradient / rows


def gather_tokens(x: torch.Tensor) -> torch.Tensor:
    """(tokens / n, D) -> (tokens, D); the gradients of all ranks are summed."""

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return comm.all_gather(x)

        @staticmethod
        def backward(ctx, gradient):
            return comm.reduce_scatter(gradient)

    return Gather.apply(x)
