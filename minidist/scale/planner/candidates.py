"""All layouts of a number of ranks that `prepare` takes, with their memory and predicted time.

Every product dp x tp x pp x cp of the ranks is tried, with every ep, ZeRO stage, sequence parallelism and the
schedules of contract/schedule_kinds.py that are planned. Where data-parallel ranks lie on several hosts, the
ranks of a host may share one copy of the state or, with ZeRO 3, a second copy of parameters. Micro-batches
are powers of two: as few as fit, since more of them make products smaller; in a pipeline one to eight per
stage, which shrink its bubble. Tensor parallelism sends the most and stays within a host (Narayanan et al.
2021, section 3.2, takeaway 1). Activations are recomputed if they do not fit otherwise, or only with many
micro-batches. `prepare`'s own checks decide which options go together.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.recompute_policies import POLICIES
from minidist.parallel.contract.residency import ROWS, SHARING
from minidist.parallel.contract.schedule_kinds import DEFAULT_SCHEDULE, SCHEDULES
from minidist.scale.dryrun.transformer import Subject
from minidist.scale.memory.estimates import Estimate
from minidist.scale.memory.parameter_sizes import share
from minidist.scale.memory.training_setup import TrainingSetup
from minidist.scale.step_time.hardware import Hardware
from minidist.scale.step_time.prediction import StepTime
from minidist.scale.step_time.step_stages import Simulated

A_STAGE = 8
"""The most micro-batches per stage of a pipeline to try; with so many, a ninth of the time is bubble."""


@dataclass(frozen=True)
class Question:
    """The model, machine and limits to plan for."""

    subject: Subject
    ranks: int
    memory: int  # bytes of each rank
    hardware: Hardware
    rows: int  # of the global batch
    tokens: int  # in each row; 0 for a model of your own
    precision: str
    optimizer: str = "adam"
    simulated: Simulated = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        """The model's name."""
        return self.subject.name

    @property
    def batch(self) -> tuple[int, int]:
        """Rows, and tokens in each row."""
        return self.rows, self.tokens

    def _setup(self, layout: Layout, secondary: int = 0) -> TrainingSetup:
        return TrainingSetup(layout, *self.batch, self.optimizer, secondary)

    def check(self, layout: Layout) -> None:
        """ValueError if `prepare` would refuse the layout, or a step the batch, by their own checks."""
        self.subject.check(self._setup(layout), self.hardware)

    def estimate(self, layout: Layout, secondary: int = 0) -> Estimate:
        """Memory of the fullest rank."""
        return self.subject.estimate(self._setup(layout, secondary))

    def fits_empty(self, layout: Layout, secondary: int = 0) -> bool:
        """Whether the fullest rank has memory for the model's state, without activations."""
        if self.subject.divided is None:  # a model of your own has no estimate without rows
            return True
        setup = TrainingSetup(layout, 0, self.tokens, self.optimizer, secondary)
        return self.subject.estimate(setup).peak <= self.memory

    def predict(self, layout: Layout, secondary: int = 0, bound: bool = False) -> StepTime:
        """Time of a step, or with `bound` a time below it that takes no simulation."""
        return self.subject.predict(self._setup(layout, secondary), self.hardware, self.simulated, bound)

    @property
    def grids(self) -> Iterator[tuple[int, int, int, int]]:
        """All (dp, tp, pp, cp) whose product is the number of ranks; for a model of your own dp alone."""
        whole = self.subject.divided is None
        sizes = [1] if whole else [size for size in range(1, self.ranks + 1) if self.ranks % size == 0]
        for tp, pp, cp in product(sizes, repeat=3):
            if self.ranks % (tp * pp * cp) == 0:
                yield self.ranks // (tp * pp * cp), tp, pp, cp

    def expert_ranks(self, ranks: int) -> list[int]:
        """Numbers of neighbours that can share the experts, of so many dp and cp ranks."""
        common = math.gcd(ranks, self.subject.experts or 1)
        return [size for size in range(1, common + 1) if common % size == 0]


