"""The calls of a dry run as the ledger has them, each with its axis and its phase.

A call's group determines its axis; where several axes share a group, what it sends does. The phases of a step
are the forward pass, the backward pass, which ends with the sums of gradients, and the update: the clipping
norm, the loss sent to all ranks, and the gathering of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from minidist import comm
from minidist.comm.ledgers import Call
from minidist.comm.mesh import Mesh
from minidist.parallel.engine.staged_passes import StagedPasses
from minidist.parallel.engine.training_step import Engine

AXES = ("dp", "tp", "pp", "cp", "ep", "world")
"""Axes of calls. The dp ranks have different rows or tokens and sum gradients; world is all ranks."""
PHASES = ("prepare", "forward", "backward", "update")
_RING = ("send", "recv")


@dataclass
class DryCall(Call):
    """A call that would have been made."""

    axis: str = ""  # one of AXES; empty for a group of one rank
    phase: str = ""  # one of PHASES


@dataclass(frozen=True)
class CallSummary:
    """The calls of one kind together."""

    axis: str
    phase: str
    name: str
    dtype: str
    ranks: int
    calls: int
    bytes_sent: int


def lines(calls: Iterable[DryCall]) -> list[CallSummary]:
    """A summary of each kind of call between ranks, by axis and phase, then in the order of first calls."""
    found: dict[tuple[str, str, str, str, int], list[int]] = {}
    for call in calls:
        if call.axis:
            kind = call.axis, call.phase, call.name, call.dtype, len(call.group)
            found.setdefault(kind, []).append(call.bytes_sent)
    made = [CallSummary(*kind, len(sent), sum(sent)) for kind, sent in found.items()]
    return sorted(made, key=lambda line: (AXES.index(line.axis), PHASES.index(line.phase)))


class Recorder(list[Any]):
    """The list into which a ledger writes its calls, which adds axis and phase to each.

    `phase` is that of the next calls outside of backward passes. `message` is "forward" or "backward", the
    direction of the last message between stages; None before one.
    """

    def __init__(self, phase: str, names: Callable[[Call], str]) -> None:
        super().__init__()
        self.phase, self.message, self.names = phase, None, names

    def append(self, call: Call) -> None:
        """Add a call with its axis and phase; the ledger calls this."""
        phase, axis = self.phase, self.names(call) if len(call.group) > 1 else ""
        if self.message is not None and call.name in _RING and axis == "pp":  # not ring attention's messages
            phase = self.message
        elif phase == "forward" and torch._C._current_graph_task_id() != -1:
            phase = "backward"
        super().append(DryCall(**vars(call), axis=axis, phase=phase))


@contextmanager
def recorded(phase: str, names: Callable[[Call], str] = lambda call: "world") -> Iterator[Recorder]:
    """Record the calls made inside, with this phase until the recorder's phase is changed."""
    with comm.ledger() as ledger:
        ledger.calls = recorder = Recorder(phase, names)
        yield recorder


def axis_names(mesh: Mesh, *shares: int) -> Callable[[Call], str]:
    """A function from a call to its axis.

    shares: how many neighbours share a copy of the state, of the parameters, or of the experts.
    """
    groups = {mesh.ranks(axis): axis for axis in ("tp", "pp", "cp", "dp") if mesh.size(axis) > 1}
    whole, own = mesh.ranks("dp_cp"), mesh.rank("dp_cp")
    attending = {*mesh.ranks("cp")} if mesh.size("cp") > 1 else set()
    gradients = {whole}
    for size in shares:
        first = own // size * size
        gradients |= {whole[first : first + size], whole[own % size :: size]}

    def name(call: Call) -> str:
        # Experts get rows, and before how many; attention's all-to-alls are flat.
        if call.name == "all_to_all" and (len(call.shape) == 2 or call.dtype == "int64"):
            return "ep"
        # Among cp's ranks attention alone sends messages, sizes (int64), and tokens for heads.
        if attending.issuperset(call.group) and (
            call.name in (*_RING, "all_to_all") or call.dtype == "int64"
        ):
            return "cp"
        return "dp" if call.group in gradients else groups.get(call.group, "world")

    return name


@contextmanager
def phases_of(engine: Engine, recorder: Recorder) -> Iterator[None]:
    """Keep the recorder's phase up to date during a step of this engine."""
    passes, strategy = engine.executor, engine.strategy
    with ExitStack() as stack:

        def replace(owner: Any, name: str, new: Any) -> None:
            setattr(owner, name, new)
            stack.callback(delattr, owner, name)  # the method of its class is there again

        def around(owner: Any, name: str, inside: str, after: str) -> None:
            original = getattr(owner, name)

            def call(*args: Any, **kwargs: Any) -> Any:
                recorder.phase, recorder.message = inside, None
                try:
                    return original(*args, **kwargs)
                finally:
                    recorder.phase, recorder.message = after, None

            replace(owner, name, call)

        around(passes, "train", "forward", "update")
        around(strategy, "synchronize", "backward", "update")
        around(passes, "summed", "backward", "update")
        if isinstance(passes, StagedPasses):
            around(passes.pipeline, "run", "forward", "backward")
            messages = passes.pipeline._messages
            tag_of = messages._tag_of

            def tag(channel: Any) -> int:  # called just before each message
                recorder.message = channel.kind
                return tag_of(channel)

            replace(messages, "_tag_of", tag)
        yield
