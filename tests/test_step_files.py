"""How many files somebody opens to follow one training step, for each strategy: few, and it stays so.

A settled step runs on two ranks under `sys.setprofile`, in all threads. A reader of `engine.step` opens the
files that it executes functions of. Of the two ranks, the one with more files counts. To tighten a limit,
lower its number in `LIMITS`.
"""

from __future__ import annotations

import sys
import threading
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch

import minidist as md
from minidist.model.gpt import GPT, GPTConfig
from minidist.parallel.contract import batch, training_state
from minidist.parallel.engine import training_step
from tests.helpers.clocks import HANG


class Files(NamedTuple):
    """How many files of minidist/parallel/, and how many of these and minidist/comm/ together."""

    parallel: int
    with_comm: int


LIMITS = {
    "dp=2": Files(9, 14),
    "dp=2,zero=1": Files(10, 15),
    "dp=2,zero=2": Files(10, 15),
    "dp=2,zero=3": Files(12, 18),
    "tp=2": Files(10, 16),
    "pp=2,micro_batches=4": Files(11, 18),  # 1F1B
}
DETOUR, IN_THREADS = "with a detour", "in threads"
"""A data-parallel step through a file that no step needs; and what runs in the other threads."""


def executed() -> dict[str, set[str]]:
    """For each layout the files of which a settled step executes functions on this rank."""
    root, main, found, in_threads = Path(md.__file__).parent, threading.get_ident(), set[str](), set[str]()

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            found.add(frame.f_code.co_filename)
            if threading.get_ident() != main:
                in_threads.add(frame.f_code.co_filename)

    def opened(layout: md.Layout) -> set[str]:
        torch.manual_seed(0)
        model = GPT(GPTConfig(vocabulary=32, context=8, width=16, heads=2, layers=2))
        engine = md.prepare(model, partial(torch.optim.AdamW, lr=1e-3), layout, rehearse=False)
        tokens = torch.randint(0, 32, (4, 9))
        steps = []
        for _ in range(9):  # the first ones agree on buckets, and make what later ones use
            found.clear()
            engine.step(tokens[:, :-1], tokens[:, 1:])
            steps.append({*found})
        settled = set.intersection(*steps[4:])  # one may look whether a late peer still lives
        inside = [name.removeprefix(f"{root}/") for name in sorted(settled)]
        return {name for name in inside if name.startswith(("parallel/", "comm/"))}

    def check_rows(*arguments: Any) -> None:
        training_state.names_of(torch.nn.Module())
        batch.check_rows(*arguments)

    threading.setprofile(profile)  # of threads that start from now on
    sys.setprofile(profile)
    try:
        every = {text: opened(md.Layout.parse(text)) for text in LIMITS}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(training_step, "check_rows", check_rows)
            return {**every, DETOUR: opened(md.Layout(dp=2)), IN_THREADS: {*in_threads}}
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@pytest.fixture(scope="module")
def of_ranks() -> list[dict[str, set[str]]]:
    """What two ranks execute. They are fresh: warm ones have threads already, which nobody can profile."""
    with md.Cluster(2, timeout=HANG, threads=1) as cluster:
        return cluster.run(executed)


@pytest.mark.parametrize("layout", LIMITS)
def test_a_reader_of_a_step_opens_few_files(of_ranks: list[dict[str, set[str]]], layout: str) -> None:
    both = [every[layout] for every in of_ranks]
    parallel = [{name for name in found if name.startswith("parallel/")} for found in both]
    for sets, most in zip((parallel, both), LIMITS[layout], strict=True):
        found = sorted(max(sets, key=len))
        message = f"{layout}: {len(found)} files, and {most} are allowed"
        assert len(found) <= most, "\n  ".join([message, *found])


def test_one_more_file_is_found(of_ranks: list[dict[str, set[str]]]) -> None:
    for every in of_ranks:
        assert every[DETOUR] - every["dp=2"] == {"parallel/contract/training_state.py"}
        assert any("/comm/transport/" in name for name in every[IN_THREADS])
