"""The rehearsal: a step of an engine beside the same step of a single process; an error where they differ.

A layout can train another model without a word: a loss that is no mean over rows, an optimizer that looks at
all parameters at once, a buffer that each rank writes for itself, a plan that cuts the wrong matrix. Lists of
such causes never end. One comparison sees them all: rank 0 takes the step alone, in plain torch, on the whole
batch (one_process.py). Loss, gradients, parameters and buffers have to agree up to rounding.

The first step is rehearsed, and ten more up to step 800. Random numbers are switched off on both sides. If
there were any, or if the steps differ, the engine gets its state back; otherwise the step counts.
"""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from minidist import comm
from minidist.comm.launching.cores import available_cores
from minidist.comm.ledgers import held_back
from minidist.comm.work import limit_of
from minidist.kernels.measure.cpu_peaks import available_memory
from minidist.parallel.contract.batch import Pair
from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.strategy import TensorBox
from minidist.parallel.engine.kept_state import KeptState, plain_attributes
from minidist.parallel.engine.one_process import (
    OneProcess,
    Outcome,
    TrainingState,
)
from minidist.parallel.engine.step_difference import (
    CUT,
    TRIALS,
    Outputs,
    failed_layer,
    options_differ,
    recorded,
    told,
)
from minidist.parallel.engine.training_step import Engine
from minidist.parallel.engine.whole_state import collect, state_before
from minidist.parallel.flat.gathering import gather_values
from minidist.parallel.flat.joined_messages import broadcast_together
from minidist.parallel.training.batch_norm import fixed_batch_norms
from minidist.parallel.training.random_off import RandomOff

