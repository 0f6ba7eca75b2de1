"""The training state on this rank by the parameters' names: as checkpoints of any layout read it.

A share begins and ends in the middle of parameters. Other layouts can read it all the same: this rank's
elements of each parameter are cut into boxes (flat/ranges.py), which are views into the share, and its
optimizer state in the same way. Whatever every rank has whole is one box.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from minidist.parallel.contract.residency import Residency
from minidist.parallel.contract.tensor_boxes import TensorBox, cut_chunks
from minidist.parallel.contract.training_state import load_groups, loadable_tensors, put_in_lists
from minidist.parallel.flat.bucket_layout import ParameterRange
from minidist.parallel.flat.buckets import Bucket
from minidist.parallel.sharding.optimizer.optimizer_slices import SCALARS, OptimizerSlice, OptimizerSlices
from minidist.parallel.sharding.sets.parameter_set import ParameterSet


class StateByName(ABC):
    """The part of a strategy that tells the state of shared parameters by their names.

    Parameters that no backward pass has dealt to buckets yet have whole masters, and whole optimizer state.

    Attributes:
        model: whose parameters they are.
        residency: what each rank keeps whole.
        sets: all ranks that train the model share the first; some of them share each of the others.
        parameters: by index. names: of each; the first one of a tied parameter. set_of: the set of each.
        group_names: the names in each of the optimizer's groups.
        slices: this rank's part.
        undealt: indices of parameters in no bucket yet, where a share of them will have the state.
        undealt_masters: their whole masters until then.
        orders: parameter indices, for each time that some were dealt; None where none are.
    """

    model: nn.Module
    residency: Residency
    sets: list[ParameterSet]
    parameters: Sequence[nn.Parameter]
    names: Mapping[Tensor, str]
    set_of: dict[Tensor, ParameterSet]
    group_names: Sequence[Sequence[str]]
    slices: OptimizerSlices
    undealt: list[int]
    undealt_masters: dict[Tensor, Tensor]
    orders: list[list[int]] | None

    @abstractmethod
    def value_buckets(self) -> list[Bucket]:
        """The buckets that hold parameters' values, cut into shares."""

    @abstractmethod
    def gradients(self) -> list[Tensor]:
        """This rank's part of the sums, as far as the slices have it."""

    @abstractmethod
    def publish(self) -> None:
        """Let all ranks compute with what the optimizer has made of the slices. A collective."""

    @abstractmethod
    def make_buckets(self, order: Sequence[Sequence[str]] | None, saved: Collection[str]) -> None:
        """Make the buckets of a saved run; saved: names with optimizer state. A collective."""

    def set_of_slice(self, each: OptimizerSlice) -> ParameterSet:
        """The set of the parameters in a slice."""
        return self.set_of[self._parameter(each, each.ranges[0])]

    def _parameter(self, each: OptimizerSlice, span: ParameterRange) -> Tensor:
        return each.value if each.bucket is None else self.parameters[span.param_index]

    def _undealt(self) -> list[nn.Parameter]:
        """The parameters that will be in a bucket with state, and are in none yet."""
        return [self.parameters[index] for index in self.undealt]

    def keep_whole_masters(self) -> None:
        """Make whole masters of parameters that no backward pass has dealt, if the optimizer has them."""
        updated = {name for names in self.group_names for name in names}
        for parameter in self._undealt():
            if self.slices.master not in (None, parameter.dtype) and self.names[parameter] in updated:
                self.undealt_masters[parameter] = parameter.detach().to(self.slices.master)

    # Gradients, once they are complete.

    def _gradients(self) -> Iterator[tuple[OptimizerSlice, ParameterRange, Tensor]]:
        """Each slice with a gradient, a range of a parameter in it, and that range's gradient."""
        self.gradients()  # from here on the slices have them
        for each in self.slices.all:
            grad = each.tensor.grad
            if grad is None:
                continue
            lengths = [*map(len, each.ranges)]
            parts = [grad] if each.bucket is None else torch.split(grad.view(-1), lengths)
            yield from ((each, span, part) for span, part in zip(each.ranges, parts, strict=True))

    def named_gradients(self, once: bool = False) -> Iterator[tuple[str, Tensor]]:
        """This rank's elements of the gradients that its update uses, with their parameters' first names.

        once: without those that count on another rank, in a sum in which each element counts once.
        """
        for each, span, part in self._gradients():
            if not once or self.set_of_slice(each).counts_here:
                yield self.names[self._parameter(each, span)], part

    def gradient_boxes(self) -> Iterator[TensorBox]:
        """The same as boxes named "gradient.NAME"."""
        for each, span, part in self._gradients():
            parameter = self._parameter(each, span)
            name = f"gradient.{self.names[parameter]}"
            if each.bucket is None:
                yield _whole(name, part.to_dense() if part.is_sparse else part)
            else:
                yield from cut_chunks(name, tuple(parameter.shape), span.start, part)

    # The state.

    def state_boxes(self) -> Iterator[TensorBox]:
        """Boxes of what is whole, and of this rank's part of the rest, in the same order on its replicas.

        Parameters, in the precision in which they are updated, and buffers are named "model.NAME", under each
        of a parameter's names, as in a state_dict. Tensors of the optimizer's state are named
        "optimizer.NAME.KEY", by the first name.
        """
        slices, parameters = self.slices, self.parameters
        buckets = self.value_buckets()
        for bucket in buckets:
            if not bucket.frees:  # else its parameters are views only during a pass
                bucket.refuse_reassigned()
        in_shares = {
            parameter
            for bucket in buckets
            for parameter in bucket.parameters
            if bucket.frees or slices.master not in (None, bucket.dtype)
        }
        masters = {each.value: each.tensor for each in slices.all if each.bucket is None}
        masters |= self.undealt_masters  # type: ignore[arg-type]
        aliases: dict[Tensor, list[str]] = {}
        parameter: Tensor
        for name, value in loadable_tensors(self.model).items():
            if value in in_shares and not value.numel():  # it is in no share
                yield _whole("model." + name, torch.empty(value.shape, dtype=value.dtype))
            elif value in in_shares:
                aliases.setdefault(value, []).append("model." + name)
            else:
                yield _whole("model." + name, masters.get(value, value).detach())
        for bucket in buckets:
            for start, span in bucket.ranges() if bucket.frozen else ():
                parameter = parameters[span.param_index]
                for alias in aliases[parameter]:
                    values = bucket.shard[start : start + len(span)]
                    yield from cut_chunks(alias, tuple(parameter.shape), span.start, values)
        for parameter in self._undealt():
            yield from tensor_boxes(self.names[parameter], slices.optimizer.state.get(parameter, {}))
        given = set()  # names of scalars: this rank may have several slices of one parameter
        for each, span, tensor, state in slices.by_parameter():
            parameter = self._parameter(each, span)
            shape = tuple(parameter.shape)
            for alias in aliases.get(parameter, []):
                yield from cut_chunks(alias, shape, span.start, tensor)
            for box in tensor_boxes(self.names[parameter], state):
                key = box.name.rpartition(".")[2]
                if each.has_cut(key, box.tensor):
                    yield from cut_chunks(box.name, shape, span.start, box.tensor)
                elif box.name not in given:
                    given.add(box.name)
                    yield box

    def settings(self) -> dict[str, Any]:
        """The state that is not a tensor: the optimizer's groups by names of parameters, and its numbers.

        A list, as LBFGS keeps, has None in the place of a tensor. "order", if known, has the names in the
        order in which gradients come: a list for each time that parameters were dealt to buckets.
        """
        optimizer = self.slices.optimizer
        states = [(self._parameter(each, span), state) for each, span, _, state in self.slices.by_parameter()]
        states += [(parameter, optimizer.state.get(parameter, {})) for parameter in self._undealt()]
        numbers: dict[str, dict[str, Any]] = {}
        for parameter, state in states:
            if own := {key: _numbers(value) for key, value in state.items() if not isinstance(value, Tensor)}:
                numbers[self.names[parameter]] = own
        groups = zip(optimizer.param_groups, self.group_names, strict=True)
        settings = {"groups": [{**group, "params": [*names]} for group, names in groups], "state": numbers}
        if self.orders is not None:
            parameters = self.parameters
            settings["order"] = [[self.names[parameters[index]] for index in order] for order in self.orders]
        return settings

    def load_settings(self, settings: Mapping[str, Any], state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take the groups of `settings`, make the saved run's buckets, and make room for the optimizer state.

        A state that was saved before any backward pass, usually empty, is kept whole until the first one
        makes the buckets. state: for each parameter the keys of its optimizer state, each with its whole
        shape and dtype.
        """
        slices = self.slices
        load_groups(slices.optimizer.param_groups, self.group_names, settings["groups"])
        slices.optimizer.state.clear()
        self.undealt_masters.clear()
        self.make_buckets(settings.get("order"), {*state, *settings["state"]})
        wholes: dict[tuple[str, str], Tensor] = {}  # one for all slices of a parameter, until `loaded`

        def empty(parameter: Tensor, device: torch.device, elements: int | None) -> dict[str, Any]:
            """Loaded numbers, and tensors to load into; those of the parameter's shape get `elements`."""
            name = self.names[parameter]
            values: dict[str, Any] = deepcopy(settings["state"].get(name, {}))
            for key, (shape, dtype) in state.get(name, {}).items():
                if elements is not None and key not in SCALARS and tuple(shape) == tuple(parameter.shape):
                    values[key] = slices.memory.zeros(elements, dtype, device)
                else:
                    whole = torch.zeros(shape, dtype=dtype, device=device if shape else "cpu")
                    values[key] = wholes.setdefault((name, key), whole)
            return put_in_lists(values)

        for parameter in self._undealt():
            if values := empty(parameter, parameter.device, None):
                slices.optimizer.state[parameter] = values
        self.keep_whole_masters()
        slices.apart()
        for each in slices.all:
            (span,) = each.ranges
            elements = len(span) if each.cuts else None
            if values := empty(self._parameter(each, span), each.tensor.device, elements):
                slices.optimizer.state[each.tensor] = values

    def loaded(self) -> None:
        """Join slices whose state agrees, and let all ranks compute with the loaded values. A collective."""
        if self.slices.reload() or not self.residency.parameters:
            self.publish()
        with torch.no_grad():
            for parameter, master in self.undealt_masters.items():
                parameter.copy_(master)


def _whole(name: str, tensor: Tensor) -> TensorBox:
    return TensorBox(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor.detach())


def tensor_boxes(name: str, state: Mapping[str, Any]) -> Iterator[TensorBox]:
    """The tensors in a parameter's state; one in a list, as LBFGS keeps, has its index in the key."""
    for key, value in state.items():
        if isinstance(value, Tensor):
            yield _whole(f"optimizer.{name}.{key}", value)
        for i, each in enumerate(value if isinstance(value, list) else ()):
            if isinstance(each, Tensor):
                yield _whole(f"optimizer.{name}.{key}[{i}]", each)


def _numbers(value: Any) -> Any:
    """What is no tensor in a value of the optimizer's state."""
    return (
        [None if isinstance(each, Tensor) else each for each in value] if isinstance(value, list) else value
    )
