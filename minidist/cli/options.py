"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else.")]
# `cli.commands.main` reads it, since errors end there.
Debug = Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")]
BatchOption = Annotated[int, typer.Option(help="Rows of a global batch, over all ranks.")]
Dtype = Annotated[str, typer.Option(help="float32 or float64.")]
Seed = Annotated[int, typer.Option(help="Seed of the weights and of the order of rows.")]
GPTOrMLP = Annotated[
    str, typer.Option(help="gpt (byte-tiny), byte-small, ..., mlp, or your own: my.module:make.")
]
OwnData = Annotated[
    str | None, typer.Option("--data", help="For a model of your own, its rows: my.module:rows.")
]
OwnLoss = Annotated[
    str | None, typer.Option("--loss", help="Its loss: my.module:loss; default: cross entropy.")
]
Optimizer = Annotated[str, typer.Option(help="adamw, adam, muon, momentum (SGD with momentum) or sgd.")]
Timeout = Annotated[float | None, typer.Option(help="The most seconds that a launch may take.")]
ClipNorm = Annotated[float | None, typer.Option(help="Largest norm of the gradients: 1.0.")]
