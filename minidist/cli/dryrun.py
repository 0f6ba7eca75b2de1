"""The command `minidist dryrun`: what a rank of a layout of any size sends and holds, without the ranks.

minidist dryrun --model gpt2-xl --layout dp=64,tp=4,pp=4,zero=1
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from minidist.cli.output import HERE, Debug, Json, check_here, console, measured, print_json

if TYPE_CHECKING:
    from minidist.scale.time.rates import Hardware

EVERY = "kinds"


def dryrun(
    model: Annotated[str, typer.Option(help="gpt2-xl, gpt3-13b, bert-large-mlm, byte-small, ...")],
    layout: Annotated[str, typer.Option(help="Such as dp=64,tp=4,pp=4,zero=1: the fields of md.Layout.")],
    batch: Annotated[
        int | None,
        typer.Option(help="Rows of a global batch; else one a micro-batch on each data-parallel rank."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens in a row; the model's context unless given.")
    ] = None,
    rank: Annotated[str, typer.Option(help="A rank's number, or kinds: one of each kind there is.")] = "0",
    optimizer: Annotated[str, typer.Option(help="adamw, adam, momentum or sgd.")] = "adamw",
    clip_norm: Annotated[float | None, typer.Option(help="Largest norm of the gradients: 1.0.")] = None,
    profile: Annotated[
        str, typer.Option(help="The machine, for the time: a100, v100-16gb, ..., or here: this one.")
    ] = "h100",
    figures: Annotated[
        Path | None, typer.Option(help="With --profile here, a JSON file that keeps its figures.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run the training's own code as one rank of a layout, with nobody else and no data, on one core.

    Says exactly what each collective sends, and what the rank holds; then predicts the time of a step.
    """
    from rich.progress import Progress

    from minidist.model.configs import config
    from minidist.parallel.contract.layout import Layout
    from minidist.scale.dry_run import report
    from minidist.scale.dry_run.run import dryrun as run
    from minidist.scale.dry_run.run import dryrun_kinds

    chosen = Layout.parse(layout)
    if rank != EVERY and not rank.removeprefix("-").isdecimal():
        raise ValueError(f"--rank is {rank!r}; give a rank from 0 to {chosen.ranks - 1}, or {EVERY}")
    rows = chosen.dp * chosen.micro_batches if batch is None else batch
    named = _named(profile, chosen.ranks, figures)
    size = (rows, config(model).context if tokens is None else tokens)
    screen = console(wide=True)
    if rank != EVERY:
        found = run(model, chosen, size, int(rank), optimizer, clip_norm=clip_norm)
        machine = named or measured(chosen.ranks, figures, quiet=as_json)
        time = found.predict(machine)
        if as_json:
            print_json(report.document([(found, None)], machine, time))
        else:
            screen.print(report.one(found, machine, time), soft_wrap=False)
        return
    with Progress(console=screen, disable=as_json or not screen.is_terminal, transient=True) as bar:
        task = bar.add_task("dry runs", total=None)

        def done(count: int, of: int) -> None:
            bar.update(task, completed=count, total=of)

        all_kinds = dryrun_kinds(model, chosen, size, optimizer, done=done, clip_norm=clip_norm)
    machine = named or measured(chosen.ranks, figures, quiet=as_json)
    time = all_kinds[0][0].predict(machine)
    if as_json:
        print_json(report.document([*all_kinds], machine, time))
    else:
        screen.print(report.many(all_kinds, machine, time))


def _named(profile: str, ranks: int, figures: Path | None) -> Hardware | None:
    """The machine of that name; None for this one, which is measured once nothing else can be wrong."""
    from minidist.scale.time.hardware import hardware

    check_here(profile, ranks, figures)
    return None if profile == HERE else hardware(profile)


def register(app: typer.Typer) -> None:
    """Add the command to the others."""
    example = "Example: minidist dryrun --model gpt2-xl --layout dp=64,tp=4,pp=4,zero=1"
    app.command(epilog=example)(dryrun)
