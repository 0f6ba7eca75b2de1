"""`Engine`: the contract between a training loop and every strategy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.parallel.contract.memory_report import Memory
from minidist.parallel.guards.refusals import require_batch

Loss = Callable[[Tensor, Tensor], Tensor]
"""From outputs and targets to a scalar, the mean over their rows."""
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""From parameters to a torch optimizer, such as `partial(torch.optim.AdamW, lr=3e-4)`."""


class Engine(ABC):
    """Trains a model on all ranks of a layout, to the weights that one process would have reached.

    After the same steps on the same global batches, every full parameter equals that of single-process
    training, to rounding. This holds for each strategy, any number of ranks, and shares of different sizes.

    Attributes:
        model: the module, or this rank's part of it.
        optimizer: the optimizer of this rank's part; learning-rate schedulers take it.
        data_rank, data_ranks: this rank's index among the ranks that share a batch's rows, and their number,
            as `Sampler` takes them. Ranks that split the model and not the batch have the same index.
        grad_norm: the norm of the last step's gradients over all ranks, before clipping; None if the step
            neither clips nor scales its loss.
        loss_scale: the factor on the next step's loss before its backward pass; 1 unless the precision is
            "fp16".
        skipped: how many steps changed nothing because a gradient was not finite; only "fp16" skips steps.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    data_rank: int
    data_ranks: int
    grad_norm: float | None = None

    @property
    def loss_scale(self) -> float:
        """The factor on the next step's loss."""
        return 1.0

    @property
    def skipped(self) -> int:
        """How many steps were skipped."""
        return 0

    @abstractmethod
    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """Train on one global batch, of which this rank passes its data-parallel share.

        Args:
            inputs: (rows, ...), this rank's rows, at least one.
            targets: (rows, ...), their targets.

        Returns:
            The mean loss over the global batch, the same number on all ranks.

        Raises:
            TypeError: inputs or targets are not tensors.
            ValueError: no rows, or inputs and targets of different lengths.
            RuntimeError: gradients are off, as in `torch.no_grad()`.
            CollectiveError: a peer is gone or late, or failed in this step. Pipeline stages on one host that
                wait for its messages learn of the failure at once; if all ranks do, training may go on. Ranks
                that wait in a collective fail at their time limit, and the run ends.
            FloatingPointError: in "fp16", a gradient is not finite with the smallest loss scale.
        """

    @abstractmethod
    def evaluate(self, inputs: Tensor, targets: Tensor, metric: Loss | None = None) -> float:
        """The mean of `metric(outputs, targets)` over the global batch's rows, without training.

        Args:
            inputs: (rows, ...), this rank's rows, possibly none.
            targets: (rows, ...), their targets.
            metric: a mean over rows; None for the loss.

        Returns:
            The mean over all ranks' rows, the same on all ranks; NaN if there are no rows at all.
        """

    @abstractmethod
    def full_state_dict(self) -> dict[str, Tensor]:
        """Every parameter and buffer in full, under the names of the model that was passed to `prepare`.

        Returns:
            Copies, on the model's device. Parameters are the same on all ranks. Buffers that training
            changes, such as a BatchNorm's statistics, are each rank's own.
        """

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """The items of `full_state_dict` one by one, in any order, so that no rank needs memory for all.

        A collective: every rank iterates to the end. Each tensor may be the engine's own, or be freed when
            the
        next one is asked for: copy what you keep, and do not write to it.
        """
        yield from self.full_state_dict().items()

    @abstractmethod
    def memory(self) -> Memory:
        """Bytes on this rank now, from tensor storages, each counted once; prints as a small table.

        Activations are those of the last step at their peak, 0 before the first step. They are counted in the
        first step with each shape of batch.
        """


def check_rows(inputs: Tensor, targets: Tensor, data_ranks: int = 1) -> int:
    """The number of this rank's rows, at least 1; `data_ranks` ranks share the batch.

    Raises:
        TypeError: inputs or targets are not tensors with rows.
        ValueError: there are no rows, or inputs and targets differ in length.
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
