"""Find the layout to train a model with, on so many ranks with so much memory.

>>> plan("bert-large", ranks=8, memory=16 * 10**9).answer.layout

A plan has every layout that fits, ranked by predicted time, and the reason why others do not fit. Its answer
is the simplest layout that no other beats by more than a tenth, since predictions are no better than that.
Plain data parallelism is the simplest, then sharding, then layouts that cut layers and matrices.

Source: Narayanan et al. 2021, section 3; Rajbhandari et al. 2020, section 2, for which layout pays when.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import groupby
from typing import TYPE_CHECKING, overload

from minidist._arguments import check_whole
from minidist.model.configs import TransformerConfig
from minidist.parallel.contract.fp8_recipes import FP8_RECIPES
from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.schedule_kinds import DEFAULT_SCHEDULE
from minidist.scale.dryrun.transformer import subject_of
from minidist.scale.memory.estimates import Estimate
from minidist.scale.memory.state_bytes import OPTIMIZERS
from minidist.scale.memory.training_setup import BatchSize
from minidist.scale.planner.candidates import Candidate, Question, Refused, candidates, frugal
from minidist.scale.step_time.hardware import Hardware, smallest
from minidist.scale.step_time.hardware import hardware as hardware_of
from minidist.scale.step_time.prediction import check_machine

if TYPE_CHECKING:
    from minidist.scale.dryrun.own_model import OwnModel

MEANINGFUL = 0.1
"""A predicted difference counts from this share of a step's time on."""
ROWS_A_RANK = {True: 8, False: 32}
"""Rows per rank of the default batch: on a machine that was measured, and on others."""


class Ranked(Sequence[Candidate]):
    """Candidates by predicted time, the answer first if one is given, predicted as far as somebody reads.

    A heap has a bound of each candidate's time. The least is replaced by the time itself, until the least is
    a time: no other candidate is faster.
    """

    def __init__(self, candidates: Iterable[Candidate], answer: Candidate | None = None) -> None:
        self._ranked = [] if answer is None else [answer]
        given = enumerate(each for each in candidates if each is not answer)
        self._waiting = [(each.bound, i, each) for i, each in given]
        self._count = len(self._waiting) + len(self._ranked)
        heapify(self._waiting)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Candidate: ...

    @overload
    def __getitem__(self, index: slice) -> list[Candidate]: ...

    def __getitem__(self, index: int | slice) -> Candidate | list[Candidate]:
        wanted = range(len(self))[index]
        last = max(wanted, default=-1) if isinstance(wanted, range) else wanted
        while len(self._ranked) <= last:
            bound, i, each = self._waiting[0]
            if bound == seconds(each):
                self._ranked.append(heappop(self._waiting)[2])
            else:
                heapreplace(self._waiting, (seconds(each), i, each))
        return self._ranked[index]


@dataclass(frozen=True)
class Plan:
    """All layouts for a question."""

    question: Question
    fitting: Sequence[Candidate]  # the answer, then the others by time
    too_large: list[Candidate]  # by memory
    refused: list[Refused]
    families: dict[str, Ranked]  # the layouts that fit by family

    @property
    def answer(self) -> Candidate | None:
        """The layout to use; None if nothing fits."""
        return self.fitting[0] if self.fitting else None

    @property
    def fastest(self) -> Candidate:
        """The layout with the least predicted time."""
        return min((own[0] for own in self.families.values()), key=seconds)

    def best(self, family: str) -> Candidate | None:
        """The fastest layout of a family that fits; None if none does."""
        return self.families[family][0] if family in self.families else None

    def least(self, *families: str) -> tuple[Layout, Estimate] | None:
        """The layout of these families that takes the least memory, or None."""
        found = [
            (form, self.question.estimate(form))
            for form in frugal(self.question)
            if family_of(form) in families
        ]
        return min(found, key=lambda each: each[1].peak, default=None)


