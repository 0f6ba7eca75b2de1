"""A world with only one real rank: its process group answers for all others.

The rank joins a world of any size and makes groups, meshes and calls as in training; the communication API
counts them in its ledgers. Nothing is sent. The answers assume that all ranks are alike: a sum over n ranks
is n times this rank's number, and whatever other ranks gather or send is this rank's own. Ranks differ in
their numbers of tokens and the shapes of activations, which follow from the layout: `Peers` knows them.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work

from minidist.comm import work
from minidist.comm.work import Failed
from minidist.parallel.context_parallel import zigzag_order
from minidist.parallel.context_parallel.attention_in_a_ring import TOLD
from minidist.parallel.contract.layout import Layout
from minidist.parallel.pipeline.stage_messages import MOST_DIMS, headers
from minidist.parallel.schedules.whole_schedules import by_name
from minidist.parallel.tensor_parallel.shares import share_of
from minidist.scale.dryrun.fake_tensors import NUMBERS, DryTensors
from minidist.scale.memory.training_setup import AXES

Form = tuple[Sequence[int], torch.dtype]
"""A tensor's shape and dtype."""


class Peers:
    """The peers of a rank on one stage of a layout.

    received: from one of the rank's chunks and a micro-batch's rows to what the stage before sends: the shape
    and the dtype of each tensor. It is known once the model is cut.
    """

    def __init__(self, layout: Layout, stage: int) -> None:
        self.layout, self.stage = layout, stage
        self.received: Callable[[int, int], Sequence[Form]] = lambda chunk, rows: ()
        self._told: set[tuple[int, int]] = set()  # chunks and rows whose shape this rank knows
        self._forms: deque[list[int]] = deque()

    def begin(self, rows: int) -> None:
        """Prepare the shapes that this rank receives in the coming step, in the schedule's order."""
        if self.layout.pp == 1:
            return
        parts = min(self.layout.micro_batches, rows)
        sizes = [len(part) for part in torch.empty(rows, device="meta").tensor_split(parts)]
        schedule = by_name(self.layout.schedule, self.layout.pp, parts, self.layout.chunks)
        for each in schedule[self.stage]:
            key = each.chunk, sizes[each.micro_batch]
            if each.kind == "recv_forward" and key not in self._told:
                self._told.add(key)
                self._forms.extend(headers(self.received(*key)))

    def message(self, into: Tensor) -> Tensor | None:
        """What this rank receives: a stage's output's shape, as numbers; None for messages without data."""
        if into.dtype != torch.int64 or into.shape != (2 + MOST_DIMS,) or not self._forms:
            return None
        return torch.tensor(self._forms.popleft())

    def gathered(self, own: Tensor, ranks: tuple[int, ...]) -> Tensor:  # (numbers) -> (ranks, numbers)
        """What each of these ranks gives to an all-gather to which this rank gives `own`.

        It is the same, except for the ranks' numbers of tokens; see `context_parallel/`.
        """
        everyones = own.expand(len(ranks), -1)
        if self.layout.cp > 1 and own.dtype == torch.int64 and own.numel() == TOLD:
            sizes = [zigzag_order.size(int(own[TOLD - 2]), len(ranks), index) for index in range(len(ranks))]
            everyones = everyones.clone()
            everyones[:, 0] = torch.tensor(sizes)
        return everyones


def kinds(divided: Sequence[int] | None, layout: Layout, batch: tuple[int, int]) -> list[tuple[int, int]]:
    """The first rank of each kind, and how many ranks are of that kind.

    Ranks of different kinds hold or send something different: they are on different stages of the pipeline,
    or have different numbers of rows, tokens, heads or scores. `divided` has the sizes that tensor
    parallelism divides; if it is None, each tp and cp rank is of its own kind.
    """
    rows, tokens = batch
    # A ring's rank sends all keys that pass it, which are all but the next rank's.
    lengths = [zigzag_order.size(tokens, layout.cp, index) for index in range(layout.cp)]
    keys: dict[str, list[tuple[int, ...]]] = {
        axis: [(index,) for index in range(getattr(layout, axis))] for axis in AXES
    }
    keys["dp"] = [(len(range(index, rows, layout.dp)),) for index in range(layout.dp)]
    if divided is not None:
        keys["cp"] = list(zip(lengths, lengths[1:] + lengths[:1], strict=True))
        keys["tp"] = [
            tuple(len(share_of(n, index, layout.tp)) for n in divided) for index in range(layout.tp)
        ]
    found = [(0, 1)]  # ranks, and how many are of their kind
    for axis in AXES:
        classes: dict[tuple[int, ...], list[int]] = {}
        for index, key in enumerate(keys[axis]):
            classes.setdefault(key, []).append(index)
        size, alike = getattr(layout, axis), [*classes.values()]
        found = [(rank * size + each[0], count * len(each)) for rank, count in found for each in alike]
    return sorted(found)


NAME = "dry"
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
LIMIT = timedelta(seconds=60)
WAYS = ("torch", "shared_memory")


