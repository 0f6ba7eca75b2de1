"""The command `minidist`: train, compare, trace, bench, report, plan, dryrun, lessons, doctor.

    minidist train --data digits --ranks 2
    minidist bench && minidist report

Every command imports what it needs when it runs, so that `minidist --help` takes a tenth of a second and not
torch's one and a half. An error is one line that says what to do; `--debug` adds the traceback. Exit codes:
0, 1 for what went wrong underway, 2 for bad input, 130 after Ctrl-C, 143 for a training with --save that
SIGTERM stopped: it is saved, or had not begun (the same command goes on with it).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from minidist.cli import dryrun, plan, report, trace
from minidist.cli.output import (
    Debug,
    Json,
    console,
    explain,
    print_json,
    require,
    say,
    short,
    show,
    speaks,
    waiting,
)

if TYPE_CHECKING:
    from minidist.cli.train import TrainConfig, TrainResult

app = typer.Typer(
    name="minidist",
    help="Parallel training in code small enough to read: train, measure, report.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

BatchOption = Annotated[int, typer.Option(help="Rows of a global batch, over all ranks.")]
Dtype = Annotated[str, typer.Option(help="float32 or float64.")]
Seed = Annotated[int, typer.Option(help="Of the weights and of the order of rows.")]


@app.command(epilog="Example: minidist train --data bytes --model byte-tiny --ranks 2 --steps 100")
def train(
    data: Annotated[str, typer.Option(help="What to learn: digits or bytes.")] = "digits",
    model: Annotated[str | None, typer.Option(help="mlp, byte-tiny, byte-small, ...; fits the data.")] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Data-parallel ranks: short for --layout dp=N.")
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(help="Such as dp=2,tp=2,pp=2,micro_batches=4: the fields of md.Layout."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Global batches to train on.")] = 230,
    batch: BatchOption = 64,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 3e-3,
    optimizer: Annotated[str, typer.Option(help="adamw or sgd.")] = "adamw",
    rung: Annotated[str | None, typer.Option(help="Matmul rung for the mlp: s4_loop_order.")] = None,
    dtype: Dtype = "float32",
    seed: Seed = 0,
    clip_norm: Annotated[float | None, typer.Option(help="Largest norm of the gradients: 1.0.")] = None,
    save: Annotated[
        Path | None, typer.Option(help="A folder for checkpoints; the same command goes on from them.")
    ] = None,
    save_every: Annotated[int, typer.Option(min=1, help="Steps from one checkpoint to the next.")] = 50,
    keep: Annotated[int, typer.Option(min=1, help="Checkpoints that stay, the newest.")] = 3,
    resume: Annotated[
        bool, typer.Option(help="Go on from the folder's newest whole checkpoint, or refuse to.")
    ] = True,
    timeout: Annotated[float | None, typer.Option(help="Seconds that the run may take.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a model on one rank or on several. With --save, a run that was stopped or killed goes on.

    SIGTERM saves at the end of a step and leaves with exit code 143. Where any rank may be killed:
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 2 --max-restarts 9
    -m minidist train --save FOLDER
    """
    from minidist._stopping import STOPPED, give_up, termination

    # From here on, since loading torch and starting the ranks take seconds.
    with termination(give_up) if save is not None else contextlib.nullcontext():
        from minidist.cli.train import TrainConfig, run
        from minidist.comm.launching.supervisor import preload_optimizers
        from minidist.parallel.contract.layout import Layout

        preload_optimizers()
        # Under torchrun there are as many ranks as it has started.
        started = int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1
        chosen = (
            Layout.parse(layout) if layout is not None else Layout(dp=started if ranks is None else ranks)
        )
        if ranks is not None and chosen.ranks != ranks:
            raise ValueError(
                f"--layout {layout} needs {chosen.ranks} ranks and --ranks is {ranks}; leave it out"
            )
        config = TrainConfig(
            data=data,
            model=model,
            layout=chosen,
            steps=steps,
            batch=batch,
            learning_rate=lr,
            optimizer=optimizer,
            rung=rung,
            dtype=dtype,
            seed=seed,
            clip_norm=clip_norm,
            save=None if save is None else str(save),
            save_every=save_every,
            keep=keep,
            resume=resume,
        )
        result = run(config, timeout=timeout, progress=not as_json)
    leave = STOPPED if result.stopped else 0
    if not speaks():
        raise typer.Exit(leave)
    last = result.losses[-1]
    if as_json:
        print_json({"config": dataclasses.asdict(config), **dataclasses.asdict(result)})
    elif result.stopped:
        say(f"stopped by SIGTERM after {len(result.losses)} steps, saved in {save}; the same command goes on")
    elif math.isfinite(last):
        show(_trained(config, result))
    if not math.isfinite(last):
        say(
            f"the training diverged: its loss is {last} after {len(result.losses)} steps; "
            f"give a smaller --lr than {lr:g}"
        )
        raise typer.Exit(1)
    raise typer.Exit(leave)


def _trained(config: TrainConfig, result: TrainResult) -> str:
    """How a training went, in two lines."""
    done = len(result.losses) - result.resumed_at
    if done:
        went = f"{done} steps in {result.seconds:.1f} s, {result.rows_per_second:,.0f} rows/s"
        if result.resumed_at:
            went += f", from step {result.resumed_at} on, where the run in {config.save} was saved"
    else:
        went = f"the run in {config.save} has {result.resumed_at} steps already, and nothing was left to do"
    return (
        f"{config.model_name} on {config.data}, {result.parameters:,} parameters, layout {config.layout}: "
        f"{went}\nloss {result.losses[0]:.4f} -> {result.losses[-1]:.4f}; held out: loss "
        f"{result.test_loss:.4f}, accuracy {result.test_accuracy:.1%}; sent by a rank: "
        f"{result.bytes_sent:,} bytes"
    )


