"""A mixture of experts: many MLPs instead of one, and a router that picks k of them for each token.

A token costs k MLPs, however many there are. The router scores every expert for a token. The k best are
chosen, and each one's result is weighted by its score (its gate), so the router learns through the gates.

A router left alone sends most tokens to a few experts. A loss that punishes this disturbs the training, so
here a bias for each expert is added to the scores that choose, and never to the gates. After a step it moves
up for the experts that got fewer tokens than the mean, and down for the others.

Shapes: N tokens, D width, E experts, k experts of a token. `Experts` has the arguments of such layers in
models of transformers, and its parameters have a row for each expert as theirs do, so
minidist.parallel.experts works on both.

Sources: Shazeer et al. 2017, "Outrageously Large Neural Networks"; Fedus et al. 2021, "Switch Transformers",
section 2.1 (k = 1: the gate is the raw score); Lepikhin et al. 2020, "GShard", section 2.2 (capacity); Wang
et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts".
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from minidist.model.configs import GPTConfig


class _CountInBackward(torch.autograd.Function):
    """Return the experts' results as they are, and count tokens when their gradient arrives.

    A forward pass may run twice (recomputation) or for no step (evaluation). A backward pass runs once for
    each token of a step, also when the batch is cut in micro-batches.
    """

    @staticmethod
    def forward(ctx: Any, results: Tensor, chosen: Tensor, router: Router) -> Tensor:
        ctx.save_for_backward(chosen)
        ctx.router = router
        return results.view_as(results)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (chosen,) = ctx.saved_tensors
        E = len(ctx.router.bias)
        # Full experts count. Rows that only fill up a batch have no gradient, and do not.
        chosen = (chosen % E).masked_fill(~gradient.any(-1, keepdim=True), E)
        ctx.router.counts = ctx.router.counts + chosen.flatten().bincount(minlength=E)[:E]
        return gradient, None, None


class Router(nn.Module):
    """Chooses k experts for each token: (N, D) -> the experts' numbers (N, k), and their gates (N, k).

    With a `capacity`, an expert takes at most capacity * k * N / E tokens of a batch, rounded up, the first
    ones in order; for the others its number is increased by E, so that no expert has it, and the gate is 0. N
    counts the tokens of one forward pass on one rank, so ranks and micro-batches drop other tokens than one
    process would.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.experts_per_token, self.capacity = config.experts_per_token, config.capacity
        self.balance_rate = config.balance_rate
        self.bias: Tensor
        self.counts: Tensor | int = 0  # tokens of each expert, since they were last balanced
        self.weight = nn.Parameter(torch.empty(config.experts, config.width))
        self.register_buffer("bias", torch.zeros(config.experts))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # (N, D) -> (N, k), (N, k)
        """Choose experts, and weight them by their scores."""
        scores = functional.linear(tokens, self.weight).softmax(-1)  # (N, E)
        chosen = self.choose(scores.detach())
        gates = scores.gather(-1, chosen)
        if self.experts_per_token > 1:
            gates = gates / gates.sum(-1, keepdim=True)
        if self.capacity is None:
            return chosen, gates
        place = functional.one_hot(chosen, len(self.weight)).flatten(0, 1)  # (N k, E)
        place = (place.cumsum(0) * place).sum(-1).view_as(chosen)  # 1 for the first token of an expert
        full = place > math.ceil(self.capacity * chosen.numel() / len(self.weight))
        return chosen + len(self.weight) * full, gates.masked_fill(full, 0.0)

    def choose(self, scores: Tensor) -> Tensor:  # (N, E) -> (N, k)
        """The best experts of each token, by score and bias."""
        return (scores + self.bias).topk(self.experts_per_token, dim=-1).indices


class Experts(nn.Module):
    """E MLPs in tensors with a row for each expert."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_experts = config.experts
        self.up = nn.Parameter(torch.empty(config.experts, config.middle, config.width))
        self.down = nn.Parameter(torch.empty(config.experts, config.width, config.middle))
        for weight in (self.up, self.down):
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:  # (N, D), (N, k), (N, k)
        """Return the sum of each token's chosen experts, weighted by the gates: (N, D)."""
        flat = chosen.flatten()
        order = flat.argsort(stable=True)  # the pairs (token, expert) of expert 0 first
        counts = flat.bincount(minlength=self.num_experts)[: self.num_experts].tolist()
        order = order[: sum(counts)]  # without those that a full expert does not take
        token = order // chosen.shape[1]
        parts = zip(torch.split(tokens[token], counts), self.up.unbind(), self.down.unbind(), strict=True)
        results = [functional.gelu(part @ up.t(), approximate="tanh") @ down.t() for part, up, down in parts]
        weighted = torch.cat(results) * gates.flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, token, weighted.to(tokens.dtype))


class MixtureOfExperts(nn.Module):
    """The MLP of a block as a mixture of experts: (B, T, D) -> (B, T, D)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.router, self.experts = Router(config), Experts(config)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D) -> (B, T, D)
        """Route every token, and run its experts."""
        tokens = x.flatten(0, -2)
        chosen, gates = self.router(tokens)
        mixed: Tensor = self.experts(tokens, chosen, gates)
        if self.router.balance_rate and mixed.requires_grad:
            mixed = _CountInBackward.apply(mixed, chosen, self.router)  # type: ignore[no-untyped-call]
        return mixed.view_as(x)
