"""A pipeline stage as a run of the model's own `forward`, from the stage's first layer to its last.

Every stage runs `forward` on the same batch, so it has masks, positions and rotary embeddings without a
message, and the model needs no rewriting. Layers of other stages only pass tensors through: the last one
before the stage's own gives what the stage before has sent, and the first one after them ends the run.
Parameters that the stage does not need are NaNs without memory, so that a result that wrongly depends on them
shows. A `LayerTrace`, which layer_trace.py makes, says how the model calls its layers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minidist.parallel.contract.batch import Path, at, call, mapped

Sources = frozenset[Any]
"""Names of parameters, and indices of layers."""


@dataclass(frozen=True)
class Sent:
    """In a layer's output: the tensor with this number among those that go on to the next layer."""

    number: int


@dataclass(frozen=True)
class Argument:
    """In a layer's output: the tensor that the layer got at this path of its arguments."""

    path: Path


@dataclass
class LayerCall:
    """How the model calls one layer."""

    arguments: dict[Path, Tensor] = field(repr=False)  # the tensors among them
    received: dict[int, Path]  # where they have the tensors that the layer before sends, by number
    beside: Sources  # from which its other arguments are computed
    output: Any = None  # with `Sent`, `Argument` or None instead of tensors


class LayerTrace(NamedTuple):
    """How a model calls the layers of a list, and which parameters outside the list are needed where."""

    name: str  # of the list
    calls: list[LayerCall]
    before: Sources  # the parameters from which the first layer's input is computed
    after: Sources  # the parameters from which the outputs are computed, given the last layer's
    likes: list[nn.Module]  # copies of the layers without memory, which have all their other attributes


class StandIn(nn.Module):
    """Takes a layer's place in a list, and shows that layer's attributes to the model around it."""

    def __init__(self, like: nn.Module) -> None:
        super().__init__()
        self.__dict__["like"] = like  # no submodule

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["like"], name)


class _Left(BaseException):
    """Ends a run of `forward` after the stage's last layer. No model catches it as an error."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors


class _PassingLayer(StandIn):
    """Stands for a layer of another stage while `stage` runs."""

    def __init__(self, stage: ModelStage, index: int) -> None:
        super().__init__(stage.trace.likes[index])
        self.__dict__.update(stage=stage, index=index)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Give the layer after this one what the stage has received, or leave the model."""
        layer, arguments = self.stage.trace.calls[self.index], (args, kwargs)
        if self.index >= self.stage.layers.stop:
            raise _Left([at(arguments, layer.received[number]) for number in sorted(layer.received)])
        received = self.stage.received
        self.stage.skips = self.index < self.stage.layers.start - 1

        def tensor(place: Sent | Argument) -> Any:
            if isinstance(place, Argument):
                return at(arguments, place.path)
            return received[min(place.number, len(received) - 1)]

        return mapped(tensor, layer.output, (Sent, Argument))


class ModelStage(nn.Module):
    """A run of a model's layers: `layers` of the list in `trace`; the two ends have the rest, too.

    The model on this rank has these layers, and may have the layers of the rank's other stages.
    """

    takes_batch = True
    """Whether `forward` gets the batch after the tensors that the stage before has sent."""

    def __init__(self, model: nn.Module, trace: LayerTrace, layers: range) -> None:
        super().__init__()
        self.model, self.trace, self.layers = model, trace, layers
        self.received: Sequence[Tensor] = ()
        self.skips = False  # whether a run is still before the stage's layers, where another stage's work is
        keys = [*model.get_submodule(trace.name)._modules]
        self._passing = {
            key: _PassingLayer(self, index) for index, key in enumerate(keys) if index not in layers
        }

    def forward(self, received: Sequence[Tensor], batch: Any) -> Any:
        """A list of the tensors for the next stage; on the last stage the model's outputs.

        received: the tensors from the stage before, none on the first stage. batch: all that the model takes.
        """
        layers = self.model.get_submodule(self.trace.name)._modules
        own = dict(layers)
        self.received, self.skips = received, self.layers.start > 0
        layers.update(self._passing)
        try:
            return call(self.model, batch)
        except _Left as left:
            return left.tensors
        finally:
            layers.update(own)
            self.received, self.skips = (), False


def drop_parameters(model: nn.Module, names: Collection[str], device: torch.device | None) -> None:
    """Replace parameters by NaNs that take no memory, and are no parameters.

    names: all names of each of them. device: where the NaNs are; None for where the parameter is.
    """
    for name in names:
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        parameter = module._parameters.pop(attribute)
        assert parameter is not None
        nothing = torch.full((), torch.nan, dtype=parameter.dtype, device=device or parameter.device)
        module.__dict__[attribute] = nothing.expand(parameter.shape)