@app.command(epilog="Example: minidist compare --model gpt --a dp=1 --b tp=2,pp=2")
def compare(
    a: Annotated[str, typer.Option("--a", help="A layout that is right: dp=1.")],
    b: Annotated[str, typer.Option("--b", help="The one in question: tp=2,pp=2.")],
    model: Annotated[str, typer.Option(help="gpt (byte-tiny), byte-small, ..., or mlp.")] = "gpt",
    steps: Annotated[int, typer.Option(help="Global batches to take both through.")] = 2,
    batch: BatchOption = 8,
    lr: Annotated[float, typer.Option(help="Learning rate of plain SGD.")] = 0.1,
    dtype: Dtype = "float32",
    seed: Seed = 0,
    timeout: Annotated[float | None, typer.Option(help="Seconds that each layout may take.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say whether two layouts train alike, or the first layer at which they part.

    Both take the same batches from the same weights, each on as many fresh ranks as it needs. Exit code 1
    where activations, gradients or updates differ by more than rounding explains.
    """
    from minidist.cli.compare_layouts import compare_layouts
    from minidist.comm.launching.supervisor import preload_optimizers
    from minidist.parallel.contract.layout import Layout

    preload_optimizers()
    with waiting(f"{a} and {b} take {steps} steps", as_json):
        found = compare_layouts(
            Layout.parse(a),
            Layout.parse(b),
            model,
            steps=steps,
            batch=batch,
            learning_rate=lr,
            dtype=dtype,
            seed=seed,
            timeout=timeout,
        )
    if as_json:
        print_json({**dataclasses.asdict(found), "agree": found.agree})
    else:
        show(str(found))
    raise typer.Exit(0 if found.agree else 1)


trace.register(app)


@app.command(epilog="Example: minidist bench launch --full. On a GPU: minidist bench cuda")
def bench(
    suites: Annotated[
        list[str] | None,
        typer.Argument(help="cpu_matmul, cuda, collectives, training, zero, ...; all unless given."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="All sizes and more rounds.")] = False,
    keyword: Annotated[
        str, typer.Option("-k", metavar="EXPRESSION", help="Only benchmarks that match, as in pytest.")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="The results file.")] = None,
    compare: Annotated[
        Path | None, typer.Option(metavar="OLD.json", help="An earlier results file: say what got slower.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure this machine, and keep the results. With --compare, exit code 1 where something got slower."""
    require("bench", "pytest", "pytest_benchmark")
    from minidist.benchmarks.harness.run import run

    done = run(suites or (), full=full, keyword=keyword, out=out, compare=compare)
    compared = done.compared
    if as_json:
        found = None if compared is None else compared.as_json()
        print_json(dataclasses.asdict(done) | {"path": str(done.path), "compared": found})
    else:
        for line in done.skipped:
            show(f"skipped {line}", style="yellow")
        many = "benchmark" if done.measured == 1 else "benchmarks"
        kept = "so nothing is kept."
        if done.measured:
            where = "" if out is None else f" --results {short(out.parent)}"
            kept = f"kept in {short(done.path)}. To read them: minidist report{where}"
        show(f"{done.measured} {many} in {done.seconds:.0f} s, {kept}")
        if "bench_cuda" in done.suites:
            from minidist.benchmarks.report import ladder

            ladder.show(console(), ladder.pick({done.path.stem: done.results}))
        for line in [] if compared is None else compared.lines():
            show(line, style="yellow" if ": slower, " in line else "")
    if compared is not None and compare is not None and compared.slower:
        say(f"{len(compared.having('slower'))} slower than in {short(compare)}")
    if done.failed:
        say(f"{len(done.failed)} failed: {'; '.join(done.failed)}")
    if done.failed or (compared is not None and compared.slower):
        raise typer.Exit(1)


report.register(app)
plan.register(app)
dryrun.register(app)


@app.command(epilog="Example: minidist lessons --progress")
def lessons(
    progress: Annotated[bool, typer.Option("--progress", help="Print the table only.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show which exercises have passed, and open JupyterLab in the lessons' folder. Ctrl-C ends it."""
    from minidist.cli import lessons as folder_of

    place = folder_of.folder()
    found = folder_of.lessons(place)
    if as_json:
        print_json({"folder": str(place), "lessons": [dataclasses.asdict(each) for each in found]})
        return
    folder_of.show(console(), found)
    if not progress:
        code = folder_of.open_lab(place)
        if code:
            raise typer.Exit(1)


@app.command(epilog="Example: minidist doctor --json")
def doctor(as_json: Json = False, debug: Debug = False) -> None:
    """Say what this machine has, and how to get what is missing."""
    from minidist.cli import doctor as examination

    parts = examination.examine()
    if as_json:
        print_json({"parts": [dataclasses.asdict(part) for part in parts]})
    else:
        examination.show(console(), parts)
    if any(part.required and not part.ok for part in parts):
        raise typer.Exit(1)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit. `arguments` are the words after `minidist`; None for those of the process."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    from minidist._stopping import STOPPED, Stopped

    command = typer.main.get_command(app)
    try:
        code = command.main(words or ["--help"], prog_name="minidist", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except Stopped as stopped:
        code = STOPPED
        if speaks():
            say(stopped.message)
    except Exception as error:
        if "--debug" in words:
            traceback.print_exc()
        code = explain(error)
    if code == 130:
        say("stopped")
    sys.exit(code if isinstance(code, int) else 0)
