"""The rehearsal compares a step of an engine with the same step in one process, and raises where they differ.

A layout can train another model without a word: a loss that is no mean over rows, an optimizer that looks at
all parameters at once, a buffer that each rank writes for itself, a plan that cuts the wrong matrix. A list
of such causes would never end. One comparison finds them all: rank 0 takes the step alone, in plain torch, on
the whole batch (one_process.py). Loss, gradients, parameters and buffers have to agree up to rounding.

The first step is rehearsed, and six more up to step 901. Constants replace random numbers on both sides. If
the step drew any, or if the steps differ, the engine gets its state back. Otherwise the step counts.
"""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.comm.ledgers import count, held_back
from minidist.comm.work import limit_of
from minidist.kernels.measure.cpu_peaks import available_memory
from minidist.parallel.contract.batch import Pair, tensors
from minidist.parallel.contract.kept_attributes import differs, plain_attributes
from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.tensor_boxes import TensorBox
from minidist.parallel.engine.one_process import OneProcess, outcome
from minidist.parallel.engine.same_rows import require_same_rows
from minidist.parallel.engine.step_difference import (
    CUT,
    TRIALS,
    Outputs,
    compared,
    failed_layer,
    options_differ,
    recorded,
)
from minidist.parallel.engine.step_executor import RankBatch
from minidist.parallel.engine.training_step import Engine
from minidist.parallel.engine.whole_state import (
    KeptState,
    TrainingState,
    collect,
    own_part,
    state_before,
)
from minidist.parallel.flat.gathering import gather_values
from minidist.parallel.flat.joined_messages import broadcast_together
from minidist.parallel.sharding import state_by_name
from minidist.parallel.training.batch_norm import fixed_batch_norms
from minidist.parallel.training.comparable_steps import RandomOff

STEPS = 1, 3, 10, 31, 100, 301, 901
"""The steps that are rehearsed, each about three times as late as the one before. Among them are multiples
of 3, 5, 10 and 100, counted from 0 and from 1, since what a training does now and then often goes by these.
With a small model on two ranks a rehearsal takes as long as 3.7 steps: its own, 1.7 of rank 0, and the rest.
"""
COPIES = 12
"""Rank 0 holds parameters, gradients and two moments of the optimizer three times: before and after the step,
and in the single process."""


