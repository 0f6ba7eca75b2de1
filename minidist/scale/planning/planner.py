"""Which layout to train a model with on so many ranks of so much memory: every one that fits, by its time.

>>> plan("bert-large", ranks=8, memory=16 * 10**9).answer.layout

The answer is the simplest layout that no other beats by more than a tenth: predictions are no better than
that, and plain data parallelism is the easiest to live with. Sharding comes after it, then what cuts layers
and matrices. What does not fit says why: its memory by kind, or what `prepare` refuses.

Source: for when which pays, Narayanan et al. 2021, section 3; Rajbhandari et al. 2020, section 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from minidist.model.configs import TransformerConfig
from minidist.model.configs import config as config_of
from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.schedule_kinds import DEFAULT_SCHEDULE
from minidist.scale.memory.estimates import Estimate
from minidist.scale.memory.state_bytes import OPTIMIZERS
from minidist.scale.planning.candidates import Candidate, Question, Refused, candidates, frugal
from minidist.scale.time.hardware import hardware as hardware_of
from minidist.scale.time.hardware import smallest
from minidist.scale.time.rates import Hardware

MEANINGFUL = 0.1
"""Share of a step's time from which on a layout is faster, and not just predicted so."""
ROWS = {True: 8, False: 32}
"""Of a batch for each rank where none is asked for: on processors that were measured, and on devices."""
FAMILIES = ("plain", "sharded", "pipeline", "tensor", "context", "mixed")
"""Plain data parallelism; ZeRO beside it; one axis more, with or without ZeRO; several."""


@dataclass(frozen=True)
class Plan:
    """What was found.

    Attributes:
        fitting: layouts that fit, the answer first, then by their time.
        too_large: those that take more memory.
        refused: those that `prepare` does not take.
    """

    question: Question
    fitting: list[Candidate]
    too_large: list[Candidate]
    refused: list[Refused]

    @property
    def answer(self) -> Candidate | None:
        """What to use; None where nothing fits."""
        return self.fitting[0] if self.fitting else None

    def best(self, family: str) -> Candidate | None:
        """The fastest of a family that fits."""
        return min((c for c in self.fitting if family_of(c.layout) == family), key=seconds, default=None)

    def least(self, *families: str) -> tuple[Layout, Estimate] | None:
        """The layout of some families that takes the least memory, however long; None where none is."""
        found = [
            (form, self.question.estimate(form))
            for form in frugal(self.question)
            if family_of(form) in families
        ]
        return min(found, key=lambda each: each[1].peak, default=None)


def plan(
    model: str | TransformerConfig,
    *,
    ranks: int,
    memory: int | None = None,
    hardware: str | Hardware | None = None,
    batch: int | tuple[int, int] | None = None,
    precision: str | None = None,
    optimizer: str = "adam",
    progress: Callable[[], object] | None = None,
) -> Plan:
    """Every layout of `ranks` ranks that trains the model, and how long a step takes.

    Args:
        model: a name, or a shape.
        ranks: all of which are used.
        memory: bytes of each; None for the machine's.
        hardware: the machine, or its name; None for the GPU with the least memory that has as much.
        batch: rows of the global batch and tokens in each; rows alone have the model's context; None for 32
            rows a rank, or 8 on a machine that was measured.
        precision: None for bfloat16, else float16, where the machine is a GPU, and float32 on processors.
        optimizer: "adam", "momentum" or "sgd".
        progress: called for each layout.

    Raises:
        TypeError, ValueError: an argument is unknown or out of range.
    """
    question = _question(model, ranks, memory, hardware, batch, precision, optimizer)
    fitting, too_large, refused = [], [], []
    for each in candidates(question):
        if progress is not None:
            progress()
        if isinstance(each, Refused):
            refused.append(each)
        elif each.step is None:
            too_large.append(each)
        else:
            fitting.append(each)
    fitting.sort(key=seconds)
    if fitting:
        enough = seconds(fitting[0]) / (1 - MEANINGFUL)
        near = [each for each in fitting if seconds(each) <= enough]
        chosen = min(near, key=lambda each: (effort(each.layout), seconds(each)))
        fitting.remove(chosen)
        fitting.insert(0, chosen)
    too_large.sort(key=lambda c: c.memory.peak)
    return Plan(question, fitting, too_large, refused)


