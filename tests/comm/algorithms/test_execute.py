"""Collectives from messages, run between ranks: results against one process, bytes against the formulas."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import minidist as md
from minidist import comm
from minidist.comm import algorithms
from tests.comm.one_process import REDUCE, exact, inputs

Clusters = Callable[[int], md.Cluster]
ALL = [(operation, name) for operation, names in algorithms.ALGORITHMS.items() for name in names]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int16, torch.uint8]


@contextmanager
def small_segments(segment: int, ahead: int) -> Iterator[None]:
    """Cut small tensors as large ones are cut."""
    from minidist.comm.algorithms import execute

    former = execute.SEGMENT_BYTES, execute.AHEAD
    execute.SEGMENT_BYTES, execute.AHEAD = (segment, 4 * segment), ahead
    try:
        yield
    finally:
        execute.SEGMENT_BYTES, execute.AHEAD = former


@contextmanager
def at_odd_times(seed: int) -> Iterator[None]:
    """Start messages late, each by its own time, so that ranks and segments meet in many orders."""
    pauses, isend, irecv = random.Random(seed), dist.isend, dist.irecv

    def late(start: Callable[..., Any]) -> Callable[..., Any]:
        def begin(*args: Any, **kwargs: Any) -> Any:
            time.sleep(pauses.choice([0, 0, 0, 0.0002, 0.001]))
            return start(*args, **kwargs)

        return begin

    dist.isend, dist.irecv = late(isend), late(irecv)
    try:
        yield
    finally:
        dist.isend, dist.irecv = isend, irecv


def every_algorithm(
    seed: int,
    elements: int,
    dtype: torch.dtype,
    op: str,
    options: dict[str, dict[str, Any]],
    batches: bool = False,
) -> dict[tuple[str, str], torch.Tensor]:
    """On each rank: what each algorithm makes of the same inputs; the bytes are checked here."""
    from minidist.comm.algorithms.execute import COMBINE, execute, in_batches

    rank, ranks = md.rank(), md.size()
    mine = inputs(seed, (elements,), dtype, ranks)[rank]
    bounds = algorithms.offsets(elements, ranks)
    own = slice(bounds[rank], bounds[rank + 1])
    results = {}
    for operation, name in ALL:
        target = mine.clone()
        source = target
        if operation == "all_gather":
            target.fill_(77)
            target[own] = mine[own]
        if operation == "all_to_all":
            target = torch.empty_like(mine[own]).repeat(ranks)
            source = mine.clone()
        settings = options.get(operation, {}) | options.get(name, {})
        steps = list(algorithms.ALGORITHMS[operation][name](rank, ranks, elements, **settings))
        if batches:
            sent = in_batches(steps, source, target, COMBINE[op], rank, None)
        else:
            sent = execute(steps, source, target, op)
        assert sent == algorithms.bytes_sent(steps, dtype.itemsize, rank), (operation, name)
        results[operation, name] = target[own] if operation == "reduce_scatter" else target
        if operation == "all_to_all":
            exact(source, mine)
    return results


def expected(
    seed: int, elements: int, dtype: torch.dtype, op: str, source: int, rank: int, ranks: int
) -> dict[str, torch.Tensor]:
    parts = inputs(seed, (elements,), dtype, ranks)
    bounds = algorithms.offsets(elements, ranks)
    owned = [slice(bounds[i], bounds[i + 1]) for i in range(ranks)]
    reduced = REDUCE[op](parts).to(dtype)
    return {
        "all_reduce": reduced,
        "reduce_scatter": reduced[owned[rank]],
        "all_gather": torch.cat([parts[i, owned[i]] for i in range(ranks)]),
        "broadcast": parts[source],
        "all_to_all": parts[:, owned[rank]].flatten(),
    }


def compare(
    cluster: md.Cluster, seed: int, elements: int, dtype: torch.dtype, op: str, segment: int, ahead: int
) -> None:
    ranks = cluster.ranks
    source = seed % ranks
    options = {"broadcast": {"source": source}, "hierarchical": {"node": 1 + seed % ranks}}

    def at_once() -> dict[tuple[str, str], torch.Tensor]:
        with small_segments(segment, ahead), at_odd_times(seed + md.rank()):
            return every_algorithm(seed, elements, dtype, op, options)

    for rank, results in enumerate(cluster.run(at_once)):
        wanted = expected(seed, elements, dtype, op, source, rank, ranks)
        for (operation, name), result in results.items():
            torch.testing.assert_close(
                result, wanted[operation], rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}"
            )


@settings(max_examples=18, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ranks=st.integers(1, 4),
    elements=st.one_of(st.integers(0, 9), st.integers(10, 250)),
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(["sum", "min", "max", "product"]),
    segment=st.sampled_from([8, 24, 64, 2**20]),
    ahead=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_results_equal_one_process(
    cluster_of: Clusters,
    ranks: int,
    elements: int,
    dtype: torch.dtype,
    op: str,
    segment: int,
    ahead: int,
    seed: int,
) -> None:
    compare(cluster_of(ranks), seed, elements, dtype, op, segment, ahead)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_large_tensors_are_cut_and_equal_gloos(cluster_of: Clusters, ranks: int) -> None:
    """8 MB and some, in segments as they are."""

    def reduce() -> list[str]:
        from minidist.comm.algorithms.execute import execute

        x = torch.arange(2**21 + 13).remainder(257).mul(md.rank() + 1).float()
        wanted = x.clone()
        dist.all_reduce(wanted)
        wrong = []
        for name, generator in algorithms.ALGORITHMS["all_reduce"].items():
            mine = x.clone()
            execute(generator(md.rank(), md.size(), len(x)), mine, mine)
            wrong += [] if torch.equal(mine, wanted) else [name]
        return wrong

    assert cluster_of(ranks).run(reduce) == [[]] * ranks


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


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_steps_in_batches_give_the_same(cluster_of: Clusters, ranks: int) -> None:
    """As over NCCL, where the messages of a step are started together; here over gloo."""
    case = (5, 41, torch.float64, "max")
    options = {"broadcast": {"source": ranks - 1}, "hierarchical": {"node": 2}}
    for rank, results in enumerate(cluster_of(ranks).run(every_algorithm, *case, options, True)):
        wanted = expected(*case, ranks - 1, rank, ranks)
        for (operation, _), result in results.items():
            exact(result, wanted[operation])


def test_wrong_arguments_are_told_in_a_sentence(cluster_of: Clusters) -> None:
    def attempt() -> list[str]:
        from minidist.comm.algorithms.execute import execute

        texts = []
        for source, target, op in (
            (torch.ones(4), torch.ones(4), "mean"),
            (torch.ones(2, 2), torch.ones(4), "sum"),
            (torch.ones(8)[::2], torch.ones(4), "sum"),
            (torch.ones(4), torch.ones(4).double(), "sum"),
        ):
            with pytest.raises(ValueError, match=r"op is|has to be flat") as error:
                execute([], source, target, op)
            texts.append(str(error.value))
        return texts

    mean, shape, strides, dtype = cluster_of(1).run(attempt)[0]
    assert mean == "op is 'mean'; a step combines by sum, product, min, max, and a mean is divided after"
    assert shape.startswith(
        "source is torch.float32[2, 2] with strides (2, 1); it has to be flat, contiguous and"
    )
    assert "strides (2,)" in strides
    assert dtype.startswith("target is torch.float64[4]")


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
