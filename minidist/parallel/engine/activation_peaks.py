"""The most bytes of activations in a step, for `engine.memory()`."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from minidist.parallel.training.activation_memory import ActivationCounter


class ActivationPeaks:
    """The peak of a model's activations in each step, counted once for each shape of batch.

    Counting takes some microseconds for each saved tensor. It is therefore done in the first step with a
    shape; later steps with that shape are taken to save as much. The batch belongs to the caller and is not
    counted.

    Attributes:
        last: bytes in the last step; 0 before the first.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._peaks, self.last = model, dict[Hashable, int](), 0

    @contextmanager
    def during(self, inputs: Tensor, targets: Tensor) -> Iterator[None]:
        """Wrap the forward and backward passes of a step on this batch."""
        shapes = inputs.shape, inputs.dtype, targets.shape, targets.dtype, self._model.training
        if shapes in self._peaks:
            yield
        else:
            with ActivationCounter(self._model, (inputs, targets)) as counter:
                yield
            self._peaks[shapes] = counter.peak
        self.last = self._peaks[shapes]
