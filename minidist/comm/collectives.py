"""Collectives: the part of the communication API in which all ranks of a group make the same call.

Every strategy communicates through these functions, and never calls torch.distributed itself. Each call is
checked and counted in the open ledgers. All ranks of the group make the same calls in the same order with the
same shapes and dtypes. With `async_op=True` a function returns a `Work` at once; the result is there after
its `wait()`. Either raises CollectiveError when a peer is gone, late, or makes another call.

`algorithm="auto"` takes what `comm.using` names, else shared memory where all ranks are CPU ranks of one
host, else "torch": torch.distributed over gloo or NCCL, as `world.join` has decided for the whole world. The
others send messages; see `comm.algorithms`. A function says what each of the three ways does and sends;
`choose`, at the end of this file, takes one.

In the formulas n is the number of ranks in the group, and S the bytes of the tensor passed. Bytes sent are
the payload that other ranks get from this one, through sockets (`Ledger.bytes_on_wire`) or from its memory.
The formulas hold for "torch" and "shared_memory". NCCL picks its own algorithm; the ledger then counts the
one named here, which NCCL uses for large tensors. In a world of one nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from minidist._names import unknown
from minidist.comm import tensor_checks
from minidist.comm.algorithms.execute import execute
from minidist.comm.algorithms.registry import ALGORITHMS as MESSAGE_ALGORITHMS
from minidist.comm.algorithms.ring import all_gather_among, reduce_scatter_among
from minidist.comm.algorithms.steps import bytes_sent, offsets
from minidist.comm.checking import call_checker
from minidist.comm.errors import described
from minidist.comm.opaque import may_be_async
from minidist.comm.transport import gloo_workarounds, shared_memory
from minidist.comm.transport.gloo_workarounds import movable
from minidist.comm.transport.shared_memory import GroupMemory, SharedMemory, group_memory
from minidist.comm.work import (
    ALGORITHMS,
    CallPlan,
    Group,
    by_minidist,
    by_torch,
    bytes_of,
    call_of,
    copy_back,
    known,
    preferred,
    rank_in,
    ranks_of,
    run,
)

# Renamed in torch 2.13, where the former names warn.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@may_be_async
def all_reduce(
    x: torch.Tensor, op: str = "sum", algorithm: str = "auto", group: Group = None, async_op: bool = False
) -> torch.Tensor:
    """Reduce `x`, of any shape, over all ranks, in place; each rank gets the result.

    Sends 2 (n - 1) / n S: gloo and NCCL run a ring, which is a reduce-scatter and an all-gather
    (Patarasuk and Yuan 2009, section 3).

    Args:
        x: the same shape and dtype on all ranks; it receives the result.
        op: "sum", "mean", "min", "max" or "product".
        algorithm: "auto", "torch", "shared_memory", "ring", "tree", "halving_doubling", "hierarchical"
            (shared memory inside a host, a ring between hosts) or "naive".
        group: the ranks that take part; None for all.
        async_op: return a `Work` at once. Only a group's first call waits, to make the ranks' shared memory.

    Returns:
        `x`, or the `Work` whose `wait()` returns it.

    Raises:
        ValueError: an unknown `op` or `algorithm`, or elements of `x` share memory, as after `expand`.
        TypeError: not a dense tensor with values, or a reduction of `tensor_checks.REFUSALS`: a mean of ints.
    """
    buffer = tensor_checks.check_reducible("all_reduce", x, op, algorithm, in_place=True).contiguous()
    ranks, how = len(ranks_of(group)), choose("all_reduce", algorithm, group, x, op)
    flat, sent = buffer.view(-1), 2 * (ranks - 1) * bytes_of(x) // ranks

    def result() -> torch.Tensor:
        if op == "mean" and ranks > 1 and how != "shared_memory":
            buffer.div_(ranks)
        return copy_back(buffer, x)

    if how == "torch":
        operation, _ = tensor_checks.OPERATIONS[op]
        plan = by_torch(partial(dist.all_reduce, buffer, operation, group=group, async_op=True), sent)
    elif how == "shared_memory":
        plan = by_minidist(group, partial(shared_memory.all_reduce, _memory(group), flat, op), sent)
    elif how == "hierarchical" and (memory := group_memory(group).memory) is not None:
        plan = _over_hosts(memory, flat, "sum" if op == "mean" else op, group)
    else:
        plan = _by_messages("all_reduce", how, flat, flat, group, op)
    return run("all_reduce", x, group, plan, result, async_op)


@may_be_async
def reduce_scatter(
    x: torch.Tensor,
    op: str = "sum",
    algorithm: str = "auto",
    group: Group = None,
    out: torch.Tensor | None = None,
    async_op: bool = False,
) -> torch.Tensor:
    """Reduce `x` over all ranks and leave each with its shard: rank r gets rows r k to (r + 1) k of it.

    Sends (n - 1) / n S. Over gloo that is an all-to-all and a local sum in rank order, so that the result
    does not depend on timing; gloo's own reduce-scatter sends as much as an all-reduce.

    Args:
        x: (n k, ...), the same shape and dtype on all ranks; it is not changed, except where `out` is.
        op, algorithm, group, async_op: as for `all_reduce`.
        out: (k, ...), where to put the shard; None for a new tensor. It may be this rank's own part of `x`.

    Returns:
        This rank's shard, (k, ...), or the `Work` whose `wait()` returns it.

    Raises:
        ValueError: n does not divide the first dimension, or `out` has another shape or dtype.
        TypeError: as for `all_reduce`.
    """
    data = tensor_checks.check_reducible("reduce_scatter", x, op, algorithm, in_place=False).contiguous()
    ranks, how = len(ranks_of(group)), choose("reduce_scatter", algorithm, group, x, op)
    rows = tensor_checks.rows_per_rank("reduce_scatter", x, ranks)
    shard = tensor_checks.output("reduce_scatter", out, data, (rows, *x.shape[1:]))
    parts, sent = data.view(ranks, *shard.shape), (ranks - 1) * bytes_of(shard)  # row r is rank r's
    operation, reduce = tensor_checks.OPERATIONS[op]
    arrived: Callable[[], torch.Tensor] | None = None  # returns the sum, if it is not in the shard by itself

    def result() -> torch.Tensor:
        if arrived is not None and ranks > 1:
            shard.copy_(arrived())
        if op == "mean" and ranks > 1 and how != "shared_memory":
            shard.div_(ranks)
        return shard if out is None else out

    if how == "shared_memory":
        bounds = [i * shard.numel() for i in range(ranks + 1)]
        flat, into = data.view(-1), shard.view(-1)
        call = partial(shared_memory.reduce_scatter, _memory(group), flat, into, op, bounds)
        plan = by_minidist(group, call, sent)
    elif how != "torch":
        scratch, rank = parts.clone(), rank_in(group)
        plan = _by_messages("reduce_scatter", how, scratch.view(-1), scratch.view(-1), group, op)
        arrived = partial(scratch.__getitem__, rank)
    elif x.is_cuda:  # NCCL's own sends no more than it must
        start = partial(_reduce_scatter_single, shard, data, operation, group=group, async_op=True)
        plan = by_torch(start, sent)
    elif not async_op and bytes_of(x) > gloo_workarounds.CHUNK:
        start = partial(gloo_workarounds.scatter_by_chunks, parts.flatten(1), shard.view(-1), reduce, group)
        plan = by_torch(start, sent)
    else:
        buffer = torch.empty_like(parts)  # row r is rank r's contribution to this rank's shard
        start = partial(dist.all_to_all_single, movable(buffer), movable(parts), group=group, async_op=True)
        plan, arrived = by_torch(start, sent), partial(reduce, buffer, dim=0)
    return run("reduce_scatter", x, group, plan, result, async_op, partial(shard.copy_, data))


@may_be_async
def all_gather(
    x: torch.Tensor,
    algorithm: str = "auto",
    group: Group = None,
    out: torch.Tensor | None = None,
    async_op: bool = False,
) -> torch.Tensor:
    """Give every rank the tensors of all ranks, one after the other along the first dimension.

    Sends (n - 1) S: around a ring, each rank passes on what it receives.

    Args:
        x: (k, ...), the same shape and dtype on all ranks.
        algorithm, group, async_op: as for `all_reduce`.
        out: (n k, ...), where to put the result; None for a new tensor. `x` may be its own part of it.

    Returns:
        (n k, ...), or the `Work` whose `wait()` returns it.

    Raises:
        ValueError: `out` has another shape or dtype, or `x` has no dimension.
    """
    data, ranks = tensor_checks.check_tensor("all_gather", x).contiguous(), len(ranks_of(group))
    rows = tensor_checks.rows_per_rank("all_gather", x, 1)
    gathered = tensor_checks.output("all_gather", out, data, (ranks * rows, *x.shape[1:]))
    how, flat, sent = choose("all_gather", algorithm, group, x), gathered.view(-1), (ranks - 1) * bytes_of(x)
    if how == "torch":
        start = partial(_all_gather_single, movable(gathered), movable(data), group=group, async_op=True)
        plan = by_torch(start, sent)
    elif how == "shared_memory":
        bounds = [i * data.numel() for i in range(ranks + 1)]
        call = partial(shared_memory.all_gather, _memory(group), data.view(-1), flat, bounds)
        plan = by_minidist(group, call, sent)
    else:
        own = gathered.narrow(0, rank_in(group) * rows, rows)
        if own.data_ptr() != data.data_ptr():
            own.copy_(data)
        plan = _by_messages("all_gather", how, flat, flat, group)
    result, alone = gathered if out is None else out, partial(gathered.copy_, data)
    return run("all_gather", x, group, plan, lambda: result, async_op, alone)


@may_be_async
def broadcast(
    x: torch.Tensor, source: int = 0, algorithm: str = "auto", group: Group = None, async_op: bool = False
) -> torch.Tensor:
    """Copy `x` from one rank to all, in place.

    Sends S to each of this rank's children in a binomial tree: ceil(log2 n) of them for the source, none for
    the leaves, n - 1 over all ranks together. Through shared memory the source counts all n - 1.

    Args:
        x: the same shape and dtype on all ranks; the source's values reach the others.
        source: the rank in the group that has the values.
        algorithm, group, async_op: as for `all_reduce`.

    Returns:
        `x`, or the `Work` whose `wait()` returns it.

    Raises:
        ValueError: `source` is not a rank of the group, or elements of `x` share memory.
    """
    buffer, ranks = tensor_checks.check_in_place("broadcast", x).contiguous(), len(ranks_of(group))
    tensor_checks.check_member("source", source, ranks)
    how, flat = choose("broadcast", algorithm, group, x), buffer.view(-1)
    if how == "torch":
        start = partial(dist.broadcast, movable(buffer), group=group, async_op=True, group_src=source)
        children = gloo_workarounds.tree_children((rank_in(group) - source) % ranks, ranks)
        plan = by_torch(start, children * bytes_of(x))
    elif how == "shared_memory":
        sent = (ranks - 1) * bytes_of(x) if rank_in(group) == source else 0
        plan = by_minidist(group, partial(shared_memory.broadcast, _memory(group), flat, source), sent)
    else:
        plan = _by_messages("broadcast", how, flat, flat, group, source=source)
    return run("broadcast", x, group, plan, partial(copy_back, buffer, x), async_op)


@may_be_async
def all_to_all(
    x: torch.Tensor,
    input_rows: Sequence[int] | None = None,
    output_rows: Sequence[int] | None = None,
    algorithm: str = "auto",
    group: Group = None,
    async_op: bool = False,
) -> torch.Tensor:
    """Send a part of `x` to each rank, and get a part from each: a transpose of rows between ranks.

    Sends all of `x` but the part that this rank keeps: (n - 1) / n S where the parts are equal.

    Args:
        x: (rows, ...): the part for rank 0, then that for rank 1, and so on.
        input_rows: rows of each part; None for equal parts.
        output_rows: rows that come from each rank; None for equal parts.
        algorithm, group, async_op: as for `all_reduce`.

    Returns:
        The part from rank 0, then that from rank 1, and so on; or the `Work` whose `wait()` returns them.

    Raises:
        ValueError: n does not divide the rows, or the parts do not add up to them.
        CollectiveError: a peer is gone or late, or sends other sizes than this rank expects of it.
    """
    data, ranks = tensor_checks.check_tensor("all_to_all", x).contiguous(), len(ranks_of(group))
    sends = tensor_checks.check_rows("input_rows", input_rows, x, ranks)
    comes = tensor_checks.check_rows("output_rows", output_rows, x, ranks)
    if sum(sends) != len(x):
        raise ValueError(
            f"input_rows {sends} add up to {sum(sends)}, and x has {len(x)} rows; they have to agree"
        )
    received = data.new_empty((sum(comes), *x.shape[1:]))
    width = x.shape[1:].numel()  # also where x has no rows
    how, flat, into = choose("all_to_all", algorithm, group, x), data.view(-1), received.view(-1)
    outgoing, incoming = ([rows * width for rows in parts] for parts in (sends, comes))
    sent = bytes_of(x) - outgoing[rank_in(group)] * x.element_size()
    if how == "torch":
        plan = by_torch(partial(gloo_workarounds.all_to_all, into, flat, incoming, outgoing, group), sent)
    elif how == "shared_memory":
        call = partial(shared_memory.all_to_all, _memory(group), flat, into, outgoing, incoming)
        plan = by_minidist(group, call, sent)
    else:
        bounds = [[0, *accumulate(lengths)] for lengths in (outgoing, incoming)]
        options = {"input_offsets": bounds[0], "output_offsets": bounds[1]}
        plan = _by_messages("all_to_all", how, flat, into, group, "sum", **options)
    return run("all_to_all", x, group, plan, lambda: received, async_op, partial(received.copy_, data))


@may_be_async
def barrier(group: Group = None, async_op: bool = False) -> None:
    """Wait until every rank of the group has come here. Sends no payload.

    Returns:
        None, or the `Work` whose `wait()` returns when all have come.
    """
    nothing = torch.empty(0)
    if choose("barrier", "auto", group, nothing) == "torch":
        plan = by_torch(partial(dist.barrier, group=group, async_op=True), 0)
    else:
        plan = by_minidist(group, partial(shared_memory.barrier, _memory(group)), 0)
    return run("barrier", nothing, group, plan, lambda: None, async_op)


# How a call is carried out


def choose(operation: str, algorithm: str, group: Group, x: torch.Tensor, op: str = "") -> str:
    """Return the algorithm of a call, the same on all ranks.

    A group's first call that may use shared memory waits for all its ranks and makes that memory, even if the
    call is asynchronous: a rank that did not wait could not know what the others chose. x is the call's
    tensor, or any other on its device. "torch" becomes "ring" if torch cannot reduce this dtype by `op`.
    Raises ValueError if the algorithm is unknown, or it is "shared_memory" and the group has none.
    """
    algorithms = ALGORITHMS[operation]
    if algorithm not in algorithms and algorithm != "auto":
        raise unknown(f"algorithm of {operation}", algorithm, ("auto", *algorithms))
    if len(ranks_of(group)) == 1:
        return "torch"
    how = preferred(operation) if algorithm == "auto" else algorithm
    if how == "shared_memory" and (why_not := _why_no_memory(operation, group, x)):
        if algorithm == how:
            raise ValueError(f"{operation} cannot go through shared memory: {why_not}; give algorithm='auto'")
        how = "torch"
    return "ring" if how == "torch" and op and tensor_checks.refusal(operation, op, x.dtype, how) else how


def _why_no_memory(operation: str, group: Group, x: torch.Tensor) -> str:
    """Return why a call cannot go through shared memory, or "". A group's first call makes its memory."""
    if x.device.type != "cpu":
        return f"its tensor is on {x.device}"
    found: GroupMemory | None = known(group).memory
    if found is None:  # making it is a collective, which the ranks' other calls must not mix with
        if call_checker.checker is not None:
            compared = call_checker.checker.enter(call_of(operation, "shared_memory", x, group))
            if compared is not None:
                compared()
        found = group_memory(group, f"{operation} of {described(x)}")
    return found.why_not


