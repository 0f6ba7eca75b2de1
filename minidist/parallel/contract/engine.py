"""What every strategy's engine can do: the contract between a strategy and the loop that uses it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.parallel.contract.memory_report import Memory
from minidist.parallel.guards.refusals import require_batch

Loss = Callable[[Tensor, Tensor], Tensor]
"""From outputs and targets to a scalar: the mean over their rows."""
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""From parameters to a torch optimizer, such as `partial(torch.optim.AdamW, lr=3e-4)`."""


class Engine(ABC):
    """Trains a model on all ranks of a layout, to the weights that one process would have reached.

    After the same steps on the same global batches every full parameter equals single-process training, to
    rounding, for each strategy and each number of ranks, also where the ranks' shares differ in size.

    Attributes:
        model: the module, or this rank's part of it.
        optimizer: the optimizer of this rank's part; learning-rate schedulers take it.
        data_rank, data_ranks: this rank's place among those that share a batch's rows, as a `Sampler` takes
            them; ranks that split the model and not the batch have the same place.
        grad_norm: of the last step's gradients over all ranks, before they were clipped, where the step
            clips or scales its loss; else None.
        loss_scale: what the next step's loss is multiplied by before its backward pass; 1 unless the
            precision is "fp16".
        skipped: steps that changed nothing, since a gradient was not finite, which is for "fp16" alone.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    data_rank: int
    data_ranks: int
    grad_norm: float | None = None

    @property
    def loss_scale(self) -> float:
        """See `Engine`."""
        return 1.0

    @property
    def skipped(self) -> int:
        """See `Engine`."""
        return 0

    @abstractmethod
    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """Train on one global batch, of which this rank passes its data-parallel share.

        Args:
            inputs: (rows, ...), this rank's rows, at least one.
            targets: (rows, ...), theirs.

        Returns:
            The mean loss over the global batch, the same number on all ranks.

        Raises:
            TypeError: inputs or targets are no tensor.
            ValueError: no rows, or inputs and targets of different lengths.
            RuntimeError: gradients are off, as in `torch.no_grad()`.
            CollectiveError: a peer is gone or late, or has failed in this step. Of that the pipeline's stages
                hear at once that wait for its messages, on one host; where all ranks have, they may go on.
                Those that wait in a collective fail at their time limit, and the run ends.
            FloatingPointError: a gradient is not finite with the smallest loss scale, in "fp16".
        """

    @abstractmethod
    def evaluate(self, inputs: Tensor, targets: Tensor, metric: Loss | None = None) -> float:
        """The mean of `metric(outputs, targets)` over the global batch's rows, without training.

        Args:
            inputs: (rows, ...), this rank's rows; unlike in `step` there may be none.
            targets: (rows, ...), theirs.
            metric: a mean over rows; None for the loss.

        Returns:
            The mean over all ranks' rows, the same number on all ranks; NaN where there are none at all.
        """

    @abstractmethod
    def full_state_dict(self) -> dict[str, Tensor]:
        """Every parameter and buffer in full, under the names of the model that was passed to `prepare`.

        Returns:
            Copies, on the model's device. Parameters are the same on all ranks; buffers that training
            changes, such as a BatchNorm's statistics, are each rank's own.
        """

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """What `full_state_dict` has, one by one and in any order, so that no rank need have all of it.

        A collective: every rank goes through all of it. Each is the tensor itself, or is gathered only until
        the next is asked for: copy what is to stay, and write to none.
        """
        yield from self.full_state_dict().items()

    @abstractmethod
    def memory(self) -> Memory:
        """Bytes on this rank now, counted from tensor storages, each once; printed, a small table.

        Activations are those of the last step at their peak, 0 before the first. They are counted in the
        first step with each shape of this rank's batch, in no other.
        """


def check_rows(inputs: Tensor, targets: Tensor, data_ranks: int = 1) -> int:
    """The number of rows, at least 1.

    data_ranks: over how many ranks a batch's rows are shared out.

    Raises:
        TypeError: inputs or targets are no tensor with rows.
        ValueError: there is none, or inputs and targets differ in length.
    """
    require_batch(inputs, targets)
    if len(inputs) != len(targets):
        raise ValueError(
            f"inputs have {len(inputs)} rows and targets {len(targets)}; give one target for each row"
        )
    if not len(inputs):
        if data_ranks == 1:
            raise ValueError("inputs have no rows; give a batch of at least one")
        raise ValueError(
            f"rank {comm.rank()} of {comm.size()} was given no rows; use a global batch of at least as many "
            f"rows as there are data-parallel ranks, {data_ranks}, or fewer ranks"
        )
    return len(inputs)
