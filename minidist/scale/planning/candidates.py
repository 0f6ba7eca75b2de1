"""All layouts of a number of ranks that `prepare` takes, with their memory and predicted time.

Every product dp x tp x pp x cp of the ranks is tried, with every ZeRO stage, sequence parallelism and the
schedules of contract/schedule_kinds.py that are planned. Where data-parallel ranks lie on several hosts, the
ranks of a host may share one copy of the state or, in stage 3, a second copy of the parameters. Micro-batches
are powers of two: as few as fit, since more of them make products smaller; in a pipeline one to eight per
stage, which shrink its bubble. Tensor parallelism sends the most and stays within a host (Narayanan et al.
2021, section 3.2, takeaway 1). Activations are recomputed if they do not fit otherwise, or only with many
micro-batches. `prepare`'s own checks decide which options go together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from typing import Any

from minidist.model.configs import GPTConfig, TransformerConfig
from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.recompute_policies import POLICIES
from minidist.parallel.contract.schedule_kinds import DEFAULT_SCHEDULE, SCHEDULES
from minidist.scale.dry_run.own_model import OwnModel
from minidist.scale.dry_run.own_prediction import check_any, estimate_any, predict_any
from minidist.scale.memory.estimates import Estimate
from minidist.scale.memory.parameter_sizes import share
from minidist.scale.time.rates import Hardware
from minidist.scale.time.stages import Simulated
from minidist.scale.time.step_time import StepTime

A_STAGE = 8
"""The most micro-batches per stage of a pipeline to try; with so many, a ninth of the time is bubble."""


@dataclass(frozen=True)
class Question:
    """The model, machine and limits to plan for."""

    name: str  # of the model
    shape: TransformerConfig | OwnModel
    ranks: int
    memory: int  # bytes of each rank
    hardware: Hardware
    rows: int  # of the global batch
    tokens: int  # in each row; 0 for a model of your own
    precision: str
    optimizer: str = "adam"
    simulated: Simulated = field(default_factory=dict, compare=False)

    @property
    def batch(self) -> tuple[int, int]:
        """Rows, and tokens in each row."""
        return self.rows, self.tokens

    def estimate(self, layout: Layout, secondary: int = 0) -> Estimate:
        """Memory of the fullest rank."""
        return estimate_any(self.shape, layout, self.batch, self.optimizer, secondary)

    def predict(self, layout: Layout, secondary: int = 0) -> StepTime:
        """Time of a step."""
        given = self.shape, layout, self.batch, self.hardware
        return predict_any(*given, self.optimizer, secondary, self.simulated)

    def recomputes(self, policy: bool | str) -> bool:
        """Whether the model has the parts that a policy recomputes."""
        return not isinstance(self.shape, OwnModel) or self.shape.recomputes(policy)

    @property
    def grids(self) -> list[tuple[int, int, int, int]]:
        """All (dp, tp, pp, cp) whose product is the number of ranks; for a model of your own dp alone."""
        if isinstance(self.shape, OwnModel):
            return [(self.ranks, 1, 1, 1)]
        return [*_grids(self.ranks)]


@dataclass(frozen=True)
class Candidate:
    """A layout that `prepare` takes."""

    layout: Layout
    memory: Estimate
    step: StepTime | None  # None if it does not fit
    secondary: int = 0  # ranks that share a second copy of the parameters, an option of `prepare`

    def __str__(self) -> str:
        """The layout, as `Layout.parse` reads it, and the option."""
        option = f' with fully_shard={{"secondary": {self.secondary}}}' if self.secondary else ""
        return f"{self.layout}{option}"


@dataclass(frozen=True)
class Refused:
    """A layout that `prepare` refuses."""

    fields: str
    reason: str


def candidates(question: Question) -> Iterator[Candidate | Refused]:
    """Yield all candidates; this file's docstring says which micro-batches are tried."""
    for dp, tp, pp, cp in question.grids:
        if tp > question.hardware.ranks_per_host:
            continue
        planned = [name for name, kind in SCHEDULES.items() if kind.planned] if pp > 1 else [DEFAULT_SCHEDULE]
        sequence = (False, True) if tp > 1 else (False,)
        sharings = [(0, 0, 0), *_sharings(question, dp * cp, tp)]
        for (zero, shard, secondary), shared, schedule in product(sharings, sequence, planned):
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
                "shard": shard,
            }
            yield from _of_one_form(question, fields, secondary)


