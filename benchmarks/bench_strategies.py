"""Every strategy on one model, in turns with plain training in one process and with peers.

All train the same model on the same global batches, in turns: our strategy, the loop of another library that
does the same work, and plain torch in one process on all cores. All times of a table are also given over
plain torch's. The losses of the first steps have to agree. A byte GPT of 3 M parameters takes 8 rows of 128 a
step, an MLP 256 digits. Memory is that of the fullest rank. Ranks share cores where they outnumber them.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from minidist.benchmarks.harness.training.peers import OUTSIDE, missing
from minidist.benchmarks.harness.training.rounds import Measured, Worlds, enter, measure, warm_worlds
from minidist.benchmarks.harness.training.strategies import Pair, pairs
from minidist.benchmarks.harness.training.what_is_trained import Work
from minidist.benchmarks.harness.turns import Benchmark, compared

GPT, MLP = Work("byte-small", rows=8), Work("mlp", rows=256)
TITLES = {
    GPT: "Strategies: a byte GPT of 3 M parameters, 8 rows of 128",
    MLP: "Strategies: an MLP of 0.6 M parameters on handwritten digits, 256 rows",
}
ROUNDS = {GPT: (5, 20), MLP: (9, 40)}
"""Rounds of a quick run and of a full one."""
EACH = 1.0
"""Seconds for each program, after which a quick run leaves it at three rounds."""


def measured(worlds: Worlds, full: bool, work: Work, family: str, named: bool) -> Measured:
    """A family in turns; rows without a peer only if they are `named`."""
    members = [
        pair
        for pair in pairs(work.model)
        if pair.row.family == family and (full or (not pair.row.full_only and (pair.peer or named)))
    ]
    # Other packages change what torch does in their process, so they get ranks of their own.
    given = replace(work, experts=members[0].row.experts)
    with warm_worlds() if family in OUTSIDE else nullcontext(worlds) as ranks:
        return measure(ranks, given, members, ROUNDS[work][full], math.inf if full else EACH)


def _lines(work: Work) -> list[Any]:
    """One parameter set for each line of a table."""
    made = []
    for pair in pairs(work.model):
        left = [] if pair.peer else [pytest.mark.no_finding]  # findings rest on comparisons
        marks = [pytest.mark.full_only] if pair.row.full_only else left
        made.append(pytest.param(pair, id=f"{pair.label}, {pair.row.layout}", marks=marks))
    return made


def _enter(benchmark: Benchmark, timed: Any, named: bool, work: Work, pair: Pair) -> None:
    reason = missing(pair.peer)
    if reason:
        pytest.skip(reason)
    enter(benchmark, pair, work, timed(work, pair.row.family, named))


@compared(TITLES[GPT])
@pytest.mark.parametrize("pair", _lines(GPT))
def test_gpt(benchmark: Benchmark, timed: Any, named: bool, pair: Pair) -> None:
    """One step: forward, backward, communication, update."""
    _enter(benchmark, timed, named, GPT, pair)


@compared(TITLES[MLP])
@pytest.mark.full_only
@pytest.mark.parametrize("pair", _lines(MLP))
def test_mlp(benchmark: Benchmark, timed: Any, named: bool, pair: Pair) -> None:
    """The same for a short step, where everything around the arithmetic counts."""
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn: pip install 'minidist[bench]'")
    _enter(benchmark, timed, named, MLP, pair)