STEPS = 1, 2, 4, 6, 12, 25, 50, 101, 200, 401, 800
"""The steps that are rehearsed: each comes about twice as late. Among them are multiples of 3, 5, 10 and 100,
counted from 0 and from 1: what a training does now and then often goes by these."""
COPIES = 12
"""Rank 0 holds parameters, gradients and two moments of the optimizer three times: before and after the step,
and in the single process."""
LONG = 0.1
"""A step of more CPU seconds is taken alone with the threads of all ranks on the host. On busy cores, threads
that wait for each other made one of 0.02 s take up to 60 times as long."""


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
        self._gradients: list[TensorBox] = []  # this rank's, and the norm of all, just before the update
        self._norm: float | None = None  # None if there was no update
        if comm.rank() == 0:
            try:
                self._alone = OneProcess(model, optimizer, loss, layout, clip_norm)
            except Exception as error:
                self.why_not = f"the model cannot be copied: {error}"

    def made(self, engine: Engine) -> None:
        """Remember the optimizer's groups and the modules' attributes, which will change; a collective."""
        if self._alone is not None:
            self._alone.device, before = engine.device, plain_attributes(self._alone.model)
            no_values = {k for k, v in before.items() if isinstance(v, torch.Tensor) and v.is_meta}
            own = plain_attributes(engine.model).items()
            self._attributes = {key: value for key, value in own if key not in no_values}
        self._made = [{**group} for group in engine.state_settings()["groups"]]
        with held_back():
            self.why_not = gather_values(self.why_not or self._too_much(engine, 0.0))[0]

    def due(self, engine: Engine) -> bool:
        """Whether the next step is to be rehearsed: the same on all ranks.

        It does not notice a batch of another structure, nor with pp a change of what is trained: one rank may
        see it alone, and to ask the others would cost a message in every step.
        """
        self._steps += 1
        if self._when == "first":
            return self._steps == 1
        if self._steps in STEPS:
            return True
        if self._layout.pp > 1:
            return False
        trained = [p.requires_grad for p in engine.model.parameters()]
        groups = () if engine.strategy.gathers else engine.optimizer.param_groups  # there of a rank's slices
        now = trained, [len(group["params"]) for group in groups]
        known, self._known = self._known, now
        return known not in (None, now)

    def step(self, engine: Engine, pairs: Sequence[Pair], train: Callable[[], float]) -> float | None:
        """Take a step with `train` and compare it; returns its loss, or None if it was not taken.

        A collective. Raises ValueError on all ranks if the steps differ; the engine is then as it was.
        """
        with held_back():
            if self.why_not:
                self._stop()
                return None
            if engine.saving is not None:
                engine.saving.join()  # its thread talks to other ranks, and a single process has none
            try:
                kept = KeptState(engine)
            except (ValueError, RuntimeError) as error:  # as of a checkpoint, on all ranks
                self.why_not = f"the state cannot be put back: {error}"
                self._stop()
                return None
            fixed = fixed_batch_norms(engine.model)
            start = state_before(engine, kept, pairs, self._attributes)
            statistics = [x for part in fixed for x in part.buffers()]
            broadcast_together(statistics, engine.strategy.group)
        quiet, self._gradients, self._norm = RandomOff(), [], None
        engine.within, engine.before_update = quiet, partial(self._keep_gradients, engine, engine.loss_scale)
        scale, failed, begun = engine.loss_scale, True, (time.perf_counter(), time.process_time())
        outputs: Outputs = defaultdict(list)
        hears = self._alone is not None and self._layout.tp > 1 and self._steps == 1
        hearing = recorded(engine.model, outputs) if hears else nullcontext()
        try:
            with held_back() as calls, hearing:
                loss = train()
            failed = False
        except Exception as error:
            where = failed_layer(engine.model, error) if self._layout.tp > 1 and self._steps == 1 else None
            if where is None or isinstance(error, comm.CollectiveError | NotImplementedError):
                raise
            raise ValueError(
                f"{where} fails once the plan has cut the model: {error}. If it runs uncut: {CUT}"
            ) from error
        finally:
            engine.within, engine.before_update = None, None
            for part in fixed:
                part.training = True
            if failed:
                kept.attributes.restore()
        with held_back():
            seconds, of_cpu = time.perf_counter() - begun[0], time.process_time() - begun[1]
            boxes = (box for box in engine.chunks() if box.name.startswith("model."))
            own = quiet.used or bool(fixed), quiet.cannot or kept.draws_elsewhere()
            end = collect([*self._gradients, *boxes], engine.device, own)
            elsewhere = next((where for _, where in end.values if where), "")
            verdict, why = "", self._too_much(engine, seconds)
            if elsewhere:
                why = f"the model draws random numbers that cannot be switched off: {elsewhere}"
            elif not why and self._alone is not None and start is not None and self._norm is not None:
                found = Outcome(loss, self._norm, end.whole, {})
                replicas = [] if fixed else end.replicas
                verdict, why = self._compared(of_cpu, start, found, scale, replicas, outputs)
            verdict, self.why_not = gather_values((verdict, why))[0]
            if self.why_not:
                self._stop()
            again = any(used for used, _ in end.values) or elsewhere
            if verdict or again:
                kept.restore()
            if verdict:
                raise ValueError(f"in step {self._steps} {verdict}")
        calls.release()  # those of a first step: a second one need not agree on buckets
        if not again:
            return loss
        with held_back():
            return train()

    def _compared(self, of_cpu: float, start: TrainingState, *compared: Any) -> tuple[str, str]:
        """How the step differs from one process's (see `told`), or why that cannot be told; on rank 0."""
        assert self._alone is not None
        threads = torch.get_num_threads()

        if of_cpu > LONG:
            torch.set_num_threads(max(threads, min(start.threads, available_cores())))
        try:
            differs = self._options_differ()
            return differs or told(self._alone, self._layout, start, *compared), ""
        except Exception as error:  # whatever the user's functions raise
            return "", f"one process cannot take the step: {type(error).__name__}: {error}"
        finally:
            torch.set_num_threads(threads)

    def _too_much(self, engine: Engine, seconds: float) -> str:
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
        self._when, self._steps = "first", STEPS[-1]
        if comm.rank() == 0:
            told = f"minidist: a step was not compared with one process, since {self.why_not}"
            print(told, file=sys.stderr)

    def _keep_gradients(self, engine: Engine, scale: float) -> None:
        """Copy the gradients just before the update, in 32 bits at least."""
        with held_back():
            self._norm = engine.placement.norm(engine.strategy) / scale
        for box in engine.placement.boxes(engine.strategy.gradient_boxes()):
            kind = torch.promote_types(box.tensor.dtype, torch.float32)
            self._gradients.append(box._replace(tensor=box.tensor.to(kind) / scale))

    def _options_differ(self) -> str:
        """In the first step: an option that the engine's optimizer has otherwise than one process's."""
        assert self._alone is not None
        differ = options_differ(self._alone.groups(), self._made) if self._made else ""
        self._made = []
        return f"this layout trains otherwise than one process: {differ}" if differ else ""
