"""The command `minidist dryrun`: what one rank of a layout of any size sends and holds.

minidist dryrun --model gpt2-xl --layout dp=64,tp=4,pp=4,zero=1
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from minidist.cli.options import ClipNorm, Debug, Json, Optimizer, OwnData, OwnLoss
from minidist.cli.output import HERE, check_here, console, measured, print_json
from minidist.cli.own_model import model_or_name

EVERY = "kinds"


def dryrun(
    model: Annotated[str, typer.Option(help="gpt2-xl, bert-large-mlm, ..., or your own: my.module:make.")],
    layout: Annotated[str, typer.Option(help="Fields of md.Layout, such as dp=64,tp=4,pp=4,zero=1.")],
    batch: Annotated[
        int | None,
        typer.Option(help="Rows of a global batch; default: one per micro-batch and data-parallel rank."),
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens in a row; default: the model's context.")] = None,
    rank: Annotated[str, typer.Option(help="A rank's number, or kinds: one rank of each kind.")] = "0",
    optimizer: Optimizer = "adamw",
    clip_norm: ClipNorm = None,
    data: OwnData = None,
    loss: OwnLoss = None,
    profile: Annotated[
        str, typer.Option(help="The machine to predict time for: a100, v100-16gb, ..., or here: this one.")
    ] = "h100",
    figures: Annotated[
        Path | None, typer.Option(help="With --profile here, a JSON file that keeps its figures.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run the training's own code as one rank of a layout, without other ranks or data, on one core.

    Prints exactly what each collective sends and what the rank holds, and predicts the time of a step.
    """
    from rich.progress import Progress

    from minidist.parallel.contract.layout import Layout
    from minidist.scale.dryrun import dryrun_report as report
    from minidist.scale.dryrun.one_rank import DryRun, dryrun_kinds
    from minidist.scale.dryrun.one_rank import dryrun as run
    from minidist.scale.step_time.hardware import hardware

    chosen = Layout.parse(layout)
    if rank != EVERY and not rank.removeprefix("-").isdecimal():
        raise ValueError(f"--rank is {rank!r}; give a rank from 0 to {chosen.ranks - 1}, or {EVERY}")
    rows = chosen.dp * chosen.micro_batches if batch is None else batch
    check_here(profile, chosen.ranks, figures)
    named = None if profile == HERE else hardware(profile)  # this machine is measured last
    whose = model_or_name(model, data, loss)
    size = rows if tokens is None else (rows, tokens)
    screen = console(wide=True)
    found: Sequence[tuple[DryRun, int | None]]
    if rank == EVERY:
        with Progress(console=screen, disable=as_json or not screen.is_terminal, transient=True) as bar:
            task = bar.add_task("dry runs", total=None)
            found = dryrun_kinds(
                whose,
                chosen,
                size,
                optimizer,
                done=lambda count, of: bar.update(task, completed=count, total=of),
                clip_norm=clip_norm,
            )
    else:
        found = [(run(whose, chosen, size, int(rank), optimizer, clip_norm=clip_norm), None)]
    machine = named or measured(chosen.ranks, figures, quiet=as_json)
    time = found[0][0].predict(machine) if found[0][0].has_time else None
    if as_json:
        print_json(report.document(found, machine, time))
    elif rank == EVERY:
        screen.print(report.many(found, machine, time))
    else:
        screen.print(report.one(found[0][0], machine, time))
