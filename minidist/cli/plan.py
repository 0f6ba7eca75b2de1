"""The command `minidist plan`: which layout to train a model with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minidist.cli.options import Debug, Json, Optimizer, OwnData, OwnLoss
from minidist.cli.output import HERE, check_here, console, measured, print_json, show, waiting
from minidist.cli.own_model import model_or_name

if TYPE_CHECKING:
    from minidist.scale.step_time.hardware import Hardware


def plan(
    model: Annotated[str, typer.Option(help="bert-large, gpt2-xl, ..., or your own: my.module:make.")],
    ranks: Annotated[int, typer.Option(min=1, help="Number of ranks; a layout uses all of them.")] = 8,
    memory: Annotated[
        str | None, typer.Option(help="Memory of each rank: 16GB, 24GiB; default: the profile's.")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            help="h200, h100, a100, a100-40gb, v100-16gb, t4, tpu-v4, tpu-v5e, trainium, trainium2, "
            "cpu-xeon-8480, or here: this machine."
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Rows of a global batch; default: 32 per rank, here 8.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a row; default: the model's context.")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16.")] = None,
    data: OwnData = None,
    loss: OwnLoss = None,
    optimizer: Optimizer = "adamw",
    measure: Annotated[
        bool, typer.Option("--measure", help="Run the best three on this machine, in turns.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Steps of each layout that --measure times.")] = 9,
    figures: Annotated[
        Path | None,
        typer.Option(help="With --profile here or --measure, a JSON file that keeps its figures."),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Find the layout to train a model with, and say why: all that fit, ranked by predicted time.

    Memory is what `python -m minidist.scale.memory` counts, without a GPU's context and allocator losses.
    Time follows from the model's operations, bytes and messages on a named machine, or on this one, measured.
    """
    from minidist.scale.memory.largest_batch import parse_bytes
    from minidist.scale.planner import plan_report as plan_words
    from minidist.scale.planner.ranking import ROWS_A_RANK, question_of
    from minidist.scale.planner.ranking import plan as find
    from minidist.scale.step_time.hardware import hardware as hardware_of

    chosen = model_or_name(model, data, loss)
    optimizer = "adam" if optimizer == "adamw" else optimizer  # the same memory and time
    budget = None if memory is None else parse_bytes(memory)
    if measure:
        if profile not in (None, HERE):
            raise ValueError(
                f"--measure runs on this machine and --profile is {profile}; leave one of them out"
            )
        from minidist.scale.planner.trial import require_trainable, trial

        require_trainable(chosen)
        profile = HERE
    check_here(profile, ranks, figures)
    machine: Hardware | None = None if profile in (None, HERE) else hardware_of(str(profile))
    rows: int | tuple[int, int] | None = batch
    if tokens is not None:
        rows = (batch or ROWS_A_RANK[profile == HERE] * ranks, tokens)
    if profile == HERE:
        # Check everything before this machine is measured, which takes a while. A GPU stands in for it: a
        # measured machine has rates for the same precisions.
        stand_in = replace(hardware_of("h100"), name="this machine")
        question_of(chosen, ranks, budget, stand_in, rows, precision, optimizer)
        machine = measured(ranks, figures, quiet=as_json)
    with waiting(f"looking at layouts of {ranks} ranks", as_json):
        found = find(
            chosen,
            ranks=ranks,
            memory=budget,
            hardware=machine,
            batch=rows,
            precision=precision,
            optimizer=optimizer,
        )
    tried = None
    if measure and found.fitting:
        layouts = [each.layout for each in found.fitting[:3]]
        with waiting(f"{len(layouts)} layouts take {rounds} steps in turns", as_json):
            tried = trial(chosen, layouts, found.question.batch, rounds=rounds, optimizer=optimizer)
    if as_json:
        print_json(plan_words.as_json(found, tried))
    else:
        _print(found, tried)
    raise typer.Exit(0 if found.fitting else 1)


def _print(found: Any, tried: dict[str, float] | None) -> None:
    """Print the answer, the table, and why other layouts do not fit."""
    from minidist.scale.planner import plan_report as plan_words

    terminal = console(wide=True)
    show(plan_words.answer(found))
    for sentence in plan_words.reasons(found):
        show(sentence)
    if found.fitting:
        terminal.print(plan_words.table(found, tried))
        left = len(found.fitting) - plan_words.BEST
        if left > 0:
            show(f"{left} more fit (--json has all).")
    if tried:
        from minidist.scale.planner.trial import verdict

        show(verdict(found.fitting, tried))
    lines = plan_words.unfit(found)
    if lines:
        show("What does not fit:")
        for line in lines:
            show(f"- {line}")
    if found.fitting:
        show("Assumed:")
        for line in found.fitting[0].step.assumptions:
            show(f"- {line}")
