"""`Engine`: a training step with the result of one process on the whole batch, for any layout.

This file has the order of forward, backward, communication and update, the mean over rows if shares or
micro-batches differ in size, and the loss over all ranks. A strategy decides how data-parallel ranks share
the work, partition_model.py which part of the model a rank has, step_executor.py how a batch goes through it
(in a pipeline: staged_passes.py), rank_model.py what its loss and its weight are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from minidist import comm
from minidist.parallel.contract.batch import check_rows, shapes, tensors
from minidist.parallel.engine.evaluation import Evaluation
from minidist.parallel.engine.rank_model import NOTHING, RankBatch, is_list, pairs_of
from minidist.parallel.guards.refusals import gradients_are_off
from minidist.parallel.training.clipping import clip_factor
from minidist.parallel.training.random_state import random_state_of


class Engine(Evaluation):
    """Trains a model on all ranks of a layout, to the weights that one process would have reached.

    After the same steps on the same global batches, every full parameter equals that of single-process
    training, to rounding, for each strategy, any number of ranks, and shares of different sizes. `prepare`
    makes it from this rank's part of the model, and the strategy of the ranks that have the same part.

    Attributes:
        model: the module, or this rank's part of it.
        optimizer: the optimizer of this rank's part; learning-rate schedulers take it. All ranks call methods
            of its own, such as a schedule-free one's `train` and `eval`.
        data_rank, data_ranks: this rank's index among the ranks that share a batch's rows, and their number,
            as `Sampler` takes them. Ranks that split the model and not the batch have the same index.
        grad_norm: the norm of the last step's gradients over all ranks, before clipping; None if the step
            neither clips nor scales its loss. Of several evaluations, the last one's.
    """

    def step(self, inputs: Any, targets: Any = NOTHING) -> float:
        """Train on one global batch, of which this rank passes its data-parallel share.

        >>> engine.step(inputs, targets)
        >>> engine.step({"input_ids": tokens, "labels": tokens})  # as a loader of transformers gives
        >>> engine.step([first, second])  # two batches of this rank, as one

        A batch is a tensor, or tensors in tuples, dicts and dataclasses; their first dimension is the rows.
        A list in it with one item for each row, such as the captions of images, is cut with the rows.
        The model is called with the inputs: `model(**dict)`, `model(*tuple)` or `model(x)`. Without
        `targets`, a pair is inputs and targets; of anything else the model gets the batch, and the loss gets
        the batch as its targets. A list of batches is accumulated: ranks may have different numbers of them.

        Sends the bytes of the strategy, of tensor and context parallelism in each pass, and of the pipeline.
        The first step adds 2 (n - 1) / n 8 bytes for the rows, and what agreeing on the buckets takes. With
        pp, each step sends as many bytes for the loss, and again for a weight that it returns; a list sends
        as many for its length. With clipping or "fp16", and with sharded gradients or parts of the model, it
        sends as many for the norm. No ledger has a rehearsal's messages.

        Args:
            inputs: this rank's rows, at least one.
            targets: their targets.

        Returns:
            The mean loss over the global batch, the same number on all ranks. NaN if its weight is 0, as
            where no label counts; then nothing changes.

        Raises:
            TypeError: inputs or targets have no tensors with rows.
            ValueError: no rows, tensors with different numbers of them, or a step that differs from one
                process's; see `prepare`.
            RuntimeError: gradients are off, as in `torch.no_grad()`.
            CollectiveError: a peer is gone or late, or failed in this step. Pipeline stages on its host learn
                of it at once; if all ranks do, training may go on. Ranks that wait in a collective fail at
                their time limit, and the run ends.
            FloatingPointError: in "fp16", a gradient is not finite with the smallest loss scale.
        """
        pairs = pairs_of(inputs, targets, self.executor.objective.takes_model)
        for pair in pairs:
            check_rows(*pair, self.data_ranks)
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            raise gradients_are_off()
        batches = [self.part.batch(pair, self._counts, self.device) for pair in pairs]
        if targets is NOTHING and is_list(inputs):
            batches += self._padding(batches)
        if self.rehearsal is not None and self.rehearsal.due(self, pairs):
            loss = self.rehearsal.step(self, pairs, batches)
            if loss is not None:
                return float(loss)
        return self._counted(batches)

    def _counted(self, batches: Sequence[RankBatch]) -> float:
        """Train, and count the activations of the first batch of its kind."""
        kind = *((*shapes(each.inputs), *shapes(each.targets)) for each in batches), self.model.training
        if kind not in self._activations.peaks:
            found = (x for each in batches for _, x in tensors((each.inputs, each.targets)))
            with self._activations.count(kind, found):
                return self._train(batches)
        self._activations.last = self._activations.peaks[kind]
        return self._train(batches)

    def _padding(self, batches: Sequence[RankBatch]) -> list[RankBatch]:
        """Batches that do not count, up to the longest list: passes may be collectives."""
        most = torch.tensor(float(len(batches)), dtype=torch.float64, device=self.device)
        comm.all_reduce(most, "max", group=self.strategy.group)
        return [batches[-1]._replace(counts=0.0)] * (int(most) - len(batches))

    def _train(self, batches: Sequence[RankBatch], updates: bool = True) -> float:
        if self.takes_closure and updates:
            return self._train_by_closure(batches)
        strategy = self.strategy
        strategy.zero_grad()
        if not self._weight:
            own = sum(batch.weight for batch in batches)
            total = torch.tensor(float(own), dtype=torch.float64, device=self.device)
            self._weight = float(comm.all_reduce(total, group=strategy.group))

        # Compute, and send gradients as they come. Each loss is weighted, by its rows unless it says more,
        # so that sums are means. The global weight is taken from the last step, because this step's would
        # cost a message, and dividing the gradients later would cost a pass over them.
        expected, scale = self._weight, self.precision.scale
        with self._random_state(), self.within or nullcontext():
            self.executor.train(batches, lambda weight: scale * weight / expected)
        all_weight, all_loss = strategy.synchronize()
        self.executor.summed()
        if self._is_weighted is None:
            simple = self.executor.objective.is_cross_entropy(batches[0].inputs, batches[0].targets)
            self._is_weighted = not simple and self._on_all_stages(float(self.executor.is_weighted)) > 0
        if self._is_weighted:  # only the last stage knows the weight
            all_weight = self._on_all_stages(all_weight if self.executor.has_loss else 0.0)
        loss = self._on_all_stages(all_loss)
        if not all_weight:
            strategy.drop()
            return math.nan
        if all_weight != expected:
            strategy.rescale(expected / all_weight)
            self._weight = all_weight
        loss /= all_weight

        # Clip, and update or skip. All ranks have the same norm.
        factor = 1 / scale
        if self.reports_norm:
            self.grad_norm = norm = self.placement.norm(strategy) * factor
            if self.precision.skips(norm):
                strategy.drop()
                return loss
            if self.clip_norm is not None:
                factor *= clip_factor(norm, self.clip_norm)
        if self.before_update is not None:
            self.before_update()
        if factor != 1:
            strategy.multiply(factor)
        if updates:
            strategy.update()
            self.executor.updated()
        return loss

    def _train_by_closure(self, batches: Sequence[RankBatch]) -> float:
        """Let the optimizer evaluate the loss, as often as it likes; returns its first value."""
        losses: list[float] = []

        def closure() -> Tensor:
            with torch.enable_grad():
                losses.append(self._train(batches, updates=False))
            self.before_update = None  # of the first evaluation alone
            return torch.tensor(losses[-1], dtype=torch.float64, device=self.device)

        self.strategy.update(closure)
        self.executor.updated()
        return losses[0]

    def _random_state(self) -> AbstractContextManager[None]:
        """Make dropout the same on ranks that tp cuts tensors over, and independent on all others."""
        mesh, shares = self.mesh, self.mesh.size("dp_cp")
        if mesh.size("pp") * shares == 1:
            return nullcontext()
        return random_state_of(mesh.rank("pp") * shares + mesh.rank("dp_cp"))

    def _on_all_stages(self, value: float) -> float:
        """Give all stages the value of the last one; the others pass 0."""
        if self.mesh.size("pp") == 1:
            return value
        known = torch.tensor(value, dtype=torch.float64, device=self.device)
        return float(comm.all_reduce(known, group=self.mesh.group("pp")))
