"""`Objective`: a micro-batch's loss and its weight, and a check that the loss is the mean that it says it is.

Ranks and micro-batches have parts of one global batch, and a step takes the mean of their losses. For that
each loss has to be a mean itself, and to say over how much: over rows, unless it returns (mean, weight), such
as the number of tokens that count. A sum, or a mean over tokens of which some are ignored, would train
another model, without an error. So the first step compares the loss of some rows with that of their halves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.comm.errors import CollectiveError
from minidist.model.loss import cross_entropy
from minidist.parallel.contract.batch import rows_of, split, tensors
from minidist.parallel.contract.engine import Loss, first_argument

Weight = float | Tensor
"""Over how much a loss is a mean: a number, or a scalar tensor, which no CPU waits for."""
IGNORED = -100
"""The label that transformers, and torch by default, leave out of a loss."""


class Objective:
    """The loss that `prepare` was given, in one of its three forms.

    given: a function of outputs and targets; or one of a model and a batch, whose first argument is called
        `model`; or None for the model's own, or else `cross_entropy`.
    """

    def __init__(self, given: Loss | None, model: nn.Module) -> None:
        self.given, self._model = given, model
        self.takes_model = given is not None and first_argument(given) == "model"

    def function(self, outputs: Any, inputs: Any, targets: Any, cp: int = 1) -> Loss:
        """The function of outputs and targets to use for a model's outputs. cp: of the layout."""
        if self.given is not None:
            return self.given
        if isinstance(outputs, Tensor) and isinstance(targets, Tensor):
            return cross_entropy
        if own_loss(outputs) is None:
            raise TypeError(
                f"the model gave a {type(outputs).__name__} without a loss of its own; pass what it needs to "
                "compute one, such as labels, or give prepare a loss of outputs and targets"
            )
        if cp > 1:
            raise ValueError(
                f"the model computes its loss itself, and cp={cp} gives each rank only some of a row's "
                "tokens, of which it would not know the next; give prepare a loss of outputs and targets, or "
                "cp=1"
            )
        return lambda outputs, _: (own_loss(outputs), labels_of(self._model, inputs))

    def is_cross_entropy(self, inputs: Any, targets: Any) -> bool:
        """Whether the loss is sure to be `cross_entropy`, a mean over rows that needs no check."""
        if self.given is None:
            return isinstance(inputs, Tensor) and isinstance(targets, Tensor)
        return self.given is cross_entropy


def own_loss(outputs: Any) -> Any:
    """The loss in what a model returned, or None."""
    return outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)


def labels_of(model: nn.Module, batch: Any) -> Weight:
    """Over how much the own loss of a model of transformers is a mean: the labels that are not ignored.

    Models that predict the next token do not use the first label of a row. Without integer labels, and for
    other models, it is the number of rows.
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if labels is None or labels.is_floating_point() or not hasattr(model, "loss_type"):
        return float(rows_of(batch))
    # transformers takes a loss of which it does not know the type for that of the next token.
    next_token = model.loss_type in (None, "ForCausalLM", "ForConditionalGeneration")
    encodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if next_token and not encodes and labels.dim() > 1:
        labels = labels[..., 1:]
    counted: Tensor = (labels != IGNORED).sum()
    return counted.double()


def weighted(result: Any, own: float) -> tuple[Tensor, Weight]:
    """A loss's result as (mean, weight); `own` is the weight of one that returns the mean alone."""
    if not isinstance(result, tuple):
        return result, own
    mean, weight = result
    return mean, weight.detach().double() if isinstance(weight, Tensor) else float(weight)


def times(mean: Tensor, weight: Weight) -> Tensor:
    """The product; 0 where the weight is 0, whatever the mean over nothing is."""
    if isinstance(weight, Tensor):
        return torch.where(weight == 0, 0.0, mean * weight)
    return mean * weight if weight else torch.zeros_like(mean)


class LossCheck:
    """Compares, in an engine's first step, the loss of some rows with the weighted mean of its halves."""

    def __init__(self) -> None:
        self.found = (math.nan, math.nan)  # this rank's loss, and the mean of its halves, if they differ
        self.weighted = False  # whether the loss has returned a weight

    @torch.no_grad()
    def compare(
        self, of: Callable[[Any], tuple[Tensor, Weight]], given: Any, dtype: torch.dtype | None = None
    ) -> None:
        """Compare `of(given)` with that of both halves of the rows.

        Rows of which the result depends on random numbers, or of which there is only one, show nothing; `of`
        is then still called three times, as it may be a collective. dtype: in which it computes, if that is
        not the loss's.
        """
        count = rows_of(given)
        parts = split(given, 2) if count > 1 else (given, given)
        on_gpu = [x.device for _, x in tensors(given) if x.is_cuda][:1]
        with torch.random.fork_rng(devices=on_gpu):
            before = _random_state(on_gpu)
            whole, _ = of(given)
            try:
                halves = [of(part) for part in parts]
            except CollectiveError:  # another rank's
                raise
            except RuntimeError as error:
                raise RuntimeError(
                    f"the loss of all rows could be computed, and that of half of them not: {error}. The "
                    "first step compares them. If model or loss keep state from one call to the next that is "
                    "no buffer or attribute of theirs, give prepare check_loss=False"
                ) from error
            if count < 2 or not torch.equal(before, _random_state(on_gpu)):
                return
        weights = [float(weight) for _, weight in halves]
        if not all(weights):
            return  # a mean over nothing
        mean = sum(float(loss) * weight for (loss, _), weight in zip(halves, weights, strict=True))
        mean /= sum(weights)
        size = sum(abs(float(loss)) for loss, _ in halves) + abs(float(whole))
        # As of a plan: up to half the digits. NaN is no reason; the step will show it.
        if abs(float(whole) - mean) > math.sqrt(torch.finfo(dtype or whole.dtype).eps) * size:
            self.found = float(whole), mean

    def agree(self) -> None:
        """Raise ValueError on all ranks if any has found a difference. Each sends 24 (n - 1) bytes."""
        own = torch.tensor([[*self.found, float(self.weighted)]], dtype=torch.float64, device=comm.device())
        for rank, each in enumerate(comm.all_gather(own)):
            loss, halves, has_weight = (float(x) for x in each)
            self.weighted |= bool(has_weight)
            if loss != halves and not math.isnan(loss):
                raise ValueError(
                    f"the loss is not the mean that it should be: of some rows of rank {rank} it is "
                    f"{loss:.6g}, and the mean of its two halves, by their weights, is {halves:.6g}. Let it "
                    "return the mean over rows, or (mean, weight) with the number that it is a mean over, "
                    "such as that of the tokens that are not ignored; if you know that ranks may average it "
                    "all the same, give prepare check_loss=False"
                )


def _random_state(devices: list[torch.device]) -> Tensor:
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]
    return torch.cat(states)
