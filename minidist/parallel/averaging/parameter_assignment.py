"""Which server holds which parameters, and how a server's part becomes one message.

A part is a list of whole parameters. All its values travel in one message of bytes, whatever their dtypes.
The parameters with the widest dtype come first, so each begins at a multiple of its own width, without gaps.

Source: Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server", section 4.2, whose
servers hold ranges of keys. Whole parameters let each server run any torch optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minidist.comm.work import bytes_of

HEAD = 16
"""Bytes of two integers that open a message of parameters: how many updates they contain, and a coordinator's
slot for a worker. Two, so that the widest dtype begins at a multiple of its width."""


class ServerPart(NamedTuple):
    """The parameters that one server holds, or that are synchronized together. See `in_order`."""

    parameters: list[nn.Parameter]

    @property
    def bytes(self) -> int:
        """Bytes of the parameters."""
        return sum(map(bytes_of, self.parameters))

    def empty_values(self) -> Tensor:  # (16 + S,) uint8
        """Return room for a message of parameters."""
        return torch.empty(HEAD + self.bytes, dtype=torch.uint8)

    def pack_values(self, updates: int, slot: int = 0) -> Tensor:  # (16 + S,) uint8
        """Return the parameters as a message."""
        message = self.empty_values()
        message[:HEAD].view(torch.int64).copy_(torch.tensor([updates, slot]))
        for view, parameter in zip(self._split(message[HEAD:]), self.parameters, strict=True):
            view.copy_(parameter.detach())
        return message

    def load_values(self, message: Tensor) -> int:
        """Copy a message's values into the parameters; return how many updates they contain."""
        with torch.no_grad():
            for parameter, value in zip(self.parameters, self.unpack_values(message), strict=True):
                parameter.copy_(value)
        return head_of(message)[0]

    def unpack_values(self, message: Tensor) -> list[Tensor]:
        """Return each parameter's value, as a view of the message."""
        return self._split(message[HEAD:])

    def empty_gradients(self) -> Tensor:  # (S + P,) uint8
        """Return room for a message of gradients."""
        return torch.empty(self.bytes + len(self.parameters), dtype=torch.uint8)

    def pack_gradients(self) -> Tensor:  # (S + P,) uint8
        """Return the gradients as a message, with a byte for each that says whether it is missing (zeros)."""
        message = self.empty_gradients()
        flags = message[self.bytes :]
        for i, (view, parameter) in enumerate(zip(self._split(message), self.parameters, strict=True)):
            gradient = parameter.grad
            flags[i] = gradient is not None
            if gradient is None:
                view.zero_()
            else:
                view.copy_(gradient.to_dense())
        return message

    def unpack_gradients(self, message: Tensor) -> list[Tensor | None]:
        """Return each parameter's gradient, as a view of the message, or None if it has none."""
        used = message[self.bytes :].tolist()
        return [g if flag else None for g, flag in zip(self._split(message), used, strict=True)]

    def _split(self, data: Tensor) -> list[Tensor]:
        """Views of the bytes in the parameters' dtypes and shapes."""
        parts = torch.split_with_sizes(data[: self.bytes], [*map(bytes_of, self.parameters)])
        return [part.view(p.dtype).view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that get gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def head_of(message: Tensor) -> tuple[int, int]:
    """Return the two integers that open a message."""
    first, second = message[:HEAD].view(torch.int64).tolist()
    return first, second


def in_order(tensors: Iterable[Any]) -> ServerPart:
    """Return the part of these tensors. The widest dtype comes first, so that no value needs padding."""
    return ServerPart(sorted(tensors, key=lambda tensor: -tensor.element_size()))


def deal_parameters(
    parameters: Sequence[nn.Parameter], servers: int, what: str = "servers"
) -> list[ServerPart]:
    """Deal the parameters to the servers: each parameter, largest first, goes to the lightest part.

    No part has more bytes than 4/3 of the least possible (Graham 1969, "Bounds on Multiprocessing Timing
    Anomalies"). Raises ValueError if there are fewer parameters than servers; `what` is its word for them.
    """
    if servers > max(1, len(parameters)):
        raise ValueError(
            f"{what} is {servers}, but the model has {len(parameters)} trainable parameters, and each "
            f"holds at least one; use fewer {what}"
        )
    held: list[list[nn.Parameter]] = [[] for _ in range(servers)]
    for parameter in sorted(parameters, key=bytes_of, reverse=True):
        # Among equally light parts, the one with the fewest parameters: this also spreads empty ones.
        min(held, key=lambda part: (sum(map(bytes_of, part)), len(part))).append(parameter)
    order = {parameter: i for i, parameter in enumerate(parameters)}
    return [in_order(sorted(part, key=order.__getitem__)) for part in held]