def _memory(group: Group) -> SharedMemory:
    memory = group_memory(group).memory
    assert memory is not None  # `choose` has checked it
    return memory


def _by_messages(
    operation: str,
    algorithm: str,
    data: torch.Tensor,
    target: torch.Tensor,
    group: Group,
    op: str = "sum",
    **options: Any,
) -> CallPlan:
    """Run an algorithm's steps, which send from `data` and receive into `target`. Both are flat."""
    rank, generator = rank_in(group), MESSAGE_ALGORITHMS[operation][algorithm]
    steps = list(generator(rank, len(ranks_of(group)), len(data), **options))
    sent = bytes_sent(steps, data.element_size(), rank)

    def call() -> None:
        execute(steps, data, target, "sum" if op == "mean" else op, group)

    return by_minidist(group, call, sent, sent, algorithm)


def _over_hosts(memory: SharedMemory, x: torch.Tensor, op: str, group: Group) -> CallPlan:
    """Reduce in shared memory inside each host, and by a ring of messages between hosts.

    The phases are those of `algorithms/hierarchical.py`. There are as many parts as the smallest host has
    ranks, so that every ring passes through every host. With m hosts the network carries 2 (m - 1) / m S for
    each host, however many ranks it has.

    Source: Jia et al. 2018, "Highly Scalable Deep Learning Training System with Mixed-Precision", 3.3.
    """
    own, members, rings = memory.own, len(memory.members), min(map(len, memory.hosts))
    bounds = [*offsets(len(x), rings), *[len(x)] * (members - rings)]  # further ranks have an empty part
    part, steps = x[bounds[own] : bounds[own + 1]], []
    if own < rings:
        ring, here = [host[own] for host in memory.hosts], memory.hosts.index(memory.members)
        within = offsets(len(part), len(ring))
        steps = [*reduce_scatter_among(ring, here, within), *all_gather_among(ring, here, within)]

    def call() -> None:
        if members > 1:
            shared_memory.reduce_scatter(memory, x, part, op, bounds)
        execute(steps, part, part, "sum" if op == "mean" else op, group)
        if members > 1:
            shared_memory.all_gather(memory, part, x, bounds)

    inside = (len(x) - len(part)) + (members - 1) * len(part)
    on_wire = bytes_sent(steps, x.element_size())
    return by_minidist(group, call, inside * x.element_size() + on_wire, on_wire, "hierarchical")
