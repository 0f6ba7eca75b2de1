"""Our own collectives: each is a generator of the messages that one rank sends and receives.

>>> from minidist.comm import algorithms
>>> for step in algorithms.ring_all_reduce(rank=0, ranks=4, elements=16):
...     print(step)
>>> schedule = algorithms.schedule("all_reduce", "ring", ranks=4, elements=16)
>>> algorithms.check(schedule)   # proves without a process that it ends, and that the result is right
>>> algorithms.draw(schedule)    # a figure: a line for each rank, an arrow for each message
>>> comm.all_reduce(x, algorithm="ring")    # runs it

The files of algorithms are a ladder: each reads like the paper that it comes from.

naive              everything to rank 0 and back
ring               each rank talks to two neighbours
tree               few steps, for small tensors
halving_doubling   a ring's bytes in a tree's number of steps
hierarchical       inside a host first, then between hosts
pairwise           all-to-all, one peer at a time
steps              what all are made of: messages, and steps of them
registry           every algorithm by operation and name; the schedule of all ranks
formulas           bytes that a rank sends, in closed form
proof              runs a schedule in one process, and checks its result
drawing            draws a schedule
execute            runs a rank's steps over torch.distributed, in segments that overlap

For readers of Horovod: `hvd.size()`, `hvd.rank()` and `hvd.local_rank()` are `minidist.size()`,
`minidist.rank()` and `minidist.local_rank()`; `hvd.allreduce(x)` is `comm.all_reduce(x, op="mean")`, since
Horovod averages by default and returns a new tensor, where ours sums and works in place; `hvd.allgather(x)`
is `comm.all_gather(x)`; `hvd.broadcast_(x, root_rank=0)` is `comm.broadcast(x, source=0)`;
`hvd.alltoall(x, splits)` is `comm.all_to_all(x, splits, ...)`. Horovod became known for `ring_all_reduce`
(Sergeev and Del Balso 2018); its hierarchical all-reduce is `hierarchical_all_reduce`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minidist._lazy import lazy

if TYPE_CHECKING:
    from minidist.comm.algorithms.drawing import draw as draw
    from minidist.comm.algorithms.formulas import formula as formula
    from minidist.comm.algorithms.halving_doubling import (
        halving_doubling_all_reduce as halving_doubling_all_reduce,
    )
    from minidist.comm.algorithms.hierarchical import hierarchical_all_reduce as hierarchical_all_reduce
    from minidist.comm.algorithms.naive import naive_all_reduce as naive_all_reduce
    from minidist.comm.algorithms.pairwise import pairwise_all_to_all as pairwise_all_to_all
    from minidist.comm.algorithms.proof import ScheduleError as ScheduleError
    from minidist.comm.algorithms.proof import check as check
    from minidist.comm.algorithms.registry import ALGORITHMS as ALGORITHMS
    from minidist.comm.algorithms.registry import CollectiveSchedule as CollectiveSchedule
    from minidist.comm.algorithms.registry import schedule as schedule
    from minidist.comm.algorithms.ring import ring_all_gather as ring_all_gather
    from minidist.comm.algorithms.ring import ring_all_reduce as ring_all_reduce
    from minidist.comm.algorithms.ring import ring_broadcast as ring_broadcast
    from minidist.comm.algorithms.ring import ring_reduce_scatter as ring_reduce_scatter
    from minidist.comm.algorithms.steps import Message as Message
    from minidist.comm.algorithms.steps import Step as Step
    from minidist.comm.algorithms.steps import bytes_sent as bytes_sent
    from minidist.comm.algorithms.steps import offsets as offsets
    from minidist.comm.algorithms.tree import tree_all_gather as tree_all_gather
    from minidist.comm.algorithms.tree import tree_all_reduce as tree_all_reduce
    from minidist.comm.algorithms.tree import tree_broadcast as tree_broadcast
    from minidist.comm.algorithms.tree import tree_reduce_scatter as tree_reduce_scatter

__getattr__, __dir__, __all__ = lazy(__name__)
