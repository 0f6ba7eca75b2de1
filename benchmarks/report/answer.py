"""Answer "What should I use?": the first strategy that fits into memory, the cheapest ones tried first.

Nothing here is measured. The largest batches are those of `minidist.scale.memory.fits`, and bytes follow the
formulas that the tests check the strategies against. The strategies are a list of layouts, ordered by their
extra cost over plain data parallelism. ZeRO's stages 1 and 2 send the same bytes, and stage 3 sends half as
many again; a pipeline's ranks wait during its first and last micro-batches; tensor parallelism sends
activations in every layer, which needs links as fast as those within one machine. So take the first one that
fits.

Sources: Rajbhandari et al. 2020 (ZeRO), section 7; Narayanan et al. 2021 (Megatron-LM), sections 2 and 3.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from minidist.benchmarks.harness import formats
from minidist.model.configs import config
from minidist.parallel.contract.layout import Layout
from minidist.parallel.sharding.residency import ROWS
from minidist.parallel.tensor.plans import bytes_per_pass
from minidist.scale.memory import Estimate, estimate
from minidist.scale.memory.largest_batch import first_that_fits, largest, sharded

GB = 10**9
HALF = 2  # bytes of a bf16 number
MODELS = ("gpt2-medium", "gpt2-large", "gpt2-xl", "gpt3-2.7b", "gpt3-6.7b", "gpt3-13b")
MACHINES = ((1, 16), (8, 16), (8, 24), (8, 80))  # GPUs, and GB of each


@dataclass(frozen=True)
class Question:
    """A question: which strategy trains this model (see `minidist.model.configs`) on this machine?"""

    model: str = "gpt2-xl"
    gpus: int = 8
    memory: int = 16 * GB  # bytes of each GPU
    called: str = "a 1.5 B model"

    @property
    def text(self) -> str:
        """The question in words."""
        many = f"{self.gpus} GPUs" if self.gpus > 1 else "one GPU"
        return f"{self.called} on {many} with {formats.size(self.memory).replace('.0 ', ' ')}"

    @property
    def batch(self) -> int:
        """Rows of the global batch for which sent bytes are given: eight per GPU."""
        return 8 * self.gpus


@dataclass(frozen=True)
class Choice:
    """A strategy and its costs. Batches are rows over all GPUs, or 0 if not even one row per GPU fits."""

    name: str
    layout: Layout  # in bf16, activations recomputed
    memory: Estimate  # of the fullest rank, with the smallest batch
    smallest: tuple[int, int]  # that batch: a row per GPU or micro-batch, and the tokens in each
    kept: int  # the largest batch if activations are kept
    recomputed: int  # the largest batch if they are recomputed
    sent: int  # bytes that a rank sends in a step of `Question.batch` rows
    idle: float  # share of a step in which a pipeline's ranks wait

    @property
    def fits(self) -> bool:
        """Whether the model fits at all."""
        return self.recomputed > 0


@functools.cache
def choices(question: Question) -> tuple[Choice, ...]:
    """Return all strategies on that machine, the cheapest first."""
    return tuple(_choice(question, name, layout) for name, layout in _layouts(question.gpus).items())


def best(found: Sequence[Choice]) -> Choice | None:
    """Return the first choice that fits, or None."""
    return next((choice for choice in found if choice.fits), None)


def first_fit(question: Question) -> tuple[str, int] | None:
    """Return the name of the best choice and its largest batch; later choices are not computed."""
    names = {layout: name for name, layout in _layouts(question.gpus).items()}
    found = first_that_fits(largest(question.model, layout, question.memory) for layout in names)
    return None if found is None else (names[found.layout], found.batch)


def _layouts(gpus: int) -> dict[str, Layout]:
    """The strategies by name, the cheapest first."""
    mixed = Layout(precision="bf16", recompute=True)
    if gpus == 1:
        return {"one process": mixed}
    return {
        "data parallel": replace(mixed, dp=gpus),
        **sharded(mixed, gpus),
        "pipeline": replace(mixed, pp=gpus, micro_batches=4 * gpus),
        "tensor parallel": replace(mixed, tp=gpus),
    }


def _choice(question: Question, name: str, layout: Layout) -> Choice:
    kept, recomputed = (
        largest(question.model, replace(layout, recompute=again), question.memory) for again in (False, True)
    )
    batch, waits = recomputed.smallest_batch, layout.pp - 1
    return Choice(
        name,
        layout,
        estimate(question.model, layout, batch=batch),
        batch,
        kept.batch,
        recomputed.batch,
        _sent(question, layout),
        waits / (layout.micro_batches + waits),
    )


def _sent(question: Question, layout: Layout) -> int:
    """Return by formula the bytes that a rank sends in a step; in a pipeline, a rank in the middle."""
    shape, ranks = config(question.model), layout.ranks
    if layout.tp > 1:
        return bytes_per_pass(shape, question.batch, shape.context, ranks, element_size=HALF)
    if layout.pp > 1:
        return 2 * question.batch * shape.context * shape.width * HALF
    return int(ROWS[layout.zero].bytes_sent(shape.parameters() * HALF, ranks))


def sentence(question: Question, found: Sequence[Choice]) -> str:
    """Answer in two or three sentences."""
    chosen, plain = best(found), found[0]
    budget = formats.size(question.memory).replace(".0 ", " ")
    if chosen is None:
        least = min(found, key=lambda choice: choice.memory.peak)
        return (
            f"None of these fits. Even {least.name} needs {formats.size(least.memory.peak)} on each GPU, "
            f"which has {budget}. Combine strategies (`minidist plan`), or take more GPUs."
        )
    rows = f"a batch of {chosen.recomputed:,} rows"
    if chosen is plain:
        return (
            f"Use plain data parallelism. It needs at least {formats.size(chosen.memory.peak)} of each GPU's "
            f"{budget}, and has room for {rows}."
        )
    told = (
        f"Use {chosen.name}. Plain data parallelism does not fit: it needs "
        f"{formats.size(plain.memory.peak)} on each GPU, which has {budget}. "
        f"{chosen.name} needs at least {formats.size(chosen.memory.peak)} and has room for {rows}"
    )
    told += ". It sends the same bytes as plain data parallelism." if chosen.sent == plain.sent else "."
    more = [each for each in found if each.sent == chosen.sent and each.recomputed > chosen.recomputed]
    if more:
        told += (
            f" {more[-1].name} also sends the same bytes: take it for a larger batch, up to "
            f"{more[-1].recomputed:,} rows."
        )
    return told


def code(choice: Choice) -> str:
    """Return the Python code of a choice's layout."""
    fields = str(choice.layout).replace("precision=bf16", 'precision="bf16"')
    return f"md.Layout({fields.replace(',', ', ')})"


def estimated(question: Question, choice: Choice) -> str:
    """Return the Python call that estimates a choice's memory."""
    return f'estimate("{question.model}", {code(choice)}, batch={choice.smallest}).peak'


def overview() -> dict[str, list[tuple[str, int] | None]]:
    """Return for each of `MODELS` the best choice on each of `MACHINES`, and its largest batch."""
    return {
        model: [first_fit(Question(model, gpus, memory * GB)) for gpus, memory in MACHINES]
        for model in MODELS
    }


def as_json(question: Question) -> dict[str, Any]:
    """Return the answer for a program to read; sizes are in bytes."""
    found = choices(question)
    chosen = best(found)
    return {
        "model": question.model,
        "gpus": question.gpus,
        "memory": question.memory,
        "answer": chosen.name if chosen else None,
        "choices": [
            {
                "name": choice.name,
                "layout": str(choice.layout),
                "fits": choice.fits,
                "memory": choice.memory.peak,
                "batch_kept": choice.kept,
                "batch_recomputed": choice.recomputed,
                "bytes_per_step": choice.sent,
                "idle": choice.idle,
            }
            for choice in found
        ],
    }