class Rehearsal:
    """Rehearses the steps of one engine. Made before its model is cut.

    when: True, "first" for the first step alone, or None to rehearse where memory allows.
    """

    def __init__(
        self, when: bool | str | None, model: nn.Module, optimizer: Any, loss: Any, layout: Layout, clip: Any
    ) -> None:
        self._when, self._layout, self._steps = when, layout, 0
        self._known: set[Any] = set()  # what has been trained, in which groups, by which kind of batch
        self._alone: OneProcess | None = None
        self.why_not = ""  # it does not run
        self._made: list[dict[str, Any]] = []  # the optimizer's groups, as `prepare` made them
        self._attributes: dict[tuple[str, str], Any] = {}  # of the cut model's modules, then
        self._parameters: list[nn.Parameter] = []  # of the cut model
        self._gradients: list[TensorBox] = []  # this rank's, and the norm of all, just before the update
        self._norm: float | None = None  # None if there was no update
        if comm.rank() == 0:
            try:
                self._alone = OneProcess(model, optimizer, loss, layout, clip)
            except Exception as error:
                self.why_not = f"the model cannot be copied: {error}"

    def made(self, engine: Engine) -> None:
        """Remember the optimizer's groups and the modules' attributes, which will change; a collective."""
        if self._alone is not None:
            self._alone.device, before = engine.device, plain_attributes(self._alone.model)
            no_values = {key for key, x in before.items() if isinstance(x, Tensor) and x.is_meta}
            now = plain_attributes(engine.model)
            self._attributes = {k: now[k] for k in now.keys() - no_values if k[1] != "training"}
        self._made = [{**group} for group in engine.state_settings()["groups"]]
        self._parameters = [*engine.model.parameters()]  # finding them takes 0.03 ms, in every step
        with held_back():
            self.why_not = gather_values(self.why_not or self._too_much(engine, 0.0))[0]

    def due(self, engine: Engine, pairs: Sequence[Pair]) -> bool:
        """Whether to rehearse the next step; the same on all ranks.

        Rehearse the steps in `STEPS`, the first step that trains other parameters (without a pipeline), and
        the first with a batch of another structure (without dp). In those layouts all ranks see the change.
        In the others they would have to ask each other, which costs a message in every step.
        """
        self._steps += 1
        if self._when == "first":
            return self._steps == 1
        now: list[Any] = []
        if self._layout.pp == 1:
            now += [parameter.requires_grad for parameter in self._parameters]
            if not engine.strategy.sharded:  # otherwise the groups hold this rank's slices
                now += [len(group["params"]) for group in engine.optimizer.param_groups]
        if self._layout.dp == 1:
            now += [(name, x.dtype, x.dim()) for pair in pairs for name, x in tensors(pair)]
        is_new = (*now,) not in self._known
        self._known.add((*now,))
        return is_new or self._steps in STEPS

    def step(self, engine: Engine, pairs: Sequence[Pair], batches: Sequence[RankBatch]) -> float | None:
        """Take a step on `batches` and compare it; returns its loss, or None if it was not taken.

        A collective. Raises ValueError on all ranks if the steps differ; the engine is then as it was.
        pairs: this rank's rows; `batches` has this rank's tokens of them.
        """
        with held_back():
            require_same_rows(engine.data_rank, engine.data_ranks, pairs)
            if engine.saving is not None and not self.why_not:
                engine.saving.join()  # its thread talks to other ranks, and a single process has none
            try:
                kept = None if self.why_not else KeptState(engine)
            except (ValueError, RuntimeError) as error:  # as of a checkpoint, on all ranks
                kept, self.why_not = None, f"the state cannot be put back: {error}"
            if kept is None:
                self._stop()
                return None
            fixed = fixed_batch_norms(engine.model)
            broadcast_together([x for part in fixed for x in part.buffers()], engine.strategy.group)
            part, start = own_part(engine, kept, pairs), None
            if self._alone is not None:
                start = state_before(engine, kept, self._attributes)
        given = (x for batch in batches for _, x in tensors((batch.inputs, batch.targets)))
        inputs = [(x, x.detach().clone()) for x in given]
        quiet, self._gradients, self._norm = RandomOff(), [], None
        engine.within, engine.before_update = quiet, partial(self._keep_gradients, engine, engine.loss_scale)
        scale, begun = engine.loss_scale, time.perf_counter()
        outputs: Outputs = defaultdict(list)
        is_first_cut = self._layout.tp > 1 and self._steps == 1
        hearing = recorded(engine.model, outputs) if is_first_cut and start else nullcontext()
        try:
            with held_back() as calls, hearing:
                loss = engine._train_and_measure(batches)
        except BaseException as error:
            kept.attributes.restore()
            where = failed_layer(engine.model, error) if is_first_cut else None
            ours = comm.CollectiveError | NotImplementedError
            if where is None or isinstance(error, ours) or not isinstance(error, Exception):
                raise
            raise ValueError(
                f"{where} fails once the plan has cut the model: {error}. If it runs uncut: {CUT}"
            ) from error
        finally:
            engine.within, engine.before_update = None, None
            for each in fixed:
                each.training = True
        with held_back():
            seconds = time.perf_counter() - begun
            before = engine.tensor_map.boxes(box for boxes in kept.boxes.values() for box in boxes)
            after = (box for box in engine.state_boxes() if box.name.startswith("model."))
            own = part, quiet.used or bool(fixed), quiet.cannot or kept.draws_elsewhere()
            found = collect(before, [*self._gradients, *after], engine.device, own)
            again = any(used for _, used, _ in found.values)
            verdict, self.why_not = "", self._too_much(engine, seconds)
            if elsewhere := next((where for *_, where in found.values if where), ""):
                self.why_not = f"the model draws random numbers that cannot be switched off: {elsewhere}"
            elif start is not None and self._norm is not None and not self.why_not:
                start = start._replace(tensors=found.before, parts=[part for part, *_ in found.values])
                taken, replicas = outcome(loss, self._norm, found.after), [] if fixed else found.replicas
                verdict, self.why_not = self._compared(start, taken, scale, replicas, outputs)
            verdict, self.why_not = gather_values((verdict, self.why_not))[0]
            if self.why_not:
                self._stop()
            if verdict or again or elsewhere:
                kept.restore()
                for x, value in inputs:
                    if differs(x, value):  # the model has written to it
                        x.data.copy_(value)
            if verdict:
                raise ValueError(
                    f"in step {self._steps} the layout {self._layout} trains otherwise than one process with "
                    f"the same weights and rows. {verdict}. (prepare(rehearse=False) does not compare them.)"
                )
        count(*calls.calls)  # to the ledger: this was the first step, and a second need not agree on buckets
        if not (again or elsewhere):
            return loss
        with held_back():
            return engine._train_and_measure(batches)

    def _compared(self, start: TrainingState, *others: Any) -> tuple[str, str]:
        """How the step differs from one process's, or why that cannot be told; on rank 0."""
        assert self._alone is not None
        made, self._made = self._made, []
        try:
            if made and (differ := options_differ(self._alone.groups(), made)):
                return differ, ""
            verdict, note = compared(self._alone, self._layout, start, *others)
        except Exception as error:  # whatever the user's functions raise
            return "", f"one process cannot take the step: {type(error).__name__}: {error}"
        if note:
            _say(f"step {self._steps} was compared with one process in part, since {note}")
        return verdict, ""

    def _too_much(self, engine: Engine, seconds: float) -> str:
        """Why rank 0 cannot take a step alone, if its own part of it took `seconds`; "" if it can."""
        if self._alone is None:
            return ""
        parts = self._layout.ranks * self._layout.micro_batches
        limit = limit_of(None) if self._layout.ranks > 1 else math.inf
        if (wants := seconds * parts * (3 + TRIALS)) > limit / 2:
            return f"it would take rank 0 about {wants:.0f} s, and ranks wait for {limit:.0f} s at most"
        if self._when is not None:
            return ""
        state = sum(each.nbytes for each in engine.tensor_map.entries.values())
        need = COPIES * state + parts * engine.last_activations
        on_gpu = engine.device.type == "cuda"
        free = torch.cuda.mem_get_info(engine.device)[0] if on_gpu else available_memory()
        if need <= free:
            return ""
        return f"one process needs {need / 1e9:.3g} GB on rank 0, and {free / 1e9:.3g} GB are free"

    def _stop(self) -> None:
        """Rehearse no more, and say why."""
        self._when, self._steps = "first", STEPS[-1]
        if comm.rank() == 0:
            _say(f"a step was not compared with one process, since {self.why_not}")

    def _keep_gradients(self, engine: Engine, scale: float) -> None:
        """Copy the gradients just before the update, in 32 bits at least."""
        with held_back():
            self._norm = engine.tensor_map.norm(engine.strategy) / scale
        for box in engine.tensor_map.boxes(state_by_name.gradient_boxes(engine.strategy)):
            kind = torch.promote_types(box.tensor.dtype, torch.float32)
            self._gradients.append(box._replace(tensor=box.tensor.to(kind) / scale))


def _say(text: str) -> None:
    print(f"minidist: {text}", file=sys.stderr)
