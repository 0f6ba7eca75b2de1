"""Experts: each rank holds some of a block's MLPs, and every token travels to the one that suits it.

A block has E MLPs, the experts, and a router that gives each of them a weight for each token. A token goes
through the expert with the largest weight only, so more experts cost a token no more work. Each rank takes
its rows of the batch, as in data parallelism, and holds E / n experts; an all-to-all takes the tokens to the
ranks of their experts, and another one takes the results back.

    rows of rank 0 ── router ──╲  ╱── experts 0 and 1 ──╲  ╱── times the weight ── rows of rank 0
                                ╳       all-to-all       ╳
    rows of rank 1 ── router ──╱  ╲── experts 2 and 3 ──╱  ╲── times the weight ── rows of rank 1

In a step a rank sends 2 (O + G) + 8 (n - 1) / n E bytes for each block, and 2 (n - 1) / n R for the gradients
of the parameters that every rank has: n ranks, R the bytes of these parameters, O the bytes of its tokens
that go to other ranks, G the bytes of guests, other ranks' tokens, whose results it sends back. The 2 counts
their gradients; 8 bytes say how many tokens go to an expert. n divides E; a batch has at least n rows.

Sources: Fedus, Zoph and Shazeer 2021, "Switch Transformers", section 2.1; Lepikhin et al. 2020, "GShard",
section 3. They also limit the tokens of an expert, and add a loss that spreads tokens evenly.
Lesson: 15 "All together"
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.plain.gpt import Batch, Block, MakeOptimizer, loss_of


class Travel(torch.autograd.Function):
    """Send outgoing[r] tokens to rank r, for rank 0 first, and receive incoming[r] from it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, outgoing: list[int], incoming: list[int]) -> Tensor:
        """All-to-all."""
        ctx.way_back = incoming, outgoing
        return comm.all_to_all(x, outgoing, incoming)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """All-to-all: the gradients travel back."""
        return comm.all_to_all(gradient, *ctx.way_back), None, None


travel: Callable[[Tensor, list[int], list[int]], Tensor] = Travel.apply


class Experts(nn.Module):
    """A router, and this rank's share of E experts."""

    def __init__(self, D: int, E: int) -> None:
        super().__init__()
        self.router = nn.Linear(D, E)
        experts = [nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D)) for _ in range(E)]
        own = E // comm.size()
        self.experts = nn.ModuleList(experts[comm.rank() * own : (comm.rank() + 1) * own])

    def forward(self, x: Tensor) -> Tensor:  # (B / n, T, D)
        """Return each token's result from its expert, times the expert's weight."""
        n, own, tokens = comm.size(), len(self.experts), x.flatten(0, 1)  # N tokens: (N, D)
        weight, chosen = self.router(tokens).softmax(-1).max(-1)  # (N), (N)
        # Announce how many tokens go from each rank to each expert.
        going = chosen.bincount(minlength=n * own)  # (E): of ours, to each expert
        coming = comm.all_to_all(going)  # (n E / n): to each of our experts, from rank 0, from rank 1, ...
        outgoing, incoming = (count.view(n, own).sum(1).tolist() for count in (going, coming))
        # Travel: the tokens of expert 0 first, then those of expert 1, ...
        order = chosen.argsort()
        guests = travel(tokens[order], outgoing, incoming)  # (sum(incoming), D)
        # Compute.
        expert_of = torch.arange(own).repeat(n).repeat_interleave(coming)  # each guest's
        results = torch.empty_like(guests)
        for i, expert in enumerate(self.experts):
            results[expert_of == i] = expert(guests[expert_of == i])
        # Travel back, each result to where its token was.
        y = torch.empty_like(tokens)
        y[order] = travel(results, incoming, outgoing)
        return y.mul(weight[:, None]).view_as(x)


class ExpertBlock(nn.Module):
    """A block with experts instead of its MLP."""

    def __init__(self, block: Block, experts: Experts) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = block.norm1, block.attention, block.norm2, experts

    def forward(self, x: Tensor) -> Tensor:  # (B / n, T, D)
        """As in gpt.py."""
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


def train(
    model: nn.Sequential, batches: Sequence[Batch], make_optimizer: MakeOptimizer, experts: int = 4
) -> list[float]:
    """Give the blocks of `model` experts, train this rank's part in place, and return the losses."""
    rank, n, losses = comm.rank(), comm.size(), []
    torch.manual_seed(0)  # all ranks draw all experts, and keep their own
    for i, layer in enumerate(model):
        if isinstance(layer, Block):
            model[i] = ExpertBlock(layer, Experts(layer.up.in_features, experts).to(layer.up.weight))
    optimizer = make_optimizer(model.parameters())
    for batch in batches:
        # Compute: what this rank's rows contribute to the mean loss, and to the gradients.
        inputs, targets = (rows.tensor_split(n)[rank] for rows in batch)  # (B / n, T)
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets) * len(inputs) / len(batch[0])
        loss.backward()
        # Communicate: add up what all rows contribute. An expert has seen all its tokens.
        for name, p in model.named_parameters():
            if ".experts." not in name:
                comm.all_reduce(p.grad)
        optimizer.step()
        losses.append(loss.detach())
    return comm.all_reduce(torch.stack(losses)).tolist()
