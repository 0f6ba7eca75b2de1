"""The training state on this rank by the parameters' names: as checkpoints of any layout read it.

A share begins and ends in the middle of parameters. Other layouts can read it all the same: this rank's
elements of each parameter are cut into boxes (flat/ranges.py), which are views into the share, and its
optimizer state in the same way. Whatever every rank has whole is one box.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from minidist.parallel.contract.strategy import TensorBox, cut_chunks
from minidist.parallel.contract.training_state import (
    loadable_tensors,
    names_of,
    put_in_lists,
    require_same_groups,
)
from minidist.parallel.flat.bucket_layout import ParameterRange
from minidist.parallel.sharding.optimizer.optimizer_slices import SCALARS, OptimizerSlice
from minidist.parallel.sharding.units.sharded_parameters import ShardedParameters
from minidist.parallel.sharding.whole.whole_parameters import WholeParameters


class StateByName:
    """The state of a model whose parameters are `shared`; group_names: those of the optimizer's groups.

    Parameters that no backward pass has dealt to buckets yet have whole masters, and whole optimizer state.
    """

    def __init__(
        self,
        model: nn.Module,
        shared: WholeParameters | ShardedParameters,
        group_names: Sequence[Sequence[str]],
    ) -> None:
        self._model, self._shared, self._group_names = model, shared, group_names
        self._slices, self._names = shared.slices, names_of(model)
        self._updated = {name for names in group_names for name in names}  # others have no masters

    def undealt(self) -> list[nn.Parameter]:
        """The parameters that will be in a bucket with state, and are in none yet."""
        return [self._shared.parameters[index] for index in self._shared.undealt]

    def _parameter(self, each: OptimizerSlice, span: ParameterRange) -> Tensor:
        return each.value if each.bucket is None else self._shared.parameters[span.param_index]

    # Gradients, once they are complete.

    def _gradients(self) -> Iterator[tuple[OptimizerSlice, ParameterRange, Tensor]]:
        """Each slice with a gradient, a range of a parameter in it, and that range's gradient."""
        self._shared.gradients()  # from here on the slices have them
        for each in self._slices.all:
            grad = each.tensor.grad
            if grad is None:
                continue
            lengths = [*map(len, each.ranges)]
            parts = [grad] if each.bucket is None else torch.split(grad.view(-1), lengths)
            yield from ((each, span, part) for span, part in zip(each.ranges, parts, strict=True))

    def named_gradients(self, once: bool = False) -> Iterator[tuple[str, Tensor]]:
        """This rank's elements of each parameter's gradient; once: without those that count elsewhere."""
        for each, span, part in self._gradients():
            if not once or self._shared.set_of_slice(each).counts_here:
                yield self._names[self._parameter(each, span)], part

    def gradient_boxes(self) -> Iterator[TensorBox]:
        """The same as boxes."""
        for each, span, part in self._gradients():
            parameter = self._parameter(each, span)
            name = f"gradient.{self._names[parameter]}"
            if each.bucket is None:
                yield _whole(name, part.to_dense() if part.is_sparse else part)
            else:
                yield from cut_chunks(name, tuple(parameter.shape), span.start, part)

    # The state.

    def boxes(self) -> Iterator[TensorBox]:
        """Boxes of what is whole, and of this rank's part of parameters, masters and optimizer state.

        A parameter with several names comes under each of them, as in a state_dict; its optimizer state comes
        under the first.
        """
        slices, parameters = self._slices, self._shared.parameters
        buckets = self._shared.value_buckets()
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
        masters |= self._shared.undealt_masters  # type: ignore[arg-type]
        aliases: dict[Tensor, list[str]] = {}
        parameter: Tensor
        for name, value in loadable_tensors(self._model).items():
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
        for parameter in self.undealt():
            yield from tensor_boxes(self._names[parameter], slices.optimizer.state.get(parameter, {}))
        given = set()  # names of scalars: this rank may have several slices of one parameter
        for each, span, tensor, state in slices.by_parameter():
            parameter = self._parameter(each, span)
            shape = tuple(parameter.shape)
            for alias in aliases.get(parameter, []):
                yield from cut_chunks(alias, shape, span.start, tensor)
            for box in tensor_boxes(self._names[parameter], state):
                key = box.name.rpartition(".")[2]
                if each.has_cut(key, box.tensor):
                    yield from cut_chunks(box.name, shape, span.start, box.tensor)
                elif box.name not in given:
                    given.add(box.name)
                    yield box

    def begin_masters(self, exact: Mapping[str, Tensor]) -> None:
        """Keep these values, whole, for the masters of parameters that no backward pass has dealt."""
        for parameter in self.undealt():
            if self._names[parameter] in self._updated & exact.keys():
                self._shared.undealt_masters[parameter] = exact[self._names[parameter]]

    def settings(self) -> dict[str, Any]:
        """The optimizer's groups, the numbers in this rank's part of its state, and the order of the
        gradients.

        A list, as LBFGS keeps, has None in the place of a tensor.
        """
        optimizer = self._slices.optimizer
        states = [
            (self._parameter(each, span), state) for each, span, _, state in self._slices.by_parameter()
        ]
        states += [(parameter, optimizer.state.get(parameter, {})) for parameter in self.undealt()]
        numbers: dict[str, dict[str, Any]] = {}
        for parameter, state in states:
            if own := {key: _numbers(value) for key, value in state.items() if not isinstance(value, Tensor)}:
                numbers[self._names[parameter]] = own
        groups = zip(optimizer.param_groups, self._group_names, strict=True)
        settings = {"groups": [{**group, "params": [*names]} for group, names in groups], "state": numbers}
        if self._shared.orders is not None:
            parameters = self._shared.parameters
            settings["order"] = [
                [self._names[parameters[index]] for index in order] for order in self._shared.orders
            ]
        return settings

    def load_settings(self, settings: Mapping[str, Any], state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take the groups of `settings`, make the saved run's buckets, and make room for the optimizer state.

        A state that was saved before any backward pass, usually empty, is kept whole until the first one
        makes the buckets.
        """
        slices = self._slices
        require_same_groups(self._group_names, settings)
        for group, values in zip(slices.optimizer.param_groups, settings["groups"], strict=True):
            group.update({key: value for key, value in values.items() if key != "params"})
        slices.optimizer.state.clear()
        self._shared.undealt_masters.clear()
        self._shared.make_buckets(settings.get("order"), {*state, *settings["state"]})
        wholes: dict[tuple[str, str], Tensor] = {}  # one for all slices of a parameter, until `loaded`

        def empty(parameter: Tensor, device: torch.device, elements: int | None) -> dict[str, Any]:
            """Loaded numbers, and tensors to load into; those of the parameter's shape get `elements`."""
            name = self._names[parameter]
            values: dict[str, Any] = deepcopy(settings["state"].get(name, {}))
            for key, (shape, dtype) in state.get(name, {}).items():
                if elements is not None and key not in SCALARS and tuple(shape) == tuple(parameter.shape):
                    values[key] = slices.memory.zeros(elements, dtype, device)
                else:
                    whole = torch.zeros(shape, dtype=dtype, device=device if shape else "cpu")
                    values[key] = wholes.setdefault((name, key), whole)
            return put_in_lists(values)

        for parameter in self.undealt():
            if values := empty(parameter, parameter.device, None):
                slices.optimizer.state[parameter] = values
            if slices.master not in (None, parameter.dtype) and self._names[parameter] in self._updated:
                self._shared.undealt_masters[parameter] = parameter.detach().to(slices.master)
        slices.apart()
        for each in slices.all:
            (span,) = each.ranges
            elements = len(span) if each.cuts else None
            if values := empty(self._parameter(each, span), each.tensor.device, elements):
                slices.optimizer.state[each.tensor] = values

    def loaded(self) -> None:
        """Join slices whose state agrees, and let all ranks compute with the loaded values. A collective."""
        if self._slices.reload() or not self._shared.sets[0].residency.parameters:
            self._shared.publish()
        with torch.no_grad():
            for parameter, master in self._shared.undealt_masters.items():
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
