"""A trace: what every rank does in a step, on one time line, to be opened in Perfetto or drawn.

Each rank notes when its modules compute, when it calls collectives and waits for them, what it sends and
receives, and which instruction of a pipeline's schedule it is at. Rank 0 gets it all, in the time of its own
clock. It takes nothing where no trace is open, and some microseconds for each slice where one is.

>>> with trace(engine) as t:
...     engine.step(inputs, targets)
>>> found = t.gather()  # on rank 0; None on the others
>>> if found is not None:
...     found.save("trace.json")  # for https://ui.perfetto.dev, or chrome://tracing
...     found.plot("trace.svg")
...     print(found.table())

On a GPU the slices of modules are the time in which work was handed over, not that in which it was done.

| File | Holds |
|---|---|
| trace.py | `trace` |
| modules.py, calls.py | what a rank notes |
| clocks.py | how far its clock is from rank 0's |
| slices.py, all_ranks.py | what comes of it: slices, and the `Trace` of all ranks |
| perfetto.py, check.py | the file, and what is wrong with one |
| plot.py | the picture |
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from threading import get_ident
from types import TracebackType

import torch
from torch import nn

from minidist import comm
from minidist.parallel.contract.engine import Engine
from minidist.parallel.engine.step_executor import StagedPasses
from minidist.parallel.engine.training_step import HybridEngine
from minidist.parallel.pipeline.execution import Pipeline
from minidist.parallel.pipeline.simulation import Event
from minidist.scale.tracing import clocks
from minidist.scale.tracing.all_ranks import RankTrace, Trace, matched
from minidist.scale.tracing.calls import Calls
from minidist.scale.tracing.modules import Modules
from minidist.scale.tracing.slices import AUTOGRAD, MAIN, Slice, lanes, passes

_open: list[Tracer] = []
"""The one that is open in this process."""


def trace(*what: Engine | Pipeline | nn.Module) -> Tracer:
    """Trace what this rank does inside a `with`; every rank of the world opens one, at the same place.

    Each rank but the first sends 128 bytes, and gets as many, before and after, to compare clocks, and there
    is a barrier: they are not in the trace.

    Args:
        what: whose modules to watch: an engine of `md.prepare`; a `md.Pipeline`; or any module, such as the
            model, or what wraps it, in a loop of your own. None of them traces communication alone.

    Raises:
        TypeError: it is something else.
    """
    return Tracer(*what)


class Tracer:
    """This rank's part of a trace, see `trace`: a `with`, then `gather`."""

    def __init__(self, *what: Engine | Pipeline | nn.Module) -> None:
        self._named: list[tuple[str, nn.Module]] = []
        self._pipelines: list[Pipeline] = []
        self._place: dict[str, int] = {}
        self.layout = ""
        kinds = Counter(type(each).__name__ for each in what)
        for number, each in enumerate(what):
            several = f"{number}: " if kinds[type(each).__name__] > 1 else ""
            self._take(each, several)
        self._calls, self._modules = Calls(), Modules(_once(self._named))
        self._spans: list[Slice] = []
        self._events: list[list[Event]] = []
        self._stack = ExitStack()
        self._readings: list[clocks.Reading] = []
        self._begun = self._ended = 0.0
        self._thread = 0

    def _take(self, what: object, prefix: str) -> None:
        """Find the modules and the pipelines of what was given."""
        if isinstance(what, HybridEngine):
            mesh = what.mesh
            self._place = {axis: mesh.rank(axis) for axis in mesh.sizes if mesh.size(axis) > 1}
            self.layout = str(what.layout)
            self._named += _parts(what.model, prefix)
            if isinstance(what.executor, StagedPasses):
                self._pipelines.append(what.executor.pipeline)
        elif isinstance(what, Pipeline):
            self._pipelines.append(what)
            for number, stage in enumerate(what.stages):
                self._named += _parts(stage, f"{prefix}chunk {number}, " if len(what.stages) > 1 else prefix)
        elif isinstance(what, nn.Module):
            self._named += _parts(what, prefix)
        else:
            raise TypeError(
                f"trace was given a {type(what).__name__}; give an engine of md.prepare, a md.Pipeline or a "
                "torch.nn.Module"
            )

    def __enter__(self) -> Tracer:
        if _open:
            raise RuntimeError("a trace is open in this process already; leave its `with` first")
        if self._readings:
            raise RuntimeError("this trace has been taken; make another one: with trace(...) as t")
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
        if kind is None:  # else others may be gone
            self._readings.append(clocks.read())

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Call what is done inside by a name, as in `with t.span("load the batch")`."""
        own = Slice(MAIN, "span", name, time.perf_counter(), 0.0)
        try:
            yield
        finally:
            own.end = time.perf_counter()
            self._spans.append(own)

    def gather(self) -> Trace | None:
        """What all ranks did, on rank 0; None on the others. A collective.

        Each rank but the first sends its slices, some 250 bytes each: `Trace.bytes_moved` says how many.

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
        arrows, meetings = matched(ranks)
        return Trace(ranks, self.layout, moved, arrows, meetings)

    def _slices(self) -> list[Slice]:
        """All of this rank's, on their lanes, in its own time."""
        held, collectives, messages = self._calls.slices()
        lanes(collectives, "background")
        lanes(messages, "messages")
        found = [*collectives, *messages]
        own = [Slice(MAIN, "span", "step", self._begun, self._ended), *self._spans]
        for events in self._events:
            for instruction, start, end in events:
                own.append(Slice(MAIN, "instruction", str(instruction), start, end, vars(instruction).copy()))
        others = 0
        for thread in {self._thread, *held, *self._modules.slices, *self._modules.atoms}:
            if thread == self._thread:
                lane = MAIN
            elif self._modules.atoms[thread]:
                lane = AUTOGRAD
            else:
                others += 1
                lane = f"thread {others}"
            slices = [*held[thread], *self._modules.slices[thread], *(own if lane == MAIN else [])]
            for each in slices:
                each.lane = lane
            found += slices
            found += passes(lane, self._modules.atoms[thread], slices)
        found.sort(key=lambda each: (each.start, -each.end))
        return found


def _parts(module: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    """A module and those in it with their names, but for compiled ones and what is in them."""
    found, compiled = [], list[nn.Module]()
    for name, part in module.named_modules():
        if part._compiled_call_impl is not None or "_orig_mod" in part._modules:
            compiled += part.modules()
        if not any(part is each for each in compiled):
            found.append((prefix + (name or type(part).__name__), part))
    return found


def _once(named: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Each module once, by the first of its names."""
    first = {id(module): (name, module) for name, module in reversed(named)}
    return [*reversed(first.values())]


def _to_first(own: bytes) -> tuple[list[bytes], int]:
    """Every rank's bytes, on rank 0; and how many bytes this moved over all ranks."""
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
