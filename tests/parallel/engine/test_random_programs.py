"""Random programs, each played by the ranks of a layout and by one process in plain torch.

A seed that differs is printed, with its program, by

    python -m tests.parallel.engine.test_random_programs SEED [LAST]
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import minidist as md
from minidist.parallel.engine import step_executor, training_step
from minidist.parallel.sharding.sets import equal_start
from tests.conftest import Clusters
from tests.helpers.contract import Fault, instead_of, nothing, patched, with_fault
from tests.helpers.random_programs import Action, Notes, OneProcess, OnRanks, Program, draw, play

TOLERANCE = 1e-9
"""Ten steps of optimizers that divide by small numbers cost more digits than the contract's three."""
DAILY = 1, 3, 4, 10, 13, 14, 15, 18, 49, 50, 55, 61, 66, 73, 78, 79, 85, 108, 109, 113
"""Seeds of programs that between them do all that a user does, in every kind of layout."""
DEEP = 64

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")


def compare(found: Notes, expected: Notes) -> None:
    """Fail at the first thing that differs."""
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (name, value), (_, wanted) in zip(found, expected, strict=True):
        torch.testing.assert_close(
            value,
            wanted,
            rtol=TOLERANCE,
            atol=TOLERANCE,
            equal_nan=name.endswith("loss"),
            msg=lambda text, name=name: f"{name}: {text}",
        )


def check(program: Program, cluster: md.Cluster, folder: Path) -> None:
    expected = play(OneProcess, program, folder)
    for found in cluster.run(play, OnRanks, program, folder):
        compare(found, expected)


@pytest.mark.parametrize(
    "seed", [*DAILY, *(pytest.param(n, marks=pytest.mark.deep) for n in range(DEEP) if n not in DAILY)]
)
def test_a_random_program_is_that_of_one_process(cluster_of: Clusters, seed: int, tmp_path: Path) -> None:
    program = draw(seed)
    check(program, cluster_of(program.layout.ranks), tmp_path)


def done(seed: int) -> set[tuple[str, str]]:
    """What is done in a program, with each property of the layout in which it is done."""
    program, what = draw(seed), set[tuple[str, str]]()
    layout = program.layout
    for action in program.actions:
        layout = action.layout or layout if action.kind == "load" else layout
        batches = [len(of_rank) for of_rank in action.sizes] or [1]
        kind = f"{action.kind}, {'other numbers of batches' * (len({*batches}) > 1)}"
        kind += ", none on some ranks" * (not min(batches))
        axes = [axis for axis in ("dp", "tp", "pp", "cp") if getattr(layout, axis) > 1]
        what |= {(kind, each) for each in (*axes, f"zero={layout.zero}")}
    return what


def test_the_daily_programs_do_everything() -> None:
    everything = set.union(*map(done, range(150)))
    assert len(everything) > 110
    assert set.union(*map(done, DAILY)) == everything


def found(blocks: str, layout: str, loss: str = "none", ranks: int = 1) -> Program:
    """A program of five steps: ranks use all experts in the first one, and others in each further one."""
    each = [(seed, ((rows,),) * ranks) for seed, rows in ((6, 12), (13, 1), (20, 1), (27, 1), (34, 1))]
    steps = [Action("train", seed, sizes, number=0.3) for seed, sizes in each]
    more, sgd = {"data_parallel": {"bucket_mb": 0}}, {"lr": 0.2}
    parsed = md.Layout.parse(layout)
    return Program(
        0,
        tuple(blocks.split()),
        False,
        False,
        "SGD",
        sgd,
        "all",
        loss,
        parsed,
        more,
        (*steps, Action("state")),
    )


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(found("attention experts experts", "cp=2,recompute=true"), id="ring attention again"),
        pytest.param(found("attention experts feed", "dp=2,cp=2,zero=2", "none", 2), id="ring attention"),
        pytest.param(found("gpt", "tp=2", "model"), id="cut logits"),
        pytest.param(
            replace(
                found("feed attention", "pp=2,cp=2,micro_batches=2", "tokens"),
                actions=(Action("train", 44101, ((3,),), number=0.3), Action("state")),
            ),
            id="no labels",
        ),
    ],
)
def test_what_random_programs_found(cluster_of: Clusters, program: Program, tmp_path: Path) -> None:
    """Ranks that use other experts meet in collectives of the pass; a loss calls a model with cut logits.

    And in a pipeline, ring attention waited for a rank of which no token in a micro-batch has a label.
    """
    check(program, cluster_of(program.layout.ranks), tmp_path)


@instead_of(training_step.Engine, "step")
def a_rank_that_waits_counts(step: Any, self: training_step.Engine, *batch: Any) -> float:
    self.is_padding = False
    return step(self, *batch)


@pytest.mark.parametrize(
    ("fault", "seed"),
    [
        (patched(step_executor.StepExecutor, "announce", nothing), 55),
        (a_rank_that_waits_counts, 1),
        (patched(training_step, "clip_factor", lambda *_: 1.0), 4),
        (patched(equal_start, "broadcast_together", nothing), 66),
    ],
    ids=["every row counts", "a rank that waits counts", "no clipping", "each rank's first values"],
)
def test_a_planted_fault_is_caught(cluster_of: Clusters, fault: Fault, seed: int, tmp_path: Path) -> None:
    program = draw(seed)
    found = cluster_of(program.layout.ranks).run(with_fault, fault, play, OnRanks, program, tmp_path)[0]
    with pytest.raises(AssertionError, match="not close"):
        compare(found, play(OneProcess, program, tmp_path))


def main(first: int, last: int) -> None:
    """Play the programs of some seeds, and print those that differ."""
    wrong, kinds = [], Counter[str]()
    clusters: dict[int, Any] = {}
    for seed in range(first, last + 1):
        program = draw(seed)
        ranks = program.layout.ranks
        if ranks not in clusters or clusters[ranks].closed:
            clusters[ranks] = md.Cluster(ranks, timeout=60, threads=1)
        kinds[kind_of(program.layout)] += 1
        with tempfile.TemporaryDirectory() as folder:
            try:
                check(program, clusters[ranks], Path(folder))
            except Exception as error:
                wrong.append(seed)
                print(f"{program}\n{type(error).__name__}: {short(str(error))}\n", flush=True)
        if seed % 100 == 99:
            print(f"{seed - first + 1} played, wrong: {wrong}", flush=True)
    print(f"{last - first + 1} played, wrong: {wrong}; {dict(kinds.most_common())}")


def short(text: str) -> str:
    """An error without torch's lists of what it has registered."""
    return "\n".join(line for line in text.splitlines() if "registered at" not in line)[-3000:]


def kind_of(layout: md.Layout) -> str:
    """The axes of a layout."""
    axes = [axis for axis in ("dp", "tp", "pp", "cp") if getattr(layout, axis) > 1]
    return "+".join(axes) + (f" zero={layout.zero}" if layout.zero else "")


if __name__ == "__main__":
    os.environ["MINIDIST_REHEARSE"] = "0"
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[-1]))
