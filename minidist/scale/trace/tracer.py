"""Trace what every rank does in a step, on one time line, for Perfetto or as a picture.

Each rank records when its modules compute, when it calls collectives and waits for them, what it sends and
receives, and which instruction of a pipeline's schedule it executes. Rank 0 gathers the slices of all ranks
and converts them to its own clock. A slice costs some microseconds; without an open trace there is no cost.

>>> with trace(engine) as t:
...     engine.step(inputs, targets)
>>> found = t.gather()  # on rank 0; None on the others
>>> if found is not None:
...     found.save("trace.json")  # for https://ui.perfetto.dev, or chrome://tracing
...     found.plot("trace.svg")
...     print(found.table())

On a GPU a module's slice is the time in which its kernels are launched, not the time in which they run.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import nn

from minidist import comm
from minidist._files import write_whole
from minidist.parallel.engine.staged_passes import StagedPasses
from minidist.parallel.engine.training_step import Engine
from minidist.parallel.pipeline.execution import Pipeline
from minidist.parallel.schedules.simulation import Event
from minidist.scale.trace import clocks, perfetto, plot
from minidist.scale.trace.all_ranks import AllRanks, RankTrace, matched
from minidist.scale.trace.record_events import (
    AUTOGRAD,
    MAIN,
    Calls,
    Modules,
    Slice,
    lanes,
    named_parts,
    passes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_open: list[Tracer] = []
"""The tracer that is open in this process, if any."""


class Trace(AllRanks):
    """The record of all ranks, in rank 0's time: `save` it for Perfetto, `plot` it, or print its `table`."""

    def save(self, path: str | PathLike[str]) -> None:
        """Write it, atomically, as a Chrome trace, which Perfetto opens.

        Raises:
            TypeError: `path` is not a path.
            OSError: the file cannot be written.
        """
        if not isinstance(path, str | PathLike):
            raise TypeError(f"path is {path!r}; give the name of a file to write, such as 'trace.json'")
        write_whole(Path(path), json.dumps(perfetto.document(self), allow_nan=False))

    def plot(self, path: str | PathLike[str] | None = None) -> Axes:
        """Draw it as a Gantt chart, and write it to `path`, such as a .png or .svg, if there is one.

        Raises:
            ImportError: matplotlib is missing.
            TypeError: `path` is not a path.
            ValueError: matplotlib does not know the kind of file.
        """
        return plot.plot(self, path)


def trace(*what: Engine | Pipeline | nn.Module) -> Tracer:
    """Trace what this rank does inside a `with`. A collective: every rank of the world opens a trace.

    To compare clocks, each rank exchanges 128 bytes with rank 0 before and after, and there is a barrier;
    neither is in the trace.

    Args:
        what: whose modules to trace: engines of `md.prepare`, a `md.Pipeline`, or any modules. With no
            arguments only communication is traced.

    Raises:
        TypeError: an argument is something else.
    """
    return Tracer(*what)


