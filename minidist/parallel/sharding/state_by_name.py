"""The training state that ranks share, by the parameters' names: as checkpoints of any layout read it.

A share begins and ends in the middle of parameters. Other layouts can read it all the same: this rank's
elements of each parameter are cut into boxes (flat/ranges.py), which are views into the share, and its
optimizer state in the same way. Whatever every rank has whole is one box.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.comm.work import rank_in
from minidist.parallel.contract.strategy import Strategy, TensorBox, cut_chunks
from minidist.parallel.contract.training_state import loadable_tensors, require_same_groups
from minidist.parallel.flat.buckets import Bucket
from minidist.parallel.sharding.optimizer_slices import OptimizerSlices
from minidist.parallel.sharding.slice_state import SCALARS, OptimizerState


class SharingStrategy(Strategy):
    """A strategy whose ranks share the optimizer's state: stages 1 to 3.

    Attributes:
        slices: this rank's part of what the optimizer updates.
        parameters, buckets: the parameters by index, and the buckets that hold them.
        names: of the parameters.
        group_names: those of the parameters in each of the optimizer's groups.
        unsliced, unsliced_masters: the optimizer's state, and the masters, of whole parameters, until a
            backward pass shows in which bucket they lie.
        left_out: the whole parameters that the optimizer did not get, by name.
    """

    sharded = True
    slices: OptimizerSlices
    parameters: Sequence[nn.Parameter]
    buckets: Sequence[Bucket]
    names: Mapping[Tensor, str]
    group_names: Sequence[Sequence[str]]
    unsliced: dict[Tensor, OptimizerState]
    unsliced_masters: dict[nn.Parameter, Tensor]
    left_out: Mapping[str, nn.Parameter] = {}

    def waiting(self) -> Sequence[nn.Parameter]:
        """The parameters that will be in a bucket, and are in none yet."""
        return ()

    def make_buckets(self, settings: Mapping[str, Any], saved: Collection[str]) -> None:
        """Make the buckets that the saved run had, as far as they are not there. A collective.

        saved: names of the parameters with optimizer state. A frozen one may have some, to go on with later.
        """

    def no_sync(self) -> AbstractContextManager[None]:
        """Change nothing: stage 1 sends only after `begin_final_backward`, 2 and 3 in every backward pass."""
        return nullcontext()

    def _name(self, param_index: int) -> str:
        return self.names[self.parameters[param_index]]

    # Gradients, once they are complete.

    def gradients(self) -> list[Tensor]:
        """This rank's share of the gradients, in flat tensors; the first rank also has those left out."""
        return [*self.slices.gradients(), *(grad for _, grad in self._left_out_gradients())]

    def sum_left_out(self) -> None:
        """Sum the gradients that no optimizer uses: they count in the norm that gradients are clipped by."""
        for parameter in self.left_out.values():
            if parameter.requires_grad:
                own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                own = own.to_dense() if own.is_sparse else own
                parameter.grad = comm.all_reduce(own, group=self.group)

    def _left_out_gradients(self) -> Iterator[tuple[str, Tensor]]:
        first = rank_in(self.share_group) == 0
        return ((name, p.grad) for name, p in self.left_out.items() if first and p.grad is not None)

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's elements of each parameter's gradient, flat; none of parameters that no rank used."""
        for each in self.slices.all:
            grad = each.tensor.grad
            if grad is not None:
                parts = torch.split(grad.view(-1), [*map(len, each.ranges)])
                yield from ((self._name(s.param_index), p) for s, p in zip(each.ranges, parts, strict=True))
        yield from self._left_out_gradients()

    def gradient_boxes(self) -> Iterator[TensorBox]:
        """Boxes of this rank's share of the gradients."""
        for each in self.slices.all:
            if each.tensor.grad is None:
                continue
            parts = torch.split(each.tensor.grad.view(-1), [*map(len, each.ranges)])
            for span, values in zip(each.ranges, parts, strict=True):
                shape = tuple(self.parameters[span.param_index].shape)
                yield from cut_chunks(f"gradient.{self._name(span.param_index)}", shape, span.start, values)
        for name, grad in self._left_out_gradients():
            yield _whole(f"gradient.{name}", grad)

    def rescale(self, factor: float) -> None:
        """Multiply this rank's share of the gradients."""
        self.multiply(factor)

    # The state.

    def chunks(self) -> Iterator[TensorBox]:
        """Boxes of what is whole, and of this rank's part of parameters, masters and optimizer state.

        A parameter with several names comes under each of them, as in a state_dict; its optimizer state comes
        under the first.
        """
        for bucket in self.buckets:
            if not bucket.frees:  # else its parameters are views only during a pass
                bucket.refuse_reassigned()
        slices, waiting = self.slices, self.waiting()
        shared = {
            parameter
            for bucket in self.buckets
            for parameter in bucket.parameters
            if bucket.frees or slices.master not in (None, bucket.dtype)
        }
        aliases: dict[Tensor, list[str]] = {}
        for name, value in loadable_tensors(self.model).items():
            if value in shared and not value.numel():  # it is in no share
                yield _whole("model." + name, torch.empty(value.shape, dtype=value.dtype))
            elif value in shared:
                aliases.setdefault(value, []).append("model." + name)
            else:
                yield _whole("model." + name, self.unsliced_masters.get(value, value).detach())
        for bucket in self.buckets:
            for start, span in bucket.ranges() if bucket.frozen else ():
                parameter = self.parameters[span.param_index]
                for alias in aliases[parameter]:
                    values = bucket.shard[start : start + len(span)]
                    yield from cut_chunks(alias, tuple(parameter.shape), span.start, values)
        for parameter in waiting:
            for key, value in self.unsliced.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield _whole(f"optimizer.{self.names[parameter]}.{key}", value)
        given = set()  # names of scalars: this rank may have several slices of one parameter
        for _, span, tensor, state in slices.by_parameter():
            parameter = self.parameters[span.param_index]
            shape = tuple(parameter.shape)
            for alias in aliases.get(parameter, []):
                yield from cut_chunks(alias, shape, span.start, tensor)
            for key, value in state.items():
                name = f"optimizer.{self.names[parameter]}.{key}"
                if slices.is_cut(key, value):
                    yield from cut_chunks(name, shape, span.start, value)
                elif isinstance(value, Tensor) and name not in given:
                    given.add(name)
                    yield _whole(name, value)

    def begin_masters(self, exact: Mapping[str, Tensor]) -> None:
        """Let masters begin with these values, whole where a backward pass has yet to deal the parameters."""
        waiting = self.waiting()
        for parameter in waiting:
            if self.names[parameter] in exact:
                self.unsliced_masters[parameter] = exact[self.names[parameter]]
        if not waiting:
            super().begin_masters(exact)

    def settings(self) -> dict[str, Any]:
        """The optimizer's groups, and the numbers in this rank's part of its state."""
        states = [(self._name(span.param_index), each) for _, span, _, each in self.slices.by_parameter()]
        states += [(self.names[parameter], self.unsliced.get(parameter, {})) for parameter in self.waiting()]
        numbers: dict[str, dict[str, Any]] = {}
        for name, each in states:
            if own := {key: value for key, value in each.items() if not isinstance(value, Tensor)}:
                numbers[name] = own
        groups = zip(self.optimizer.param_groups, self.group_names, strict=True)
        return {"groups": [{**group, "params": [*names]} for group, names in groups], "state": numbers}

    def load_settings(self, settings: Mapping[str, Any], state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take the groups of `settings`, make the saved run's buckets, and make room for the optimizer state.

        If the state was saved before a first backward pass, all of it, mostly none, waits here for one.
        """
        require_same_groups(self.group_names, settings)
        for group, values in zip(self.optimizer.param_groups, settings["groups"], strict=True):
            group.update({key: value for key, value in values.items() if key != "params"})
        self.slices.optimizer.state.clear()
        self.unsliced_masters.clear()
        self.make_buckets(settings, {*state, *settings["state"]})
        wholes: dict[tuple[str, str], Tensor] = {}  # one for all slices of a parameter, until `loaded`

        def empty(parameter: nn.Parameter, device: torch.device, elements: int | None) -> dict[str, Any]:
            """Loaded numbers, and tensors to load into; those of the parameter's shape get `elements`."""
            name = self.names[parameter]
            values = dict(settings["state"].get(name, {}))
            for key, (shape, dtype) in state.get(name, {}).items():
                if elements is not None and key not in SCALARS and tuple(shape) == tuple(parameter.shape):
                    values[key] = self.slices.memory.zeros(elements, dtype, device)
                else:
                    whole = torch.zeros(shape, dtype=dtype, device=device if shape else "cpu")
                    values[key] = wholes.setdefault((name, key), whole)
            return values

        for parameter in self.waiting():
            if values := empty(parameter, parameter.device, None):
                self.unsliced[parameter] = values
            if self.slices.master not in (None, parameter.dtype):
                self.unsliced_masters[parameter] = parameter.detach().to(self.slices.master)
        self.slices.apart()
        for each in self.slices.all:
            (span,) = each.ranges
            elements = len(span) if self.slices.cut_anywhere else None
            if values := empty(self.parameters[span.param_index], each.tensor.device, elements):
                self.slices.optimizer.state[each.tensor] = values


def _whole(name: str, tensor: Tensor) -> TensorBox:
    return TensorBox(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)


def tensors_of(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    """The tensors in an optimizer's state."""
    return [v for each in optimizer.state.values() for v in each.values() if isinstance(v, Tensor)]
