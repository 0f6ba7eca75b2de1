"""ZeRO 3 for a loop of one's own: each rank keeps an n-th of parameters, gradients and optimizer state.

The model is cut into units (units.py), such as transformer blocks. A unit's parameters are gathered just
before its forward pass, and again before its backward pass, and freed after each. After the backward pass its
gradients are reduced, and each rank keeps the sum of its n-th.

Sources: Rajbhandari et al. 2020, "ZeRO", section 5.3 and 7.2.2; Zhao et al. 2023, "PyTorch FSDP".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from minidist.comm.work import Group
from minidist.parallel.contract.residency import ZERO_3
from minidist.parallel.contract.user_functions import MakeOptimizer
from minidist.parallel.flat.gradients import GradientComm
from minidist.parallel.sharding.loops.loop_classes import check_fully_shard_arguments, delegated
from minidist.parallel.sharding.optimizer.memory_source import memory_source
from minidist.parallel.sharding.sets.parameter_set import ParameterSet
from minidist.parallel.sharding.units import gathered_model
from minidist.parallel.sharding.units.cut_into_units import Units
from minidist.parallel.sharding.units.sharded_parameters import ShardedParameters


class FullyShard(nn.Module):
    """A module whose parameters, gradients and optimizer state are sharded, with its optimizer.

    >>> sharded = md.FullyShard(model, torch.optim.AdamW, lr=1e-3)
    >>> cross_entropy(sharded(inputs), targets).backward()
    >>> sharded.step()
    >>> sharded.zero_grad()

    Gradients are means over the ranks, as in `DataParallel`; with several backward passes before a step they
    add up. Every rank makes the same calls. Outside a pass, reading the module's parameters is an error, and
    `summon` shows them. `requires_grad` may change between steps, on all ranks alike. A unit may be called by
    itself, forward and backward, by all ranks alike. `optimizer.zero_grad`, and `optimizer.step` if no state
    lies on disk, do as the methods here.

    Args:
        module: the model; the same architecture on all ranks. On the meta device it is made unit by unit, so
            that the whole model is never in memory. Otherwise its memory is given back unit by unit.
        optimizer_class: the class of an optimizer. One that looks at whole parameters updates each of them on
            its owner (whole_on_owners.py). Or a function from parameters to one: it is given stand-ins of the
            parameters' shapes, and may form groups of them and leave some out.
        group: the ranks that share the batch; None for all.
        offload: "cpu" keeps shards, gradients and optimizer state in CPU memory; a directory keeps them in
            files there, and has the optimizer step on slices (memory_source.py). False: with the module.
        units: classes of modules, or modules, that are gathered as a whole; None for the children of every
            nn.ModuleList and nn.Sequential.
        initialize: gives a submodule's own parameters their first values if they were on the meta device;
            None for the model's method `initialize_part`, else each submodule's `reset_parameters`.
        prefetch: gather the next unit while one computes. None: only if messages leave the computing cores
            free. Where ranks gather through memory that they share, it gains nothing and takes the memory of
            a unit (`minidist bench zero --full`).
        master: dtype of the copies that the optimizer updates; None for the parameters' own.
        **defaults: of the optimizer, such as lr.

    Raises TypeError or ValueError if an argument is wrong, the ranks' modules differ, another object trains
    the module or has sharded it, or an embedding has max_norm; OSError if offload's directory takes no files.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer_class: type[torch.optim.Optimizer] | MakeOptimizer,
        group: Group | GradientComm = None,
        offload: bool | str | os.PathLike[str] = False,
        *,
        units: Units = None,
        initialize: Callable[[nn.Module], object] | None = None,
        prefetch: bool | None = None,
        master: torch.dtype | None = None,
        **defaults: Any,
    ) -> None:
        super().__init__()
        check_fully_shard_arguments(module, optimizer_class, units, initialize, prefetch, master)
        given = {"units": units, "initialize": initialize, "prefetch": prefetch, "master": master, **defaults}
        memory = memory_source(offload)
        sets = [ParameterSet(ZERO_3, GradientComm.over(group), memory=memory, sum_dtype=master)]
        self.module = module
        self.shared = ShardedParameters(module, optimizer_class, sets, memory, **given)
        self.group, self.optimizer = self.shared.group, self.shared.optimizer

    forward = delegated("shared", ShardedParameters.forward)
    synchronize = delegated("shared", ShardedParameters.sum_over_ranks)
    clip_grad_norm = delegated("shared", ShardedParameters.clip_grad_norm)
    step = delegated("shared", ShardedParameters.update)
    zero_grad = delegated("shared", ShardedParameters.forget)
    no_sync = delegated("shared", ShardedParameters.no_sync)
    summon = delegated("shared", gathered_model.summon)
    named_shards = delegated("shared", gathered_model.named_shards)
    bytes_per_step = delegated("shared", ShardedParameters.bytes_per_step)

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's shards with names that number them, including those that the optimizer leaves out."""
        yield from ((f"shard.{number}", piece) for number, piece in enumerate(self.shared.pieces()))

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Copies of all parameters and buffers, in full, under the module's names. A collective."""
        with self.summon():
            state = self.module.state_dict(*args, **kwargs)
            return {name: v.detach().clone() if isinstance(v, Tensor) else v for name, v in state.items()}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Take the module's state, in full and the same on all ranks. A collective."""
        with self.summon():
            return self.module.load_state_dict(state_dict, strict)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        raise TypeError("a FullyShard cannot be moved or converted; do it to the module before it is sharded")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a FullyShard cannot be copied or pickled; save its state_dict()")