class Tracer:
    """This rank's part of a trace: a `with`, then `gather`; made by `trace`."""

    def __init__(self, *what: Engine | Pipeline | nn.Module) -> None:
        self._pipelines: list[Pipeline] = []
        self._place: dict[str, int] = {}
        self.layout = ""
        kinds = Counter(type(each).__name__ for each in what)
        named: list[tuple[str, nn.Module]] = []
        for number, each in enumerate(what):
            several = f"{number}: " if kinds[type(each).__name__] > 1 else ""
            named += self._modules_of(each, several)
        self._calls, self._modules = Calls(), Modules(named)
        self._spans: list[Slice] = []
        self._events: list[list[Event]] = []
        self._stack = ExitStack()
        self._readings: list[clocks.Reading] = []
        self._begun = self._ended = 0.0
        self._thread = 0

    def _modules_of(self, what: object, prefix: str) -> list[tuple[str, nn.Module]]:
        """The modules of an argument, with their names; its pipeline is kept."""
        if isinstance(what, Engine):
            mesh = what.mesh
            self._place = {axis: mesh.rank(axis) for axis in mesh.sizes if mesh.size(axis) > 1}
            self.layout = str(what.layout)
            if isinstance(what.executor, StagedPasses):
                self._pipelines.append(what.executor.pipeline)
            return named_parts(what.model, prefix)
        if isinstance(what, Pipeline):
            self._pipelines.append(what)
            several = len(what.stages) > 1
            chunks = [f"{prefix}chunk {i}, " if several else prefix for i in range(len(what.stages))]
            return [each for own in zip(what.stages, chunks, strict=True) for each in named_parts(*own)]
        if isinstance(what, nn.Module):
            return named_parts(what, prefix)
        raise TypeError(
            f"trace was given a {type(what).__name__}; give an engine of md.prepare, a md.Pipeline or a "
            "torch.nn.Module"
        )

    def __enter__(self) -> Tracer:
        if _open:
            raise RuntimeError("a trace is open in this process already; leave its `with` first")
        if self._readings:
            raise RuntimeError("this trace has been taken already; make another one: with trace(...) as t")
        with ExitStack() as stack:
            stack.callback(self._modules.close)
            self._modules.open()
            self._events = [stack.enter_context(each.timed()) for each in self._pipelines]
            self._readings.append(clocks.read())
            comm.barrier()
            self._calls.open()
            stack.callback(self._calls.close)
            _open.append(self)
            stack.callback(_open.remove, self)
            self._stack = stack.pop_all()
        self._thread, self._begun = get_ident(), time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended = time.perf_counter()
        self._stack.close()
        if kind is None:  # after an error the other ranks may be gone
            self._readings.append(clocks.read())

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Name what is done inside, as in `with t.span("load the batch")`."""
        own = Slice(MAIN, "span", name, time.perf_counter(), 0.0)
        try:
            yield
        finally:
            own.end = time.perf_counter()
            self._spans.append(own)

    def gather(self) -> Trace | None:
        """Gather the slices of all ranks on rank 0; the others return None. A collective.

        Every other rank sends its slices, some 250 bytes each; `Trace.bytes_moved` counts them.

        Raises:
            RuntimeError: the `with` has not been left, or was left by an error.
        """
        if len(self._readings) < 2:
            raise RuntimeError(
                "there is no whole trace to gather: leave its `with` first, without an error, on all ranks"
            )
        own = json.dumps([self._place, [vars(each) for each in self._slices()], *map(asdict, self._readings)])
        texts, moved = _to_first(own.encode())
        if not texts:
            return None
        ranks = []
        for rank, text in enumerate(texts):
            place, slices, first, last = json.loads(text)
            clock = clocks.Clock(clocks.Reading(**first), clocks.Reading(**last))
            found = [Slice(**each) for each in slices]
            for each in found:
                each.start, each.end = clock.align(each.start), clock.align(each.end)
                if "called" in each.args:
                    each.args["called"] = clock.align(each.args["called"])
            offset = 0.0 if clock.same else clock.first.offset
            ranks.append(RankTrace(rank, place, found, offset, clock.error))
        return Trace(ranks, self.layout, moved, *matched(ranks))

    def _slices(self) -> list[Slice]:
        """All slices of this rank on their lanes, in its own time."""
        held, collectives, messages = self._calls.slices()
        lanes(collectives, "background")
        lanes(messages, "messages")
        found, others = [*collectives, *messages], 0
        own = [Slice(MAIN, "span", "step", self._begun, self._ended), *self._spans]
        for instruction, start, end in (event for events in self._events for event in events):
            own.append(Slice(MAIN, "instruction", str(instruction), start, end, vars(instruction).copy()))
        for thread in {self._thread, *held, *self._modules.slices, *self._modules.atoms}:
            slices, lane = [*held[thread], *self._modules.slices[thread]], AUTOGRAD
            if thread == self._thread:
                slices, lane = slices + own, MAIN
            elif not self._modules.atoms[thread]:
                others += 1
                lane = f"thread {others}"
            for each in slices:
                each.lane = lane
            found += [*slices, *passes(lane, self._modules.atoms[thread], slices)]
        return sorted(found, key=lambda each: (each.start, -each.end))


def _to_first(own: bytes) -> tuple[list[bytes], int]:
    """Gather every rank's bytes on rank 0; also return how many bytes all ranks sent for it."""
    device, ranks = comm.device(), comm.size()
    sizes = comm.all_gather(torch.tensor([len(own)], device=device)).tolist()
    moved = sum(sizes[1:]) + 8 * ranks * (ranks - 1)
    if comm.rank():
        comm.send(torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device), 0)
        return [], moved
    texts = [own]
    for rank in range(1, ranks):
        text = comm.recv(torch.empty(sizes[rank], dtype=torch.uint8, device=device), rank)
        texts.append(bytes(text.cpu().numpy()))
    return texts, moved
