"""ZeRO stage 3: each rank keeps an n-th of the parameters, their gradients and the optimizer's state.

The model is cut into units (units.py), such as transformer blocks. A unit's parameters are gathered
just before its forward pass and freed after it; gathered again before its backward pass, after which its
gradients are reduced, each rank keeps the sum of its n-th, and the rest is freed. Where messages leave the
cores free, the next unit is on its way while one computes.

Sources: Rajbhandari et al. 2020, "ZeRO", section 5.3 and 7.2.2; Zhao et al. 2023, "PyTorch FSDP".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.comm.errors import CollectiveError
from minidist.comm.transport.algorithm_choice import choose
from minidist.comm.work import Group, ranks_of
from minidist.parallel.contract.engine import MakeOptimizer
from minidist.parallel.flat.buckets import broadcast_together, require_same
from minidist.parallel.guards.ownership import FULLY_SHARD, claim, require_free
from minidist.parallel.guards.refusals import refuse_renormed
from minidist.parallel.sharding.arguments import check_arguments
from minidist.parallel.sharding.build_units import build
from minidist.parallel.sharding.elementwise_optimizers import require_elementwise
from minidist.parallel.sharding.offload import place_for
from minidist.parallel.sharding.optimizer_wrapper import follow
from minidist.parallel.sharding.parameter_groups import FlatParameterGroups
from minidist.parallel.sharding.unit_gradients import UnitGradients
from minidist.parallel.sharding.unit_runtime import UnitRuntime
from minidist.parallel.sharding.units import Units
from minidist.parallel.training.clipping import check_max_norm, clip_grad_norm


class FullyShard(nn.Module):
    """A module whose parameters, gradients and optimizer state are sharded, with its optimizer.

    >>> sharded = md.FullyShard(model, torch.optim.AdamW, lr=1e-3)
    >>> loss = cross_entropy(sharded(inputs), targets)
    >>> loss.backward()
    >>> sharded.step()
    >>> sharded.zero_grad()

    Gradients are means over the ranks, as in `DataParallel`; with several backward passes before a step they
    add up. Every rank makes the same calls. Outside a pass the module's own parameters hold NaN; `summon`
    shows them. A parameter that is frozen when this is made cannot be thawed later. A unit may also be called
    by itself, forward and backward, by all ranks alike: a head on one chunk of the activations at a time. And
    `optimizer.zero_grad` and, where no state lies on disk, `optimizer.step` do what those here do.

    Bytes that a rank sends in a step: see `bytes_per_step`; one and a half times what `DataParallel` does.

    Args:
        module: the model; the same architecture on all ranks. Where its parameters are on the meta device,
            they are made unit by unit, so that the whole model is never in memory. Otherwise their memory is
            given back unit by unit.
        optimizer_class: of the optimizer, which takes flat shards: an elementwise one, see
            elementwise_optimizers.py. Or any function from parameters to an optimizer, which is given
            stand-ins of the parameters' shapes
            and may form groups of them, and leave some out.
        group: the ranks that share the batch; None for all.
        offload: "cpu" keeps shards, gradients and optimizer state in CPU memory, where they are anyway if the
            module computes there; a directory keeps them in files there, mapped into memory and removed at
            once, and has the optimizer step on slices; see offload.py. False: with the module.
        units: classes of modules, or modules, that are gathered as a whole; None for the children of every
            nn.ModuleList and nn.Sequential.
        initialize: gives a submodule's own parameters their first values, where they were on the meta device;
            None for the model's method `initialize_part`, else each submodule's `reset_parameters`.
        prefetch: gather the next unit while one computes. None: where messages leave the cores that compute
            free, and not where gathering is those cores' own copying, through memory that the ranks share:
            there it gains nothing, and takes the memory of a unit more: at 1 and 8 rows a step took 0.48 and
            0.83 of torch's time without, 0.51 and 0.82 with (`minidist bench fully_shard --full`).
        master: dtype of the copies that the optimizer updates; None for the parameters' own.
        **defaults: of the optimizer, such as lr.

    Raises:
        TypeError, ValueError: an argument is wrong, or the ranks' modules differ, or another object trains
            the module, or has sharded it, or an embedding has max_norm.
        OSError: offload names a directory that has no room or takes no files.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer_class: type[torch.optim.Optimizer] | MakeOptimizer,
        group: Group = None,
        offload: bool | str | os.PathLike[str] = False,
        *,
        units: Units = None,
        initialize: Callable[[nn.Module], object] | None = None,
        prefetch: bool | None = None,
        master: torch.dtype | None = None,
        **defaults: Any,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"module is a {type(module).__name__}; give a torch.nn.Module")
        check_arguments(module, optimizer_class, offload, units, initialize, prefetch, master)
        require_elementwise(optimizer_class)
        require_free(module.named_parameters())
        refuse_renormed(module)
        self.module, self.group = module, group
        self.ranks = len(ranks_of(group))
        if self.ranks > 1:
            state = [*module.named_parameters(), *module.named_buffers()]
            require_same("parameters and buffers", state, group)
        self.place = place_for(offload)
        self.names = [name for name, _ in module.named_parameters()]
        self.shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        self.groups = FlatParameterGroups(optimizer_class, module, defaults)
        require_elementwise(type(self.groups.optimizer))
        self.units, self.stores = build(module, units, group, master, initialize, self.place, self.groups.of)
        claim(self, FULLY_SHARD, module.parameters(), takes_values=True)
        for parameter in module.parameters():
            parameter.grad = None  # of before; the first step would add to it
        broadcast_together([*module.buffers()], group)
        for store in self.stores:
            store.fill()
        self.gradients = UnitGradients(self.stores, len(self.names), group)
        if prefetch is None:
            flats = [flat for unit in self.units for flat in unit.flats]
            ways = {choose("all_gather", "auto", group, flat.full, async_op=True) for flat in flats}
            prefetch = ways != {"shared_memory"}
        self.passes = UnitRuntime(self.units, self.gradients, group, prefetch)
        pieces = ((of, p) for store in self.stores for of, p in zip(store.groups, store.pieces, strict=True))
        self.optimizer: torch.optim.Optimizer = self.groups.hand_over(pieces)
        self.stepping = False  # the optimizer's step is called here
        follow(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns for this rank's share of the batch. Every rank takes part."""
        try:
            return self.module(*args, **kwargs)
        except BaseException:
            with suppress(CollectiveError):  # where a peer is gone, the first error says so
                self.passes.abandon()
            raise

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """This rank's shards, as the optimizer takes them, and those that it leaves out."""
        for _, piece in self.named_parameters():
            yield piece

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's shards with names that number them."""
        pieces = [piece for store in self.stores for piece in store.pieces]
        yield from ((f"shard.{number}", piece) for number, piece in enumerate(pieces))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self.gradients.forget()
        for piece in self.parameters():
            piece.grad = None

    def synchronize(self, *totals: float | Tensor) -> list[float]:
        """Complete the gradients: which parameters any rank used. `step` does it where nobody has.

        Sends 2 (n - 1) / n 8 (P + 2) bytes for P parameters.

        Args:
            totals: up to two numbers of this rank.

        Returns:
            Their sums over the ranks.
        """
        self.passes.finish()
        used = [*map(float, self.gradients.used), *totals, *(0.0,) * (2 - len(totals))]
        device = self.units[0].device
        counts = comm.all_reduce(
            torch.tensor(used, dtype=torch.float64, device=device), group=self.group
        ).tolist()
        flags = [count > 0 for count in counts[:-2]]
        for store in self.stores:
            store.give_gradients(flags, self.optimizer)
        self.gradients.synchronized = True
        return counts[-2:]

    def step(self) -> None:
        """The optimizer's step on this rank's shards; the next pass gathers what it leaves."""
        self.complete()
        self.stepping = True
        try:
            self.place.step(self.optimizer)
        finally:
            self.stepping = False
        self.publish()

    def complete(self) -> None:
        """`synchronize`, unless no backward pass has come since."""
        if not self.gradients.synchronized:
            self.synchronize()

    def publish(self) -> None:
        """After a step: what the next pass gathers is what the optimizer has left."""
        for store in self.stores:
            store.publish()
        self.passes.version += 1

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Shorten the gradients where their norm over all ranks is above `max_norm`; call it before `step`.

        As `torch.nn.utils.clip_grad_norm_` does in one process. A collective; sends what `synchronize` does,
        where it was not called, and 2 (n - 1) / n 8 bytes.

        Args:
            max_norm: above 0.
            norm_type: the p of the p-norm, above 0, or `math.inf`.

        Returns:
            The norm before.
        """
        check_max_norm("max_norm", max_norm)
        self.complete()
        return clip_grad_norm([*self.parameters()], max_norm, True, self.group, norm_type)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """As in `DataParallel`, for loops that accumulate gradients; here each backward pass reduces anyway.

        Whole gradients, which could wait, would take n times the memory of their shards.
        """
        yield

    @contextmanager
    def summon(self) -> Iterator[nn.Module]:
        """Inside, the module's parameters are whole. A collective; sends n - 1 times the shards' bytes.

        What is written to them is kept: each rank takes its own shard back, so that all ranks have to write
        the same.
        """
        self.passes.gather_all()
        try:
            yield self.module
        finally:
            try:
                with torch.no_grad():
                    for flat in (flat for unit in self.units for flat in unit.flats):
                        flat.take_reassigned()
                    for store in self.stores:
                        store.take_back()
            finally:
                self.passes.free_all()

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

    def bytes_per_step(self, passes: int = 1) -> int:
        """Bytes that this rank sends in a step of so many forward and backward passes, by the formula.

        An all-gather forward, one backward and a reduce-scatter: 3 (n - 1) / n of the padded bytes of the
        parameters, each flat tensor padded to a multiple of n. The root unit is gathered once and frozen
        parameters are not reduced: a third less for each. And which parameters were used, with two totals:
        2 (n - 1) / n 8 (P + 2). The first pass, in which the order is settled, sends 48 (n - 1) / n for each
        unit more; a call of a unit more than it was settled sends 32 (n - 1) / n and gathers it once more.
        """
        each = 0
        for unit in self.units:
            for flat in unit.flats:
                times = 2 + flat.trained - (unit is self.units[0])
                each += times * (self.ranks - 1) * flat.share * flat.full.element_size()
        return passes * each + 2 * (self.ranks - 1) * 8 * (len(self.names) + 2) // self.ranks