def _sharings(question: Question, ranks: int, tp: int) -> Iterator[tuple[int, int, int]]:
    """ZeRO's stage, the layout's `shard`, and the ranks of secondary shares, for so many dp and cp ranks."""
    host = question.hardware.ranks_per_host
    there = host // tp  # of these ranks on a host
    several = 1 < there < ranks and host % tp == 0 and ranks % there == 0
    for zero in range(1, 4) if ranks > 1 else ():
        yield zero, 0, 0
        if several:
            yield zero, there, 0
    if several:
        yield 3, 0, there


def frugal(question: Question) -> Iterator[Layout]:
    """Layouts with at most one axis besides dp that save memory: one row at a time, recomputed, ZeRO."""
    for dp, tp, pp, cp in question.grids:
        if sum(size > 1 for size in (tp, pp, cp)) > 1:
            continue
        for zero in (0, 3 if pp == 1 else 1) if dp * cp > 1 else (0,):
            try:
                again = question.recomputes(True)
                layout = Layout(dp, tp, pp, zero, 1, question.precision, again, cp, sequence_parallel=tp > 1)
                require_supported(question, layout)
            except ValueError:
                continue
            yield replace(layout, micro_batches=share(question.rows, dp))


def _of_one_form(
    question: Question, fields: dict[str, object], secondary: int
) -> Iterator[Candidate | Refused]:
    """Candidates that differ only in micro-batches and recomputation."""
    try:
        layout = Layout(**fields)  # type: ignore[arg-type]
        require_supported(question, layout)
    except ValueError as error:
        one = Layout()
        written = ",".join(f"{name}={value}" for name, value in fields.items() if value != getattr(one, name))
        if not (secondary or fields["shard"]):  # else it is refused without them as well
            yield Refused(written or "dp=1", str(error))
        return
    forms = [layout]
    if SCHEDULES[layout.schedule].allows_recompute:
        planned = [name for name, policy in POLICIES.items() if policy.planned and question.recomputes(name)]
        forms += [replace(layout, recompute=name) for name in planned]
    most, last, found = share(question.rows, layout.dp), None, False
    for form in forms:
        least = 0  # the fewest micro-batches that fit
        for micro in _powers(most):
            if micro < min(layout.pp, most):
                continue
            if least and (layout.pp == 1 or micro > A_STAGE * layout.pp):
                break
            tried = replace(form, micro_batches=micro)
            memory = question.estimate(tried, secondary)
            if memory.peak > question.memory:
                last = Candidate(tried, memory, None, secondary)
                continue
            least, found = least or micro, True
            yield Candidate(tried, memory, question.predict(tried, secondary), secondary)
        if least:
            most = least // 2
        if not most:
            break
    if not found:
        assert last is not None
        yield last


def require_supported(question: Question, layout: Layout) -> None:
    """ValueError if `prepare` would refuse the layout, or a step the batch, by their own checks."""
    shape = question.shape
    check_any(shape, layout, question.batch, question.hardware)
    if isinstance(shape, GPTConfig) and layout.pp * layout.tp > 1:
        _check_parts(shape, layout.pp, layout.chunks, layout.schedule, layout.tp)


@lru_cache(maxsize=1024)
def _check_parts(shape: GPTConfig, pp: int, chunks: int, schedule: str, tp: int) -> None:
    """ValueError if the layers cannot be cut into stages, or the matrices over ranks."""
    from minidist.parallel.pipeline.layer_chain import check_layers
    from minidist.parallel.tensor.heads import cut_between_heads
    from minidist.parallel.tensor.plans import plan_for
    from minidist.parallel.tensor.styles import check_ties, resolve

    model = _model(shape)
    if pp > 1:
        check_layers(model, Layout(pp=pp, chunks=chunks, schedule=schedule))
    if tp > 1:
        parts, together = resolve(model, plan_for(model))
        check_ties(model, parts)
        cut_between_heads(model, parts, together, tp)


@lru_cache(maxsize=2)
def _model(shape: GPTConfig) -> Any:
    """The model on the meta device, without memory."""
    from minidist.model.gpt import GPT

    return GPT(shape, device="meta")


def _grids(ranks: int) -> Iterator[tuple[int, int, int, int]]:
    """All (dp, tp, pp, cp) whose product is the number of ranks."""
    divisors = [size for size in range(1, ranks + 1) if ranks % size == 0]
    for tp, pp, cp in product(divisors, repeat=3):
        if ranks % (tp * pp * cp) == 0:
            yield ranks // (tp * pp * cp), tp, pp, cp


def _powers(rows: int) -> Iterator[int]:
    """1, 2, 4, ... and the number of rows."""
    micro = 1
    while micro < rows:
        yield micro
        micro *= 2
    yield max(rows, 1)
