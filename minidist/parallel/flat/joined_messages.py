"""Many tensors in a few flat messages, since every message costs its latency, however small it is.

Among them are pieces that travel between ranks: those of one matrix to its owner, say, and back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.comm.work import Group, bytes_of, ranks_of
from minidist.parallel.flat.bucket_layout import WholeTensors
from minidist.parallel.flat.gathering import gather_values

MB = 2**20
TOGETHER_BYTES = 25 * MB
"""Most bytes of tensors that `together` joins in one message; joining them copies as many bytes."""


def deal_to_buckets(tensors: Sequence[Tensor], order: Iterable[int], limit: int) -> list[list[int]]:
    """Deal tensors to buckets of one dtype and device each; return the indices in each bucket.

    order: indices of tensors, in the order in which their gradients come; the buckets become complete in the
    order returned. limit: the most bytes in a bucket; a larger tensor has one to itself. With 0 every tensor
    has its own.
    """
    done: list[tuple[int, list[int]]] = []  # when a bucket's last gradient comes, and its indices
    filling: dict[Any, tuple[int, int, list[int]]] = {}  # bytes, when the last gradient came, indices
    for when, index in enumerate(order):
        tensor = tensors[index]
        key, size = (tensor.dtype, tensor.device), bytes_of(tensor)
        filled, last, indices = filling.get(key, (0, 0, []))
        if indices and (not limit or filled + size > limit):
            done.append((last, indices))
            filled, indices = 0, []
        filling[key] = (filled + size, when, [*indices, index])
    done.extend((last, indices) for _, last, indices in filling.values())
    return [indices for _, indices in sorted(done)]


def deal_whole(
    tensors: Sequence[Tensor], order: Sequence[int], limit: int, deal: WholeTensors
) -> list[list[int]]:
    """Deal tensors of which each has one owner to buckets: of `limit` bytes, or as many of about one size.

    A last bucket of few tensors leaves most owners idle. The less padded way is taken, then the more even.
    """
    owners, sizes = len(deal.loads), [bytes_of(tensors[index]) for index in order]
    # The bucket of a large one would otherwise be mostly padding.
    limit = max(limit, owners * max(sizes))
    equal = -(-sum(sizes) // -(-sum(sizes) // limit)) + max(sizes) // 2

    def unevenness(buckets: list[list[int]]) -> tuple[int, float]:
        trial = WholeTensors(deal.work, owners)
        trial.loads = [*deal.loads]
        padded = sum(trial([tensors[index] for index in each], owners)[1] for each in buckets)
        return padded, max(trial.loads)

    return min((deal_to_buckets(tensors, order, most) for most in (limit, equal)), key=unevenness)


def give_memory(model: nn.Module) -> None:
    """Give buffers whose elements share memory, as after `expand`, memory of their own, to be written to."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and 0 in buffer.stride():
                module._buffers[name] = buffer.clone(memory_format=torch.contiguous_format)


def broadcast_together(tensors: Sequence[Tensor], group: Group, source: int = 0) -> None:
    """Copy parameters or buffers from one of the group's ranks to all, in place.

    It sends as many bytes as `comm.broadcast` of all the tensors, in messages of up to 25 MB.
    """
    together(tensors, lambda flat: comm.broadcast(flat, source=source, group=group))


def together(tensors: Sequence[Tensor], send: Callable[[Tensor], object]) -> None:
    """Call `send`, which changes a tensor in place, on the tensors joined to flat ones of up to 25 MB."""
    with torch.no_grad():
        for indices in deal_to_buckets(tensors, range(len(tensors)), TOGETHER_BYTES):
            chosen = [tensors[index] for index in indices]
            if len(chosen) == 1:
                send(chosen[0])
                continue
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in chosen])
            send(flat)
            parts = torch.split(flat, [tensor.numel() for tensor in chosen])
            for tensor, values in zip(chosen, parts, strict=True):
                tensor.copy_(values.view(tensor.shape))


def digest_of(tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Return a number that differs where the tensors' names, shapes, dtypes or `requires_grad` do."""
    lines = map(_line, tensors)
    return int.from_bytes(hashlib.sha256("".join(lines).encode()).digest()[:7], "big")


def _line(named: tuple[str, Tensor]) -> str:
    name, x = named
    return f"{name} {tuple(x.shape)} {x.dtype} {x.requires_grad}\n"


def require_same(what: str, tensors: Iterable[tuple[str, Tensor]], group: Group) -> None:
    """ValueError, on every rank, where the ranks' tensors differ in names, shapes, dtypes or `requires_grad`.

    Each rank sends 8 (n - 1) bytes; where they differ, all that is compared as well, to name a tensor.
    """
    named = [*tensors]
    device = next((tensor.device for _, tensor in reversed(named) if not tensor.is_meta), torch.device("cpu"))
    own = torch.tensor([digest_of(named)], device=device)
    everyones = comm.all_gather(own, group=group).tolist()
    different = [rank for rank, each in enumerate(everyones) if each != everyones[0]]
    if different:
        texts = gather_values([*map(_line, named)], group)
        first, other = next(
            pair
            for pair in zip_longest(texts[0], texts[different[0]], fillvalue="no more\n")
            if pair[0] != pair[1]
        )
        raise ValueError(
            f"the {what} of rank {', '.join(map(str, different))} in the group differ from rank 0's in name, "
            f"shape, dtype or requires_grad: rank 0 has {first[:-1]}, and rank {different[0]} {other[:-1]}; "
            "build the same module on all ranks"
        )


Pieces = Sequence[Sequence[Tensor]]
"""For each rank of a group, views of what it gets from this one, or of where its own lies here."""


@torch.no_grad()
def exchange(sent: Pieces, received: Pieces, like: Tensor, group: Group) -> None:
    """Send each rank its pieces in `sent`, and write what comes from it to those in `received`.

    A collective: an all-to-all, which sends all pieces but this rank's own. like: has the message's dtype and
    device.
    """
    outgoing, incoming = ([sum(x.numel() for x in each) for each in pieces] for pieces in (sent, received))
    flat = torch.cat([like.new_empty(0), *(x.reshape(-1).to(like) for each in sent for x in each)])
    if len(ranks_of(group)) > 1:
        flat = comm.all_to_all(flat, outgoing, incoming, group=group)
    into = [view for each in received for view in each]
    for view, values in zip(into, torch.split(flat, [view.numel() for view in into]), strict=True):
        view.copy_(values.view(view.shape))
