"""`Engine`: a training step with the result of one process on the whole batch, for any layout.

This file has the order of forward, backward, communication and update, the mean over rows if shares or
micro-batches differ in size, and the loss over all ranks. The engine has four parts, and asks them for the
rest: an executor runs a batch through this rank's part of the model (step_executor.py, for a pipeline
staged_passes.py), a strategy decides how data-parallel ranks share the work, a tensor map knows where this
rank's tensors lie in the whole model (tensor_map.py), and evaluation.py computes without training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from minidist import comm
from minidist.model.seeding import random_state_of
from minidist.parallel.contract.batch import NOTHING, check_rows, is_list, pairs_of, shapes, tensors
from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.memory_report import Memory, memory_of
from minidist.parallel.contract.tensor_boxes import TensorBox
from minidist.parallel.contract.user_functions import Loss, requires_closure
from minidist.parallel.engine import evaluation
from minidist.parallel.engine.partition_model import RankModel
from minidist.parallel.engine.same_rows import require_same_rows
from minidist.parallel.engine.staged_passes import StagedPasses
from minidist.parallel.engine.step_executor import RankBatch, StepExecutor, WholePasses
from minidist.parallel.experts.load_balance import balance_experts, balanced_routers
from minidist.parallel.guards.refusals import gradients_are_off, refuse_copy, refuse_growth
from minidist.parallel.sharding import state_by_name
from minidist.parallel.sharding.sharded import Sharded
from minidist.parallel.training.activation_memory import ActivationCounter
from minidist.parallel.training.batch_norm import average_statistics
from minidist.parallel.training.clipping import clip_factor
from minidist.parallel.training.precision import Precision


class Engine:
    """Trains a model on all ranks of a layout, to the weights that one process would have reached.

    After the same steps on the same global batches, every full parameter equals that of single-process
    training, to rounding, for each strategy, any number of ranks, and shares of different sizes. `prepare`
    makes it from this rank's part of the model, and the strategy of the ranks that have the same part.

    Attributes:
        model: the module, or this rank's part of it.
        optimizer: the optimizer of this rank's part; learning-rate schedulers take it. If it has further
            methods, such as a schedule-free one's `train` and `eval`, all ranks call them together.
        data_rank, data_ranks: this rank's index among the ranks that share a batch's rows, and their number,
            as `Sampler` takes them. Ranks that split the model and not the batch have the same index.
        data_group: those ranks, for a loss that gathers rows.
        grad_norm: the norm of the last step's gradients over all ranks, before clipping; None if the step
            neither clips nor scales its loss. If the optimizer evaluates several times, the last one's.
    """

    def __init__(
        self,
        part: RankModel,
        strategy: Sharded,
        layout: Layout,
        loss: Loss | None,
        precision: Precision,
        clip_norm: float | None = None,
    ) -> None:
        self.model, self.part, self.strategy, self.layout = part.model, part, strategy, layout
        self.loss, self.precision, self.clip_norm = loss, precision, clip_norm
        kind = StagedPasses if layout.pp > 1 else WholePasses
        self.executor: StepExecutor = kind(part, strategy, layout, loss, precision)
        self.mesh, self.tensor_map, self.device = part.mesh, part.tensor_map, self.executor.device
        self._routers = balanced_routers(self.model)
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
        self.data_group = self.mesh.group("dp")
        self.saving: Any = None  # the last `Saving` of this engine
        self.rehearsal: Any = None  # the `Rehearsal` of this engine's steps, while it may still run
        self.within: AbstractContextManager[Any] | None = None  # in which passes run, in a rehearsal
        self.before_update: Callable[[], None] | None = None
        self._weight = 0.0  # of the last global batch's loss, the same on all ranks: its rows, as a rule
        self._has_stepped = False  # since this engine was made
        self.is_padding = False  # in `batches`, once this rank's loader has ended
        # Dropout is the same on ranks that tp cuts tensors over, and independent on all others.
        parts = self.mesh.size("pp"), self.mesh.size("dp_cp")
        stream = self.mesh.rank("pp") * parts[1] + self.mesh.rank("dp_cp")
        self._random_stream = stream if max(parts) > 1 else None
        self._stages = self.mesh.group("pp")
        # Whether the last stage of a pipeline has to tell the others the weight; the first step finds out.
        self._is_weighted = None if layout.pp > 1 else False
        # Bytes at their peak, by the shapes of a batch: counting takes microseconds for each saved tensor.
        self._activations: dict[Any, int] = {}
        self.last_activations = 0  # of the last step
        self.tensor_map.join_groups(strategy)

    __deepcopy__ = refuse_copy

    def step(self, inputs: Any, targets: Any = NOTHING) -> float:
        """Train on one global batch; each rank passes its data-parallel share of the rows.

        >>> engine.step(inputs, targets)
        >>> engine.step({"input_ids": tokens, "labels": tokens})  # as a loader of transformers gives
        >>> engine.step([first, second])  # two batches of this rank, as one

        A batch is a tensor, or tensors in tuples, dicts and dataclasses; their first dimension is the rows.
        A list in it with one item for each row, such as the captions of images, is cut with the rows.
        The model is called with the inputs: `model(**dict)`, `model(*tuple)` or `model(x)`. Without
        `targets`, a pair is inputs and targets; of anything else the model gets the batch, and the loss gets
        the batch as its targets. A list of batches is accumulated: ranks may have different numbers of them.

        Sends the bytes of the strategy, of tensor, context and expert parallelism in each pass, and of the
        pipeline. Balanced experts add `balance_experts`, FP8 what training/fp8.py says.
        The first step adds 2 (n - 1) / n 8 bytes for the rows, and what agreeing on the buckets takes. With
        pp, each step sends as many bytes for the loss, and again for a weight that it returns; a list sends
        as many for its length. With clipping or "fp16", and with sharded gradients or parts of the model, it
        sends as many for the norm. No ledger has a rehearsal's messages, nor those of `require_same_rows` in
        the first step.

        Args:
            inputs: this rank's rows, at least one.
            targets: their targets.

        Returns:
            The mean loss over the global batch, the same number on all ranks. NaN if its weight is 0, as
            where no label counts; then nothing changes.

        Raises:
            TypeError: inputs or targets have no tensors with rows.
            ValueError: no rows, tensors with different numbers of them, in the first step other rows than
                those of a rank that has to pass the same, or a step that differs from one process's; see
                `prepare`.
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
        batches = [self.executor.own_batch(pair, self.is_padding) for pair in pairs]
        if targets is NOTHING and is_list(inputs):
            batches += self._padding(batches)
        for router in self._routers:
            router.counts = 0  # the step before may have been skipped, or have failed
        is_first, self._has_stepped = not self._has_stepped, True
        if self.rehearsal is not None and self.rehearsal.due(self, pairs):
            loss = self.rehearsal.step(self, pairs, batches)
            if loss is not None:
                return float(loss)
        elif is_first:
            require_same_rows(self.data_rank, self.data_ranks, pairs)
        return self._train_and_measure(batches)

    def _padding(self, batches: Sequence[RankBatch]) -> list[RankBatch]:
        """Batches that do not count, up to the longest list of all ranks: passes may be collectives."""
        most = torch.tensor(float(len(batches)), dtype=torch.float64, device=self.device)
        comm.all_reduce(most, "max", group=self.strategy.group)
        return [batches[-1]._replace(is_padding=True)] * (int(most) - len(batches))

    def _train_and_measure(self, batches: Sequence[RankBatch]) -> float:
        """Train, and count the activations of the first batch of its kind."""
        kind = *((*shapes(each.inputs), *shapes(each.targets)) for each in batches), self.model.training
        if kind in self._activations:
            self.last_activations = self._activations[kind]
            return self._train(batches)
        found = (x for each in batches for _, x in tensors((each.inputs, each.targets)))
        with ActivationCounter(self.model, found) as counter:  # the batch belongs to the caller
            loss = self._train(batches)
        self.last_activations = self._activations[kind] = counter.peak
        return loss

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
        draws = nullcontext() if self._random_stream is None else random_state_of(self._random_stream)
        with draws, self.within or nullcontext():
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
        if self.clip_norm is not None or self.precision.scales:
            self.grad_norm = norm = self.tensor_map.norm(strategy) * factor
            if self.precision.skips(norm):
                strategy.drop()
                return loss
            if self.clip_norm is not None:
                factor *= clip_factor(norm, self.clip_norm)
        if self.before_update is not None:
            self.before_update()
        if factor != 1:
            strategy.rescale(factor, kept=False)
        if updates:
            strategy.update()
            self._updated()
        return loss

    def _updated(self) -> None:
        """Do what follows an update: give tied copies the first one's values, and balance the experts."""
        self.executor.updated()
        if self.precision.fp8 is not None:
            self.precision.fp8.end_step()
        if self._routers:
            shares_rows = self.layout.sequence_parallel
            more = [self.mesh.group("tp")] if shares_rows else []
            balance_experts(self._routers, self.strategy.group, *more)

    def _train_by_closure(self, batches: Sequence[RankBatch]) -> float:
        """Let the optimizer evaluate the loss, as often as it likes; returns its first value."""
        losses: list[float] = []

        def closure() -> Tensor:
            with torch.enable_grad():
                losses.append(self._train(batches, updates=False))
            self.before_update = None  # of the first evaluation alone
            return torch.tensor(losses[-1], dtype=torch.float64, device=self.device)

        self.strategy.update(closure)
        self._updated()
        return losses[0]

    def _on_all_stages(self, value: float) -> float:
        """Give all stages the value of the last one; the others pass 0."""
        if self.layout.pp == 1:
            return value
        known = torch.tensor(value, dtype=torch.float64, device=self.device)
        return float(comm.all_reduce(known, group=self._stages))

    # Batches and metrics without training.

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield this rank's batches until the loaders of all ranks have ended, for loaders that differ.

        >>> for batch in engine.batches(loader):
        ...     engine.step(batch)

        A rank whose loader has ended gets its last batch again. It takes part in every collective with it,
        but with weight 0. (A rank without any gets one of another rank.) Torch's counterpart is `Join`. Each
        batch sends n - 1 bytes over the data-parallel ranks, and the end as many. Ranks of a pipeline, or of
        tp or cp, pass the same batches: ValueError, on all ranks, where one ends before another. That sends
        16 (N - 1) bytes more for each, over all N ranks.
        """
        try:
            for batch, is_padding in evaluation.aligned(loader, self.strategy.group, self.mesh):
                self.is_padding = is_padding
                yield batch
        finally:
            self.is_padding = False

    def evaluate(
        self,
        inputs: Any,
        targets: Any = NOTHING,
        metric: Loss | None = None,
        metrics: Mapping[str, Loss | None] | None = None,
    ) -> Any:
        """The mean of `metric(outputs, targets)` over the global batch, or over loaders, without training.

        For each batch the bytes of forward passes, and of `batches` with a loader. At the end 32 (n - 1) / n
        bytes for each metric, with pp 32 (p - 1) / p more. With tp, a metric other than `cross_entropy`
        gathers the logits.

        Args:
            inputs, targets: a batch as for `step`, this rank's rows, possibly none. Or an iterable of
                batches, such as a DataLoader; the ranks' may end at different times, or have none.
            metric: a mean over rows, or (mean, weight), as a loss: of outputs and targets, or, if its first
                argument is called `model`, of the model and the batch. None for the loss.
            metrics: several by name, in place of `metric`: {"accuracy": accuracy, "loss": None}.

        Returns:
            The mean, the same on all ranks; NaN if there are no rows at all. With `metrics` a dict of means.
        """
        return evaluation.means(self.executor, inputs, targets, metric, metrics)

    def predict(self, inputs: Any) -> Any:
        """The outputs for all ranks' rows, on every rank, without training: those of rank 0's rows first.

        Each tensor whose first dimension is the rows is joined; anything else in the outputs is that of the
        first rows. With tp the logits are whole, with cp the tokens in order.

        Sends the bytes of a forward pass, and n - 1 times this rank's outputs, through the CPU.

        inputs: this rank's rows as for `step`, without targets, possibly none.
        """
        return evaluation.predictions(self.executor, inputs)

    # The state of the training, whole or in this rank's boxes, and its memory.

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """The items of `full_state_dict` one by one, in any order, so that no rank needs memory for all.

        A collective: every rank iterates to the end. Each tensor may be the engine's own, which the next
        step changes: copy what you keep longer, and do not write to it. Each tensor that tp or ep cut is
        summed over its t ranks, which sends 2 (t - 1) / t of its bytes. With pp, each stage broadcasts its
        tensors, joined to messages of up to 25 MB.
        """
        average_statistics(self.model, self.strategy.group)
        return self.tensor_map.whole(self.strategy.whole())

    def full_state_dict(self) -> dict[str, Tensor]:
        """Copies of every parameter and buffer in full, by the names in the model given to `prepare`.

        They are the same on all ranks, with BatchNorms' statistics, and lie on the model's device.
        """
        copies = {name: value.clone() for name, value in self.whole()}  # ZeRO 3 gives them unit by unit
        return {name: copies[name] for name in self.tensor_map.entries}

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
        state, first = self.full_state_dict(), self.tensor_map.first
        weights = {name: state[first[name]] for name in first if first[name] in state}
        yield weights
        self.tensor_map.write(weights, self.state_boxes())
        state_by_name.loaded(self.strategy)

    def state_boxes(self) -> Iterator[TensorBox]:
        """This rank's boxes of the whole state, as for `state_by_name.state_boxes`."""
        return self.tensor_map.boxes(state_by_name.state_boxes(self.strategy))

    def state_settings(self) -> dict[str, Any]:
        """The state that is not a tensor, as for `state_by_name.settings`."""
        return self.tensor_map.settings(state_by_name.settings(self.strategy))

    def load_state_settings(
        self, settings: Mapping[str, Any], state: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Restore the settings and allocate the state, as for `state_by_name.load_settings`."""
        self.tensor_map.load_settings(self.strategy, settings, state)

    def settings(self) -> dict[str, Any]:
        """The engine's own state besides the strategy's: plain values, the same on all ranks."""
        # The key is older than losses that count by a weight of their own.
        return {"rows": self._weight, "precision": self.precision.settings()}

    def load_settings(self, settings: Mapping[str, Any]) -> None:
        """Restore what `settings` returned, on this or another number of ranks."""
        self._weight = settings["rows"]
        self.precision.load_settings(settings["precision"])

    def memory(self) -> Memory:
        """Bytes on this rank now, from tensor storages, each counted once; prints as a small table.

        Activations are those of the last step at their peak, 0 before the first step. They are counted in the
        first step with each shape of batch.
        """
        return memory_of(self.strategy.held(), self.last_activations)

    @property
    def loss_scale(self) -> float:
        """The factor on the next step's loss before its backward pass; 1 unless the precision is "fp16"."""
        return self.precision.scale

    @property
    def skipped(self) -> int:
        """How many steps changed nothing because a gradient was not finite; only "fp16" skips steps."""
        return self.precision.skipped


def check_engine(engine: Engine) -> None:
    """Raise TypeError unless `engine` is what `md.prepare` returned."""
    if not isinstance(engine, Engine):
        raise TypeError(f"engine is a {type(engine).__name__}; give what md.prepare returned")