def plan(
    model: str | TransformerConfig | OwnModel,
    *,
    ranks: int,
    memory: int | None = None,
    hardware: str | Hardware | None = None,
    batch: BatchSize | None = None,
    precision: str | None = None,
    optimizer: str = "adam",
) -> Plan:
    """Find every layout of `ranks` ranks that trains the model, and predict the time of a step.

    Args:
        model: a name, a shape, or a model of your own, for which ranks are data-parallel.
        ranks: number of ranks; a layout uses all of them.
        memory: bytes of each rank; None for the machine's.
        hardware: a machine, or its name; None for the GPU with the least memory that has `memory`.
        batch: rows of the global batch, or (rows, tokens in each row), by default the model's context; None
            for 32 rows per rank, or 8 on a machine that was measured.
        precision: None for bfloat16 (or float16) on an accelerator and float32 on a CPU.
        optimizer: "adam", "muon", "momentum" or "sgd".

    Raises:
        TypeError, ValueError: an argument is unknown or out of range.
    """
    question = question_of(model, ranks, memory, hardware, batch, precision, optimizer)
    fitting, too_large, refused = list[Candidate](), list[Candidate](), list[Refused]()
    families = defaultdict[str, list[Candidate]](list)
    for each in candidates(question):
        if isinstance(each, Refused):
            refused.append(each)
        elif each.fits:
            fitting.append(each)
            families[family_of(each.layout)].append(each)
        else:
            too_large.append(each)
    too_large.sort(key=lambda c: c.memory.peak)
    ranked = {family: Ranked(own) for family, own in families.items()}
    return Plan(question, Ranked(fitting, _simplest(fitting)), too_large, refused, ranked)


def _simplest(fitting: Sequence[Candidate]) -> Candidate | None:
    """The simplest layout that no other beats by more than a prediction can tell."""
    if not fitting:
        return None
    enough = seconds(Ranked(fitting)[0]) / (1 - MEANINGFUL)
    near = sorted((each for each in fitting if each.bound <= enough), key=effort)
    for _, alike in groupby(near, key=effort):
        if found := [each for each in alike if seconds(each) <= enough]:
            return min(found, key=seconds)
    raise AssertionError("the fastest layout is near itself")


def seconds(candidate: Candidate) -> float:
    """Seconds of a step; infinite for a layout that does not fit."""
    return math.inf if candidate.step is None else candidate.step.seconds


def family_of(layout: Layout) -> str:
    """The family of a layout.

    "plain" data parallelism; "sharded" with ZeRO; "pipeline", "tensor", "context" or "experts" with one more
    axis, with or without ZeRO; "mixed" with several.
    """
    sizes = {"pipeline": layout.pp, "tensor": layout.tp, "context": layout.cp, "experts": layout.ep}
    axes = [name for name, size in sizes.items() if size > 1]
    if len(axes) > 1:
        return "mixed"
    return axes[0] if axes else "plain" if layout.residency.whole_state else "sharded"


def effort(candidate: Candidate) -> tuple[float, ...]:
    """How complex a candidate is: axes besides dp; what is shared, and other options; micro-batches."""
    layout = candidate.layout
    axes = sum(size > 1 for size in (layout.tp, layout.pp, layout.cp, layout.ep))
    more = bool(layout.recompute) + layout.sequence_parallel + (layout.schedule != DEFAULT_SCHEDULE)
    more += (layout.shard > 0) + (candidate.secondary > 0)
    shared = layout.residency.held(0, 1)  # of parameters, gradients and state
    return axes, sum(shared) + more, layout.micro_batches


def question_of(
    model: str | TransformerConfig | OwnModel,
    ranks: int,
    memory: int | None,
    hardware: str | Hardware | None,
    batch: BatchSize | None,
    precision: str | None,
    optimizer: str,
) -> Question:
    """Check `plan`'s arguments and fill in the defaults."""
    check_whole("ranks", ranks, 1)
    if memory is not None:
        check_whole("memory", memory, 1)
    subject = subject_of(model)
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer is {optimizer!r}; give {', '.join(OPTIMIZERS)}")
    if hardware is None and memory is None and precision not in FP8_RECIPES:  # which are refused below
        raise ValueError("neither memory nor a profile is given; give one, such as --memory 16GB")
    machine = smallest(memory or 0) if hardware is None else hardware_of(hardware)
    measured = bool(machine.crowds)
    size = ROWS_A_RANK[measured] * ranks if batch is None else batch
    rows, tokens = subject.rows_and_tokens(size)
    if precision is None:
        accelerator = machine.rates is not None and machine.rates.asynchronous
        known = [name for name in ("bf16", "fp16") if name in machine.peak and accelerator]
        precision = known[0] if known else "fp32"
    check_machine(precision, machine)
    sharing = min(ranks, machine.ranks_per_host) if machine.cores else 1  # they share a host's memory
    budget = machine.memory // sharing if memory is None else memory
    return Question(subject, ranks, budget, machine, rows, tokens, precision, optimizer)