@dataclass(frozen=True)
class Candidate:
    """A layout that `prepare` takes."""

    layout: Layout
    memory: Estimate
    question: Question = field(repr=False)
    secondary: int = 0  # ranks that share a second copy of the parameters, an option of `prepare`

    @property
    def fits(self) -> bool:
        """Whether the fullest rank has enough memory."""
        return self.memory.peak <= self.question.memory

    @cached_property
    def bound(self) -> float:
        """Seconds that a step takes at the least; no pipeline is simulated for it."""
        return self.question.predict(self.layout, self.secondary, bound=True).seconds

    @cached_property
    def step(self) -> StepTime | None:
        """The predicted time of a step; None if it does not fit."""
        return self.question.predict(self.layout, self.secondary) if self.fits else None

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
        kinds = _cp_kinds(question, cp, tp)
        sharings = [(0, 0, 0), *_sharings(question, dp * cp, tp)]
        forms = product(sharings, sequence, planned, kinds, question.expert_ranks(dp * cp))
        for (zero, shard, secondary), shared, schedule, kind, ep in forms:
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
                "cp_kind": kind,
                "ep": ep,
            }
            yield from _of_one_form(question, fields, secondary)


def _cp_kinds(question: Question, cp: int, tp: int) -> list[str]:
    """A ring, and as many neighbours that trade heads as there are heads: all, or groups in a ring."""
    heads = (question.subject.divided or (1,))[0] // tp
    trading = max(size for size in range(1, cp + 1) if cp % size == 0 and size <= max(heads, 1))
    return ["ring", "ulysses" if trading == cp else f"{trading}x{cp // trading}"][: 1 + (trading > 1)]


def _sharings(question: Question, ranks: int, tp: int) -> Iterator[tuple[int, int, int]]:
    """ZeRO's row, the layout's `shard`, and the ranks of secondary shares, for so many dp and cp ranks."""
    host = question.hardware.ranks_per_host
    there = host // tp  # of these ranks on a host
    several = 1 < there < ranks and host % tp == 0 and ranks % there == 0
    for zero in SHARING if ranks > 1 else ():
        yield zero, 0, 0
        if several:
            yield zero, there, 0
        if several and not ROWS[zero].whole_parameters:
            yield zero, 0, there


def frugal(question: Question) -> Iterator[Layout]:
    """Layouts with at most one axis besides dp that save memory: one row at a time, recomputed, ZeRO."""
    for dp, tp, pp, cp in question.grids:
        if sum(size > 1 for size in (tp, pp, cp)) > 1:
            continue
        again = question.subject.recomputes(True)
        for ep in question.expert_ranks(dp) if tp * pp * cp == 1 else [1]:
            micro = share(question.rows, dp)
            plain = Layout(
                dp=dp,
                tp=tp,
                pp=pp,
                cp=cp,
                ep=ep,
                micro_batches=micro,
                precision=question.precision,
                recompute=again,
                sequence_parallel=tp > 1,
            )
            sharing = [replace(plain, zero=zero) for zero in reversed(SHARING)] if dp * cp > 1 else []
            for forms in ([plain], sharing):  # of ZeRO's rows the one that shares most
                for form in forms:
                    with contextlib.suppress(ValueError):
                        question.check(form)
                        yield form
                        break


def _of_one_form(
    question: Question, fields: dict[str, object], secondary: int
) -> Iterator[Candidate | Refused]:
    """Candidates that differ only in micro-batches and recomputation."""
    try:
        layout = Layout(**fields)  # type: ignore[arg-type]
        question.check(layout)
    except ValueError as error:
        one = Layout()
        written = ",".join(f"{name}={value}" for name, value in fields.items() if value != getattr(one, name))
        if not (secondary or fields["shard"]):  # else it is refused without them as well
            yield Refused(written or "dp=1", str(error))
        return
    forms = [layout]
    if SCHEDULES[layout.schedule].allows_recompute:
        recomputes = question.subject.recomputes
        planned = [name for name, policy in POLICIES.items() if policy.planned and recomputes(name)]
        forms += [replace(layout, recompute=name) for name in planned]
    most, too_large, found = share(question.rows, layout.dp), list[Candidate](), False
    state_fits = question.fits_empty(layout, secondary)  # else only the smallest is estimated, to be reported
    for form in forms if state_fits else forms[-1:]:
        least = 0  # the fewest micro-batches that fit
        powers = (most - 1).bit_length() if state_fits else 0
        for micro in [*(2**power for power in range(powers)), most]:
            if micro < min(layout.pp, most):
                continue
            if least and (layout.pp == 1 or micro > A_STAGE * layout.pp):
                break
            tried = replace(form, micro_batches=micro)
            each = Candidate(tried, question.estimate(tried, secondary), question, secondary)
            if not each.fits:
                too_large.append(each)
                continue
            least, found = least or micro, True
            yield each
        if least:
            most = least // 2  # recomputed activations pay if fewer micro-batches fit then
        if not most:
            break
    if not found:
        yield too_large[-1]
