"""A bucket's values, where each rank owns a share of them: whole on every rank, or whole while they are used.

The values lie in one flat tensor, so one all-gather brings all ranks' shares to every rank, with no copy
before or after. `WholeValues` stay whole between steps (ZeRO 1 and 2). `GatheredValues` have memory only from
`gather` to `free`; in between a rank keeps its share alone (ZeRO 3).

Source: Zhao et al. 2023, "PyTorch FSDP", sections 3.2.1 and 4.2 (values that are freed).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.comm.work import rank_in
from minidist.parallel.flat import freed
from minidist.parallel.flat.bucket_layout import BucketLayout
from minidist.parallel.flat.gradients import GradientComm, PendingMessage

Parameters = Sequence[nn.Parameter]


class WholeValues:
    """Values that every rank has whole. Making it is a collective: the parameters become views into `flat`.

    names: of the parameters, for messages.

    Attributes:
        flat: (n share,), the parameters, and zeros between or behind them.
        shard: (share,), this rank's part of `flat`.
    """

    frees = False

    def __init__(
        self, layout: BucketLayout, parameters: Parameters, gradient_comm: GradientComm, names: Sequence[str]
    ) -> None:
        self.layout, self.gradient_comm, self._parameters = layout, gradient_comm, parameters
        self._names = names
        self._gathering: PendingMessage | None = None
        self.flat = gradient_comm.zeros(layout.length, layout.dtype, parameters[0].device)
        self.shard = self.flat[layout.own_range]
        for parameter, view in zip(parameters, layout.views_of(self.flat), strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self._shown = _addresses(parameters)

    def gather(self, blocking: bool = False) -> None:
        """Launch the all-gather of the shares; a rank sends n - 1 times its share's bytes.

        blocking: complete it at once; see `GradientComm.start`.
        """
        if self.layout.owners > 1 and self.layout.share:
            over = self.gradient_comm
            gather = comm.all_gather, self.shard, over.algorithm, over.share_group, self.flat
            self._gathering = over.start(*gather, blocking=blocking)

    def wait(self) -> None:
        """Complete the all-gather."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def refuse_reassigned(self) -> None:
        """ValueError where `parameter.data = tensor` has taken a parameter out of `flat`.

        `torch.nn.utils.vector_to_parameters` makes that assignment for every parameter of a model. The ranks
        go on updating and sending the flat tensor, so the parameter would never be trained again.
        """
        _require_addresses(self._parameters, self._shown, self._names)


class GatheredValues:
    """Values of which a rank keeps its share, in `shard`: that of rank 0's values. Making it is a collective.

    Freed, `flat` keeps its identity in torch with a storage of no bytes: tensors that autograd saved for the
    backward pass have their values again after the next gather. The parameters are then a single NaN,
    expanded to their shapes, and reading one raises RuntimeError (freed.py).

    secondary: this rank's part of a second copy that the ranks of a host share; None for no such copy.
    device: where the values are gathered. names: of the parameters, for messages.

    Attributes:
        flat: (n share,), the parameters, and zeros behind them, while they are gathered.
    """

    frees = True

    def __init__(
        self,
        layout: BucketLayout,
        parameters: Parameters,
        gradient_comm: GradientComm,
        device: torch.device,
        names: Sequence[str],
        shard: Tensor,
        secondary: Tensor | None = None,
    ) -> None:
        self.layout, self.gradient_comm, self.shard, self.secondary = layout, gradient_comm, shard, secondary
        self._parameters, self._names, self._device = parameters, names, device
        self._gathering: PendingMessage | None = None
        self._is_fresh = False  # whether the second copy has the present values
        nothing = torch.zeros((), dtype=layout.dtype, device=device)
        if layout.dtype.is_floating_point:
            nothing.fill_(math.nan)
        self._hidden = [nothing.expand(shape) for shape in layout.shapes]
        self._unseen = _addresses(self._hidden)
        self._make_flat()
        self._load_from_rank0()

    def _make_flat(self) -> None:
        self.flat = torch.empty(self.layout.length, dtype=self.layout.dtype, device=self._device)
        self._storage, self._bytes = self.flat.untyped_storage(), self.flat.nbytes
        self._views = self.layout.views_of(self.flat)
        self._storage.resize_(0)

    @torch.no_grad()
    def _load_from_rank0(self) -> None:
        """Keep this rank's share of rank 0's values, and free the rest."""
        self._storage.resize_(self._bytes)
        for view, parameter in zip(self._views, self._parameters, strict=True):
            view.copy_(parameter)
        self.flat[self.layout.elements :] = 0
        comm.broadcast(self.flat, group=self.gradient_comm.group)
        self.shard.copy_(self.flat[self.layout.own_range])
        self.free()

    def gather(self, blocking: bool = False) -> None:
        """Launch the all-gather of the shares, or of the second copy's parts if it has the present values.

        A rank sends n - 1 times its share's bytes. blocking: complete it at once; see `GradientComm.start`.
        """
        self._storage.resize_(self._bytes)
        over, share, group = self.gradient_comm, self.shard.to(self._device), self.gradient_comm.share_group
        if self.secondary is not None and self._is_fresh:
            share, group = self.secondary, over.secondary
        self._gathering = over.start(
            comm.all_gather, share, over.algorithm, group, self.flat, blocking=blocking
        )

    def wait(self) -> None:
        """Complete the all-gather, and fill this rank's part of the second copy."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
            if self.secondary is not None and not self._is_fresh:
                own, share = rank_in(self.gradient_comm.secondary), len(self.secondary)
                self.secondary.copy_(self.flat[own * share : (own + 1) * share])
                self._is_fresh = True

    def forget_copy(self) -> None:
        """Gather from the shards, which may have changed since the second copy was filled."""
        self._is_fresh = False

    def show(self) -> None:
        """Make the parameters views into the gathered values."""
        self.wait()
        freed.show(self._parameters)
        _require_addresses(self._parameters, self._unseen, self._names)
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.data = view

    def free(self) -> None:
        """Give the memory of the gathered values back."""
        self.wait()
        freed.hide(self._parameters, self._hidden, self._names)
        if self._storage.resizable():
            self._storage.resize_(0)
        else:  # NumPy has seen it; its memory is free once the backward pass no longer needs it
            self._make_flat()

    def refuse_reassigned(self) -> None:
        """ValueError where a shown parameter lies elsewhere now; see `WholeValues.refuse_reassigned`."""
        _require_addresses(self._parameters, _addresses(self._views), self._names)


def _addresses(tensors: Sequence[Tensor]) -> list[tuple[int, tuple[int, ...]]]:
    """Where each tensor begins in memory, and its strides: one comparison shows a reassigned one."""
    return [(tensor.data_ptr(), tensor.stride()) for tensor in tensors]


def _require_addresses(parameters: Parameters, expected: Sequence[object], names: Sequence[str]) -> None:
    """ValueError that names the first parameter that does not lie where it is expected."""
    found = _addresses(parameters)
    if found == expected:
        return
    name = next(name for name, here, lay in zip(names, found, expected, strict=True) if here != lay)
    raise ValueError(
        f"the parameter {name} was given other memory, as "
        "`parameter.data = tensor` and module.to(dtype) do, and has to stay in the flat memory of the "
        "ranks; write into it instead: `with torch.no_grad(): parameter.copy_(tensor)`"
    )
