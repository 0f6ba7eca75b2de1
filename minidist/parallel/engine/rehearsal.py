"""The rehearsal: a step of an engine beside the same step of a single process; an error where they differ.

A layout can train another model without a word: a loss that is no mean over rows, an optimizer that looks at
all parameters at once, a buffer that each rank writes for itself, a plan that cuts the wrong matrix. Lists of
such causes never end. One comparison sees them all: rank 0 takes the step alone, in plain torch, on the whole
batch (one_process.py). Loss, gradients, parameters and buffers have to agree up to rounding.

The first step is rehearsed, and steps 2, 4, 8 up to 1,024. Random numbers are switched off on both sides. If
there were any, or if the steps differ, the engine gets its state back; otherwise the step counts.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.comm.ledgers import held_back
from minidist.comm.work import limit_of, ranks_of
from minidist.kernels.measure.cpu_peaks import available_memory
from minidist.parallel.contract.batch import mapped, moved
from minidist.parallel.contract.engine import KeptAttributes, differs
from minidist.parallel.contract.layout import Layout
from minidist.parallel.engine.engine_state import EngineState
from minidist.parallel.engine.kept_state import KeptState
from minidist.parallel.engine.one_process import (
    OneProcess,
    Outcome,
    TrainingState,
    fixed_batch_norms,
    plain_attributes,
)
from minidist.parallel.engine.rank_model import Pair
from minidist.parallel.engine.step_difference import TRIALS, options_differ, told
from minidist.parallel.engine.whole_state import Collected, collect
from minidist.parallel.flat.gathering import gather_values
from minidist.parallel.flat.joined_messages import broadcast_together
from minidist.parallel.training.random_off import RandomOff

LAST = 1024
"""The last step that is rehearsed."""
COPIES = 12
"""Rank 0 holds parameters, gradients and two moments of the optimizer three times: before and after the step,
and in the single process."""


class Rehearsal:
    """Rehearses the steps of one engine. Made before its model is cut.

    when: True, "first" for the first step alone, or None to rehearse where memory allows.
    """

    def __init__(
        self,
        when: bool | str | None,
        model: nn.Module,
        optimizer: Any,
        loss: Any,
        layout: Layout,
        clip_norm: Any,
    ) -> None:
        self._when, self._layout, self._steps = when, layout, 0
        self._known: Any = None  # what gets gradients, and in which groups
        self._alone: OneProcess | None = None
        self.why_not = ""  # it does not run
        self._made: list[dict[str, Any]] = []  # the optimizer's groups, as `prepare` made them
        self._attributes: dict[tuple[str, str], Any] = {}  # of the cut model's modules, then
        self._gradients: Collected | None = None  # and their norm, just before the update
        self._norm = 0.0
        if comm.rank() == 0:
            try:
                self._alone = OneProcess(model, optimizer, loss, layout, clip_norm)
            except Exception as error:
                self.why_not = f"the model cannot be copied: {error}"

    def made(self, engine: EngineState) -> None:
        """Remember the optimizer's groups and the modules' attributes, which will change."""
        if self._alone is not None:
            self._attributes = plain_attributes(engine.model)
        self._made = [{**group} for group in engine.state_settings()["groups"]]

    def due(self, engine: EngineState) -> bool:
        """Whether the next step is to be rehearsed: the same on all ranks."""
        self._steps += 1
        if self._when == "first":
            return self._steps == 1
        if self._steps <= LAST and not self._steps & (self._steps - 1):
            return True
        if self._layout.pp > 1:
            return False  # each stage sees its own parameters only
        trained = [p.requires_grad for p in engine.model.parameters()]
        now = trained, [len(group["params"]) for group in engine.optimizer.param_groups]
        known, self._known = self._known, now
        return known not in (None, now)

    def step(self, engine: EngineState, pairs: Sequence[Pair], train: Callable[[], float]) -> float | None:
        """Take a step with `train` and compare it; returns its loss, or None if it was not taken.

        A collective. Raises ValueError on all ranks if the steps differ; the engine is then as it was.
        """
        with held_back():
            self.why_not = gather_values(self.why_not or self._too_much(engine, 0.0))[0]
            if self.why_not:
                self._stop()
                return None
            try:
                kept = KeptState(engine)
            except (ValueError, RuntimeError) as error:  # as of a checkpoint, on all ranks
                self.why_not = f"the state cannot be put back: {error}"
                self._stop()
                return None
            fixed = fixed_batch_norms(engine.model)
            statistics = [x for part in fixed for x in part.buffers()]
            broadcast_together(statistics, engine.strategy.group)
            start, batches = self._start(engine), self._batches(engine, pairs)
        scale, skipped = engine.loss_scale, engine.skipped
        quiet, self._gradients = RandomOff(), None
        engine.within, engine.before_update = quiet, partial(self._keep_gradients, engine, scale)
        failed = True
        begun = time.perf_counter()
        try:
            with held_back() as calls:
                loss = train()
            failed = False
        finally:
            engine.within, engine.before_update = None, None
            for part in fixed:
                part.training = True
            if failed:
                kept.attributes.restore()
        with held_back():
            boxes = (box for box in engine.chunks() if box.name.startswith("model."))
            end = collect(boxes, engine.device)
            own = quiet.used or bool(fixed), quiet.cannot or kept.draws_elsewhere()
            of_ranks = gather_values(own)
            elsewhere = next((where for _, where in of_ranks if where), "")
            verdict, why = "", self._too_much(engine, time.perf_counter() - begun)
            if elsewhere:
                why = f"the model draws random numbers that cannot be switched off: {elsewhere}"
            elif (
                not why
                and self._alone is not None
                and self._gradients is not None
                and engine.skipped == skipped
            ):
                assert start is not None
                now = {**self._gradients.whole, **end.whole}
                found = Outcome(loss, self._norm, now, engine.state_settings()["groups"])
                replicas = [*self._gradients.replicas, *end.replicas]
                try:
                    verdict = self._options_differ() or told(
                        self._alone, self._layout, start, batches, found, scale, [] if fixed else replicas
                    )
                except Exception as error:  # whatever the user's functions raise
                    why = f"one process cannot take the step: {type(error).__name__}: {error}"
            verdict, self.why_not = gather_values((verdict, why))[0]
            if self.why_not:
                self._stop()
            again = any(used for used, _ in of_ranks) or elsewhere
            if verdict or again:
                kept.restore()
            if verdict:
                raise ValueError(verdict)
        calls.release()  # those of a first step: a second one need not agree on buckets
        if not again:
            return loss
        with held_back():
            return train()

    def _too_much(self, engine: EngineState, seconds: float) -> str:
        """Why rank 0 cannot take a step alone of which its part took `seconds`; "" if it can."""
        if self._alone is None:
            return ""
        parts = self._layout.ranks * self._layout.micro_batches
        limit = limit_of(None) if self._layout.ranks > 1 else math.inf
        if (wants := seconds * parts * (2 + TRIALS)) > limit / 2:
            return f"it would take rank 0 about {wants:.0f} s, and ranks wait for {limit:.0f} s at most"
        if self._when is not None:
            return ""
        sizes = ((e.shape.numel(), e.dtype.itemsize) for e in engine.placement.entries.values())
        need = COPIES * sum(count * size for count, size in sizes) + parts * engine._activations.last
        on_gpu = engine.device.type == "cuda"
        free = torch.cuda.mem_get_info(engine.device)[0] if on_gpu else available_memory()
        if need <= free:
            return ""
        return f"one process needs {need / 1e9:.3g} GB on rank 0, and {free / 1e9:.3g} GB are free"

    def _stop(self) -> None:
        """Rehearse no more, and say why."""
        self._when, self._steps = "first", LAST
        if comm.rank() == 0:
            told = f"minidist: a step was not compared with one process, since {self.why_not}"
            print(told, file=sys.stderr)

    def _start(self, engine: EngineState) -> TrainingState | None:
        """The whole state before the step, on rank 0."""
        named = engine.model.named_parameters(remove_duplicate=False)
        settings = engine.state_settings()
        facts = settings["state"], {name: p.requires_grad for name, p in named}
        everyones = gather_values(facts)
        found = collect(engine.chunks(), engine.device)
        if self._alone is None:
            return None
        numbers: dict[str, Any] = {}
        trained: dict[str, bool] = {}
        for state, requires_grad in everyones:
            numbers |= state
            trained |= requires_grad
        modes = {name: part.training for name, part in engine.model.named_modules()}
        now = plain_attributes(engine.model)
        changed = {
            k: v for k, v in now.items() if k not in self._attributes or differs(v, self._attributes[k])
        }
        of_loss = KeptAttributes(engine.loss)
        own = [*engine.model.parameters()]
        return TrainingState(found.whole, settings["groups"], numbers, trained, modes, of_loss, changed, own)

    def _batches(self, engine: EngineState, pairs: Sequence[Pair]) -> list[Pair]:
        """The batches of all data ranks, on rank 0. Ranks that differ in tp, pp or cp have the same."""
        group = engine.mesh.group("dp")
        if 0 not in ranks_of(group):
            return []
        own = [(mapped(Tensor.cpu, x), x is y, mapped(Tensor.cpu, y)) for x, y in pairs if engine._counts]
        found = [each for of_rank in gather_values(own, group) for each in of_rank]
        placed = [(moved(x, engine.device), one, y) for x, one, y in found]
        return [(x, x if one else moved(y, engine.device)) for x, one, y in placed]

    def _keep_gradients(self, engine: EngineState, scale: float) -> None:
        """Collect the gradients just before the update."""
        with held_back():
            boxes = engine.placement.chunks(engine.strategy.gradient_boxes())
            factor = 1 / scale
            self._norm = engine.placement.norm(engine.strategy) * factor
            self._gradients = collect((b._replace(tensor=b.tensor * factor) for b in boxes), engine.device)

    def _options_differ(self) -> str:
        """In the first step: an option that the engine's optimizer has otherwise than one process's."""
        assert self._alone is not None
        differ = options_differ(self._alone.groups(), self._made) if self._made else ""
        self._made = []
        return f"this layout trains otherwise than one process: {differ}" if differ else ""
