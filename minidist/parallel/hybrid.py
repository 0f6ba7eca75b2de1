"""The engine: a step whose result is that of one process on the whole batch, whatever the strategy.

The mean over rows where shares or micro-batches differ in size, the loss over all ranks, and the order of
forward, backward, communication and update are done here; how the ranks share the work is a strategy's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.parallel.clipping import clip_factor, global_norm
from minidist.parallel.engine import Engine, Loss, check_rows
from minidist.parallel.layout import Layout
from minidist.parallel.memory import ActivationPeaks, Memory, count
from minidist.parallel.precision import Precision
from minidist.parallel.strategy import Strategy


class HybridEngine(Engine):
    """Trains `model` by `strategy` over all ranks of the world.

    precision: to which the model was converted; None for its own. clip_norm: see `prepare`.
    """

    def __init__(
        self,
        model: nn.Module,
        strategy: Strategy,
        layout: Layout,
        loss: Loss,
        precision: Precision | None = None,
        clip_norm: float | None = None,
    ) -> None:
        self.model, self.strategy, self.layout, self.loss = model, strategy, layout, loss
        self.precision, self.clip_norm = precision or Precision("fp32"), clip_norm
        self.optimizer = strategy.optimizer
        self.data_rank, self.data_ranks = comm.rank(), comm.size()
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._rows = 0.0  # of the last global batch, the same on all ranks
        self.saving: Any = None  # the last `Saving` of this engine
        self._activations = ActivationPeaks(model)

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """Train on one global batch; see `Engine.step`.

        Bytes sent: the strategy's; in the first step 2 (n - 1) / n 8 for the rows, too, and what agreeing on
        the buckets takes. As many for the norm, where gradients are sharded and the step clips or has
        precision "fp16".
        """
        with self._activations.during(inputs, targets):
            return self._train(inputs, targets)

    def _train(self, inputs: Tensor, targets: Tensor) -> float:
        rows = check_rows(inputs, targets)
        strategy = self.strategy
        strategy.zero_grad()
        if not self._rows:
            total = torch.tensor(float(rows), dtype=torch.float64, device=self.device)
            self._rows = float(comm.all_reduce(total))

        # Compute, and send as gradients come. Each loss is weighted with its rows, since shares may differ in
        # size and so may micro-batches; sums over ranks are then means over rows. The number of all rows is
        # taken to be that of the last step, which all ranks know: to hear this step's would cost a message.
        # (Not 1, and the gradients divided later: that would cost a pass over them.)
        expected, scale = self._rows, self.precision.scale
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        # Where each pass is a collective, all ranks make as many, with no rows, too.
        parts = self.layout.micro_batches if strategy.gathers else min(self.layout.micro_batches, rows)
        micro_batches = zip(
            inputs.to(self.device).tensor_split(parts),
            targets.to(self.device).tensor_split(parts),
            strict=True,
        )
        for number, (x, y) in enumerate(micro_batches, 1):
            last = number == parts
            with nullcontext() if last else strategy.no_sync():
                loss = self._loss(x, y)
                loss_sum += loss.detach().double() * len(x)
                if last:
                    strategy.announce(float(rows), loss_sum)
                (loss * (scale * len(x) / expected)).backward()  # type: ignore[no-untyped-call]
        all_rows, all_loss = strategy.synchronize()
        if all_rows != expected:
            strategy.rescale(expected / all_rows)
            self._rows = all_rows

        # Skip or shorten, and update. All ranks have the same norm.
        factor = 1 / scale
        if self.clip_norm is not None or self.precision.scales:
            self.grad_norm = norm = global_norm(strategy.gradients(), strategy.sharded) * factor
            if self.precision.skips(norm):
                strategy.drop()
                return all_loss / all_rows
            if self.clip_norm is not None:
                factor *= clip_factor(norm, self.clip_norm)
        if factor != 1:
            strategy.multiply(factor)
        strategy.update()
        return all_loss / all_rows

    @property
    def loss_scale(self) -> float:
        """What the next step's loss is multiplied by; see `Engine`."""
        return self.precision.scale

    @property
    def skipped(self) -> int:
        """Steps that were not made; see `Engine`."""
        return self.precision.skipped

    def _forward(self, inputs: Tensor) -> Tensor:
        return self.precision.outputs(self.strategy.forward(self.precision.inputs(inputs)))

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        outputs = self._forward(inputs)  # let go when this returns, before the backward pass
        return self.loss(outputs, targets) if len(inputs) else outputs.sum()  # a sum of nothing: 0

    def evaluate(self, inputs: Tensor, targets: Tensor, metric: Loss | None = None) -> float:
        """The mean of a metric over a global batch; see `Engine.evaluate`.

        Sends 32 (n - 1) / n bytes, and what the strategy's forward pass sends.
        """
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        training = {module: module.training for module in self.model.modules()}  # frozen parts may not be
        self.model.eval()
        try:
            if len(inputs) or self.strategy.gathers:
                with torch.no_grad():
                    outputs = self._forward(inputs.to(self.device))
                    if len(inputs):
                        mean = (metric or self.loss)(outputs, targets.to(self.device))
                        total[0], total[1] = mean.double() * len(inputs), len(inputs)
        finally:
            for module, mode in training.items():
                module.training = mode
        comm.all_reduce(total)
        return float(total[0] / total[1])

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and buffer, one after the other; see `Engine.whole`."""
        return self.strategy.whole()

    def full_state_dict(self) -> dict[str, Tensor]:
        """Every parameter and buffer; see `Engine.full_state_dict`."""
        return self.strategy.full_state_dict()

    def settings(self) -> dict[str, Any]:
        """What a step depends on beside the strategy's state; plain values, the same on all ranks."""
        return {"rows": self._rows, "precision": self.precision.settings()}

    def load_settings(self, settings: Mapping[str, Any]) -> None:
        """Take what `settings` gave, here or on another number of ranks."""
        self._rows = settings["rows"]
        self.precision.load_settings(settings["precision"])

    def memory(self) -> Memory:
        """What this rank holds; see `Engine.memory`."""
        return count(self.strategy.held(), self._activations.last)
