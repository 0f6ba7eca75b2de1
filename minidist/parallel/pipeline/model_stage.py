"""A pipeline stage as a run of the model's own `forward`, from the stage's first layer to its last.

Every stage runs `forward` on the same batch, so masks, positions and rotary embeddings are there without a
message. Layers of other stages only pass tensors through: the last one before the stage's own gives what the
stage before has sent, and the first one after them ends the run. So the model needs no rewriting. A parameter
that the stage does not need is NaN without memory: embeddings outside the first stage cost a look-up, and
what is wrongly computed from them shows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minidist.parallel.contract.batch import at, call, replaced
from minidist.parallel.pipeline.layer_trace import Argument, LayerTrace, Sent, StandIn


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

        return replaced(layer.output, tensor, (Sent, Argument))


class ModelStage(nn.Module):
    """A run of a model's layers, `layers` of the list in `trace`, and on the first and last stage the rest.

    The model on this rank has these layers; it may have those of other stages of the rank too.
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