class CountingGroup(dist.ProcessGroup):
    """A process group in which this process is the only rank; it answers as if the others were alike."""

    def __init__(self, name: str, members: tuple[int, ...], rank: int, world: _World) -> None:
        super().__init__(rank, len(members))  # type: ignore[call-arg]
        self._name, self._members, self._rank, self._world = name, members, rank, world

    # Called by torch and the communication API.

    def getBackendName(self) -> str:
        """The backend's name."""
        return NAME

    def getGroupName(self) -> str:
        """The group's name."""
        return self._name

    @property
    def group_name(self) -> Any:
        """The group's name."""
        return self._name

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(options=SimpleNamespace(_timeout=LIMIT))

    def shared_memory(self) -> Any:
        """Stands in for a host's shared memory; see `transport.shared_memory.group_memory`."""
        if self._world.way == "torch":
            raise Failed("this is a dry run of ranks that talk over a network")
        return SimpleNamespace(group=self, hosts=[self._members], empty=lambda shape, dtype: None)

    def background(self) -> _Answers:
        """Stands in for the thread that runs collectives; see `comm.work.background`."""
        return _Answers(self)

    # Collectives, called by torch.distributed.

    def allreduce(self, tensors: list[Tensor], options: Any) -> Work:  # type: ignore[override]
        """A sum is n times this rank's number; a minimum or maximum is this rank's number."""
        name = next((name for name, each in _OPERATIONS.items() if options.reduceOp == each), "")
        for x in tensors:
            self._reduced(x, name)
        return _Done()

    def _reduced(self, x: Tensor, operation: str) -> None:
        if operation == "sum":
            numbers = x.view(-1)[-NUMBERS:]  # a bucket has them at its end
            if self._world.tensors.computes_with(numbers):
                numbers.mul_(self.size())
        elif operation not in ("mean", "min", "max"):
            raise ValueError("a dry run supports only sums, means, minima and maxima; use one of them")

    def broadcast(self, tensors: list[Tensor], options: Any) -> Work:  # type: ignore[override]
        """The source has what this rank has, so nothing changes."""
        return _Done()

    def _allgather_base(self, into: Tensor, x: Tensor, options: Any = None) -> Work:
        """Fill in each rank's part, as `Peers` says."""
        self._gathered(into, x)
        return _Done()

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """The name of `_allgather_base` from torch 2.13 on."""
        return self._allgather_base(output, input, opts)

    def _gathered(self, into: Tensor, x: Tensor) -> None:
        if self._world.tensors.computes_with(into, x) and x.numel():
            # A copy, since `x` may be this rank's part of `into`.
            everyones = self._world.peers.gathered(x.clone().view(-1), self._members)
            into.view(everyones.shape).copy_(everyones)

    def alltoall_base(
        self, into: Tensor, x: Tensor, comes: list[int], goes: list[int], options: Any = None
    ) -> Work:
        """Every rank sends this rank the same as this rank keeps for itself."""
        self._exchanged(into, x, goes)
        return _Done()

    def _exchanged(self, into: Tensor, x: Tensor, goes: list[int]) -> None:
        if not self._world.tensors.computes_with(into, x):
            return
        sizes = list(goes) or [len(x) // self.size()] * self.size()
        own = torch.split(x, sizes)[self._rank]
        if len(into) == len(own) * self.size():
            into.copy_(torch.cat([own] * self.size()))

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> Work:
        """Nothing is sent."""
        return _Done()

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work:
        """Receive what `Peers` says."""
        for x in tensors:
            message = self._world.peers.message(x)
            if message is not None:
                x.copy_(message)
        return _Done()

    def barrier(self, options: Any = None) -> Work:
        """All ranks are there."""
        return _Done()


class _Done(Work):
    """A completed call."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Answers:
    """Answers the shared-memory collectives that the communication API hands to a group's thread."""

    completed = None

    def __init__(self, group: CountingGroup) -> None:
        self._group = group

    def start(self, run: Any) -> _Answers:
        """Answer a collective; its function and arguments are those of shared_memory.py."""
        if not isinstance(run, partial):
            raise ValueError(
                "a dry run cannot send the messages of an algorithm, which comm.using(...) or algorithm= "
                "asks for; call it outside comm.using, and leave algorithm out"
            )
        name, (_, *args), group = run.func.__name__, run.args, self._group
        tensors = group._world.tensors
        if name == "all_reduce":
            group._reduced(*args)
        elif name == "reduce_scatter":
            x, out, op, offsets = args
            if tensors.computes_with(x, out):
                out.copy_(x[offsets[group._rank] : offsets[group._rank + 1]])
                group._reduced(out, op)
        elif name == "all_gather":
            group._gathered(args[1], args[0])
        elif name == "all_to_all":
            group._exchanged(args[1], args[0], args[2])
        return self

    here = start

    def wait(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        """Always true."""
        return True

    def stop(self) -> None:
        """Do nothing, since nothing runs."""


@dataclass
class _World:
    tensors: DryTensors
    peers: Peers
    way: str


_now: list[_World] = []


def _group(options: Any, _: Any = None) -> CountingGroup:
    members = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return CountingGroup(options.group_id, members, options.group_rank, _now[-1])


@contextmanager
def dry_world(rank: int, ranks: int, tensors: DryTensors, peers: Peers, way: str = "torch") -> Iterator[None]:
    """Make this process rank `rank` of a world of `ranks` ranks, the only real one.

    `tensors` knows which tensors hold data, `peers` what other ranks send. `way` is how ranks communicate:
    "torch", as over a network or NCCL, or "shared_memory", as on one host without GPUs.
    """
    if dist.is_initialized():
        raise ValueError(
            "a dry run makes its own world, and this process has joined one; call it in another process"
        )
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _group, extended_api=True, devices=["cpu", "cuda"])
    _now.append(_World(tensors, peers, way))
    hook = sys.excepthook  # init_process_group replaces it by one that prints the rank before each error
    try:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(NAME, store=store, rank=rank, world_size=ranks, timeout=LIMIT)
        try:
            yield
        finally:
            work.forget_groups()
            dist.destroy_process_group()
    finally:
        sys.excepthook = hook
        _now.pop().__dict__.clear()  # groups may outlive their world and must not keep its tensors alive
