"""The strategy of ZeRO stage 3: `FullyShard`, as an engine trains with it.

A shard begins and ends in the middle of parameters. Other layouts can read the training state all the same:
this rank's elements of each parameter are cut into boxes (flat/ranges.py), which are views into the shard,
and its optimizer state in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from minidist.comm.work import Group
from minidist.parallel.contract.engine import MakeOptimizer
from minidist.parallel.contract.strategy import ResidentTensors, Strategy, TensorBox, cut_chunks
from minidist.parallel.contract.training_state import require_same_groups
from minidist.parallel.sharding.fully_shard import FullyShard


class FullySharded(Strategy):
    """Stage 3 over the ranks of a group.

    options: those of `FullyShard`, such as `offload`.
    group: None for all ranks of the world.
    """

    sharded = True
    gathers = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: MakeOptimizer,
        options: Mapping[str, Any] | None = None,
        master: torch.dtype | None = None,
        group: Group = None,
    ) -> None:
        self.group = group
        self.parallel = FullyShard(model, optimizer, group, master=master, **(options or {}))
        self.parallel.gradients.operation = "sum"
        self.optimizer, self.flat_shards = self.parallel.optimizer, self.parallel.flat_shards
        self._own: tuple[float, float | Tensor] = (0.0, 0.0)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the module's outputs. A collective."""
        outputs: Tensor = self.parallel(inputs)
        return outputs

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""
        self.parallel.zero_grad()

    def no_sync(self) -> AbstractContextManager[None]:
        """Change nothing: the gradients of every micro-batch are reduced."""
        return self.parallel.no_sync()

    def begin_final_backward(self, rows: float, loss_sum: Tensor, waits: bool = True) -> None:
        """Keep rows and loss for `synchronize`, which sums them."""
        self._own = rows, loss_sum

    def synchronize(self) -> tuple[float, float]:
        """Complete the gradients; return rows and loss, summed over the ranks."""
        rows, loss = self.parallel.synchronize(*self._own)
        return rows, loss

    def rescale(self, factor: float) -> None:
        """Multiply the gradients."""
        for gradient in self.gradients():
            gradient.mul_(factor)

    def gradients(self) -> list[Tensor]:
        """The gradients of this rank's shards."""
        return [piece.grad for piece in self.parallel.parameters() if piece.grad is not None]

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's elements of each parameter's gradient, flat; none of parameters that no rank used."""
        for shards in self.flat_shards:
            for name, _, piece, part in shards.by_parameter():
                if piece.grad is not None:
                    yield name, piece.grad[part]

    def update(self) -> None:
        """The optimizer's step on this rank's shards; the next pass gathers the result."""
        self.parallel.step()

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter under all its names, then the buffers. It gathers one unit at a time."""
        aliases, buffers = self._names()
        for unit in self.parallel.units:
            unit.show()
            try:
                for flat in unit.flat_parameters:
                    for name, parameter in zip(flat.names, flat.parameters, strict=True):
                        for alias in aliases[name]:
                            yield alias, parameter.detach()
            finally:
                unit.free()
        yield from buffers

    def held(self) -> ResidentTensors:
        """Shards and what is gathered now; the buffers that reduce gradients count among the gradients."""
        flat_shards, units = self.flat_shards, self.parallel.units
        buffers = [buffer for each in self.parallel.gradients.buffers.values() for buffer in each]
        masters = [shards.updated for shards in flat_shards if shards.updated is not shards.shard]
        state = [v for each in self.optimizer.state.values() for v in each.values() if isinstance(v, Tensor)]
        gathered = [flat.full for unit in units for flat in unit.flat_parameters]
        return ResidentTensors(
            [*(shards.shard for shards in flat_shards), *gathered],
            [*(shards.grad for shards in flat_shards if shards.grad is not None), *buffers],
            [*masters, *state],
            [*self.parallel.module.buffers()],
        )

    # The state by names.

    def chunks(self) -> Iterator[TensorBox]:
        """This rank's boxes of parameters, all buffers, and this rank's boxes of the optimizer's state.

        A parameter with several names comes under each of them, as in a state_dict; its optimizer state comes
        under the first.
        """
        (aliases, buffers), shapes = self._names(), self.parallel.shapes
        for shards in self.flat_shards:
            for name, (start, stop), first in zip(shards.names, shards.spans, shards.starts, strict=True):
                for alias in aliases[name]:
                    yield from cut_chunks(f"model.{alias}", shapes[name], first, shards.updated[start:stop])
        for name, value in buffers:
            yield TensorBox(f"model.{name}", tuple(value.shape), (0,) * value.dim(), value)
        given = set()  # names of scalars: a parameter may lie in several pieces
        for shards in self.flat_shards:
            for name, first, piece, part in shards.by_parameter():
                for key, value in self.optimizer.state.get(piece, {}).items():
                    full = f"optimizer.{name}.{key}"
                    if isinstance(value, Tensor) and value.dim():
                        yield from cut_chunks(full, shapes[name], first, value[part])
                    elif isinstance(value, Tensor) and full not in given:
                        given.add(full)
                        yield TensorBox(full, (), (), value)

    def _names(self) -> tuple[dict[str, list[str]], list[tuple[str, Tensor]]]:
        """All names of each parameter, under the first, and the buffers of the state_dict."""
        module = self.parallel.module
        aliases: dict[str, list[str]] = {}
        first = {id(parameter): name for name, parameter in module.named_parameters()}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            aliases.setdefault(first[id(parameter)], []).append(name)
        parameters = {alias for each in aliases.values() for alias in each}
        return aliases, [item for item in module.state_dict().items() if item[0] not in parameters]

    def settings(self) -> dict[str, Any]:
        """The optimizer's groups with the names of parameters, and the numbers in its state."""
        state: dict[str, dict[str, Any]] = {}
        for shards in self.flat_shards:
            for name, _, piece, _ in shards.by_parameter():
                values = self.optimizer.state.get(piece, {})
                if others := {key: value for key, value in values.items() if not isinstance(value, Tensor)}:
                    state[name] = others
        pairs = zip(self.optimizer.param_groups, self.parallel.groups.names, strict=True)
        return {"groups": [{**group, "params": [*names]} for group, names in pairs], "state": state}

    def load_settings(self, settings: Mapping[str, Any], state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take the groups of `settings`, and make room for each parameter's optimizer state by itself.

        state: for each name the keys of its optimizer state, each with shape and dtype. ValueError where the
        settings have other groups.
        """
        optimizer, shapes = self.optimizer, self.parallel.shapes
        require_same_groups(self.parallel.groups.names, settings)
        for group, values in zip(optimizer.param_groups, settings["groups"], strict=True):
            group.update({key: value for key, value in values.items() if key != "params"})
        optimizer.state.clear()
        for shards in self.flat_shards:
            if not shards.trained:
                continue
            shards.cut_everywhere(optimizer)
            long: dict[tuple[str, torch.dtype], Tensor] = {}
            for name, (start, stop) in zip(shards.names, shards.spans, strict=True):
                numbers: dict[str, Any] = dict(settings["state"].get(name, {}))
                for key, (shape, dtype) in state.get(name, {}).items():
                    if not shape and shapes[name]:
                        numbers[key] = torch.zeros((), dtype=dtype)  # of all pieces, until `loaded`
                    elif (key, dtype) not in long:
                        long[key, dtype] = self.parallel.location.like(shards.updated, dtype)
                for piece, (low, high) in shards.within(start, stop):
                    values = dict(numbers)
                    for key, (_, dtype) in state.get(name, {}).items():
                        if key not in numbers:
                            values[key] = long[key, dtype][low:high]
                    if values:
                        optimizer.state[piece] = values

    def loaded(self) -> None:
        """Make long pieces again where neighbours' states agree, and round masters to the shards."""
        for values in self.optimizer.state.values():
            values.update({k: v.clone() for k, v in values.items() if isinstance(v, Tensor) and not v.dim()})
        for shards in self.flat_shards:
            shards.merge(self.optimizer)
            shards.publish()
