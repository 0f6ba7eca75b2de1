"""Run a collective in shared memory, by an algorithm of messages, or by both, and count the bytes it sends.

Each function returns a `Dispatch`, which the communication API starts. Tensors are flat and contiguous. The
sum of a mean is divided here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from minidist.comm.algorithms.execute import execute
from minidist.comm.algorithms.registry import ALGORITHMS
from minidist.comm.algorithms.steps import bytes_sent
from minidist.comm.transport import shared_collectives
from minidist.comm.transport.algorithm_choice import background, group_memory
from minidist.comm.transport.background_thread import Background
from minidist.comm.transport.hierarchical_all_reduce import hierarchical_all_reduce
from minidist.comm.transport.shared_memory import SharedMemory
from minidist.comm.work import Dispatch, Group, bytes_of, rank_in, ranks_of


def all_reduce(algorithm: str, x: torch.Tensor, op: str, group: Group) -> Dispatch:
    """Reduce x in place."""
    ranks = len(ranks_of(group))
    memory = group_memory(group).memory if algorithm in ("shared_memory", "hierarchical") else None
    if memory is not None and (algorithm == "shared_memory" or len(memory.hosts) == 1):
        run = partial(shared_collectives.all_reduce, memory, x, op)
        return _shared(memory, run, 2 * (ranks - 1) * bytes_of(x) // ranks)
    if memory is not None:
        run_both, sent, on_wire = hierarchical_all_reduce(memory, x, op)
        return Dispatch(partial(_begin, background(group), run_both), sent, on_wire)
    finish = partial(x.div_, ranks) if op == "mean" else None
    return _messages("all_reduce", algorithm, x, x, group, op, finish)


def reduce_scatter(algorithm: str, x: torch.Tensor, out: torch.Tensor, op: str, group: Group) -> Dispatch:
    """Reduce x, and put this rank's share into out."""
    ranks, rank = len(ranks_of(group)), rank_in(group)
    if algorithm == "shared_memory":
        memory, offsets = _memory(group), [i * len(out) for i in range(ranks + 1)]
        run = partial(shared_collectives.reduce_scatter, memory, x, out, op, offsets)
        return _shared(memory, run, bytes_of(x) - bytes_of(out))
    scratch = x.clone()
    share = scratch[rank * len(out) : (rank + 1) * len(out)]

    def finish() -> None:
        out.copy_(share)
        if op == "mean":
            out.div_(ranks)

    return _messages("reduce_scatter", algorithm, scratch, scratch, group, op, finish)


def all_gather(algorithm: str, x: torch.Tensor, out: torch.Tensor, group: Group) -> Dispatch:
    """Put the x of all ranks into out. x may be a part of out."""
    ranks, rank = len(ranks_of(group)), rank_in(group)
    if algorithm == "shared_memory":
        memory, offsets = _memory(group), [i * len(x) for i in range(ranks + 1)]
        run = partial(shared_collectives.all_gather, memory, x, out, offsets)
        return _shared(memory, run, (ranks - 1) * bytes_of(x))
    own = out[rank * len(x) : (rank + 1) * len(x)]
    if own.data_ptr() != x.data_ptr():
        own.copy_(x)
    return _messages("all_gather", algorithm, out, out, group)


def broadcast(algorithm: str, x: torch.Tensor, source: int, group: Group) -> Dispatch:
    """Copy x from one rank to all."""
    if algorithm == "shared_memory":
        memory = _memory(group)
        run = partial(shared_collectives.broadcast, memory, x, source)
        sent = (len(ranks_of(group)) - 1) * bytes_of(x) if rank_in(group) == source else 0
        return _shared(memory, run, sent)
    return _messages("broadcast", algorithm, x, x, group, options={"source": source})


def all_to_all(
    algorithm: str,
    x: torch.Tensor,
    out: torch.Tensor,
    sends: Sequence[int],
    receives: Sequence[int],
    group: Group,
) -> Dispatch:
    """Send each rank its part of x, and put the parts that arrive into out. The parts have these lengths."""
    if algorithm == "shared_memory":
        memory = _memory(group)
        run = partial(shared_collectives.all_to_all, memory, x, out, sends, receives)
        return _shared(memory, run, bytes_of(x) - sends[rank_in(group)] * x.element_size())
    offsets = {"input_offsets": [0, *accumulate(sends)], "output_offsets": [0, *accumulate(receives)]}
    return _messages("all_to_all", algorithm, x, out, group, options=offsets)


def barrier(group: Group) -> Dispatch:
    """Wait for the other ranks, in shared memory."""
    memory = _memory(group)
    return _shared(memory, partial(shared_collectives.barrier, memory), 0)


def _memory(group: Group) -> SharedMemory:
    memory = group_memory(group).memory
    assert memory is not None  # `algorithm_choice.choose` has checked it
    return memory


def _shared(memory: SharedMemory, run: Callable[[], None], sent: int) -> Dispatch:
    return Dispatch(partial(_begin, background(memory.group), run), sent, 0)


def _begin(runner: Background, run: Callable[[], None], at_once: bool) -> Any:
    return runner.start(run) if at_once else runner.here(run)


def _messages(
    operation: str,
    algorithm: str,
    source: torch.Tensor,
    target: torch.Tensor,
    group: Group,
    op: str = "sum",
    finish: Callable[[], object] | None = None,
    options: dict[str, Any] | None = None,
) -> Dispatch:
    """Run an algorithm's steps, which send from `source` and receive into `target`; then call `finish`."""
    rank = rank_in(group)
    steps = list(ALGORITHMS[operation][algorithm](rank, len(ranks_of(group)), len(source), **(options or {})))
    sent = bytes_sent(steps, source.element_size(), rank)

    runner = background(group)

    def run() -> None:
        with (
            runner.call()
        ):  # a message of a call that failed could still arrive, and be taken for the next one's
            execute(steps, source, target, "sum" if op == "mean" else op, group)
        if finish is not None:
            finish()

    return Dispatch(partial(_begin, runner, run), sent, sent)
