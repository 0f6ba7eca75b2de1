"""The engine: a step whose result is that of one process on the whole batch, whatever the layout.

The mean over rows where shares or micro-batches differ in size, the loss over all ranks, and the order of
forward, backward, communication and update are done here. How data-parallel ranks share the work is a
strategy's; what part of the model a rank has, and how a batch goes through it, see `partition_model.py` and
`step_executor.py`.
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
from minidist.parallel.contract.evaluation_mode import require_gradients
from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.memory_report import ActivationPeaks, Memory, count
from minidist.parallel.contract.strategy import Strategy, TensorBox
from minidist.parallel.engine.partition_model import RankModel, whole_model
from minidist.parallel.engine.step_executor import StagedPasses, StepExecutor, WholePasses
from minidist.parallel.guards.refusals import require_batch, require_metric
from minidist.parallel.training.clipping import clip_factor
from minidist.parallel.training.precision import Precision
from minidist.parallel.training.random_state import random_state_of


class HybridEngine(Engine):
    """Trains `model` by `strategy` with the ranks that have the same part of it.

    precision: to which the model was converted; None for its own. clip_norm: see `prepare`. part: what the
    model is of a whole; None where it is whole.
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
        self.passes: StepExecutor = kind(self.part, strategy, layout, loss, self.precision)
        self.mesh, self.placement = self.part.mesh, self.part.placement
        self.optimizer = strategy.optimizer
        self.data_rank, self.data_ranks = self.mesh.rank("dp"), self.mesh.size("dp")
        self.device = next((p.device for p in model.parameters()), self.placement.device)
        self._rows = 0.0  # of the last global batch, the same on all ranks
        self.saving: Any = None  # the last `Saving` of this engine
        self._activations = ActivationPeaks(self.model)
        self.placement.join(strategy)

    def __deepcopy__(self, memo: Any) -> HybridEngine:
        """Refuse: groups of ranks, hooks and shared memory have no copies."""
        raise TypeError(
            "an engine cannot be copied, since its ranks talk to each other through it; prepare another one, "
            "and give its model these weights, engine.full_state_dict(), or load a checkpoint into it"
        )

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """Train on one global batch; see `Engine.step`.

        Bytes sent: the strategy's, tensor and context parallelism's in each pass and the pipeline's; in the
        first step 2 (n - 1) / n 8 for the rows, too, and what agreeing on the buckets takes. With pp as many
        over the stages for the loss; and where gradients are sharded or parts of the model are, and the step
        clips or has precision "fp16", as many for the norm, over all that share them.
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

        # Compute, and send as gradients come. Each loss is weighted with its rows, since shares may differ in
        # size and so may micro-batches; sums over ranks are then means over rows. The number of all rows is
        # taken to be that of the last step, which all ranks know: to hear this step's would cost a message.
        # (Not 1, and the gradients divided later: that would cost a pass over them.)
        expected, scale = self._rows, self.precision.scale
        with self._random_state():
            self.passes.train(inputs, targets, lambda count: scale * count * share / expected, share)
        all_rows, all_loss = strategy.synchronize()
        self.passes.summed()
        if all_rows != expected:
            strategy.rescale(expected / all_rows)
            self._rows = all_rows
        loss = self._on_all_stages(all_loss) / all_rows

        # Skip or shorten, and update. All ranks have the same norm.
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
        self.passes.updated()
        return loss

    def _random_state(self) -> AbstractContextManager[None]:
        """Dropout is the same on the ranks that tensors are cut over, and independent of it on others."""
        mesh, shares = self.mesh, self.mesh.size("dp_cp")
        if mesh.size("pp") * shares == 1:
            return nullcontext()
        return random_state_of(mesh.rank("pp") * shares + mesh.rank("dp_cp"))

    def _on_all_stages(self, value: float) -> float:
        """What the last stage knows, and the others have as 0."""
        if self.mesh.size("pp") == 1:
            return value
        known = torch.tensor(value, dtype=torch.float64, device=self.device)
        return float(comm.all_reduce(known, group=self.mesh.group("pp")))

    @property
    def loss_scale(self) -> float:
        """What the next step's loss is multiplied by; see `Engine`."""
        return self.precision.scale

    @property
    def skipped(self) -> int:
        """Steps that were not made; see `Engine`."""
        return self.precision.skipped

    def evaluate(self, inputs: Tensor, targets: Tensor, metric: Loss | None = None) -> float:
        """The mean of a metric over a global batch; see `Engine.evaluate`.

        Sends 32 (n - 1) / n bytes, with pp 16 (p - 1) / p more, and what forward passes send. With tp a
        metric other than `cross_entropy` has the logits gathered.
        """
        require_batch(inputs, targets)
        require_metric(metric)
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        training = {module: module.training for module in self.model.modules()}  # frozen parts may not be
        self.model.eval()
        try:
            if len(inputs) or self.strategy.gathers:
                x, y, share = self.part.cut(inputs.to(self.device), targets.to(self.device))
                with torch.no_grad():
                    total[0] = self.passes.evaluate(x, y, metric or self.loss) * share
                total[1] = len(inputs) * share
        finally:
            for module, mode in training.items():
                module.training = mode
        comm.all_reduce(total, group=self.strategy.group)
        value, rows = total.tolist()
        return self._on_all_stages(value) / rows if rows else math.nan

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and buffer, one after the other; see `Engine.whole` and `Placement.whole`."""
        return self.placement.whole(self.strategy.whole())

    def full_state_dict(self) -> dict[str, Tensor]:
        """Every parameter and buffer; see `Engine.full_state_dict` and `Placement.full_state_dict`."""
        return self.placement.full_state_dict(self.strategy.full_state_dict())

    def memory(self) -> Memory:
        """What this rank holds; see `Engine.memory`."""
        return count(self.strategy.held(), self._activations.last)

    # The training state, in the terms of one process: what a checkpoint saves and loads.

    def chunks(self) -> Iterator[TensorBox]:
        """This rank's boxes of the whole state; see `Strategy.chunks`."""
        return self.placement.chunks(self.strategy.chunks())

    def state_settings(self) -> dict[str, Any]:
        """The state that is no tensor; see `Strategy.settings`."""
        return self.placement.settings(self.strategy.settings())

    def load_state_settings(
        self, settings: Mapping[str, Any], state: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Make room for what is loaded; see `Strategy.load_settings`."""
        self.placement.load_settings(self.strategy, settings, state)

    def settings(self) -> dict[str, Any]:
        """What a step depends on beside the strategy's state; plain values, the same on all ranks."""
        return {"rows": self._rows, "precision": self.precision.settings()}

    def load_settings(self, settings: Mapping[str, Any]) -> None:
        """Take what `settings` gave, here or on another number of ranks."""
        self._rows = settings["rows"]
        self.precision.load_settings(settings["precision"])
