"""One rank of a world whose other ranks are not there: a process group that answers for them.

The rank joins a world of any size, and makes its groups, meshes and calls as in training; the door counts
them in its ledgers. Nothing is sent. What comes back is what would if all ranks were alike: a sum over n
ranks is n times this rank's number, and what the others gather or send is this rank's own. Where ranks are
known to differ, such as in how many tokens of a sequence they have, `Peers` says what theirs is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work

from minidist.comm.transport import algorithm_choice
from minidist.comm.transport.shared_memory import Failed
from minidist.scale.dry_run.fake_tensors import DryTensors

NAME = "dry"
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
LIMIT = timedelta(seconds=60)
WAYS = ("torch", "shared_memory")


class Peers:
    """What the other ranks would say, where it is not what this one does."""

    def gathered(self, own: Tensor, ranks: tuple[int, ...]) -> list[Tensor]:
        """What each of a group's ranks gives to an all-gather, for this rank's share of it."""
        return [own] * len(ranks)

    def message(self, into: Tensor, source: int) -> Tensor | None:
        """What a rank of the world sends that this one is to receive into `into`; None for no data."""
        return None


class CountingGroup(dist.ProcessGroup):
    """A process group of which this process is one rank, and whose other ranks are like it."""

    def __init__(self, name: str, members: tuple[int, ...], place: int, world: _World) -> None:
        super().__init__(place, len(members))  # type: ignore[call-arg]
        self._name, self._members, self._place, self._world = name, members, place, world

    # What torch and the door ask of a group.

    def getBackendName(self) -> str:
        """Of the backend."""
        return NAME

    def getGroupName(self) -> str:
        """Of the group."""
        return self._name

    @property
    def group_name(self) -> Any:
        """Of the group."""
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(options=SimpleNamespace(_timeout=LIMIT))

    def shared_memory(self) -> Any:
        """In place of memory that the ranks of a host share, see `routes.route`."""
        if self._world.way == "torch":
            raise Failed("this is a dry run of ranks that talk over a network")
        return SimpleNamespace(group=self, hosts=[self._members], empty=lambda shape, dtype: None)

    def background(self) -> _Answers:
        """In place of what runs collectives in shared memory, see `routes.background`."""
        return _Answers(self)

    # Collectives, as torch.distributed calls them.

    def allreduce(self, tensors: list[Tensor], options: Any) -> Work:  # type: ignore[override]
        """A sum of n equal summands; of equal numbers the largest is any."""
        name = next((name for name, each in _OPERATIONS.items() if options.reduceOp == each), "")
        for x in tensors:
            self._reduced(x, name)
        return _Done()

    def _reduced(self, x: Tensor, operation: str) -> None:
        if operation == "sum":
            for part in self._world.tensors.parts_with_data(x):
                part.mul_(self.size())
        elif operation not in ("mean", "min", "max"):
            raise ValueError("a dry run answers sums, means, minima and maxima alone; use one of them")

    def broadcast(self, tensors: list[Tensor], options: Any) -> Work:  # type: ignore[override]
        """The source has what this rank has."""
        return _Done()

    def _allgather_base(self, into: Tensor, x: Tensor, options: Any = None) -> Work:
        """Each rank's part, as `Peers` says."""
        self._gathered(into, x)
        return _Done()

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Its name from torch 2.13 on."""
        return self._allgather_base(output, input, opts)

    def _gathered(self, into: Tensor, x: Tensor) -> None:
        if not self._world.tensors.holds_data(x):
            self._world.tensors.write(into)
        elif x.numel():
            parts = self._world.peers.gathered(x.clone(), self._members)
            for place, (room, part) in enumerate(zip(into.view(len(parts), -1), parts, strict=True)):
                if place != self._place or room.data_ptr() != x.data_ptr():
                    room.copy_(part.view(-1))

    def alltoall_base(
        self, into: Tensor, x: Tensor, comes: list[int], goes: list[int], options: Any = None
    ) -> Work:
        """Every rank sends this one what it keeps of its own."""
        self._exchanged(into, x, goes)
        return _Done()

    def _exchanged(self, into: Tensor, x: Tensor, goes: list[int]) -> None:
        if not self._world.tensors.holds_data(x):
            self._world.tensors.write(into)
            return
        sizes = list(goes) or [len(x) // self.size()] * self.size()
        own = torch.split(x, sizes)[self._place]
        if len(into) == len(own) * self.size():
            into.copy_(torch.cat([own] * self.size()))

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> Work:
        """It is received."""
        return _Done()

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work:
        """What `Peers` says."""
        for x in tensors:
            message = self._world.peers.message(x, self._members[source])
            if message is None:
                self._world.tensors.write(x)
            else:
                x.copy_(message)
        return _Done()

    def barrier(self, options: Any = None) -> Work:
        """All are there."""
        return _Done()


class _Done(Work):
    """A call that is complete."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Answers:
    """Runs what the door hands to a group's background: a collective in shared memory, answered."""

    completed = None

    def __init__(self, group: CountingGroup) -> None:
        self._group = group

    def start(self, run: Any) -> _Answers:
        """The collective's function and arguments say what it is: see shared_collectives.py."""
        name, (_, *args), group = run.func.__name__, run.args, self._group
        tensors = group._world.tensors
        if name == "all_reduce":
            group._reduced(*args)
        elif name == "reduce_scatter":
            x, out, op, offsets = args
            if tensors.holds_data(x):
                out.copy_(x[offsets[group._place] : offsets[group._place + 1]])
                group._reduced(out, op)
            else:
                tensors.write(out)
        elif name == "all_gather":
            group._gathered(args[1], args[0])
        elif name == "all_to_all":
            group._exchanged(args[1], args[0], args[2])
        return self

    here = start

    def wait(self) -> None:
        """It is complete."""

    def is_completed(self) -> bool:
        """It is."""
        return True

    def stop(self) -> None:
        """Nothing runs."""


class _World:
    def __init__(self, tensors: DryTensors, peers: Peers, way: str) -> None:
        self.tensors, self.peers, self.way = tensors, peers, way


_now: list[_World] = []


def _group(options: Any, _: Any = None) -> CountingGroup:
    members = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return CountingGroup(options.group_id, members, options.group_rank, _now[-1])


@contextmanager
def dry_world(rank: int, ranks: int, tensors: DryTensors, peers: Peers, way: str = "torch") -> Iterator[None]:
    """Inside, this process is a rank of a world of so many, and the only one.

    Args:
        rank, ranks: its own, and how many.
        tensors: that tell which tensors hold data.
        peers: what the others say.
        way: how the ranks talk: "torch" through torch.distributed, as over a network or NCCL, or
            "shared_memory" as those of one host without GPUs do.

    Raises:
        ValueError: this process is in a world already.
    """
    if dist.is_initialized():
        raise ValueError(
            "a dry run makes a world of its own, and this process has joined one already; call it in another "
            "process"
        )
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _group, extended_api=True, devices=["cpu", "cuda"])
    _now.append(_World(tensors, peers, way))
    hook = sys.excepthook  # torch puts the rank before every error from now on
    try:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(NAME, store=store, rank=rank, world_size=ranks, timeout=LIMIT)
        try:
            yield
        finally:
            algorithm_choice.forget()
            dist.destroy_process_group()
    finally:
        sys.excepthook = hook
        _now.pop().__dict__.clear()  # groups may outlive their world, and are not to hold what was in it
