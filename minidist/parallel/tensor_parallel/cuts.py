"""Where a tensor is cut between ranks, and how a rank gets its part of a whole layer.

Rank r of n gets units u r / n to u (r + 1) / n of u, so parts differ by at most one unit. A unit is one row
or column, or a group of them that must stay together, such as the rows of an attention head. Nothing is
padded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.comm.work import Group, rank_in, ranks_of
from minidist.parallel.contract.training_state import parameter_like
from minidist.parallel.flat.ranges import narrowed
from minidist.parallel.tensor_parallel.shares import share_of

Part = TypeVar("Part", bound="TensorParallel")
Device = torch.device | str | None


class Cut(NamedTuple):
    """The box of a whole tensor that a rank holds, at the start of the rank's own tensor.

    Anything beyond `sizes` in the rank's tensor is padding: it is zero, has gradient zero, and stays zero.
    If several equal matrices are packed in one, one after the other in dimension `along`, the rank has this
    box of each of them.
    """

    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]  # where the box begins in it
    sizes: tuple[int, ...]  # of the box
    packed: int = 1  # the number of packed matrices
    along: int = 0  # the dimension in which they lie one after the other

    def boxes(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """For each packed matrix, where the rank's box begins in its own tensor, and in the whole one."""
        step = self.shape[self.along] // self.packed
        for index in range(self.packed):
            own, whole = [0] * len(self.shape), [*self.offsets]
            own[self.along] = index * self.sizes[self.along]
            whole[self.along] += index * step
            yield tuple(own), tuple(whole)

    def transposed(self) -> Cut:
        """The same cut of the transposed matrix."""
        return Cut(self.shape[::-1], self.offsets[::-1], self.sizes[::-1], self.packed, 1 - self.along)

    def take(self, whole: Tensor) -> Tensor:
        """The rank's part of the whole tensor, without padding; a view if nothing is packed."""
        found = [narrowed(whole, offsets, self.sizes) for _, offsets in self.boxes()]
        return found[0] if self.packed == 1 else torch.cat(found, self.along)

    def put(self, own: Tensor, whole: Tensor) -> None:
        """Copy the rank's part to where it lies in the whole tensor."""
        for start, offsets in self.boxes():
            narrowed(whole, offsets, self.sizes).copy_(narrowed(own, start, self.sizes))


class TensorParallel(nn.Module, ABC):
    """A module that holds this rank's part of some parameters."""

    group: Group  # the ranks that share the parameters; None for all
    sequence_parallel: bool  # whether each rank has only a share of the sequence outside the cut layers

    @abstractmethod
    def cuts(self) -> dict[str, Cut]:
        """Return the `Cut` of each of the module's own parameters that is cut, if it has that parameter."""

    def draw(self, whole: nn.Module) -> None:
        """Keep this rank's part of a new layer, the one that the group's first rank has drawn."""
        send_whole(whole, self.group)
        self.keep_part(whole)

    def keep_part(self: Part, whole: nn.Module) -> Part:
        """Keep this rank's part of the weight and the bias of `whole`, and its mode. Sends nothing."""
        cuts = self.cuts()
        for name in ("weight", "bias"):
            if not hasattr(whole, name):
                continue
            part, parameter = None, getattr(whole, name)  # which a parametrization computes
            if parameter is not None:
                own = parameter.detach() if name not in cuts else cuts[name].take(parameter.detach())
                part = parameter_like(parameter, own.clone(memory_format=torch.contiguous_format))
            setattr(self, name, part)
        return self.train(whole.training)


def cuts(module: nn.Module) -> dict[str, Cut]:
    """Return, for each parameter of `module` that is cut, which box of the whole this rank has.

    The other parameters are whole on every rank, and so are their gradients after a backward pass. A tied
    parameter appears under each of its names.
    """
    found = {
        part._parameters[name]: cut
        for part in module.modules()
        if isinstance(part, TensorParallel)
        for name, cut in part.cuts().items()
        if part._parameters.get(name) is not None
    }
    named = module.named_parameters(remove_duplicate=False)
    return {name: found[parameter] for name, parameter in named if parameter in found}


def own_range(size: int, group: Group = None, unit: int = 1, what: str = "the tensor") -> range:
    """Return this rank's part of `size` elements, cut between units. `what` names the tensor in errors.

    Raises ValueError if there are more ranks than units, or `unit` does not divide `size`.
    """
    if unit < 1 or size % unit:
        raise ValueError(f"{what} has size {size}, which units of {unit} do not divide; give another unit")
    ranks, units = len(ranks_of(group)), size // unit
    if units < ranks:
        things = f"{units}" if unit == 1 else f"{units} units of {unit}"
        raise ValueError(
            f"{what} has size {size}: {things} cannot be shared by {ranks} tensor-parallel ranks; "
            f"use at most {units}"
        )
    return share_of(size, rank_in(group), ranks, unit)


def base_of(module: Any) -> Any:
    """Return the layer inside a LoRA of peft; any other module itself."""
    return module.base_layer if hasattr(module, "lora_A") and hasattr(module, "base_layer") else module


def send_whole(module: nn.Module, group: Group) -> None:
    """Copy the parameters and buffers of the group's first rank to all ranks; a collective."""
    for tensor in [*module.parameters(), *module.buffers()]:
        if not tensor.is_meta:
            comm.broadcast(tensor.detach(), group=group)
