"""All that a layout of data-parallel ranks can combine, held to the contract together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import contract
import pytest
from test_data_parallel import CASES

import minidist as md

Clusters = Callable[[int], md.Cluster]
GPT = CASES["gpt"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_stage_with_everything_else(cluster_of: Clusters, zero: int, ranks: int) -> None:
    layout = md.Layout(dp=ranks, zero=zero, micro_batches=3, recompute=True)
    contract.check(cluster_of(ranks), replace(GPT, clip_norm=0.5), layout)
