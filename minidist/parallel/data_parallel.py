"""Data parallelism: every rank holds the whole model and computes on its share of the batch.

The naive form. The ranks start from one set of weights; after each backward pass every gradient is summed
over the ranks by an all-reduce of its own; then each rank makes the same optimizer step.

Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", section
3.1; this is the solution that the paper starts from.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.comm.work import Group, ranks_of
from minidist.parallel.engine import Engine, Loss, MakeOptimizer
from minidist.parallel.layout import Layout


class DataParallel(nn.Module):
    """A module whose copies on all ranks stay the same, for a loop that the user writes.

    >>> model = md.DataParallel(model)
    >>> loss = cross_entropy(model(inputs), targets)
    >>> loss.backward()
    >>> model.synchronize()
    >>> optimizer.step()

    Parameters and buffers are broadcast from the group's rank 0 when it is made, so that ranks which start
    from different seeds do not go on differing. Each rank sends S to each child in the tree, S being their
    bytes.

    Args:
        module: the model; the same architecture on all ranks.
        group: the ranks that share the batch; None for all.
    """

    def __init__(self, module: nn.Module, group: Group = None) -> None:
        super().__init__()
        self.module = module
        self.group = group
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                comm.broadcast(tensor, source=0, group=group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns for this rank's share of the batch."""
        return self.module(*args, **kwargs)

    def synchronize(self) -> None:
        """Average the gradients over the ranks: call it after backward and before the optimizer's step.

        The mean over ranks is the gradient of the mean loss over the global batch where the shares are
        equal, as in torch's DDP. Bytes sent: 2 (n - 1) / n of each gradient, and of a count in float64 for
        each of them.

        Raises:
            CollectiveError: a peer is gone or late.
        """
        parameters = trainable(self.module)
        has_gradient = [p.grad is not None for p in parameters]
        used = torch.tensor(has_gradient, dtype=torch.float64, device=_device(parameters))
        comm.all_reduce(used, group=self.group)
        self.reduce_gradients(used.tolist(), divisor=len(ranks_of(self.group)))

    def reduce_gradients(self, used: Iterable[float], divisor: float) -> None:
        """Sum each gradient over the ranks and divide it: one all-reduce a parameter.

        Args:
            used: for each trainable parameter, on how many ranks it has a gradient. Where that is none it
                keeps none, so that the optimizer passes it over as it would in one process.
            divisor: what the sums are divided by.
        """
        for parameter, ranks in zip(trainable(self.module), used, strict=True):
            if not ranks:
                continue
            if parameter.grad is None:  # unused here, but not everywhere
                parameter.grad = torch.zeros_like(parameter)
            comm.all_reduce(parameter.grad, group=self.group)
            parameter.grad.div_(divisor)


class DataParallelEngine(Engine):
    """Naive data parallelism over all ranks of the world; one process where there is one rank."""

    def __init__(self, model: nn.Module, optimizer: MakeOptimizer, layout: Layout, loss: Loss) -> None:
        self.model = model
        self.parallel = DataParallel(model)
        self.optimizer = optimizer(model.parameters())
        self.loss = loss
        self.micro_batches = layout.micro_batches
        self.data_rank, self.data_ranks = comm.rank(), comm.size()

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """Train on one global batch; see `Engine.step`. Bytes sent: `bytes_per_step`."""
        rows = check_rows(inputs, targets)
        self.optimizer.zero_grad()
        parameters = trainable(self.model)
        device = _device(parameters)

        # Compute. The sum over rows and not their mean: shares may differ in size, and so may micro-batches.
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        parts = min(self.micro_batches, rows)
        for x, y in zip(
            inputs.to(device).tensor_split(parts), targets.to(device).tensor_split(parts), strict=True
        ):
            loss = self.loss(self.parallel(x), y) * len(x)
            loss.backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.detach()

        # Communicate: rows, loss and which parameters were used in one small message, then the gradients.
        used = [float(p.grad is not None) for p in parameters]
        counts = torch.tensor([rows, 0.0, *used], dtype=torch.float64, device=device)
        counts[1] = loss_sum
        comm.all_reduce(counts)
        all_rows, all_loss, *used = counts.tolist()
        self.parallel.reduce_gradients(used, divisor=all_rows)

        # Update.
        self.optimizer.step()
        return float(all_loss / all_rows)

    def evaluate(self, inputs: Tensor, targets: Tensor, metric: Loss | None = None) -> float:
        """The mean of a metric over a global batch; see `Engine.evaluate`. Sends 32 (n - 1) / n bytes."""
        device = _device(list(self.model.parameters()))
        total = torch.zeros(2, dtype=torch.float64, device=device)
        training = self.model.training
        self.model.eval()
        if len(inputs):
            with torch.no_grad():
                mean = (metric or self.loss)(self.parallel(inputs.to(device)), targets.to(device))
            total[0], total[1] = mean.double() * len(inputs), len(inputs)
        self.model.train(training)
        comm.all_reduce(total)
        return float(total[0] / total[1])

    def full_state_dict(self) -> dict[str, Tensor]:
        """Every parameter and buffer; see `Engine.full_state_dict`. Nothing is sent: each rank has all."""
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}


def bytes_per_step(model: nn.Module, ranks: int) -> int:
    """Bytes that a rank sends in a step: 2 (n - 1) / n of each gradient, and of 2 + P counts in float64.

    P is the number of trainable parameters; each is used on some rank.
    """
    sizes = [p.numel() * p.element_size() for p in trainable(model)]
    return sum(2 * (ranks - 1) * size // ranks for size in [*sizes, 8 * (2 + len(sizes))])


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that get gradients, each once, also where two layers share one."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def check_rows(inputs: Tensor, targets: Tensor) -> int:
    """The number of rows, at least 1.

    Raises:
        ValueError: there is none, or inputs and targets differ in length.
    """
    if len(inputs) != len(targets):
        raise ValueError(
            f"inputs have {len(inputs)} rows and targets {len(targets)}; give one target for each row"
        )
    if not len(inputs):
        raise ValueError(
            f"rank {comm.rank()} of {comm.size()} was given no rows; use a global batch of at least as many "
            "rows as there are data-parallel ranks, or fewer ranks"
        )
    return len(inputs)


def _device(parameters: list[nn.Parameter]) -> torch.device:
    return parameters[0].device if parameters else torch.device("cpu")
