"""Experts: each rank holds some of a block's MLPs, and every token travels to the one that suits it.

A block has E MLPs, the experts, and a router that gives each of them a weight for each token. A token goes
through the MLP with the largest weight only, so more MLPs cost a token no more work. Each rank takes its rows
of the batch, as in data parallelism, and holds E / n MLPs; an all-to-all takes the tokens to the ranks of
their MLPs, and another one takes the results back.

    rows of rank 0 ── router ──╲  ╱── MLPs 0 and 1 ──╲  ╱── times the weight ── rows of rank 0
                                ╳     all-to-all      ╳
    rows of rank 1 ── router ──╱  ╲── MLPs 2 and 3 ──╱  ╲── times the weight ── rows of rank 1

In a step a rank sends 2 (O + G) + 8 (n - 1) / n E bytes for each block, and 2 (n - 1) / n R for the gradients
of the parameters that every rank has: n ranks, R the bytes of these parameters, O the bytes of its tokens
that go to other ranks, G the bytes of guests, other ranks' tokens, whose results it sends back. The 2 counts
their gradients; 8 bytes say how many tokens go to an MLP. n divides E; a batch has at least n rows.

Sources: Fedus et al. 2021, "Switch Transformers", section 2.1; Lepikhin et al. 2020, "GShard", section 3.
Lesson: 15 "All together"
"""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.plain.gpt import Batch, Block, MakeOptimizer, loss_of, same_weights


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


class ExpertBlock(nn.Module):
    """A block with a router and E MLPs instead of one MLP, as a single process has it."""

    def __init__(self, block: Block, E: int) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = block.norm1, block.attention, block.norm2
        D = block.up.in_features
        mlps = [nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D)) for _ in range(E)]
        self.router, self.mlps = nn.Linear(D, E), nn.ModuleList(mlps)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        """As in gpt.py, but for the MLP: each token's result comes from the one that the router chooses."""
        x = x + self.attention(self.norm1(x))
        tokens = self.norm2(x).flatten(0, 1)  # N tokens: (N, D)
        weight, chosen = self.router(tokens).softmax(-1).max(-1)  # (N), (N)
        return x + self.results(tokens, chosen).mul(weight[:, None]).view_as(x)

    def results(self, tokens: Tensor, chosen: Tensor) -> Tensor:  # (N, D), (N)
        """Return each token's result from the MLP with the chosen number."""
        results = torch.empty_like(tokens)
        for i, mlp in enumerate(self.mlps):
            results[chosen == i] = mlp(tokens[chosen == i])
        return results


class SharedBlock(ExpertBlock):
    """The same with E / n of the MLPs. The comments' example: n = 2, E = 4, our tokens choose 2 0 3 0."""

    def results(self, tokens: Tensor, chosen: Tensor) -> Tensor:  # (N, D), (N)
        """Send the tokens to the ranks of their MLPs, compute there, and send the results back."""
        n, k = comm.size(), len(self.mlps)
        # Announce how many tokens go from each rank to each MLP.
        going = chosen.bincount(minlength=n * k)  # (E), of ours to each: 2 0 1 1
        coming = comm.all_to_all(going)  # (n k), to each of our k: from rank 0, from rank 1, ...
        outgoing, incoming = (count.view(n, k).sum(1).tolist() for count in (going, coming))  # 2 2 go
        # Travel: the tokens of MLP 0 first, then those of MLP 1, ...
        order = chosen.argsort()  # 1 3 0 2
        guests = Travel.apply(tokens[order], outgoing, incoming)  # (sum(incoming), D)
        chosen_by_guests = torch.arange(k, device=coming.device).repeat(n).repeat_interleave(coming)
        results = super().results(guests, chosen_by_guests)
        return Travel.apply(results, incoming, outgoing)[order.argsort()]  # each to where its token was


def train(
    model: nn.Sequential, batches: Sequence[Batch], make_optimizer: MakeOptimizer, E: int = 4
) -> list[float]:
    """Give each block of `model` E experts, train this rank's, fetch the others, and return the losses."""
    rank, n, k = comm.rank(), comm.size(), E // comm.size()
    for i, layer in enumerate(model):
        if isinstance(layer, Block):
            model[i] = ExpertBlock(layer, E).to(layer.up.weight)
    same_weights(model)
    blocks = [layer for layer in model if isinstance(layer, ExpertBlock)]
    for block in blocks:
        block.__class__, block.mlps = SharedBlock, block.mlps[rank * k : (rank + 1) * k]
    optimizer, losses = make_optimizer(model.parameters()), []
    for batch in batches:
        # Compute: what this rank's rows contribute to the mean loss, and to the gradients.
        inputs, targets = (rows.tensor_split(n)[rank] for rows in batch)  # (B / n, T)
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets) * len(inputs) / len(batch[0])
        loss.backward()
        # Communicate: add up what all rows contribute. An MLP has seen all its tokens.
        for name, p in model.named_parameters():
            if ".mlps." not in name:
                comm.all_reduce(p.grad)
        optimizer.step()
        losses.append(loss.detach())
    for block in blocks:  # the caller gets all MLPs
        own, block.__class__ = block.mlps, ExpertBlock
        block.mlps = nn.ModuleList(own[i % k] if i // k == rank else deepcopy(own[0]) for i in range(E))
        for i, mlp in enumerate(block.mlps):
            same_weights(mlp, i // k)
    return comm.all_reduce(torch.stack(losses)).tolist()
