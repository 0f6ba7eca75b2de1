"""Compare predicted steps with measured ones on this machine.

    python -m minidist.scale.planner.calibration --rounds 15
    python -m minidist.scale.planner.calibration --ranks 2,4 --json calibration.json

For each number of ranks it measures the machine, then at once, before the machine drifts, times steps of two
byte GPTs in turns in one launch: with data parallelism, ZeRO, tensor parallelism, pipelines and combinations.
It does so three times and keeps the one with the median ratio. Run it while nothing else runs. The exit code
is 1 if a prediction is off by more than 30%.

On a machine with other users, all steps of a launch take longer alike. So the table also has each ratio over
the median of its launch, which shows whether layouts are ranked rightly.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from minidist._files import check_file
from minidist.comm.launching.supervisor import preload_optimizers
from minidist.parallel.contract.layout import Layout
from minidist.scale.planner.trial import NEAR, trial
from minidist.scale.step_time.measure_machine import RANKS, this_machine
from minidist.scale.step_time.prediction import predict_step

LAYOUTS: dict[int, tuple[str, ...]] = {
    1: ("dp=1", "micro_batches=4", "recompute=true"),
    2: ("dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2", "pp=2,micro_batches=4"),
    4: ("dp=4", "dp=4,zero=2", "dp=4,zero=3", "tp=4", "dp=2,tp=2", "dp=2,pp=2,micro_batches=4"),
    8: ("dp=8", "dp=8,zero=1", "dp=4,tp=2", "dp=2,tp=2,pp=2,micro_batches=2", "dp=2,pp=4,micro_batches=4"),
}
"""Layouts by number of ranks, as `Layout.parse` reads them."""
BATCHES = {"byte-small": (16, 128), "byte-tiny": (32, 64)}
"""Rows of the global batch and tokens in each row, by model."""
TURNS = 3
"""How often to measure the machine and then the steps: an odd number, so that there is a median."""


@dataclass(frozen=True)
class Compared:
    """Predicted and measured seconds of one layout's step."""

    model: str
    ranks: int
    layout: str
    predicted: float
    measured: float
    parts: dict[str, float]

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured


def calibrate(
    ranks: Sequence[int], rounds: int, models: Sequence[str] = tuple(BATCHES), figures: str | None = None
) -> list[Compared]:
    """Measure, predict and compare all layouts of these numbers of ranks.

    `rounds` counts the steps of each layout in all turns together. The file `figures` keeps the machine's
    figures; without it they are measured again in each turn.
    """
    found = []
    for count in ranks:
        turns: dict[tuple[str, str], list[Compared]] = {}
        layouts = [Layout.parse(text) for text in LAYOUTS[count]]
        for _ in range(TURNS):
            machine = this_machine((count,), figures)
            for model in models:
                measured = trial(model, layouts, BATCHES[model], rounds=-(-rounds // TURNS))
                for layout in layouts:
                    step, name = predict_step(model, layout, BATCHES[model], machine), str(layout)
                    one = Compared(model, count, name, step.seconds, measured[name], step.parts)
                    turns.setdefault((model, name), []).append(one)
        found += [sorted(each, key=lambda one: one.ratio)[TURNS // 2] for each in turns.values()]
    return found


def relative(found: Sequence[Compared]) -> list[float]:
    """Each ratio over the median ratio of the same model and number of ranks."""
    launches: dict[tuple[str, int], list[float]] = {}
    for each in found:
        launches.setdefault((each.model, each.ranks), []).append(each.ratio)
    return [each.ratio / statistics.median(launches[each.model, each.ranks]) for each in found]


def table(found: Sequence[Compared]) -> Table:
    """A table with a line for each step."""
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("model", "ranks", "layout", "predicted", "measured", "ratio", "to its launch", "parts, ms"):
        drawn.add_column(name, justify="left" if name in ("model", "layout") else "right")
    for each, to_launch in zip(found, relative(found), strict=True):
        parts = ", ".join(f"{name} {1e3 * s:.1f}" for name, s in each.parts.items() if s > 5e-5)
        times = f"{1e3 * each.predicted:.1f} ms", f"{1e3 * each.measured:.1f} ms"
        ratios = f"{each.ratio:.2f}", f"{to_launch:.2f}"
        drawn.add_row(each.model, str(each.ranks), each.layout, *times, *ratios, parts)
    return drawn


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m minidist.scale.planner.calibration", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--ranks", default=",".join(map(str, RANKS)), help="numbers of ranks (default 1,2,4,8)"
    )
    parser.add_argument("--models", default=",".join(BATCHES), help="default byte-small,byte-tiny")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each layout (default 15)")
    parser.add_argument("--figures", help="a file that keeps this machine's figures")
    parser.add_argument("--json", metavar="FILE", help="a file to write the comparison to")
    given = parser.parse_args(arguments)
    preload_optimizers()
    try:
        ranks = [int(word) for word in given.ranks.split(",")]
        wrong = [count for count in ranks if count not in LAYOUTS]
        models = given.models.split(",")
        if wrong or not set(models) <= set(BATCHES):
            raise ValueError(
                f"ranks are {given.ranks} and models {given.models}; give some of "
                f"{', '.join(map(str, LAYOUTS))} and of {', '.join(BATCHES)}"
            )
        for option, name in (("--json", given.json), ("--figures", given.figures)):
            if name:
                check_file(option, Path(name))
        found = calibrate(ranks, given.rounds, models, given.figures)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console = Console()
    if not console.is_terminal:
        console.width = 170
    console.print(table(found))
    inside = [each for each in found if abs(each.ratio - 1) <= NEAR]
    alike = sum(abs(each - 1) <= NEAR for each in relative(found))
    print(
        f"{len(inside)} of {len(found)} predictions are within {NEAR:.0%} of the measured time; {alike} of "
        f"{len(found)} ratios are within {NEAR:.0%} of the median of their launch"
    )
    if given.json:
        Path(given.json).write_text(json.dumps([asdict(each) for each in found], indent=1), encoding="utf-8")
    return 0 if len(inside) == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
