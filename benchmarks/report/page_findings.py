"""The beginning of the page: what was found, and what to use."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from minidist.benchmarks.harness import formats
from minidist.benchmarks.report import answer, memory_bars
from minidist.benchmarks.report.answer import Choice, Question
from minidist.benchmarks.report.chapters import CHAPTERS
from minidist.benchmarks.report.finding import Finding
from minidist.benchmarks.report.findings import MOST
from minidist.benchmarks.report.page_html import (
    Cell,
    Heading,
    Row,
    figure,
    figures,
    folded,
    identifier,
    prose,
    table,
)
from minidist.benchmarks.report.page_notes import Notes
from minidist.model.configs import config
from minidist.parallel.contract.memory_report import PARTS
from minidist.scale.memory.largest_batch import count

HOW = (
    "<p>The largest batches come from <code>minidist.scale.memory.fits</code>. Sent bytes follow the "
    "formulas that the tests check the strategies against. With n GPUs and 2 bytes per parameter, a rank "
    "sends 2 (n - 1) / n times the parameters for data parallelism, ZeRO-1 and ZeRO-2, and 3 (n - 1) / n "
    "times for ZeRO-3; <code>minidist.parallel.tensor.plans.bytes_per_pass</code> has the formula for "
    "tensor parallelism; a pipeline's rank sends its stage's output and its input's gradient. A pipeline of "
    "p stages is idle for (p - 1) / (m + p - 1) of a step of m micro-batches, here m = {micro_batches}.</p>"
)
TITLES = {chapter.name: chapter.title for chapter in CHAPTERS}


def findings(found: list[Finding], notes: Notes) -> str:
    """Return the findings; each number links to its row."""
    items = "".join(f"<li>{_sentence(each, notes)}{_rests(each)}</li>\n" for each in found)
    missing = ""
    if len(found) < MOST:
        missing = (
            f'<p class="quiet">{len(found)} of {MOST} findings: the others lack results. Run '
            "<code>minidist bench --full</code> to measure them.</p>\n"
        )
    return (
        '<section id="findings">\n<h2>What was found</h2>\n'
        f'<ol class="findings">\n{items}</ol>\n{missing}</section>\n'
    )


def _sentence(found: Finding, notes: Notes) -> str:
    parts = []
    for word in found.words:
        if isinstance(word, str):
            parts.append(prose(word))
        else:
            target, note = notes.target(found.slug, word.entry), notes.name(found.slug, word.entry)
            link = f'<a class="figure" href="#{target}" data-note="{note}">{escape(word.text)}</a>'
            parts.append(link + notes.mark(found.slug, word.entry))
    return "".join(parts)


def _rests(found: Finding) -> str:
    many = f"{len(found.rests_on)} results" if len(found.rests_on) > 1 else "one result"
    where = f"{identifier(found.slug)}-{found.chapter}"
    on = f", {escape(found.machine)}" if found.machine else ""
    link = f'<a href="#{where}">{escape(TITLES[found.chapter])}</a>'
    return f'<span class="rests">Based on {many}: {link}{on}</span>'


def what_to_use(question: Question) -> str:
    """Return the answer, the table behind it, and the answers for other models and machines."""
    found = answer.choices(question)
    chosen = answer.best(found)
    title = f"{question.text[0].upper()}{question.text[1:]}: {chosen.name if chosen else 'none of these'}"
    layout = f"<p><code>{escape(answer.code(chosen))}</code></p>" if chosen else ""
    further = (
        f"<p>All layouts, by predicted time: <code>minidist plan --model {question.model} --memory "
        f"{question.memory // answer.GB}GB --ranks {question.gpus}</code></p>"
    )
    shape = config(question.model)
    about = (
        f"Computed by minidist's own memory model for {question.model} with {count(shape.parameters())} "
        f"parameters, rows of {shape.context:,} tokens, and Adam in bf16. Activations are recomputed, which "
        "takes a third more arithmetic, unless the table says that they are kept. The strategies are sorted "
        "by their extra cost over plain data parallelism: take the first that fits. Add about half a GB for "
        "a GPU's context."
    )
    how = "".join(
        f"<li><code>{escape(answer.estimated(question, choice))}</code> is {choice.memory.peak:,}</li>"
        for choice in found
    )
    return (
        '<section id="answer">\n<h2>What should I use?</h2>\n'
        f'<div class="answer"><p><strong>{escape(title)}</strong></p>'
        f"<p>{prose(answer.sentence(question, found))}</p>{layout}{further}</div>\n"
        f'<h3 id="choices">Each strategy for {escape(question.text)}</h3>\n'
        f'<p class="quiet">{prose(about)}</p>\n'
        f"{_choices(question, found, chosen)}{figures([_bars(question, found)])}"
        f'<h3 id="overview">Other models, other machines</h3>\n'
        '<p class="quiet">The first strategy that fits, and its largest batch over all GPUs.</p>\n'
        f"{_overview()}"
        + folded(
            "How this is computed",
            f"<p>With <code>from minidist.scale.memory import estimate</code>, in bytes:</p><ul>{how}</ul>"
            + HOW.format(micro_batches=4 * question.gpus),
        )
        + "</section>\n"
    )


def _choices(question: Question, found: Sequence[Choice], chosen: Choice | None) -> str:
    headings = [
        Heading("least memory per GPU", right=True),
        Heading("fits", right=False),
        Heading("largest batch, rows", right=True),
        Heading("with activations kept", right=True),
        Heading(f"sent per step of {question.batch} rows", right=True),
        Heading("idle time", right=True),
    ]
    rows = []
    for choice in found:
        fits = Cell("yes", "good") if choice.fits else Cell("no", "bad")
        cells = [
            Cell(formats.size(choice.memory.peak), "right"),
            fits,
            Cell(f"{choice.recomputed:,}" if choice.fits else "–", "right"),
            Cell(f"{choice.kept:,}" if choice.kept else "–", "right"),
            Cell(formats.size(choice.sent), "right"),
            Cell(f"{100 * choice.idle:.0f}%", "right"),
        ]
        rows.append(Row(choice.name, cells, kind="chosen" if choice is chosen else ""))
    return table("choices", headings, rows, "strategy")


def _bars(question: Question, found: Sequence[Choice]) -> str:
    parts = (*PARTS, "transient")
    rows = [(each.name, {part: getattr(each.memory, part) for part in parts}) for each in found]
    caption = (
        "Estimated for the smallest batch, one row per GPU or micro-batch. Transient memory is used only for "
        "a moment: the logits' gradient, gathered parameters, the optimizer's temporaries. The line is the "
        "GPU's memory."
    )
    return figure(
        memory_bars.bars(rows, "answer", caption, question.memory), "answer", f"Memory for {question.text}"
    )


def _overview() -> str:
    headings = [
        Heading(f"{gpus} × {memory} GB" if gpus > 1 else f"one GPU, {memory} GB", right=False)
        for gpus, memory in answer.MACHINES
    ]
    rows = []
    for model, several in answer.overview().items():
        cells = [
            Cell(
                f"{choice[0]}, {choice[1]:,} rows" if choice else "does not fit",
                "" if choice else "undecided",
            )
            for choice in several
        ]
        rows.append(Row(f"{model}, {count(config(model).parameters())}", cells))
    return table("overview", headings, rows, "model")