def check(
    model: str | TransformerConfig,
    *,
    ranks: int,
    memory: int | None = None,
    batch: int | tuple[int, int] | None = None,
    precision: str | None = None,
    optimizer: str = "adam",
) -> None:
    """Raise what `plan` would for a machine that is yet to be measured, which takes a while.

    It has rates for the precisions that a GPU has, so one stands in for it.

    Raises:
        TypeError, ValueError: see `plan`.
    """
    machine = replace(hardware_of("h100"), name="this machine")
    _question(model, ranks, memory, machine, batch, precision, optimizer)


def seconds(candidate: Candidate) -> float:
    """Of a step; infinite for what does not fit."""
    return math.inf if candidate.step is None else candidate.step.seconds


def family_of(layout: Layout) -> str:
    """One of FAMILIES."""
    sizes = {"pipeline": layout.pp, "tensor": layout.tp, "context": layout.cp}
    axes = [name for name, size in sizes.items() if size > 1]
    if len(axes) > 1:
        return "mixed"
    return axes[0] if axes else "sharded" if layout.zero else "plain"


def effort(layout: Layout) -> tuple[float, ...]:
    """How much there is to it: axes beside dp, ZeRO's stage, what else is switched on, micro-batches."""
    axes = sum(size > 1 for size in (layout.tp, layout.pp, layout.cp))
    more = layout.recompute + layout.sequence_parallel + (layout.schedule != DEFAULT_SCHEDULE)
    return axes, layout.zero + more, layout.micro_batches


def _question(
    model: str | TransformerConfig,
    ranks: int,
    memory: int | None,
    hardware: str | Hardware | None,
    batch: int | tuple[int, int] | None,
    precision: str | None,
    optimizer: str,
) -> Question:
    for what, value in (("ranks", ranks), ("memory", memory)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{what} is {value!r}; give a whole number of at least 1")
    shape = config_of(model) if isinstance(model, str) else model
    if not isinstance(shape, TransformerConfig):
        raise TypeError(f"model is {model!r}; give the name of one, or a GPTConfig or BERTConfig")
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer is {optimizer!r}; give {', '.join(OPTIMIZERS)}")
    if hardware is None and memory is None:
        raise ValueError("neither memory nor a profile is given; give one, such as --memory 16GB")
    machine = smallest(memory or 0) if hardware is None else hardware_of(hardware)
    measured = bool(machine.crowds)
    rows = ROWS[measured] * ranks if batch is None else batch
    rows, tokens = rows if isinstance(rows, tuple) else (rows, shape.context)
    if rows < 1 or not 1 <= tokens <= shape.context:
        raise ValueError(
            f"the batch is {rows} rows of {tokens} tokens; give at least 1 row, of 1 to {shape.context}"
        )
    if precision is None:
        is_gpu = machine.rates is not None and machine.rates.asynchronous
        known = [name for name in ("bf16", "fp16") if name in machine.peak and is_gpu]
        precision = known[0] if known else "fp32"
    if precision not in machine.peak:
        raise ValueError(
            f"precision is {precision!r}, and {machine.name} has no rate for it; give "
            f"{' or '.join(machine.peak)}"
        )
    name = model if isinstance(model, str) else f"{shape.layers} layers of {shape.width}"
    sharing = min(ranks, machine.ranks_per_host) if machine.cores else 1  # ranks of a host share its memory
    budget = machine.memory // sharing if memory is None else memory
    return Question(name, shape, ranks, budget, machine, rows, tokens, precision, optimizer)
