"""`HybridEngine`: a training step with the result of one process on the whole batch, for any layout.

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
from torch import Tensor, nn

from minidist import comm
from minidist.parallel.contract.engine import Engine, Loss, check_rows
from minidist.parallel.contract.evaluation_mode import evaluating, require_gradients
from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.memory_report import Memory, count
from minidist.parallel.contract.strategy import Strategy, TensorBox
from minidist.parallel.engine.activation_peaks import ActivationPeaks
from minidist.parallel.engine.partition_model import RankModel, whole_model
from minidist.parallel.engine.step_executor import StagedPasses, StepExecutor, WholePasses
from minidist.parallel.guards.refusals import require_batch, require_metric
from minidist.parallel.training.clipping import clip_factor
from minidist.parallel.training.precision import Precision
from minidist.parallel.training.random_state import random_state_of


class HybridEngine(Engine):
    """Trains `model` with `strategy`, together with the ranks that have the same part of it.

    Args:
        model, strategy, layout, loss: as `prepare` made or got them.
        precision: to which the model was converted; None for its own.
        clip_norm: see `prepare`.
        part: this rank's part of a model; None if `model` is whole.
    """

    def __init__(
        self,
        model: nn.Module,
        strategy: Strategy,
        layout: Layout,
        loss: Loss,
        precision: Precision | None = None,
        clip_norm: float | None = None,
        part: RankModel | None = None,
    ) -> None:
        self.model, self.strategy, self.layout, self.loss = model, strategy, layout, loss
        self.precision, self.clip_norm = precision or Precision("fp32"), clip_norm
        self.part = part or whole_model(model)
        kind = StagedPasses if layout.pp > 1 else WholePasses
        self.executor: StepExecutor = kind(self.part, strategy, layout, loss, self.precision)
        self.mesh, self.placement = self.part.mesh, self.part.placement
        self.optimizer = strategy.optimizer
        self.data_rank, self.data_ranks = self.mesh.rank("dp"), self.mesh.size("dp")
        self.device = next((p.device for p in model.parameters()), self.placement.device)
        self._rows = 0.0  # of the last global batch, the same on all ranks
        self.saving: Any = None  # the last `Saving` of this engine
        self._activations = ActivationPeaks(self.model)
        self.placement.join(strategy)

    def __deepcopy__(self, memo: Any) -> HybridEngine:
        """Refuse: groups of ranks, hooks and shared memory cannot be copied."""
        raise TypeError(
            "an engine cannot be copied, since its ranks talk to each other through it; prepare another one, "
            "and give its model these weights, engine.full_state_dict(), or load a checkpoint into it"
        )

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """Train on one global batch.

        Sends the bytes of the strategy, of tensor and context parallelism in each pass, and of the pipeline.
        The first step adds 2 (n - 1) / n 8 bytes for the rows, and what agreeing on the buckets takes. With
        pp, each step sends as many bytes over the stages for the loss. With clipping or "fp16", and with
        sharded gradients or parts of the model, it sends as many for the norm, over all ranks that share
        them.
        """
        rows = check_rows(inputs, targets, self.data_ranks)
        require_gradients()
        x, y, share = self.part.cut(inputs.to(self.device), targets.to(self.device))
        with self._activations.during(x, y):
            return self._train(x, y, rows * share, share)

    def _train(self, inputs: Tensor, targets: Tensor, rows: float, share: float) -> float:
        strategy = self.strategy
        strategy.zero_grad()
        if not self._rows:
            total = torch.tensor(float(rows), dtype=torch.float64, device=self.device)
            self._rows = float(comm.all_reduce(total, group=strategy.group))

        # Compute, and send gradients as they come. Shares and micro-batches differ in size, so each loss is
        # weighted with its rows: sums over ranks are then means over rows. The global number of rows is taken
        # from the last step, because this step's would cost a message, and dividing the gradients later would
        # cost a pass over them.
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
        """The factor on the next step's loss."""
        return self.precision.scale

    @property
    def skipped(self) -> int:
        """How many steps were skipped."""
        return self.precision.skipped

    def evaluate(self, inputs: Tensor, targets: Tensor, metric: Loss | None = None) -> float:
        """The mean of a metric over a global batch.

        Sends 32 (n - 1) / n bytes, with pp 16 (p - 1) / p more, and the bytes of forward passes. With tp, a
        metric other than `cross_entropy` gathers the logits.
        """
        require_batch(inputs, targets)
        require_metric(metric)
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
        """Every parameter and buffer in full, one after the other."""
        return self.placement.whole(self.strategy.whole())

    def full_state_dict(self) -> dict[str, Tensor]:
        """Copies of every parameter and buffer in full."""
        return self.placement.full_state_dict(self.strategy.full_state_dict())

    def memory(self) -> Memory:
        """Bytes that this rank holds."""
        return count(self.strategy.held(), self._activations.last)

    # The training state in the terms of one process, for checkpoints.

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
