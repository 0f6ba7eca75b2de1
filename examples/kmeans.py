"""Cluster rows by k-means: every rank has some of the rows, and one all-reduce a step moves the centers.

python examples/kmeans.py
torchrun --nproc-per-node 2 examples/kmeans.py
mpirun -np 4 python examples/kmeans.py 4
"""

import sys

import torch
from torch import Tensor

import minidist as md
from minidist import comm

CLUSTERS, FEATURES = 5, 2


def rows_of(rank: int, rows: int = 20_000) -> Tensor:
    """Rows around five corners, (rows, 2); every rank draws others."""
    generator = torch.Generator().manual_seed(rank)
    corners = 4 * torch.tensor([[0.0, 0], [0, 1], [1, 0], [1, 1], [2, 2]])
    chosen = torch.randint(len(corners), (rows,), generator=generator)
    return corners[chosen] + torch.randn(rows, FEATURES, generator=generator) / 2


def first_centers(rows: Tensor) -> Tensor:
    """Rank 0's rows that are far from one another, the same on all ranks."""
    centers = rows[:1]
    while len(centers) < CLUSTERS:
        centers = torch.cat([centers, rows[torch.cdist(rows, centers).amin(1).argmax()][None]])
    return comm.broadcast(centers.contiguous(), source=0)


def train(steps: int = 20) -> tuple[Tensor, float]:
    rows = rows_of(md.rank())  # (N, F)
    centers = first_centers(rows)  # (K, F)
    for _ in range(steps):
        distances = torch.cdist(rows, centers)  # (N, K)
        nearest = distances.argmin(1)
        # For each cluster the sum of its rows, and their number: one message of K (F + 1) numbers.
        sums = torch.zeros(CLUSTERS, FEATURES + 1)
        sums.index_add_(0, nearest, torch.cat([rows, torch.ones(len(rows), 1)], 1))
        comm.all_reduce(sums)
        centers = sums[:, :-1] / sums[:, -1:].clamp(min=1)
    error = comm.all_reduce(distances.amin(1).square().mean(), "mean")
    return centers, error.item()


if __name__ == "__main__":
    ranks = int(sys.argv[1]) if sys.argv[-1].isdigit() else 2  # a notebook has other arguments
    centers, error = md.launch(train, ranks)[0]
    print("centers", [[round(value, 2) for value in row] for row in centers.tolist()])
    print(f"mean squared distance: {error:.3f}")
