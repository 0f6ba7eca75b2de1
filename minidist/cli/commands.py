"""The command `minidist`: train, compare, trace, bench, report, plan, dryrun, mistakes, judge,
lessons, doctor.

    minidist train --data digits --ranks 2
    minidist bench && minidist report

Every command imports what it needs when it runs, so `minidist --help` takes a tenth of a second; importing
torch takes one and a half. An error is one line that says what to do; `--debug` adds the
traceback. Exit codes: 0; 1 for a failure while running; 2 for bad input; 130 after Ctrl-C; 143 for a training
with --save that SIGTERM stopped after saving it, or before it began (the same command continues it).
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import math
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from minidist.cli import options as shared
from minidist.cli.bench import bench
from minidist.cli.compare import compare
from minidist.cli.dryrun import dryrun
from minidist.cli.judge import judge
from minidist.cli.lessons import lessons
from minidist.cli.mistakes import mistakes
from minidist.cli.output import console, explain, print_json, say, show, speaks
from minidist.cli.own_model import is_own
from minidist.cli.plan import plan
from minidist.cli.report import report
from minidist.cli.trace import trace
from minidist.comm.started_by import started

if TYPE_CHECKING:
    from minidist.cli.train import TrainResult
    from minidist.cli.train_config import TrainConfig

app = typer.Typer(
    name="minidist",
    help="Parallel training in code small enough to read: train, measure, report.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _version(asked: bool) -> None:
    if asked:
        from minidist import __version__

        show(f"minidist {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Take the options before a command's name."""


