"""One thread of a rank at a time in the collectives of a group.

The ranks of a group pair their calls by order. Two threads of a rank have no order that the other ranks could
share: rank 0's first thread would be paired with rank 1's second, and both would get wrong numbers without a
word. A lock would only hide it, so both threads get an error. Collectives under way (`async_op=True`), which
minidist's own thread runs in the order of their calls, do not count.
"""

from __future__ import annotations

import torch.distributed as dist

from minidist.comm.errors import CollectiveError
from minidist.comm.failures import describe_tensor, note
from minidist.comm.ledgers import Call

_inside: dict[dist.ProcessGroup | None, Call] = {}
"""The call of each group in which a thread is now. One operation on a dictionary is atomic."""


def enter(group: dist.ProcessGroup | None, call: Call) -> None:
    """Begin a collective, or raise CollectiveError where another thread is in one of this group.

    Messages are not paired by the order of all calls, but by their tag: any number of threads may send them.
    """
    other = call if call.message is not None else _inside.setdefault(group, call)
    if other is not call:
        _inside[group] = call  # so that the other finds it when it leaves
        raise _two(call, other)


def leave(group: dist.ProcessGroup | None, call: Call) -> None:
    """End it; CollectiveError if another thread has come meanwhile."""
    other = call if call.message is not None else _inside.pop(group, call)
    if other is not call:
        raise _two(call, other)


def _two(call: Call, other: Call) -> CollectiveError:
    calls = (f"{each.name} of {describe_tensor(each.dtype, each.shape)}" for each in (call, other))
    text = (
        f"two threads of this rank are in collectives of one group at once, {' and '.join(calls)}; ranks "
        "pair their calls by order, so make them in one thread, or give each thread a group of its own, such "
        "as Mesh.duplicate's"
    )
    note(text)
    return CollectiveError(text)
