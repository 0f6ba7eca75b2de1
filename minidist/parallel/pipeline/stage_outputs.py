"""A stage's output, one tensor or several, and how to send it to a rank that does not know its shapes."""

from __future__ import annotations

import torch
from torch import Tensor

from minidist import comm
from minidist.comm.errors import described
from minidist.comm.work import Group

Tensors = list[Tensor]
"""A stage's output, or the gradients of its floating-point tensors."""
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool)
MOST_DIMS = 8


def tensors_to_send(stage: int, outputs: object) -> Tensors:
    """A stage's output as a list of tensors; TypeError if it is something else, or the first is no float."""
    several = isinstance(outputs, tuple | list) and len(outputs) > 0
    tensors: list[object] = [*outputs] if isinstance(outputs, tuple | list) and several else [outputs]
    found = [each for each in tensors if isinstance(each, Tensor)]
    if len(found) < len(tensors):
        raise TypeError(
            f"stage {stage} gave a {type(outputs).__name__}; between stages goes one floating-point tensor, "
            "or a tuple of tensors of which the first is one"
        )
    return found


def send_unknown(xs: Tensors, destination: int, group: Group, tag: int) -> list[comm.Work]:
    """Send tensors whose forms the receiver does not know: each goes after its shape and dtype, 80 bytes."""
    for number, x in enumerate(xs):
        if x.dtype not in DTYPES or x.dim() > MOST_DIMS or not (number or x.is_floating_point()):
            raise TypeError(
                f"a stage gave {described(x)}; between stages goes one floating-point tensor of at most "
                f"{MOST_DIMS} dimensions, or a tuple of tensors of which the first is one"
            )
    works = []
    for more, x in zip(reversed(range(len(xs))), xs, strict=True):
        kind = DTYPES.index(x.dtype) + len(DTYPES) * more
        header = torch.tensor([kind, x.dim(), *x.shape, *[0] * (MOST_DIMS - x.dim())])
        parts = header.to(x.device), x
        works += [comm.send(part, destination, tag, group, async_op=True) for part in parts]
    return works


def receive_unknown(source: int, group: Group, device: torch.device, tag: int) -> Tensors:
    """Receive the tensors that `send_unknown` sent."""
    received: Tensors = []
    more = 1
    while more:
        header = torch.empty(2 + MOST_DIMS, dtype=torch.int64, device=device)
        kind, dims, *sizes = comm.recv(header, source, tag, group).tolist()
        more, dtype = divmod(kind, len(DTYPES))
        x = torch.empty(sizes[:dims], dtype=DTYPES[dtype], device=device)
        received.append(comm.recv(x, source, tag, group))
    return received


def in_words(xs: Tensors) -> str:
    """Tensors in an error."""
    return " and ".join(described(x) for x in xs)
