"""A small training with all that makes one hard to resume.

It has dropout, averages of BatchNorm, AdamW, a warm-up and shuffled epochs.
"""

from __future__ import annotations

import torch
from torch import nn

ROWS, BATCH, WARM_UP = 48, 8, 20


class Training:
    """One process that trains a small network; its steps depend on nothing but what stands here.

    seed: of the first weights, of the dropout and of the order of rows.
    """

    def __init__(self, seed: int) -> None:
        self.inputs = torch.linspace(-1, 1, ROWS * 8).sin().view(ROWS, 8)
        self.targets = self.inputs.sum(1, keepdim=True)
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.steps = 0  # done so far
        self.order = torch.empty(0, dtype=torch.int64)  # rows of this epoch that are still to come

    def step(self) -> float:
        """Train on the next batch; its loss."""
        if len(self.order) == 0:
            self.order = torch.randperm(ROWS)  # a new epoch
        rows, self.order = self.order[:BATCH], self.order[BATCH:]
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 * min(1, (self.steps + 1) / WARM_UP)
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(self.inputs[rows]), self.targets[rows])
        loss.backward()
        self.optimizer.step()
        self.steps += 1
        return loss.item()

    def __repr__(self) -> str:
        """As messages name it."""
        return f"a training after {self.steps} steps"
