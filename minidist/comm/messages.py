"""Messages: from one rank to another, from one to all, from all to one.

The same rules hold as in `collectives.py`: `group` is None for all ranks, and with `async_op=True` a function
returns a `Work` at once. Ranks are counted inside the group.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from minidist.comm.opaque import may_be_async
from minidist.comm.tensor_checks import (
    check_in_place,
    check_member,
    check_plain,
    check_tensor,
    rows_per_rank,
)
from minidist.comm.transport import mailbox
from minidist.comm.transport.gloo_workarounds import movable
from minidist.comm.work import (
    Group,
    Work,
    by_torch,
    bytes_of,
    call_of,
    copy_back,
    known,
    limit_of,
    rank_in,
    ranks_of,
    run,
)


@may_be_async
def send(
    x: torch.Tensor, destination: int, tag: int = 0, group: Group = None, async_op: bool = False
) -> torch.Tensor:
    """Send `x` to one rank, which has to `recv` the same shape and dtype with the same tag. Sends S.

    A message of up to 4 MiB to a rank of the same host goes through shared memory, and does not wait for the
    receiver.

    Returns:
        `x`, or the `Work` whose `wait()` returns it; `x` must not change before that.

    Raises:
        ValueError: `destination` is not another rank of the group.
    """
    data = check_tensor("send", x).contiguous()
    _check_peer("destination", destination, group)
    by_library = partial(dist.isend, data, group=group, group_dst=destination)
    message = mailbox.identity(rank_in(group), destination, tag, group)
    box = mailbox.outgoing(message.destination, data)
    if box is None:
        plan = by_torch(partial(by_library, tag=tag), bytes_of(x))
        return run("send", x, group, plan, lambda: x, async_op, message=message)

    def start(at_once: bool) -> Any:
        if box.put((message.group, tag), data, partial(limit_of, group)):
            return None
        call.bytes_on_wire = bytes_of(x)
        return by_library(tag=mailbox.tag_elsewhere(tag))

    call = call_of("send", "shared_memory", x, group, bytes_of(x), message=message)
    work = Work(call, start, lambda: x, async_op)
    return cast("torch.Tensor", work if async_op else work.wait())


@may_be_async
def recv(
    x: torch.Tensor, source: int, tag: int = 0, group: Group = None, async_op: bool = False
) -> torch.Tensor:
    """Receive into `x` what one rank sends, in place. Sends nothing.

    Returns:
        `x`, or the `Work` whose `wait()` returns it; its values are there only then.

    Raises:
        ValueError: `source` is not another rank of the group, or elements of `x` share memory.
    """
    buffer = check_in_place("recv", x).contiguous()
    _check_peer("source", source, group)
    message = mailbox.identity(source, rank_in(group), tag, group)
    by_mailbox = mailbox.incoming(source, buffer, tag, group)
    plan = by_torch(by_mailbox or partial(dist.irecv, buffer, group=group, tag=tag, group_src=source), 0)
    if by_mailbox:
        plan = plan._replace(algorithm="shared_memory")
    return run("recv", x, group, plan, partial(copy_back, buffer, x), async_op, message=message)


def tell_failure(destination: int, tag: int = 0, group: Group = None) -> None:
    """Make one rank's next `recv` with this tag raise CollectiveError, because this rank failed to send.

    Messages that were sent before arrive first. The word goes through the shared memory of a host: a rank of
    another host, or one that waits for a message too large for it, is not told, and waits for its time limit.

    Raises:
        ValueError: `destination` is not another rank of the group.
    """
    _check_peer("destination", destination, group)
    box = mailbox.outgoing(ranks_of(group)[destination], torch.empty(0))
    if box is not None:
        box.fail((known(group).number, tag), partial(limit_of, group))


@may_be_async
def gather(
    x: torch.Tensor, destination: int = 0, group: Group = None, async_op: bool = False
) -> torch.Tensor | None:
    """Bring the tensors of all ranks to one rank, one after the other along the first dimension.

    Every rank but the destination sends S.

    Args:
        x: (k, ...), the same shape and dtype on all ranks.
        destination: the rank in the group that gets the result.

    Returns:
        (n k, ...) on the destination and None elsewhere; or the `Work` whose `wait()` returns it.

    Raises:
        ValueError: `destination` is not a rank of the group, or `x` has no dimension.
    """
    data, ranks = check_tensor("gather", x).contiguous(), len(ranks_of(group))
    check_member("destination", destination, ranks)
    rows_per_rank("gather", x, 1)
    here = rank_in(group) == destination
    gathered = data.new_empty((ranks, *x.shape)) if here else None
    parts = [movable(part) for part in gathered] if gathered is not None else None

    def result() -> torch.Tensor | None:
        return None if gathered is None else gathered.flatten(0, 1)

    start = partial(dist.gather, movable(data), parts, group=group, async_op=True, group_dst=destination)
    plan = by_torch(start, 0 if here else bytes_of(x))

    def alone() -> None:
        if gathered is not None:
            gathered[0].copy_(data)

    return run("gather", x, group, plan, result, async_op, alone)


@may_be_async
def scatter(
    x: torch.Tensor | None, out: torch.Tensor, source: int = 0, group: Group = None, async_op: bool = False
) -> torch.Tensor:
    """Give each rank its part of one rank's tensor, into `out`: rank r gets rows r k to (r + 1) k.

    The source sends (n - 1) / n S, the others nothing.

    Args:
        x: (n k, ...) on the source; ignored elsewhere, where None is fine.
        out: (k, ...), contiguous, the same shape and dtype on all ranks; it receives the part.
        source: the rank in the group that has `x`.

    Returns:
        `out`, or the `Work` whose `wait()` returns it.

    Raises:
        ValueError: `source` is not a rank of the group, or the shapes or dtypes of `x` and `out` do not fit.
    """
    part, ranks = check_tensor("scatter", out), len(ranks_of(group))
    check_member("source", source, ranks)
    check_plain("scatter", out)
    parts, sent = None, 0
    if rank_in(group) == source:
        data = check_tensor("scatter", x).contiguous()
        wanted = (ranks * len(out), *out.shape[1:]) if out.dim() else None
        if wanted is None or data.shape != wanted or data.dtype != out.dtype:
            raise ValueError(
                f"scatter: x is {data.dtype}{list(data.shape)} and out {out.dtype}{list(out.shape)}; "
                f"x needs {ranks} times the rows of out and its dtype, and out at least one dimension"
            )
        parts, sent = list(data.chunk(ranks)) if len(out) else [part] * ranks, (ranks - 1) * bytes_of(out)
    wire = None if parts is None else [movable(each) for each in parts]
    start = partial(dist.scatter, movable(part), wire, group=group, async_op=True, group_src=source)
    plan = by_torch(start, sent)

    def alone() -> None:
        if parts is not None:
            part.copy_(parts[0])

    return run("scatter", out, group, plan, lambda: out, async_op, alone)


def _check_peer(what: str, peer: int, group: Group) -> None:
    ranks = len(ranks_of(group))
    check_member(what, peer, ranks)
    if peer == rank_in(group):
        raise ValueError(f"{what} is {peer}, this rank itself; give another of the {ranks} ranks")
