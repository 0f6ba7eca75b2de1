"""Layouts of a number of ranks: which there are, which `prepare` takes, which fit, and how long each takes.

Every way to write the ranks as dp x tp x pp x cp is tried, with every ZeRO stage, sequence parallelism and
the schedules of contract/schedule_kinds.py that are planned. Micro-batches are powers of two: as few as fit,
since more of them make products smaller; a pipeline's one to eight a stage, as they shrink its bubble. Tensor
parallelism, which sends most, stays on a host (Narayanan et al. 2021, section 3.2, takeaway 1). Activations
are recomputed where they do not fit otherwise, or where they take so many micro-batches.

What does not go together says `prepare`, by its own checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from typing import Any

from minidist.model.configs import GPTConfig, TransformerConfig
from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.schedule_kinds import DEFAULT_SCHEDULE, SCHEDULES
from minidist.parallel.engine.prepare import check_available
from minidist.scale.memory import estimates
from minidist.scale.memory.arguments import refuse_cut_rows
from minidist.scale.memory.estimates import Estimate, estimate
from minidist.scale.memory.parameter_sizes import share
from minidist.scale.time.rates import Hardware
from minidist.scale.time.stages import Simulated
from minidist.scale.time.step_time import StepTime, check_fits, predict_step

A_STAGE = 8
"""Micro-batches for each stage of a pipeline, up to which more are tried: then a ninth is bubble."""


@dataclass(frozen=True)
class Question:
    """What a plan is asked for."""

    name: str  # of the model
    shape: TransformerConfig
    ranks: int
    memory: int  # bytes of each rank
    hardware: Hardware
    rows: int  # of the global batch
    tokens: int
    precision: str
    optimizer: str = "adam"
    simulated: Simulated = field(default_factory=dict, compare=False)

    @property
    def batch(self) -> tuple[int, int]:
        """Rows, and tokens in each."""
        return self.rows, self.tokens

    def estimate(self, layout: Layout) -> Estimate:
        """The memory of the fullest rank; see `minidist.scale.memory`."""
        return estimate(self.shape, layout, batch=self.batch, optimizer=self.optimizer)

    def predict(self, layout: Layout) -> StepTime:
        """The time of a step."""
        return predict_step(
            self.shape, layout, self.batch, self.hardware, optimizer=self.optimizer, simulated=self.simulated
        )


@dataclass(frozen=True)
class Candidate:
    """A layout that `prepare` takes."""

    layout: Layout
    memory: Estimate
    step: StepTime | None  # None where it does not fit


@dataclass(frozen=True)
class Refused:
    """A layout that it does not."""

    fields: str
    reason: str


def candidates(question: Question) -> Iterator[Candidate | Refused]:
    """All of them; of those that differ in micro-batches alone what the top of this file says."""
    for dp, tp, pp, cp in _grids(question.ranks):
        if tp > question.hardware.ranks_per_host:
            continue
        planned = [name for name, kind in SCHEDULES.items() if kind.planned] if pp > 1 else [DEFAULT_SCHEDULE]
        stages = range(4) if dp * cp > 1 else range(1)
        sequence = (False, True) if tp > 1 else (False,)
        for zero, shared, schedule in product(stages, sequence, planned):
            fields = {
                "dp": dp,
                "tp": tp,
                "pp": pp,
                "cp": cp,
                "zero": zero,
                "precision": question.precision,
                "sequence_parallel": shared,
                "schedule": schedule,
                "chunks": SCHEDULES[schedule].least_chunks,
            }
            yield from _of_one_form(question, fields)


def frugal(question: Question) -> Iterator[Layout]:
    """Layouts along one axis beside dp that take little memory: a row at a time, recomputed, sharded."""
    for dp, tp, pp, cp in _grids(question.ranks):
        if sum(size > 1 for size in (tp, pp, cp)) > 1:
            continue
        for zero in (0, 3 if pp == 1 else 1) if dp * cp > 1 else (0,):
            try:
                layout = Layout(dp, tp, pp, zero, 1, question.precision, True, cp, sequence_parallel=tp > 1)
                require_supported(question.shape, layout, question.rows, question.tokens, question.hardware)
            except ValueError:
                continue
            yield replace(layout, micro_batches=share(question.rows, dp))


def _of_one_form(question: Question, fields: dict[str, object]) -> Iterator[Candidate | Refused]:
    """Of layouts that differ in micro-batches."""
    try:
        layout = Layout(**fields)  # type: ignore[arg-type]
        require_supported(question.shape, layout, question.rows, question.tokens, question.hardware)
    except ValueError as error:
        one = Layout()
        written = ",".join(f"{name}={value}" for name, value in fields.items() if value != getattr(one, name))
        yield Refused(written or "dp=1", str(error))
        return
    forms = [layout]
    if SCHEDULES[layout.schedule].allows_recompute:
        forms.append(replace(layout, recompute=True))
    most, last, found = share(question.rows, layout.dp), None, False
    for form in forms:
        least = 0  # micro-batches with which it fits
        for micro in _powers(most):
            if micro < min(layout.pp, most):
                continue
            if least and (layout.pp == 1 or micro > A_STAGE * layout.pp):
                break
            tried = replace(form, micro_batches=micro)
            memory = question.estimate(tried)
            if memory.peak > question.memory:
                last = Candidate(tried, memory, None)
                continue
            least, found = least or micro, True
            yield Candidate(tried, memory, question.predict(tried))
        if least:
            most = least // 2
        if not most:
            break
    if not found:
        assert last is not None
        yield last


def require_supported(
    shape: TransformerConfig, layout: Layout, rows: int, tokens: int, hardware: Hardware
) -> None:
    """ValueError where `prepare` would refuse a layout, or a step the batch: from their own checks."""
    check_available(layout)
    refuse_cut_rows(shape, layout)
    estimates.check(shape, layout, layout.precision, "adam", None, None)
    check_fits(shape, layout, rows, tokens, hardware)
    if isinstance(shape, GPTConfig) and layout.pp * layout.tp > 1:
        _check_parts(shape, layout.pp, layout.chunks, layout.schedule, layout.tp)


@lru_cache(maxsize=1024)
def _check_parts(shape: GPTConfig, pp: int, chunks: int, schedule: str, tp: int) -> None:
    """That the model's layers can be cut into stages, and its matrices over ranks."""
    from minidist.parallel.pipeline.layer_chain import check_layers
    from minidist.parallel.tensor.plans import plan_for
    from minidist.parallel.tensor.styles import check_ties, cut_between_heads, resolve

    model = _model(shape)
    if pp > 1:
        check_layers(model, Layout(pp=pp, chunks=chunks, schedule=schedule))
    if tp > 1:
        parts, together = resolve(model, plan_for(model))
        check_ties(model, parts)
        cut_between_heads(model, parts, together, tp)


@lru_cache(maxsize=2)
def _model(shape: GPTConfig) -> Any:
    """Without memory."""
    from minidist.model.gpt import GPT

    return GPT(shape, device="meta")


def _grids(ranks: int) -> Iterator[tuple[int, int, int, int]]:
    """All dp, tp, pp, cp whose product is the ranks."""
    divisors = [size for size in range(1, ranks + 1) if ranks % size == 0]
    for tp, pp, cp in product(divisors, repeat=3):
        if ranks % (tp * pp * cp) == 0:
            yield ranks // (tp * pp * cp), tp, pp, cp


def _powers(rows: int) -> Iterator[int]:
    """1, 2, 4, ... up to a row each."""
    micro = 1
    while micro < rows:
        yield micro
        micro *= 2
    yield max(rows, 1)
