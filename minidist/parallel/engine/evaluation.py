"""An engine without training: means of metrics over batches or loaders, and predictions for all rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from minidist import comm
from minidist.comm.mesh import Mesh
from minidist.comm.work import Group, rank_in, ranks_of
from minidist.parallel.context_parallel import zigzag_order
from minidist.parallel.contract.batch import (
    NOTHING,
    as_batch,
    is_list,
    joined,
    mapped,
    pairs_of,
    require_batch,
    rows_of,
    tensors,
    to_device,
    with_a_row,
)
from minidist.parallel.contract.kept_attributes import evaluating
from minidist.parallel.contract.user_functions import Loss
from minidist.parallel.engine.same_rows import require_same_batches
from minidist.parallel.engine.step_executor import StepExecutor, takes_model
from minidist.parallel.flat.gathering import gather_values
from minidist.parallel.guards.refusals import require_metric
from minidist.parallel.training.batch_norm import average_statistics


def means(
    executor: StepExecutor,
    inputs: Any,
    targets: Any,
    metric: Loss | None,
    metrics: Mapping[str, Loss | None] | None,
) -> Any:
    """For `Engine.evaluate`: the mean of one metric, or a dict with the means of several."""
    part, group = executor.part, executor.strategy.group
    named = {"": metric} if metrics is None else dict(metrics)
    for each in named.values():
        require_metric(each)
        if takes_model(each) and executor.layout.pp > 1:
            raise ValueError(
                f"the metric takes the model, and the layout has pp={executor.layout.pp}, where no rank can "
                "call the whole model; give a metric of outputs and targets"
            )
    if callable(targets):
        raise TypeError(
            "targets are a function; name a metric, as in engine.evaluate(loader, metric=accuracy)"
        )
    total = torch.zeros(len(named), 2, dtype=torch.float64, device=executor.device)
    average_statistics(part.model, group)
    is_one = executor.objective.takes_model
    loads = targets is NOTHING and is_loader(inputs)
    with evaluating([part.model]):
        for batch, is_padding in aligned(inputs, group, part.mesh) if loads else [(inputs, False)]:
            for pair in pairs_of(batch, targets, is_one):
                require_batch(*pair)
                is_empty = not rows_of(pair[0])
                if executor.meets or not is_empty:
                    own = executor.own_batch(with_a_row(pair), is_padding or is_empty)
                    total += executor.evaluate(own, [*named.values()])
    comm.all_reduce(total, group=group)
    if part.mesh.size("pp") > 1:
        comm.all_reduce(total, group=part.mesh.group("pp"))
    found = [value / weight if weight else math.nan for value, weight in total.tolist()]
    return found[0] if metrics is None else dict(zip(named, found, strict=True))


def predictions(executor: StepExecutor, inputs: Any) -> Any:
    """For `Engine.predict`: the outputs for all ranks' rows, on every rank."""
    require_batch(inputs, inputs)
    part, found = executor.part, None
    average_statistics(part.model, executor.strategy.group)
    if rows_of(inputs) or executor.meets:
        own = executor.own_batch((with_a_row(inputs),) * 2)
        with evaluating([part.model]):
            found = executor.predict(own.inputs)
    found = mapped(Tensor.cpu, found) if rows_of(inputs) else None
    if part.mesh.size("pp") > 1:
        stages = gather_values(found, part.mesh.group("pp"))
        found = next((each for each in stages if each is not None), None)  # the last stage's
    if (share := part.token_share) is not None:
        parts = gather_values(found, share.group)
        found = None if found is None else _restored(parts, found, share.length or 0)
    everyones = [each for each in gather_values(found, part.mesh.group("dp")) if each is not None]
    if not everyones:
        raise ValueError("no rank has rows to predict; give at least one of them a row")
    return to_device(joined(everyones, found), executor.device)


def _restored(parts: list[Any], like: Any, length: int) -> Any:
    """Join the outputs of context-parallel ranks, each for its own tokens, into outputs for all tokens."""
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


def aligned(loader: Iterable[Any], group: Group, mesh: Mesh) -> Iterator[tuple[Any, bool]]:
    """A rank's batches, and whether each is padding: until all of the group's ranks have run out.

    A rank that has run out gets its last batch again, as padding. A rank without any batch gets the first
    batch of another rank. Each batch sends n - 1 bytes, and the end as many; with pp, tp or cp each also
    sends 16 (N - 1) over all N ranks. Raises ValueError if ranks that pass the same rows do not end together.
    """
    batches, batch, is_first = iter(loader), NOTHING, True
    while True:
        new = next(batches, NOTHING)
        require_same_batches(mesh.rank("dp"), mesh.size("dp"), int(new is not NOTHING))
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
        yield batch, new is NOTHING
