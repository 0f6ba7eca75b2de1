"""Collectives from messages, run between ranks: results against one process, bytes against the formulas."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

import minidist as md
from minidist import comm
from minidist.comm import algorithms
from minidist.comm.algorithms import execute
from tests.comm.one_process import REDUCE, exact, inputs
from tests.conftest import Clusters
from tests.helpers.on_ranks import on_ranks

ALL = [(operation, name) for operation, names in algorithms.ALGORITHMS.items() for name in names]


def on_this_rank(operation: str, name: str, x: torch.Tensor, batches: bool) -> torch.Tensor:
    """What an algorithm makes of a rank's elements; the bytes are checked here."""
    from minidist.comm.algorithms.execute import execute, in_batches

    rank, ranks = md.rank(), md.size()
    options = {"broadcast": {"source": ranks - 1}, "hierarchical": {"node": 2}}
    settings = options.get(operation, {}) | options.get(name, {})
    steps = list(algorithms.ALGORITHMS[operation][name](rank, ranks, len(x), **settings))
    target = torch.zeros(len(x) + ranks) if operation == "all_to_all" else x.clone()
    source = x.clone() if operation == "all_to_all" else target
    if batches:
        sent = in_batches(steps, source, target, torch.add, rank, None)
    else:
        sent = execute(steps, source, target)
    assert sent == algorithms.bytes_sent(steps, x.element_size(), rank), (operation, name)
    bounds = algorithms.offsets(len(x), ranks)  # the rest is a reduce-scatter's partial results
    return target[bounds[rank] : bounds[rank + 1]] if operation == "reduce_scatter" else target


@on_ranks(1, 3, 4)
def test_steps_in_batches_give_the_same() -> None:
    """As over NCCL, where the messages of a step are started together; here over gloo."""
    x = inputs(5, (41,), torch.float32, md.size())[md.rank()]
    for operation, name in ALL:
        exact(*(on_this_rank(operation, name, x, batches) for batches in (False, True)))


@pytest.mark.parametrize("name", sorted(algorithms.ALGORITHMS["all_reduce"]))
def test_all_ranks_get_the_same_bits(cluster_of: Clusters, name: str) -> None:
    def reduce() -> torch.Tensor:
        from minidist.comm.algorithms.execute import execute

        x = torch.randn(1001, generator=torch.Generator().manual_seed(md.rank()))
        execute(algorithms.ALGORITHMS["all_reduce"][name](md.rank(), md.size(), len(x)), x, x)
        return x

    first, *others = cluster_of(4).run(reduce)
    # float32 sums of four numbers round in at most three places, by 2**-24 of at most their sum of sizes.
    wanted = sum(
        torch.randn(1001, generator=torch.Generator().manual_seed(rank)).double() for rank in range(4)
    )
    torch.testing.assert_close(first.double(), wanted, rtol=0, atol=3 * 2**-24 * 16)
    for other in others:
        exact(other, first)


def test_groups_and_threads(cluster_of: Clusters) -> None:
    """Peers are counted inside the group; another thread may run the steps; other messages do no harm."""

    def inside() -> tuple[list[float], list[float]] | None:
        from minidist.comm.algorithms.execute import execute

        group = dist.new_group([2, 1])
        if md.rank() == 0:
            return None
        place = dist.get_rank(group)
        x = torch.full((5,), float(md.rank()))
        kept = x.clone()

        def background() -> None:
            for _ in range(3):
                execute(algorithms.ring_all_reduce(place, 2, 5), x, x, group=group)

        thread = threading.Thread(target=background)
        thread.start()
        y = torch.zeros(5)
        if place == 0:
            comm.send(kept, 1, group=group)
        else:
            comm.recv(y, 0, group=group)
        thread.join()
        return x.tolist(), y.tolist()

    nothing, *results = cluster_of(3).run(inside)
    assert nothing is None
    assert [x for x, _ in results] == [[12.0] * 5] * 2  # (1 + 2) doubled twice
    assert sorted(y[0] for _, y in results) in ([0.0, 1.0], [0.0, 2.0])


def test_torchs_errors_pass_through(cluster_of: Clusters, capsys: pytest.CaptureFixture[str]) -> None:
    def leave() -> None:
        from minidist.comm.algorithms.execute import execute

        x = torch.ones(2**20)
        execute(algorithms.ring_all_reduce(md.rank(), 2, len(x)), x, x)
        if md.rank() == 0:
            os._exit(1)
        try:
            for _ in range(100):
                execute(algorithms.ring_all_reduce(md.rank(), 2, len(x)), x, x)
        except RuntimeError as error:
            print("passed", type(error).__module__, "peer" in str(error))

    with pytest.raises(md.RankDied, match="rank 0 ended with exit code 1"):
        cluster_of(2).run(leave)
    assert "passed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "target", "op"),
    [
        (torch.ones(4), torch.ones(4), "mean"),
        (torch.ones(2, 2), torch.ones(4), "sum"),
        (torch.ones(4), torch.ones(8)[::2], "sum"),
        (torch.ones(4), torch.ones(4).double(), "sum"),
    ],
)
def test_wrong_arguments_are_told_in_a_sentence(source: torch.Tensor, target: torch.Tensor, op: str) -> None:
    with pytest.raises(ValueError, match=r"op is one of sum, product, min, max, and both are flat, contig"):
        execute.execute([], source, target, op)


@on_ranks(
    3,
    op=("min", "max", "product"),
    dtype=(torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int16),
)
def test_other_reductions_and_dtypes_equal_one_process(op: str, dtype: torch.dtype) -> None:
    parts = inputs(5, (41,), dtype, md.size())
    for generator in algorithms.ALGORITHMS["all_reduce"].values():
        x = parts[md.rank()].clone()
        execute.execute(generator(md.rank(), md.size(), len(x)), x, x, op)
        exact(x, REDUCE[op](parts).to(dtype))


def test_cutting_grows_with_the_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []

    class Counted(execute.Receive):
        def __getattribute__(self, name: str) -> Any:
            reads.append(name)
            return super().__getattribute__(name)

    monkeypatch.setattr(execute, "Receive", Counted)
    monkeypatch.setattr(execute, "SEGMENT_BYTES", (4, 4))
    counts = []
    for elements in (64, 256):
        reads.clear()
        execute.cut_into_segments(list(algorithms.ring_all_reduce(0, 2, elements)), 4, 0, in_place=True)
        counts.append(len(reads))
    assert counts[1] < 5 * counts[0]
