"""The state of an engine: all tensors of the training, whole or in this rank's boxes, and their memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.memory_report import Memory, memory_of
from minidist.parallel.contract.strategy import Strategy, TensorBox
from minidist.parallel.contract.user_functions import Loss, requires_closure
from minidist.parallel.engine.rank_model import RankModel
from minidist.parallel.engine.staged_passes import StagedPasses
from minidist.parallel.engine.step_executor import StepExecutor, WholePasses
from minidist.parallel.flat.ranges import narrowed
from minidist.parallel.guards.refusals import refuse_growth
from minidist.parallel.training.activation_memory import ActivationPeaks
from minidist.parallel.training.batch_norm import average_statistics
from minidist.parallel.training.precision import Precision


class EngineState:
    """An engine without its step and its evaluation."""

    def __init__(
        self,
        part: RankModel,
        strategy: Strategy,
        layout: Layout,
        loss: Loss | None,
        precision: Precision,
        clip_norm: float | None = None,
    ) -> None:
        self.model, self.part, self.strategy, self.layout = part.model, part, strategy, layout
        self.loss, self.precision, self.clip_norm = loss, precision, clip_norm
        kind = StagedPasses if layout.pp > 1 else WholePasses
        self.executor: StepExecutor = kind(part, strategy, layout, loss, precision)
        self.mesh, self.placement = part.mesh, part.placement
        self.optimizer = strategy.optimizer
        self.optimizer.add_param_group = refuse_growth  # type: ignore[method-assign, assignment]
        self.takes_closure = requires_closure(self.optimizer)
        if self.takes_closure and layout.precision != "fp32":
            raise ValueError(
                f"precision is {layout.precision!r}, and the optimizer's step evaluates the loss itself: it "
                "would change copies in float32, which the model does not see; use precision='fp32'"
            )
        self.grad_norm: float | None = None
        self.data_rank, self.data_ranks = self.mesh.rank("dp"), self.mesh.size("dp")
        self.device = next((p.device for p in part.model.parameters()), self.placement.device)
        self._weight = 0.0  # of the last global batch's loss, the same on all ranks: its rows, as a rule
        self._is_padding = False  # in `batches`, once this rank's loader has ended
        # Whether the last stage of a pipeline has to tell the others the weight; the first step finds out.
        self._is_weighted = None if layout.pp > 1 else False
        self.saving: Any = None  # the last `Saving` of this engine
        self._activations = ActivationPeaks(self.model)
        self.rehearsal: Any = None  # the `Rehearsal` of this engine's steps
        self.within: AbstractContextManager[Any] | None = None  # in which passes run, in a rehearsal
        self.before_update: Callable[[], None] | None = None
        self.placement.join_groups(strategy)

    def __deepcopy__(self, memo: Any) -> EngineState:
        """Refuse: groups of ranks, hooks and shared memory cannot be copied."""
        raise TypeError(
            "an engine cannot be copied, since its ranks talk to each other through it; prepare another one, "
            "and give its model these weights, engine.full_state_dict(), or load a checkpoint into it"
        )

    @property
    def reports_norm(self) -> bool:
        """Whether each step computes the norm of the gradients."""
        return self.clip_norm is not None or self.precision.scales

    @property
    def data_group(self) -> Any:
        """The ranks that have other rows of the batch, for a loss that gathers rows."""
        return self.mesh.group("dp")

    @property
    def loss_scale(self) -> float:
        """The factor on the next step's loss before its backward pass; 1 unless the precision is "fp16"."""
        return self.precision.scale

    @property
    def skipped(self) -> int:
        """How many steps changed nothing because a gradient was not finite; only "fp16" skips steps."""
        return self.precision.skipped

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """The items of `full_state_dict` one by one, in any order, so that no rank needs memory for all.

        A collective: every rank iterates to the end. Each tensor may be the engine's own, which the next
        step changes: copy what you keep longer, and do not write to it. Each tensor that tp cut is summed
        over tp, which sends 2 (t - 1) / t of its bytes. With pp, each stage broadcasts its tensors, joined
        to messages of up to 25 MB.
        """
        average_statistics(self.model, self.strategy.group)
        return self.placement.whole(self.strategy.whole())

    def full_state_dict(self) -> dict[str, Tensor]:
        """Copies of every parameter and buffer in full, by the names in the model given to `prepare`.

        They are the same on all ranks, with BatchNorms' statistics, and lie on the model's device.
        """
        copies = {name: value.clone() for name, value in self.whole()}  # stage 3 gives them unit by unit
        return {name: copies[name] for name in self.placement.entries}

    @contextmanager
    def summon(self) -> Iterator[dict[str, Tensor]]:
        """Inside, this rank has every parameter in full; afterwards the engine has what was written to them.

        >>> with engine.summon() as weights:
        ...     for weight in weights.values():
        ...         weight.clamp_(-0.01, 0.01)

        For what one process would do to its weights between steps: clip them, move a teacher towards its
        student, normalize a matrix. They have the names in the model given to `prepare`, and tied ones are
        one tensor. Every rank writes the same values. Where a value stays, its master weight does too. An
        error inside leaves the engine as it was.

        A collective; it sends what `full_state_dict` sends, and with sharded optimizer state in half
        precision a step's all-gather. Each rank has memory for one copy of all parameters.
        """
        state, first = self.full_state_dict(), self.placement.first
        weights = {name: state[first[name]] for name in first if first[name] in state}
        yield weights
        with torch.no_grad():
            for box in self.chunks():
                new = weights.get(box.name.removeprefix("model."))
                if new is not None and box.name.startswith("model."):
                    own, old = narrowed(new, box.offsets, box.tensor.shape), box.tensor
                    own = own.to(old.device)
                    old.copy_(torch.where(own == old.to(own.dtype), old, own.to(old.dtype)))
        self.strategy.loaded()

    def memory(self) -> Memory:
        """Bytes on this rank now, from tensor storages, each counted once; prints as a small table.

        Activations are those of the last step at their peak, 0 before the first step. They are counted in the
        first step with each shape of batch.
        """
        return memory_of(self.strategy.held(), self._activations.last)

    def chunks(self) -> Iterator[TensorBox]:
        """This rank's boxes of the whole state, as for `Strategy.chunks`."""
        return self.placement.boxes(self.strategy.chunks())

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
        return {"rows": self._weight, "precision": self.precision.settings()}

    def load_settings(self, settings: Mapping[str, Any]) -> None:
        """Restore what `settings` returned, on this or another number of ranks."""
        self._weight = settings["rows"]
        self.precision.load_settings(settings["precision"])
