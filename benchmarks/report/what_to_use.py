"""The answer to "What should I use?", which `answer.py` computes, as a card, tables and bars."""

from __future__ import annotations

from collections.abc import Sequence

from minidist.benchmarks.harness import formats
from minidist.benchmarks.report import answer, chapter_plots
from minidist.benchmarks.report.answer import Choice, Question
from minidist.benchmarks.report.figures import Plot
from minidist.benchmarks.report.pieces import (
    Bullets,
    Card,
    Cell,
    Figure,
    Figures,
    Folded,
    Heading,
    Piece,
    Row,
    Table,
    Words,
)
from minidist.model.configs import config
from minidist.parallel.contract.memory_report import PARTS
from minidist.scale.memory.largest_batch import count

HOW = (
    "The largest batches come from `minidist.scale.memory.fits`. Sent bytes follow the formulas that the "
    "tests check the strategies against. With n GPUs and 2 bytes per parameter, a rank sends 2 (n - 1) / n "
    "times the parameters for data parallelism, ZeRO-1 and ZeRO-2, and 3 (n - 1) / n times for ZeRO-3; "
    "`minidist.parallel.tensor.plans.bytes_per_pass` has the formula for tensor parallelism; a pipeline's "
    "rank sends its stage's output and its input's gradient. A pipeline of p stages is idle for (p - 1) / "
    "(m + p - 1) of a step of m micro-batches, here m = {micro_batches}."
)


def pieces(question: Question) -> list[Piece]:
    """Return the answer, the table behind it, and the answers for other models and machines."""
    found = answer.choices(question)
    chosen = answer.best(found)
    shape = config(question.model)
    card = Card(
        f"{asked(question)}: {chosen.name if chosen else 'none of these'}",
        [
            answer.sentence(question, found),
            *([f"`{answer.code(chosen)}`"] if chosen else []),
            f"All layouts, by predicted time: `minidist plan --model {question.model} --memory "
            f"{question.memory // answer.GB}GB --ranks {question.gpus}`",
        ],
    )
    about = (
        f"Computed by minidist's own memory model for {question.model} with {count(shape.parameters())} "
        f"parameters, rows of {shape.context:,} tokens, and Adam in bf16. Activations are recomputed, which "
        "takes a third more arithmetic, unless the table says that they are kept. The strategies are sorted "
        "by their extra cost over plain data parallelism: take the first that fits. Add about half a GB for "
        "a GPU's context."
    )
    how = [
        Words("With `from minidist.scale.memory import estimate`, in bytes:", quiet=False),
        Bullets(
            [f"`{answer.estimated(question, each)}` is {each.memory.peak:,}" for each in found], quiet=False
        ),
        Words(HOW.format(micro_batches=4 * question.gpus), quiet=False),
    ]
    others = "The first strategy that fits, and its largest batch over all GPUs."
    return [
        card,
        Words(about, f"Each strategy for {question.text}", "choices", level=3),
        choices(question, found),
        Figures([Figure("answer", f"Memory for {question.text}", _bars(question, found))]),
        Words(others, "Other models, other machines", "overview", level=3),
        _overview(),
        Folded("How this is computed", how),
    ]


def asked(question: Question) -> str:
    """Return the question as the beginning of a sentence."""
    return question.text[0].upper() + question.text[1:]


def choices(question: Question, found: Sequence[Choice]) -> Table:
    """Return the table of all strategies."""
    headings = [
        Heading("least memory per GPU"),
        Heading("fits", right=False),
        Heading("largest batch, rows"),
        Heading("with activations kept"),
        Heading(f"sent per step of {question.batch} rows"),
        Heading("idle time"),
    ]
    rows = []
    for choice in found:
        cells = [
            Cell(formats.size(choice.memory.peak), "right"),
            Cell("yes", "good") if choice.fits else Cell("no", "bad"),
            Cell(f"{choice.recomputed:,}" if choice.fits else "–", "right"),
            Cell(f"{choice.kept:,}" if choice.kept else "–", "right"),
            Cell(formats.size(choice.sent), "right"),
            Cell(f"{100 * choice.idle:.0f}%", "right"),
        ]
        rows.append(Row(choice.name, cells, kind="chosen" if choice is answer.best(found) else ""))
    return Table(headings, rows, first="strategy", label="choices")


def _bars(question: Question, found: Sequence[Choice]) -> Plot:
    parts = (*PARTS, "transient")
    rows = [(each.name, {part: getattr(each.memory, part) for part in parts}) for each in found]
    caption = (
        "Estimated for the smallest batch, one row per GPU or micro-batch. Transient memory is used only for "
        "a moment: the logits' gradient, gathered parameters, the optimizer's temporaries. The line is the "
        "GPU's memory."
    )
    return chapter_plots.memory(rows, caption, question.memory)


def _overview() -> Table:
    headings = [
        Heading(f"{gpus} × {memory} GB" if gpus > 1 else f"one GPU, {memory} GB", right=False)
        for gpus, memory in answer.MACHINES
    ]
    rows = []
    for model, several in answer.overview().items():
        cells = [
            Cell(f"{choice[0]}, {choice[1]:,} rows") if choice else Cell("does not fit", "undecided")
            for choice in several
        ]
        rows.append(Row(f"{model}, {count(config(model).parameters())}", cells))
    return Table(headings, rows, first="model", label="overview")
