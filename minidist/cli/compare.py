"""The command `minidist compare`: whether two layouts train alike."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from minidist.cli import options
from minidist.cli.output import print_json, show, waiting


def compare(
    a: Annotated[str, typer.Option("--a", help="A layout known to be right: dp=1.")],
    b: Annotated[str, typer.Option("--b", help="The layout in question: tp=2,pp=2.")],
    model: options.GPTOrMLP = "gpt",
    steps: Annotated[int, typer.Option(help="Global batches that both train on.")] = 2,
    batch: options.BatchOption = 8,
    lr: Annotated[float, typer.Option(help="Learning rate of plain SGD.")] = 0.1,
    dtype: options.Dtype = "float32",
    seed: options.Seed = 0,
    data: options.OwnData = None,
    loss: options.OwnLoss = None,
    timeout: options.Timeout = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Check whether two layouts train alike; if not, find the first layer at which they differ.

    Both train on the same batches from the same weights, each on as many new ranks as it needs. The exit code
    is 1 if activations, gradients or updates differ by more than rounding explains.
    """
    from minidist.cli.train import compare_layouts
    from minidist.cli.train_config import config_of
    from minidist.comm.launching.supervisor import preload_optimizers
    from minidist.parallel.contract.layout import Layout

    preload_optimizers()
    fields = {"loss": loss, "steps": steps, "batch": batch, "dtype": dtype, "seed": seed}
    first, second = (
        config_of(model, Layout.parse(layout), data, learning_rate=lr, optimizer="sgd", **fields)
        for layout in (a, b)
    )
    with waiting(f"{a} and {b} take {steps} steps", as_json):
        found = compare_layouts(first, second, timeout)
    if as_json:
        print_json({**dataclasses.asdict(found), "agree": found.agree})
    else:
        show(str(found))
    raise typer.Exit(0 if found.agree else 1)
