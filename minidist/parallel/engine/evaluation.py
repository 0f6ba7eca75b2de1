"""An engine without training: means of metrics over batches or loaders, and predictions for all rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from minidist import comm
from minidist.comm.work import Group, rank_in, ranks_of
from minidist.parallel.context import zigzag_order
from minidist.parallel.contract.batch import joined, mapped, moved, require_batch, rows_of, tensors
from minidist.parallel.contract.engine import Loss, evaluating
from minidist.parallel.engine.engine_state import EngineState
from minidist.parallel.engine.rank_model import NOTHING, Pair, as_batch, is_list, pairs_of, takes_model
from minidist.parallel.flat.gathering import gather_values
from minidist.parallel.guards.refusals import require_metric
from minidist.parallel.training.batch_norm import average_statistics


class Evaluation(EngineState):
    """An engine's methods that compute without training."""

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield this rank's batches until the loaders of all ranks have ended, for loaders that differ.

        >>> for batch in engine.batches(loader):
        ...     engine.step(batch)

        A rank whose loader has ended gets its last batch again. It takes part in every collective with it,
        but with weight 0. (A rank without any gets one of another rank.) Torch's counterpart is `Join`. Each
        batch sends n - 1 bytes over the data-parallel ranks, and the end as many.
        """
        try:
            for batch, counts in aligned(loader, self.strategy.group):
                self._counts = float(counts)
                yield batch
        finally:
            self._counts = 1.0

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
        named = {"": metric} if metrics is None else dict(metrics)
        for each in named.values():
            require_metric(each)
            if takes_model(each) and self.layout.pp > 1:
                raise ValueError(
                    f"the metric takes the model, and the layout has pp={self.layout.pp}, where no rank can "
                    "call the whole model; give a metric of outputs and targets"
                )
        if callable(targets):
            raise TypeError(
                "targets are a function; name a metric, as in engine.evaluate(loader, metric=accuracy)"
            )
        total = torch.zeros(len(named), 2, dtype=torch.float64, device=self.device)
        average_statistics(self.model, self.strategy.group)
        is_one = self.executor.objective.takes_model
        with evaluating([self.model]):
            if targets is NOTHING and is_loader(inputs):
                for batch, counts in aligned(inputs, self.strategy.group):
                    for pair in pairs_of(batch, NOTHING, is_one):
                        total += self._evaluate(pair, float(counts), [*named.values()])
            else:
                for pair in pairs_of(inputs, targets, is_one):
                    total += self._evaluate(pair, 1.0, [*named.values()])
        comm.all_reduce(total, group=self.strategy.group)
        if self.mesh.size("pp") > 1:
            comm.all_reduce(total, group=self.mesh.group("pp"))
        means = [value / weight if weight else math.nan for value, weight in total.tolist()]
        return means[0] if metrics is None else dict(zip(named, means, strict=True))

    def _evaluate(self, pair: Pair, counts: float, metrics: list[Loss | None]) -> Tensor | float:
        require_batch(*pair)
        if not rows_of(pair[0]) and not self.strategy.gathers:
            return 0.0
        return self.executor.evaluate(self.part.batch(pair, counts, self.device), metrics)

    def predict(self, inputs: Any) -> Any:
        """The outputs for all ranks' rows, on every rank, without training: those of rank 0's rows first.

        Each tensor whose first dimension is the rows is joined; anything else in the outputs is that of the
        first rows. With tp the logits are whole, with cp the tokens in order.

        Sends the bytes of a forward pass, and n - 1 times this rank's outputs, through the CPU.

        inputs: this rank's rows as for `step`, without targets, possibly none.
        """
        require_batch(inputs, inputs)
        average_statistics(self.model, self.strategy.group)
        found = None
        if rows_of(inputs) or self.strategy.gathers:
            own = self.part.batch((inputs, inputs), 1.0, self.device)
            with evaluating([self.model]):
                found = self.executor.predict(own.inputs)
        found = mapped(Tensor.cpu, found) if rows_of(inputs) else None
        if self.mesh.size("pp") > 1:
            stages = gather_values(found, self.mesh.group("pp"))
            found = next((each for each in stages if each is not None), None)  # that of the last stage
        if (share := self.part.share) is not None:
            parts = gather_values(found, share.group)
            found = None if found is None else _restored(parts, found, share.length or 0)
        everyones = [each for each in gather_values(found, self.mesh.group("dp")) if each is not None]
        if not everyones:
            raise ValueError("no rank has rows to predict; give at least one of them a row")
        return moved(joined(everyones, found), self.device)


def _restored(parts: list[Any], like: Any, length: int) -> Any:
    """Outputs with all tokens, from those of context-parallel ranks, each with its part of them."""
    sizes = [zigzag_order.size(length, len(parts), rank) for rank in range(len(parts))]
    others = [iter([x for _, x in tensors(part)]) for part in parts]

    def restore(_: Tensor) -> Tensor:
        pieces = [next(other) for other in others]
        are_cut = all(x.dim() > 1 and x.shape[1] == size for x, size in zip(pieces, sizes, strict=True))
        return zigzag_order.join(pieces, 1) if are_cut else pieces[0]

    return mapped(restore, like)


def is_loader(given: Any) -> bool:
    """Whether it gives batches, one after the other."""
    if isinstance(given, Tensor | Mapping | tuple | str) or not isinstance(given, Iterable):
        return False
    return not isinstance(given, list) or is_list(given)


def aligned(loader: Iterable[Any], group: Group) -> Iterator[tuple[Any, bool]]:
    """A rank's batches, and whether each counts: until all of the group's ranks have run out.

    A rank that has run out gets its last batch again, which does not count. One that has none at all gets the
    first batch of another rank. Each batch sends n - 1 bytes, and the end as many.
    """
    batches, batch, is_first = iter(loader), NOTHING, True
    while True:
        new = next(batches, NOTHING)
        own = torch.tensor([new is not NOTHING], dtype=torch.uint8, device=comm.device())
        have = comm.all_gather(own, group=group).tolist() if len(ranks_of(group)) > 1 else own.tolist()
        if not any(have):
            return
        if is_first and not all(have):
            sends = have.index(1) == rank_in(group)
            own_first = mapped(Tensor.cpu, as_batch(new)) if sends else None
            batch = gather_values(own_first, group)[have.index(1)]
        if new is not NOTHING:
            batch = as_batch(new)
        is_first = False
        yield batch, new is not NOTHING
