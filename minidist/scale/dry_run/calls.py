"""The calls of a dry run, as the ledger has them, each with its axis and its phase.

An axis is found by a call's group, and where several axes have one group by what it sends. The phases are
those of a step: a forward pass, a backward pass, which ends with sums of gradients, and the update with all
that comes behind these: the norm, the loss told to all, parameters gathered again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from minidist import comm
from minidist.comm.ledgers import Call
from minidist.comm.mesh import Mesh
from minidist.parallel.engine.step_executor import StagedPasses
from minidist.parallel.engine.training_step import HybridEngine

AXES = ("dp", "tp", "pp", "cp", "world")
"""Of calls: dp are those that have other rows or tokens, and share gradients; world are all ranks."""
PHASES = ("prepare", "forward", "backward", "update")
_RING = ("send", "recv")


@dataclass
class DryCall(Call):
    """A call that would have been made."""

    axis: str = ""  # one of AXES; empty for a group of one rank
    phase: str = ""  # one of PHASES

    @property
    def kind(self) -> tuple[str, str, str, str, int]:
        """Axis, phase, name, dtype and ranks: what a table has a line for."""
        return self.axis, self.phase, self.name, self.dtype, len(self.group)


@dataclass(frozen=True)
class CallSummary:
    """Calls of one kind."""

    axis: str
    phase: str
    name: str
    dtype: str
    ranks: int
    calls: int
    bytes_sent: int


def lines(calls: Iterable[DryCall]) -> list[CallSummary]:
    """A line for each kind of call between ranks, by axis and phase, in the order of the first of each."""
    found: dict[tuple[str, str, str, str, int], list[int]] = {}
    for call in calls:
        if call.axis:
            found.setdefault(call.kind, []).append(call.bytes_sent)
    made = [CallSummary(*kind, len(sent), sum(sent)) for kind, sent in found.items()]
    return sorted(made, key=lambda line: (AXES.index(line.axis), PHASES.index(line.phase)))


class Recorder(list[Any]):
    """What a ledger writes calls into.

    Attributes:
        phase: of what comes now, outside of backward passes.
        message: "forward" or "backward" of the last message between a pipeline's stages; None before one.
    """

    def __init__(self, phase: str = "prepare") -> None:
        super().__init__()
        self.phase, self.message = phase, None
        self.names: Callable[[Call], str] = lambda call: "world"

    def append(self, call: Call) -> None:
        """Called by the ledger."""
        phase, axis = self.phase, self.names(call) if len(call.group) > 1 else ""
        if self.message is not None and call.name in _RING and axis == "pp":  # a ring's are cp's
            phase = self.message
        elif phase == "forward" and torch._C._current_graph_task_id() != -1:
            phase = "backward"
        values = {field.name: getattr(call, field.name) for field in fields(Call)}
        super().append(DryCall(**values, axis=axis, phase=phase))


@contextmanager
def recorded(phase: str, names: Callable[[Call], str] | None = None) -> Iterator[Recorder]:
    """Inside, calls are written down, with this phase until told otherwise."""
    recorder = Recorder(phase)
    if names is not None:
        recorder.names = names
    with comm.ledger() as ledger:
        ledger.calls = recorder
        yield recorder


def axis_names(mesh: Mesh) -> Callable[[Call], str]:
    """From a call to the axis along which it goes."""
    groups = {mesh.ranks(axis): axis for axis in ("tp", "pp", "cp", "dp") if mesh.size(axis) > 1}
    gradients = mesh.ranks("dp_cp")

    def name(call: Call) -> str:
        # Of ranks that share the tokens the ring's messages are, and what they tell each other before.
        if call.group == gradients and call.name not in _RING and call.dtype != "int64":
            return "dp"
        return groups.get(call.group, "dp" if call.group == gradients else "world")

    return name


@contextmanager
def phases_of(engine: HybridEngine, recorder: Recorder) -> Iterator[None]:
    """Inside, the recorder learns which phase a step of this engine is in."""
    passes, strategy = engine.executor, engine.strategy
    replaced: list[tuple[Any, str]] = []

    def around(owner: Any, name: str, inside: str, after: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            recorder.phase, recorder.message = inside, None
            try:
                return original(*args, **kwargs)
            finally:
                recorder.phase, recorder.message = after, None

        setattr(owner, name, call)
        replaced.append((owner, name))

    around(passes, "train", "forward", "update")
    around(strategy, "synchronize", "backward", "update")
    around(passes, "summed", "backward", "update")
    if isinstance(passes, StagedPasses):
        around(passes.pipeline, "run", "forward", "backward")
        messages = passes.pipeline._messages
        tag_of = messages._tag_of

        def tag(channel: Any) -> int:  # asked for each message, just before it
            recorder.message = channel.kind
            return tag_of(channel)

        messages._tag_of = tag  # type: ignore[method-assign]
        replaced.append((messages, "_tag_of"))
    try:
        yield
    finally:
        for owner, name in replaced:
            delattr(owner, name)


def as_json(calls: Iterable[DryCall]) -> list[dict[str, Any]]:
    """The lines, as plain values."""
    return [asdict(line) for line in lines(calls)]
