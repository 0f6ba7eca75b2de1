"""`Sharded`: the engine's strategy for plain data parallelism and ZeRO 1 to 3, whatever each rank keeps.

The table in contract/residency.py decides: data parallelism and ZeRO 1 to 3 are this one strategy with four
rows. It tells the parameters which backward pass is a step's last, sums weight and loss, and lets the
optimizer update this rank's slices. A model may have several sets of parameters, each with its row and its
ranks (parameter_set.py). whole_parameters.py turns gradients into sums, or, where parameters are not whole,
sharded_parameters.py does. state_by_name.py knows where each part of the state lies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from minidist.parallel.compression.by_name import compression_of
from minidist.parallel.contract.residency import ROWS, Residency
from minidist.parallel.contract.strategy import ResidentTensors, Strategy, TensorBox
from minidist.parallel.contract.training_state import model_tensors, names_of
from minidist.parallel.contract.user_functions import MakeOptimizer
from minidist.parallel.flat.buckets import GradientComm
from minidist.parallel.guards.refusals import refuse_state_of_slices
from minidist.parallel.sharding.loops.loop_classes import check_bucket_mb
from minidist.parallel.sharding.optimizer.memory_source import memory_source
from minidist.parallel.sharding.optimizer.optimizer_slices import OptimizerSlices
from minidist.parallel.sharding.sets.equal_start import set_for, start_equal
from minidist.parallel.sharding.sets.parameter_set import ParameterSet
from minidist.parallel.sharding.state.state_by_name import StateByName, tensor_boxes
from minidist.parallel.sharding.units.gathered_model import whole
from minidist.parallel.sharding.units.sharded_parameters import ShardedParameters
from minidist.parallel.sharding.units.units import weakly
from minidist.parallel.sharding.whole.whole_parameters import WholeParameters
from minidist.parallel.training.elementwise_optimizers import refuse_unshareable
from minidist.parallel.training.master_weights import follow_own_methods, optimizer_of_masters

Options = Mapping[str, Any]


class Sharded(Strategy):
    """Trains a model over the ranks of a group; each rank keeps what a row of the table says.

    With the row of data parallelism that is everything, and only the gradients' sums are shared.

    residency: the row. options: where parameters are whole, of `DataParallel` (bucket_mb, overlap,
    compression, algorithm, broadcast_buffers); otherwise of `FullyShard`, such as offload. master: the dtype
    in which the optimizer updates copies of the parameters; None for no copies. gradient_comm: the ranks;
    None for all. others: sets of parameters that some of these ranks share in another way, such as experts.

    Attributes:
        shared: the parameters and the way they are shared. slices: this rank's part of them for the
        optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: MakeOptimizer,
        residency: Residency,
        options: Options | None = None,
        master: torch.dtype | None = None,
        gradient_comm: GradientComm | None = None,
        others: Sequence[ParameterSet] = (),
    ) -> None:
        self.model, self.gradient_comm = model, gradient_comm or GradientComm(None)
        self.group, self._master = self.gradient_comm.group, master
        self.sets = [ParameterSet(residency, self.gradient_comm), *others]
        if any(param_set.residency.parameters != residency.parameters for param_set in others):
            raise ValueError(
                f"the residencies are {[each.residency for each in self.sets]}; either all sets of "
                "parameters are whole between steps, or none is"
            )
        make = self._share_whole if residency.parameters else self._share_shards
        self.shared: WholeParameters | ShardedParameters
        self.shared, group_names = make(optimizer, dict(options or {}))
        self.slices = self.shared.slices
        self.optimizer = self.slices.optimizer
        self._state = StateByName(model, self.shared, group_names)

    @property
    def sharded(self) -> bool:  # type: ignore[override]
        """Whether this rank's update uses a share of the gradients."""
        return any(not param_set.residency.state for param_set in self.sets)

    @property
    def gathers(self) -> bool:  # type: ignore[override]
        """Whether a forward pass is a collective."""
        return not self.sets[0].residency.parameters or len(self.sets) > 1  # rows go to their experts

    def _share_whole(
        self, make: MakeOptimizer, options: dict[str, Any]
    ) -> tuple[WholeParameters, list[list[str]]]:
        """Share parameters that stay whole; returns also the names in each of the optimizer's groups."""
        if self.sharded and options.get("compression") is not None:
            zero = next(number for number, row in ROWS.items() if row == self.sets[0].residency)
            raise ValueError(
                f"compression is {options['compression']!r} with zero={zero} in the layout, which reduces "
                "gradients to their owners as they are; use zero=0 for compressed ones"
            )
        options["compression"] = compression_of(options.get("compression"))
        check_bucket_mb(options.get("bucket_mb", 25))
        algorithm = options.pop("algorithm", "auto")
        for param_set in self.sets:
            param_set.gradient_comm.algorithm = algorithm
        start_equal(self.model, self.sets)
        # Where a rank owns all of a parameter, the optimizer gets it, or its master. Shares come later.
        names, parameters = names_of(self.model), [*self.model.parameters()]
        is_whole = [set_for(names[parameter], self.sets).residency.state for parameter in parameters]
        dtypes = [self._master if whole else None for whole in is_whole]
        optimizer, updated = optimizer_of_masters(parameters, make, dtypes)
        slices = OptimizerSlices(optimizer, self._master)
        pairs = [pair for *pair, whole in zip(parameters, updated, is_whole, strict=True) if whole]
        slices.add_whole([parameter for parameter, _ in pairs], [tensor for _, tensor in pairs])
        if self.sharded:
            refuse_unshareable(type(optimizer))
            optimizer.register_state_dict_pre_hook(refuse_state_of_slices)
            optimizer.register_load_state_dict_pre_hook(refuse_state_of_slices)
        groups = [[*group["params"]] for group in optimizer.param_groups]
        shared = WholeParameters(
            self.model.named_parameters,
            self.sets,
            slices,
            groups=[{"params": group} for group in groups],
            module=self.model,
            average=False,  # the engine weights them
            **options,
        )
        if self.sharded or self._master is not None:
            follow_own_methods(optimizer, weakly(shared.after_own_method))
        name_of = dict(zip(updated, map(names.__getitem__, parameters), strict=True))
        return shared, [[name_of[tensor] for tensor in group] for group in groups]

    def _share_shards(
        self, make: MakeOptimizer, options: dict[str, Any]
    ) -> tuple[ShardedParameters, list[list[str]]]:
        """Share parameters as shards; returns also the names in each of the optimizer's groups."""
        memory = memory_source(options.pop("offload", False))
        shared = ShardedParameters(
            self.model, make, self.sets, memory, master=self._master, average=False, **options
        )
        return shared, shared.groups.names

    # The passes of a step.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on this rank's rows: a collective where its parameters are gathered."""
        return self.shared.forward(*args, **kwargs)

    def ready(self) -> None:
        """Prepare a pass, as `forward` does."""
        self.shared.ready()

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""
        if not self.sharded:
            self.optimizer.zero_grad()  # an optimizer's own may do more
        self.shared.forget()

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, gradients add up on this rank and nothing is sent, where the row keeps them whole."""
        return self.shared.no_sync()

    def begin_final_backward(self, weight: float | Tensor, loss_sum: Tensor, waits: bool = True) -> None:
        """Have the next backward pass complete the gradients, and sum weight and loss over the ranks."""
        self.shared.begin_final_backward((weight, loss_sum), waits)

    def synchronize(self) -> tuple[float, float]:
        """Complete the gradients; return weight and loss, summed over the ranks."""
        return self.shared.synchronize()

    # The gradients, and the update.

    def announce(self, is_padding: bool) -> None:
        """Say whether the rows of the next pass are padding: they use no parameter of the first set.

        Other sets, such as experts, also get rows of other ranks, which may count.
        """
        self.gradient_comm.counts = not is_padding

    def norm(self) -> float:
        """The norm of all gradients; the same on all ranks."""
        return self.shared.norm()

    def named_gradients(self, once: bool = False) -> Iterator[tuple[str, Tensor]]:
        """This rank's part of each parameter's gradient, a share flat. Skips parameters that no rank used."""
        return self._state.named_gradients(once)

    def gradient_boxes(self) -> Iterator[TensorBox]:
        """Boxes of this rank's part of the gradients."""
        return self._state.gradient_boxes()

    def rescale(self, factor: float) -> None:
        """Multiply this rank's part of the gradients, and what compression has kept back of them."""
        self.shared.rescale(factor)

    def multiply(self, factor: float) -> None:
        """Multiply the gradients that `update` takes, but not what compression has kept back of them."""
        self.shared.rescale(factor, kept=False)

    def drop(self) -> None:
        """Forget the gradients of a step that is skipped, and what compression has kept back of them."""
        self.zero_grad()
        self.shared.clear()

    def update(self, closure: Callable[[], Any] | None = None) -> None:
        """Update this rank's slices; afterwards every rank computes with the slices of all."""
        self.shared.update(closure)

    def bytes_per_step(self, passes: int = 1) -> int:
        """Bytes that a rank sends in a step of so many passes; see the class that has the options."""
        return self.shared.bytes_per_step(passes)

    # The state.

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter under all its names, and the buffers; a collective where `gathers`."""
        if not isinstance(self.shared, ShardedParameters):
            yield from super().whole()
            return
        aliases: dict[Tensor, list[str]] = {}
        others = []
        own = {*self.model.parameters()}
        for name, value in model_tensors(self.model).items():
            if value in own:
                aliases.setdefault(value, []).append(name)
            else:
                others.append((name, value.detach()))
        for parameter in whole(self.shared):
            for alias in aliases[parameter]:
                yield alias, parameter.detach().clone()  # its unit's memory is given back
        yield from others

    def held(self) -> ResidentTensors:
        """What this rank holds now. Masters count as the optimizer's, memory for reductions as gradients."""
        sums = [tensor for each in self.sets for tensor in each.tensors()]
        sums += [each.reduced for each in self.shared.on_owners if each.reduced is not None]
        own = [p.grad for p in self.model.parameters() if p.grad is not None]
        state = self.optimizer.state.values()
        return ResidentTensors(
            self.shared.resident(),
            [*own, *sums],
            [
                *self.slices.masters(),
                *self.shared.undealt_masters.values(),
                *(box.tensor for each in state for box in tensor_boxes("", each)),
            ],
            [*self.model.buffers()],
        )

    def state_boxes(self) -> Iterator[TensorBox]:
        """Boxes of this rank's part of the training state."""
        return self._state.boxes()

    def begin_masters(self, exact: Mapping[str, Tensor]) -> None:
        """Let masters begin with these values, whole where a backward pass has yet to deal the parameters."""
        self._state.begin_masters(exact)
        if not self.shared.undealt:
            super().begin_masters(exact)

    def settings(self) -> dict[str, Any]:
        """The optimizer's groups, the numbers in its state, and the gradients' order once it is known."""
        return self._state.settings()

    def load_settings(self, settings: Mapping[str, Any], state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take the groups of `settings`, and make room for the optimizer state."""
        self._state.load_settings(settings, state)

    def loaded(self) -> None:
        """Publish what was loaded, and join slices whose state agrees."""
        self._state.loaded()
