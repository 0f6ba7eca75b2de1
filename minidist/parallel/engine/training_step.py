"""`Engine`: a training step with the result of one process on the whole batch, for any layout.

This file has the order of forward, backward, communication and update, the mean over rows if shares or
micro-batches differ in size, and the loss over all ranks. A strategy decides how data-parallel ranks share
the work, partition_model.py which part of the model a rank has, step_executor.py how a batch goes through it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from minidist import comm
from minidist.parallel.contract.engine import Loss, evaluating
from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.memory_report import Memory, count
from minidist.parallel.contract.strategy import Strategy, TensorBox
from minidist.parallel.engine.prepare_checks import PlanCheck
from minidist.parallel.engine.step_executor import RankModel, StagedPasses, StepExecutor, WholePasses
from minidist.parallel.guards.refusals import check_rows, require_batch, require_gradients, require_metric
from minidist.parallel.training.activation_memory import ActivationPeaks
from minidist.parallel.training.batch_norm import average_statistics
from minidist.parallel.training.clipping import clip_factor
from minidist.parallel.training.precision import Precision
from minidist.parallel.training.random_state import random_state_of


class Engine:
    """Trains a model on all ranks of a layout, to the weights that one process would have reached.

    After the same steps on the same global batches, every full parameter equals that of single-process
    training, to rounding, for each strategy, any number of ranks, and shares of different sizes. `prepare`
    makes it from this rank's part of the model, and the strategy of the ranks that have the same part.

    Attributes:
        model: the module, or this rank's part of it.
        optimizer: the optimizer of this rank's part; learning-rate schedulers take it.
        data_rank, data_ranks: this rank's index among the ranks that share a batch's rows, and their number,
            as `Sampler` takes them. Ranks that split the model and not the batch have the same index.
        grad_norm: the norm of the last step's gradients over all ranks, before clipping; None if the step
            neither clips nor scales its loss.
    """

    def __init__(
        self,
        part: RankModel,
        strategy: Strategy,
        layout: Layout,
        loss: Loss,
        precision: Precision,
        clip_norm: float | None = None,
        plan_check: PlanCheck | None = None,
    ) -> None:
        self.model, self.part, self.strategy, self.layout = part.model, part, strategy, layout
        self.loss, self.precision, self.clip_norm = loss, precision, clip_norm
        kind = StagedPasses if layout.pp > 1 else WholePasses
        self.executor: StepExecutor = kind(part, strategy, layout, loss, precision)
        self.mesh, self.placement = part.mesh, part.placement
        self.optimizer = strategy.optimizer
        self.grad_norm: float | None = None
        self.data_rank, self.data_ranks = self.mesh.rank("dp"), self.mesh.size("dp")
        self.device = next((p.device for p in part.model.parameters()), self.placement.device)
        self._rows = 0.0  # of the last global batch, the same on all ranks
        self.saving: Any = None  # the last `Saving` of this engine
        self._activations = ActivationPeaks(self.model)
        self._plan_check = plan_check  # until it has run
        self.placement.join(strategy)

    def __deepcopy__(self, memo: Any) -> Engine:
        """Refuse: groups of ranks, hooks and shared memory cannot be copied."""
        raise TypeError(
            "an engine cannot be copied, since its ranks talk to each other through it; prepare another one, "
            "and give its model these weights, engine.full_state_dict(), or load a checkpoint into it"
        )

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """Train on one global batch, of which this rank passes its data-parallel share.

        Sends the bytes of the strategy, of tensor and context parallelism in each pass, and of the pipeline.
        The first step adds 2 (n - 1) / n 8 bytes for the rows, what agreeing on the buckets takes, and the
        check of a plan. With pp, each step sends as many bytes for the loss. With clipping or "fp16", and
        with sharded gradients or parts of the model, it sends as many for the norm.

        Args:
            inputs: (rows, ...), this rank's rows, at least one.
            targets: (rows, ...), their targets.

        Returns:
            The mean loss over the global batch, the same number on all ranks.

        Raises:
            TypeError: inputs or targets are not tensors.
            ValueError: no rows, inputs and targets of different lengths, or a plan that makes another model.
            RuntimeError: gradients are off, as in `torch.no_grad()`.
            CollectiveError: a peer is gone or late, or failed in this step. Pipeline stages on its host learn
                of it at once; if all ranks do, training may go on. Ranks that wait in a collective fail at
                their time limit, and the run ends.
            FloatingPointError: in "fp16", a gradient is not finite with the smallest loss scale.
        """
        rows = check_rows(inputs, targets, self.data_ranks)
        require_gradients()
        self._check_plan(inputs)
        x, y, share = self.part.cut(inputs.to(self.device), targets.to(self.device))
        batch = x.shape, x.dtype, y.shape, y.dtype, self.model.training
        if batch not in self._activations.peaks:
            with self._activations.count(batch, x, y):
                return self._train(x, y, rows * share, share)
        self._activations.last = self._activations.peaks[batch]
        return self._train(x, y, rows * share, share)

    def _check_plan(self, inputs: Tensor) -> None:
        check = self._plan_check
        if check is not None and check.run(self.whole(), inputs.to(self.device), self.mesh):
            self._plan_check = None

    def _train(self, inputs: Tensor, targets: Tensor, rows: float, share: float) -> float:
        strategy = self.strategy
        strategy.zero_grad()
        if not self._rows:
            total = torch.tensor(float(rows), dtype=torch.float64, device=self.device)
            self._rows = float(comm.all_reduce(total, group=strategy.group))

        # Compute, and send gradients as they come. Each loss is weighted with its rows, so that sums are
        # means over rows. The global number of rows is taken from the last step, because this step's would
        # cost a message, and dividing the gradients later would cost a pass over them.
        expected, scale = self._rows, self.precision.scale
        with self._random_state():
            self.executor.train(inputs, targets, lambda count: scale * count * share / expected, share)
        all_rows, all_loss = strategy.synchronize()
        self.executor.summed()
        if all_rows != expected:
            strategy.rescale(expected / all_rows)
            self._rows = all_rows
        loss = self._on_all_stages(all_loss) / all_rows

        # Clip, and update or skip. All ranks have the same norm.
        factor = 1 / scale
        if self.clip_norm is not None or self.precision.scales:
            self.grad_norm = norm = self.placement.norm(strategy) * factor
            if self.precision.skips(norm):
                strategy.drop()
                return loss
            if self.clip_norm is not None:
                factor *= clip_factor(norm, self.clip_norm)
        if factor != 1:
            strategy.multiply(factor)
        strategy.update()
        self.executor.updated()
        return loss

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

    @property
    def loss_scale(self) -> float:
        """The factor on the next step's loss before its backward pass; 1 unless the precision is "fp16"."""
        return self.precision.scale

    @property
    def skipped(self) -> int:
        """How many steps changed nothing because a gradient was not finite; only "fp16" skips steps."""
        return self.precision.skipped

    def evaluate(self, inputs: Tensor, targets: Tensor, metric: Loss | None = None) -> float:
        """The mean of `metric(outputs, targets)` over the global batch's rows, without training.

        Sends 32 (n - 1) / n bytes, with pp 16 (p - 1) / p more, and the bytes of forward passes. With tp, a
        metric other than `cross_entropy` gathers the logits.

        inputs, targets: (rows, ...), this rank's rows, possibly none, and their targets. metric: a mean over
        rows; None for the loss. Returns the same mean on all ranks; NaN if there are no rows at all.
        """
        require_batch(inputs, targets)
        require_metric(metric)
        self._check_plan(inputs)
        average_statistics(self.model, self.strategy.group)
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        if len(inputs) or self.strategy.gathers:
            x, y, share = self.part.cut(inputs.to(self.device), targets.to(self.device))
            with evaluating([self.model]):
                total[0] = self.executor.evaluate(x, y, metric or self.loss) * share
            total[1] = len(inputs) * share
        comm.all_reduce(total, group=self.strategy.group)
        value, rows = total.tolist()
        return self._on_all_stages(value) / rows if rows else math.nan

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """The items of `full_state_dict` one by one, in any order, so that no rank needs memory for all.

        A collective: every rank iterates to the end. Each tensor may be the engine's own, or be freed when
        the next one is asked for: copy what you keep, and do not write to it. Each tensor that tp cut is
        summed over tp, which sends 2 (t - 1) / t of its bytes. With pp, its stage broadcasts a tensor.
        """
        average_statistics(self.model, self.strategy.group)
        return self.placement.whole(self.strategy.whole())

    def full_state_dict(self) -> dict[str, Tensor]:
        """Copies of every parameter and buffer in full, by the names in the model given to `prepare`.

        They are the same on all ranks, with BatchNorms' statistics, and lie on the model's device.
        """
        copies = {name: value.clone() for name, value in self.whole()}  # stage 3 gives them unit by unit
        return {name: copies[name] for name in self.placement.entries}

    def memory(self) -> Memory:
        """Bytes on this rank now, from tensor storages, each counted once; prints as a small table.

        Activations are those of the last step at their peak, 0 before the first step. They are counted in the
        first step with each shape of batch.
        """
        return count(self.strategy.held(), self._activations.last)

    def chunks(self) -> Iterator[TensorBox]:
        """This rank's boxes of the whole state, as for `Strategy.chunks`."""
        return self.placement.chunks(self.strategy.chunks())

    def state_settings(self) -> dict[str, Any]:
        """The state that is not a tensor, as for `Strategy.settings`."""
        return self.placement.settings(self.strategy.settings())

    def load_state_settings(
        self, settings: Mapping[str, Any], state: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Restore the settings and allocate the state, as for `Strategy.load_settings`."""
        self.placement.load_settings(self.strategy, settings, state)

    def settings(self) -> dict[str, Any]:
        """The engine's own state besides the strategy's: plain values, the same on all ranks."""
        return {"rows": self._rows, "precision": self.precision.settings()}

    def load_settings(self, settings: Mapping[str, Any]) -> None:
        """Restore what `settings` returned, on this or another number of ranks."""
        self._rows = settings["rows"]
        self.precision.load_settings(settings["precision"])
