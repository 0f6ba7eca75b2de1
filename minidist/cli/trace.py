"""The command `minidist trace`: one step of a layout on a time line, for Perfetto and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from minidist._files import check_file
from minidist.cli import options
from minidist.cli.output import print_json, require, short, show, speaks, waiting

PICTURES = (".svg", ".png", ".pdf")


def trace(
    layout: Annotated[str, typer.Option(help="Such as dp=2,pp=2,micro_batches=4.")],
    model: options.GPTOrMLP = "gpt",
    out: Annotated[Path, typer.Option(help="The file, for ui.perfetto.dev.")] = Path("trace.json"),
    plot: Annotated[Path | None, typer.Option(help="A picture to draw as well: trace.svg.")] = None,
    steps: Annotated[int, typer.Option(help="Steps before the one that is traced.")] = 3,
    batch: options.BatchOption = 32,
    optimizer: options.Optimizer = "adamw",
    dtype: options.Dtype = "float32",
    seed: options.Seed = 0,
    data: options.OwnData = None,
    loss: options.OwnLoss = None,
    timeout: options.Timeout = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Show what every rank does in one step: who computes, who waits for whom, and what is sent.

    The table has each rank's shares of the time: computing in modules and the optimizer, other work, waiting
    for communication in progress, and idle until another rank makes the same call.
    """
    for option, path in (("--out", out), ("--plot", plot)):
        if path is not None:
            check_file(option, path)
    if plot is not None:
        if plot.suffix not in PICTURES:
            raise ValueError(f"--plot {plot} has to end in {', '.join(PICTURES)}")
        if plot.absolute() == out.absolute():
            raise ValueError(f"--plot and --out are both {out}; give two different files")
        require("trace --plot", "matplotlib")
    from minidist._arguments import check_whole
    from minidist.cli.train import trace_layout
    from minidist.cli.train_config import config_of
    from minidist.comm.launching.supervisor import preload_optimizers
    from minidist.parallel.contract.layout import Layout

    preload_optimizers()
    check_whole("steps", steps, 0)
    chosen = Layout.parse(layout)
    fields = {"loss": loss, "batch": batch, "optimizer": optimizer, "dtype": dtype, "seed": seed}
    config = config_of(model, chosen, data, steps=steps + 1, **fields)
    with waiting(f"{chosen} takes {steps + 1} steps on {chosen.ranks} ranks", as_json):
        found = trace_layout(config, timeout)
    if not speaks():
        return
    found.save(out)
    if plot is not None:
        found.plot(plot)
    seconds = found.end - found.start
    if as_json:
        ranks = [
            {"rank": each.rank, "place": each.place, **found.shares(each.rank)}
            | {"calls": len(each.calls), "bytes_sent": each.bytes_sent}
            for each in found.ranks
        ]
        files = {"trace": str(out), "plot": None if plot is None else str(plot)}
        print_json({"layout": str(chosen), "model": model, "seconds": seconds, "ranks": ranks, **files})
        return
    show(found.table())
    drawn = "" if plot is None else f"; as a picture: {short(plot)}"
    where = f"{short(out)}, which ui.perfetto.dev opens{drawn}"
    show(f"A step of {seconds * 1e3:.1f} ms, {len(found.arrows)} messages from rank to rank: {where}")