def train(
    data: Annotated[
        str | None, typer.Option(help="Data to learn: digits, bytes, or your own: my.module:rows.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="mlp, byte-tiny, bert-tiny-mlm, or your own: my.module:make; default: the data's."),
    ] = None,
    loss: shared.OwnLoss = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Data-parallel ranks: --layout dp=N.")] = None,
    layout: Annotated[
        str | None, typer.Option(help="Fields of md.Layout, such as dp=2,tp=2,precision=bf16.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Global batches to train on.")] = 230,
    batch: shared.BatchOption = 64,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 3e-3,
    optimizer: shared.Optimizer = "adamw",
    rung: Annotated[
        str | None,
        typer.Option(help="The mlp's matmul rung, such as s4_loop_order, or a GPT's of attention."),
    ] = None,
    dtype: shared.Dtype = "float32",
    seed: shared.Seed = 0,
    clip_norm: shared.ClipNorm = None,
    save: Annotated[
        Path | None, typer.Option(help="A folder for checkpoints; the same command continues from them.")
    ] = None,
    save_every: Annotated[int, typer.Option(min=1, help="Steps from one checkpoint to the next.")] = 50,
    keep: Annotated[int, typer.Option(min=1, help="How many of the newest checkpoints to keep.")] = 3,
    resume: Annotated[
        bool, typer.Option(help="Continue from the folder's newest whole checkpoint, or refuse to.")
    ] = True,
    timeout: shared.Timeout = None,
    as_json: shared.Json = False,
    debug: shared.Debug = False,
) -> None:
    """Train a model on one or several ranks. With --save, a run that was stopped or killed can continue.

    SIGTERM saves at the end of a step and exits with code 143. If ranks may be killed at any time:

    torchrun --standalone --nproc-per-node 2 --max-restarts 9 -m minidist train --save FOLDER
    """
    given: dict[str, Any] = {**locals()}
    from minidist._stopping import STOPPED, give_up, termination

    # SIGTERM may come while torch loads and the ranks start, which takes seconds.
    with termination(give_up) if save is not None else contextlib.nullcontext():
        from minidist.parallel.contract.layout import Layout

        found = started()  # torchrun, mpirun or srun may have started the ranks already
        chosen = Layout(dp=ranks or (found.ranks if found else 1)) if layout is None else Layout.parse(layout)
        if ranks is not None and chosen.ranks != ranks:
            raise ValueError(
                f"--layout {layout} needs {chosen.ranks} ranks and --ranks is {ranks}; leave --ranks out"
            )
        if sys.stderr.isatty() and speaks() and not as_json:
            many = "1 rank" if chosen.ranks == 1 else f"{chosen.ranks} ranks"
            say(f"loading torch for {many}; the first step is some seconds away")
        from minidist.cli.train import TrainConfig, run
        from minidist.comm.launching.supervisor import preload_optimizers

        preload_optimizers()
        # The other options are called like the fields.
        given |= {"data": data or ("" if is_own(model) else "digits"), "layout": chosen, "learning_rate": lr}
        given["save"] = None if save is None else str(save)
        config = TrainConfig(**{field.name: given[field.name] for field in dataclasses.fields(TrainConfig)})
        result = run(config, timeout=timeout, progress=not as_json)
    leave = STOPPED if result.stopped else 0
    if not speaks():
        raise typer.Exit(leave)
    last = result.losses[-1]
    if as_json:
        print_json({"config": dataclasses.asdict(config), **dataclasses.asdict(result)})
    elif result.stopped:
        steps = len(result.losses)
        say(f"stopped by SIGTERM after {steps} steps, saved in {save}; the same command continues")
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
    """Summarize a training in two lines."""
    done = len(result.losses) - result.resumed_at
    if done:
        went = f"{done} steps in {result.seconds:.1f} s, {result.rows_per_second:,.0f} rows/s"
        if result.resumed_at:
            went += f", continued from step {result.resumed_at}, saved in {config.save}"
    else:
        went = f"the run in {config.save} has all {result.resumed_at} steps already"
    known = math.isfinite(result.test_accuracy)
    accuracy = f", accuracy {result.test_accuracy:.1%}" if known else ""
    return (
        f"{config.model_name} on {config.data}, {result.parameters:,} parameters, layout {config.layout}: "
        f"{went}\nloss {result.losses[0]:.4f} -> {result.losses[-1]:.4f}; held out: loss "
        f"{result.test_loss:.4f}{accuracy}; sent by a rank: "
        f"{result.bytes_sent:,} bytes"
    )


def doctor(
    gpu: Annotated[bool, typer.Option("--gpu", help="Only whether the CUDA ladder will run.")] = False,
    as_json: shared.Json = False,
    debug: shared.Debug = False,
) -> None:
    """List what this machine has for parallel training, and how to install what is missing."""
    from minidist.cli import doctor as examination

    parts = examination.examine()
    parts = examination.needed_for_cuda(parts) if gpu else parts
    if as_json:
        print_json({"parts": [dataclasses.asdict(part) for part in parts]})
    else:
        (examination.show_cuda if gpu else examination.show)(console(), parts)
    if any((part.required or gpu) and not part.ok for part in parts):
        raise typer.Exit(1)


for command, example in (
    (train, "train --data bytes --model byte-tiny --ranks 2 --steps 100"),
    (compare, "compare --model gpt --a dp=1 --b tp=2,pp=2"),
    (trace, "trace --layout dp=2,pp=2,micro_batches=4 --plot trace.svg"),
    (bench, "bench launch --full. On a GPU: minidist bench cuda"),
    (report, "report --out report.html. For a README: --markdown"),
    (plan, "plan --model bert-large --memory 16GB --ranks 8"),
    (dryrun, "dryrun --model gpt2-xl --layout dp=64,tp=4,pp=4,zero=1"),
    (mistakes, "mistakes --show backward-adds-again. One class: minidist mistakes tensor"),
    (judge, "judge my_kernels.py --table scores.csv. The problems: minidist judge --list"),
    (lessons, "lessons --progress. From a wheel: minidist lessons --to my-lessons"),
    (doctor, "doctor --json. On a GPU: minidist doctor --gpu"),
):
    # A docstring's lines end at 110 columns; a terminal wraps each paragraph itself.
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    app.command(help=text, epilog=f"Example: minidist {example}")(command)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit. `arguments` are the words after `minidist`; None for the process's own."""
    from minidist._stopping import INTERRUPTED, Stopped

    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a C locale has no "…" and no "×"
        command = typer.main.get_command(app)
        code = command.main(words or ["--help"], prog_name="minidist", standalone_mode=False)
        if code == INTERRUPTED:  # what typer makes of Ctrl-C
            raise KeyboardInterrupt
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
        say("stopped")
    except Stopped as stopped:
        code = stopped.code
        if speaks():
            say(stopped.message)
    except Exception as error:
        if "--debug" in words:
            traceback.print_exc()
        code = explain(error, words)
    sys.exit(code if isinstance(code, int) else 0)
