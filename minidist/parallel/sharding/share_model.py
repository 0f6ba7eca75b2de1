"""`share_model`: the strategy for a model whose parameters stay whole on every rank, or are sharded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from minidist.parallel.compression.by_name import compression_of
from minidist.parallel.contract.residency import ROWS, Residency
from minidist.parallel.contract.training_state import names_of
from minidist.parallel.contract.user_functions import MakeOptimizer
from minidist.parallel.flat.gradients import GradientComm
from minidist.parallel.guards.refusals import refuse_state_of_slices
from minidist.parallel.sharding.loops.loop_classes import check_bucket_mb
from minidist.parallel.sharding.optimizer.memory_source import memory_source
from minidist.parallel.sharding.optimizer.optimizer_slices import OptimizerSlices
from minidist.parallel.sharding.sets.equal_start import start_equal
from minidist.parallel.sharding.sets.parameter_set import ParameterSet
from minidist.parallel.sharding.sharded import Sharded
from minidist.parallel.sharding.units.sharded_parameters import ShardedParameters
from minidist.parallel.sharding.units.units import weakly
from minidist.parallel.sharding.whole.whole_parameters import WholeParameters, WithSharedState
from minidist.parallel.training.elementwise_optimizers import refuse_unshareable
from minidist.parallel.training.master_weights import follow_own_methods, optimizer_of_masters


def share_model(
    model: nn.Module,
    optimizer: MakeOptimizer,
    residency: Residency,
    options: Mapping[str, Any] | None = None,
    master: torch.dtype | None = None,
    gradient_comm: GradientComm | None = None,
    others: Sequence[tuple[GradientComm, Collection[str]]] = (),
) -> Sharded:
    """A strategy for the ranks that train a model together, each of which keeps what a row of the table says.

    Making it is a collective.

    Args:
        residency: the row.
        options: where parameters are whole, of `DataParallel` (bucket_mb, overlap, compression, algorithm,
            broadcast_buffers); otherwise of `FullyShard`, such as offload.
        master: the dtype in which the optimizer updates copies of the parameters; None for no copies.
        gradient_comm: the ranks; None for all.
        others: names of parameters that only some of these ranks share, such as experts, after those ranks.
    """
    parts = [(gradient_comm or GradientComm(None), None), *others]
    given = dict(options or {})
    if residency.whole_parameters:
        return _share_whole(model, optimizer, residency, parts, given, master)
    memory = memory_source(given.pop("offload", False))
    # The engine weights the losses, so gradients are sums.
    shared_by = partial(ParameterSet, residency, average=False, memory=memory, sum_dtype=master)
    sets = [shared_by(*part) for part in parts]
    return ShardedParameters(model, optimizer, sets, memory, master=master, **given)


def _share_whole(
    model: nn.Module,
    make: MakeOptimizer,
    row: Residency,
    parts: Sequence[tuple[GradientComm, Collection[str] | None]],
    options: dict[str, Any],
    master: torch.dtype | None,
) -> WholeParameters:
    """Share parameters that stay whole."""
    if not row.whole_state and options.get("compression") is not None:
        zero = next(number for number, known in ROWS.items() if known == row)
        raise ValueError(
            f"compression is {options['compression']!r} with zero={zero} in the layout, which reduces "
            "gradients to their owners as they are; use zero=0 for compressed ones"
        )
    compression = compression_of(options.pop("compression", None))
    check_bucket_mb(options.get("bucket_mb", 25))
    algorithm = options.pop("algorithm", "auto")
    shared_by = partial(ParameterSet, row, average=False, compression=compression)
    sets = [shared_by(replace(over, algorithm=algorithm), names) for over, names in parts]
    start_equal(model, sets)
    # Where a rank owns all of a parameter, the optimizer gets it, or its master. Shares come later.
    names, parameters = names_of(model), [*model.parameters()]
    optimizer, updated = optimizer_of_masters(parameters, make, master if row.whole_state else None)
    slices = OptimizerSlices(optimizer, master)
    if row.whole_state:
        number_of = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        for index, (parameter, tensor) in enumerate(zip(parameters, updated, strict=True)):
            slices.add_whole(index, number_of.get(id(tensor)), parameter, tensor)
    else:
        refuse_unshareable(type(optimizer))
        optimizer.register_state_dict_pre_hook(refuse_state_of_slices)
        optimizer.register_load_state_dict_pre_hook(refuse_state_of_slices)
    groups = [[*group["params"]] for group in optimizer.param_groups]
    name_of = dict(zip(updated, map(names.__getitem__, parameters), strict=True))
    shared = (WholeParameters if row.whole_state else WithSharedState)(
        model.named_parameters,
        sets,
        slices,
        groups=[{"params": group} for group in groups],
        module=model,
        group_names=[[name_of[tensor] for tensor in group] for group in groups],
        **options,
    )
    if not row.whole_state or master is not None:
        follow_own_methods(optimizer, weakly(shared.after_own_method))
    return shared
