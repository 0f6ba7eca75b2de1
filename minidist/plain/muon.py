"""Muon: each hidden matrix moves by its momentum, made orthogonal; whole matrices are dealt to owners.

A gradient of a matrix has most of its norm in few directions, and a step along it teaches those alone. Muon
brings all singular values of the momentum close to 1, so that every direction learns. Five products of the
matrix with itself do that, without a singular value decomposition. The embedding, the head, biases and norms
stay with another optimizer.

These products are much more work than AdamW's update, so ranks should share it. ZeRO's equal shares would
cut a matrix, and parts made orthogonal are no orthogonal matrix. But a model has many matrices of one shape.
Put n of them in a stack: a reduce-scatter brings each rank one whole matrix's gradient, the rank keeps its
momentum and makes the update, and an all-gather publishes the n updates.

    gradients of rank 0:  A B C D ─╲ reduce-    ╱─ A: momentum, orthogonalize ─╲ all-      A B C D
    gradients of rank 1:  A B C D ─╱ scatter, 2 ╲─ B: momentum, orthogonalize ─╱ gather, 2 A B C D

A rank sends 2 (n - 1) / n S bytes in a step: n ranks, S bytes of parameters, where zeros make the matrices of
a shape a multiple of n. A batch has at least n rows.

Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".
Lesson: 14 "ZeRO 1, 2, 3"
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.plain.gpt import Batch, Block, MakeOptimizer, loss_of, same_weights


def orthogonalized(matrix: Tensor) -> Tensor:
    """Bring the singular values close to 1: each x becomes 3.4445 x - 4.775 x^3 + 2.0315 x^5, five times."""
    rows, columns = matrix.shape
    x = matrix if rows <= columns else matrix.T  # (m, n), m <= n
    x = x / x.norm().clamp(min=1e-7)  # no singular value is above 1
    for _ in range(5):
        square = x @ x.T  # (m, m)
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return x if rows <= columns else x.T


class Stack:
    """Up to n matrices of one shape. This rank owns one of them, or zeros."""

    def __init__(self, matrices: list[Tensor]) -> None:
        self.matrices, self.momentum = matrices, torch.zeros_like(matrices[0])

    def step(self, lr: float) -> None:
        """Add up the gradients of each matrix on its owner, which makes the update for all ranks."""
        gradients = self.momentum.new_zeros(comm.size(), *self.momentum.shape)
        for whole, p in zip(gradients, self.matrices, strict=False):
            whole.copy_(p.grad)
        own = comm.reduce_scatter(gradients)[0]  # (n, rows, columns) to (rows, columns)
        self.momentum.lerp_(own, 0.05)
        update = orthogonalized(own.lerp(self.momentum, 0.95))  # Nesterov's: as if one step ahead
        updates = comm.all_gather(update[None])  # (1, rows, columns) to (n, rows, columns)
        rows, columns = update.shape
        for p, each in zip(self.matrices, updates, strict=False):
            p.detach().sub_(each, alpha=lr * max(1, rows / columns) ** 0.5)


def train(
    model: nn.Sequential, batches: Sequence[Batch], make_optimizer: MakeOptimizer, lr: float = 0.02
) -> list[float]:
    """Train `model` in place: the blocks' matrices with Muon at rate `lr`, the rest with the optimizer."""
    rank, n = comm.rank(), comm.size()
    same_weights(model)
    hidden = [p for block in model if isinstance(block, Block) for p in block.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if all(p is not each for each in hidden)]
    shapes: dict[torch.Size, list[Tensor]] = {}
    for p in hidden:
        shapes.setdefault(p.shape, []).append(p)
    stacks = [Stack(same[i : i + n]) for same in shapes.values() for i in range(0, len(same), n)]
    optimizer, losses = make_optimizer(rest), []
    for batch in batches:
        # Compute: what this rank's rows contribute to the mean loss, and to the gradients.
        inputs, targets = (whole.tensor_split(n)[rank] for whole in batch)  # (B / n, T)
        model.zero_grad()
        loss = loss_of(model(inputs), targets) * len(inputs) / len(batch[0])
        loss.backward()
        # Communicate and update: the rest on every rank, each hidden matrix on its owner.
        for p in rest:
            comm.all_reduce(p.grad)
        optimizer.step()
        for stack in stacks:
            stack.step(lr)
        losses.append(loss.detach())
    return comm.all_reduce(torch.stack(losses)).tolist()
