"""A world with only one real rank: its process group answers for all others.

The rank joins a world of any size and makes groups, meshes and calls as in training; the communication API
counts them in its ledgers. Nothing is sent. The answers assume that all ranks are alike: a sum over n ranks
is n times this rank's number, and whatever other ranks gather or send is this rank's own. Where ranks differ,
such as in their numbers of tokens, `Peers` has the answers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work

from minidist.comm.transport import shared_memory
from minidist.comm.work import Failed
from minidist.scale.dry_run.fake_tensors import LARGE, DryTensors
from minidist.scale.dry_run.peers import Peers

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
            numbers = x.view(-1)[-LARGE:]  # a bucket has them at its end
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
            parts = self._world.peers.gathered(x.clone(), self._members)
            for rank, (room, part) in enumerate(zip(into.view(len(parts), -1), parts, strict=True)):
                if rank != self._rank or room.data_ptr() != x.data_ptr():
                    room.copy_(part.view(-1))

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
            shared_memory.forget()
            dist.destroy_process_group()
    finally:
        sys.excepthook = hook
        _now.pop().__dict__.clear()  # groups may outlive their world and must not keep its tensors alive
