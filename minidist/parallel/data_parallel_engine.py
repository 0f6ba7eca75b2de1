"""The engine of data parallelism: a step whose result is that of one process on the whole batch.

What `DataParallel` leaves to the loop is done here: the mean over rows where shares or micro-batches differ
in size, the loss over all ranks, and gradients that no rank has. No message of its own is needed for that:
rows and loss travel at the end of the last bucket.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.parallel.data_parallel import DataParallel, device_of
from minidist.parallel.engine import Engine, Loss, MakeOptimizer
from minidist.parallel.layout import Layout


class DataParallelEngine(Engine):
    """Data parallelism over all ranks of the world; one process where there is one rank.

    options: those of `DataParallel`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: MakeOptimizer,
        layout: Layout,
        loss: Loss,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.parallel = DataParallel(model, **(options or {}))
        self.optimizer = optimizer(model.parameters())
        self.loss = loss
        self.micro_batches = layout.micro_batches
        self.data_rank, self.data_ranks = comm.rank(), comm.size()
        self._rows = 0.0  # of the last global batch, the same on all ranks

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """Train on one global batch; see `Engine.step`.

        Bytes sent: `DataParallel.bytes_per_step`; in the first step 2 (n - 1) / n 8 for the rows, too, and
        what agreeing on the buckets takes.
        """
        rows = check_rows(inputs, targets)
        self.optimizer.zero_grad()
        device = device_of(self.model)
        if not self._rows:
            self._rows = float(comm.all_reduce(torch.tensor(float(rows), dtype=torch.float64, device=device)))

        # Compute, and send as gradients come. Each loss is weighted with its rows, since shares may differ in
        # size and so may micro-batches; sums over ranks are then means over rows. The number of all rows is
        # taken to be that of the last step, which all ranks know: to hear this step's would cost a message.
        # (Not 1, and the gradients divided later: that would cost a pass over them.)
        expected = self._rows
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        parts = min(self.micro_batches, rows)
        micro_batches = zip(
            inputs.to(device).tensor_split(parts), targets.to(device).tensor_split(parts), strict=True
        )
        for number, (x, y) in enumerate(micro_batches, 1):
            with nullcontext() if number == parts else self.parallel.no_sync():
                loss = self.loss(self.parallel(x), y)
                loss_sum += loss.detach().double() * len(x)
                reducer = self.parallel.reducer
                if reducer is not None and number == parts:
                    reducer.scale, reducer.totals = 1.0, (float(rows), loss_sum)
                (loss * (len(x) / expected)).backward()  # type: ignore[no-untyped-call]
        self.parallel.synchronize()

        all_rows, all_loss = (float(rows), float(loss_sum))
        if reducer is not None:
            all_rows, all_loss = reducer.sums.tolist()
        if all_rows != expected:
            self.parallel.rescale_gradients(expected / all_rows)
            self._rows = all_rows

        # Update.
        self.optimizer.step()
        return all_loss / all_rows

    def evaluate(self, inputs: Tensor, targets: Tensor, metric: Loss | None = None) -> float:
        """The mean of a metric over a global batch; see `Engine.evaluate`. Sends 32 (n - 1) / n bytes."""
        device = device_of(self.model)
        total = torch.zeros(2, dtype=torch.float64, device=device)
        training = self.model.training
        self.model.eval()
        if len(inputs):
            with torch.no_grad():
                mean = (metric or self.loss)(self.model(inputs.to(device)), targets.to(device))
            total[0], total[1] = mean.double() * len(inputs), len(inputs)
        self.model.train(training)
        comm.all_reduce(total)
        return float(total[0] / total[1])

    def full_state_dict(self) -> dict[str, Tensor]:
        """Every parameter and buffer; see `Engine.full_state_dict`. Nothing is sent: each rank has all."""
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}


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
