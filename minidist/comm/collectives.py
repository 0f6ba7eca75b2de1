"""Collectives: the part of the communication API in which all ranks of a group make the same call.

Every strategy communicates through these functions, and never calls torch.distributed itself. Each call is
checked and counted in the open ledgers. All ranks of the group make the same calls in the same order with the
same shapes and dtypes. With `async_op=True` a function returns a `Work` at once; the result is there after
its `wait()`. Either raises CollectiveError when a peer is gone, late, or makes another call.

`algorithm="auto"` takes what `comm.using` names, else shared memory where all ranks are CPU ranks of one
host, else "torch": torch.distributed over gloo or NCCL. The others send messages; see `comm.algorithms`.

In the formulas n is the number of ranks in the group, and S the bytes of the tensor passed. Bytes sent are
the payload that other ranks get from this one, through sockets (`Ledger.bytes_on_wire`) or from its memory.
The formulas hold for "torch" and "shared_memory". NCCL picks its own algorithm; the ledger then counts the
one named here, which NCCL uses for large tensors. In a world of one nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from minidist.comm import tensor_checks
from minidist.comm.opaque import may_be_async
from minidist.comm.transport import algorithm_choice, gloo_workarounds
from minidist.comm.transport.algorithm_choice import choose
from minidist.comm.transport.gloo_workarounds import movable
from minidist.comm.work import Group, by_torch, bytes_of, copy_back, rank_in, ranks_of, run

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

    def result() -> torch.Tensor:
        if op == "mean" and ranks > 1 and how == "torch":
            buffer.div_(ranks)
        return copy_back(buffer, x)

    if how == "torch":
        operation, _ = tensor_checks.OPERATIONS[op]
        start = partial(dist.all_reduce, buffer, operation, group=group, async_op=True)
        plan = by_torch(start, 2 * (ranks - 1) * bytes_of(x) // ranks)
    else:
        plan = algorithm_choice.all_reduce(how, buffer.view(-1), op, group)
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
        x: (n k, ...), the same shape and dtype on all ranks; it is not changed.
        op, algorithm, group, async_op: as for `all_reduce`.
        out: (k, ...), where to put the shard; None for a new tensor.

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
    if how != "torch":
        plan = algorithm_choice.reduce_scatter(how, data.view(-1), shard.view(-1), op, group)
        return run("reduce_scatter", x, group, plan, lambda: shard if out is None else out, async_op)
    operation, reduce = tensor_checks.OPERATIONS[op]
    by_library = x.is_cuda and ranks > 1  # NCCL's own sends no more than it must
    by_chunks = not by_library and not async_op and ranks > 1 and bytes_of(x) > gloo_workarounds.CHUNK
    # Row r of what arrives is rank r's contribution to this rank's shard.
    arrived = shard if by_library or by_chunks else torch.empty_like(data)

    def result() -> torch.Tensor:
        if not by_library and not by_chunks:
            shard.copy_(reduce(arrived.view(ranks, *shard.shape), dim=0))
        if op == "mean" and ranks > 1:
            shard.div_(ranks)
        return shard if out is None else out

    if by_library:
        start = partial(_reduce_scatter_single, shard, data, operation, group=group, async_op=True)
    elif by_chunks:
        parts = data.view(ranks, -1)
        start = partial(gloo_workarounds.scatter_by_chunks, parts, shard.view(-1), reduce, group)
    else:
        start = partial(dist.all_to_all_single, movable(arrived), movable(data), group=group, async_op=True)
    plan = by_torch(start, (ranks - 1) * bytes_of(x) // ranks)
    return run("reduce_scatter", x, group, plan, result, async_op, partial(arrived.copy_, data))


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
    how = choose("all_gather", algorithm, group, x)
    if how == "torch":
        start = partial(_all_gather_single, movable(gathered), movable(data), group=group, async_op=True)
        plan = by_torch(start, (ranks - 1) * bytes_of(x))
    else:
        plan = algorithm_choice.all_gather(how, data.view(-1), gathered.view(-1), group)
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
    how = choose("broadcast", algorithm, group, x)
    if how == "torch":
        start = partial(dist.broadcast, movable(buffer), group=group, async_op=True, group_src=source)
        children = gloo_workarounds.tree_children((rank_in(group) - source) % ranks, ranks)
        plan = by_torch(start, children * bytes_of(x))
    else:
        plan = algorithm_choice.broadcast(how, buffer.view(-1), source, group)
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
    if how == "torch":
        start = partial(gloo_workarounds.all_to_all, into, flat, incoming, outgoing, group)
        plan = by_torch(start, bytes_of(x) - outgoing[rank_in(group)] * x.element_size())
    else:
        plan = algorithm_choice.all_to_all(how, flat, into, outgoing, incoming, group)
    return run("all_to_all", x, group, plan, lambda: received, async_op, partial(received.copy_, data))
