"""Collectives: values against what one process computes, bytes against the formulas and against the wire."""

from __future__ import annotations

import os
import pydoc
import re
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import minidist as md
from minidist import comm
from minidist.comm.transport.gloo_workarounds import tree_children
from minidist.comm.work import ALGORITHMS
from tests.comm.one_process import REDUCE, exact, expected, inputs
from tests.conftest import Clusters
from tests.helpers.clocks import until
from tests.helpers.on_ranks import on_ranks

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.uint8)


def every_collective(
    seed: int, rows: int, width: int, dtype: torch.dtype, op: str, shared: tuple[bool, ...] = (False,)
) -> list[dict[str, Any]]:
    """On each rank: the results of each collective, on the same inputs that `expected` gets.

    Each is made twice, so that buffers are used again while other ranks still read them.
    """
    rank, ranks = md.rank(), md.size()
    own, last = inputs(seed, (rows * ranks, width), dtype, ranks)[rank], ranks - 1
    memory, out = comm.empty_shared((2 * own.numel() + 3,), dtype), own.new_empty(rows, width)
    turns = []
    for turn in range(2):
        x = own.clone()
        if shared[rank % len(shared)]:
            # At different offsets, unless all ranks are to read each other in place.
            start = 3 if all(shared) else rank % 4
            x = memory[start : start + x.numel()].view(x.shape).copy_(x)
        results: dict[str, Any] = {
            "reduce_scatter": comm.reduce_scatter(x, op),
            "all_gather": comm.all_gather(x),
            "all_to_all": comm.all_to_all(x),
            "gather": comm.gather(x, destination=last),
            "scatter": comm.scatter(x if rank == last else None, out, source=last).clone(),
        }
        if ranks > 1:
            sent = comm.send(x, (rank + 1) % ranks, tag=7, async_op=True)
            results["recv"] = comm.recv(torch.empty_like(x), (rank - 1) % ranks, tag=7)
            sent.wait()
        exact(x, own)
        results["broadcast"] = comm.broadcast(x.clone() if turn else x, source=last).clone()
        x.copy_(own)
        turns.append({**results, "all_reduce": comm.all_reduce(x, op).clone()})
    return turns


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ranks=st.integers(1, 4),
    rows=st.integers(0, 5),
    width=st.integers(0, 7),
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(sorted(REDUCE)),
    seed=st.integers(0, 1000),
    shared=st.sampled_from([(False,), (True,), (True, False)]),
)
def test_results_equal_one_process(
    small_buffers: Clusters,
    ranks: int,
    rows: int,
    width: int,
    dtype: torch.dtype,
    op: str,
    seed: int,
    shared: tuple[bool, ...],
) -> None:
    if op == "mean" and (not dtype.is_floating_point or ranks == 3):
        op = "sum"  # a third is not exact, and integers have no mean
    parts = inputs(seed, (rows * ranks, width), dtype, ranks)
    found = small_buffers(ranks).run(every_collective, seed, rows, width, dtype, op, shared)
    for rank, turns in enumerate(found):
        wanted = expected(parts, op, rank, ranks - 1)
        for results in turns:
            for name, result in results.items():
                exact(result, wanted[name])


def test_an_asynchronous_barrier_waits_in_wait(cluster_of: Clusters, tmp_path: Path) -> None:
    """Rank 1 makes its call when rank 0 has returned from its own, and is waited for."""

    def meet() -> bool:
        comm.barrier()  # a first call would wait for rank 1
        if md.rank() == 1:
            comm.recv(torch.empty(1), 0)
            time.sleep(0.2)
            came.touch()
            comm.barrier()
        else:
            work = comm.barrier(async_op=True)
            comm.send(torch.ones(1), 1)
            assert work.wait() is None
        return came.exists()

    came = tmp_path / "rank 1 came"
    assert cluster_of(2).run(meet) == [True, True]


@on_ranks(2)
def test_a_first_call_may_be_asynchronous_on_some_ranks() -> None:
    """All ranks choose the same algorithm, and nothing hangs."""
    group, x = dist.new_group([0, 1]), torch.ones(3)
    with comm.ledger() as ledger:
        if md.rank() == 0:
            comm.all_reduce(x, group=group, async_op=True).wait()
        else:
            comm.all_reduce(x, group=group)
    assert (ledger.calls[0].algorithm, float(x.sum())) == ("shared_memory", 6.0)


@on_ranks(3)
def test_groups_count_their_own_ranks() -> None:
    group = dist.new_group([1, 2])
    if md.rank() == 0:
        with pytest.raises(ValueError, match="rank 0 is not a member of the group"):
            comm.all_reduce(torch.ones(1), group=group)
        return
    with comm.ledger() as ledger:
        x = comm.broadcast(torch.full((2,), float(md.rank())), source=1, group=group)
        x = comm.all_reduce(x, group=group)
    assert (x.tolist(), ledger.calls[1].group) == ([4.0, 4.0], (1, 2))
    assert ledger.bytes_sent == 8 * md.rank()  # rank 1 is the broadcast's leaf, and sends half of 2 x 8 bytes


CALLS: dict[str, Callable[[torch.Tensor], object]] = {
    "all_reduce": comm.all_reduce,
    "reduce_scatter": comm.reduce_scatter,
    "all_gather": comm.all_gather,
    "all_to_all": comm.all_to_all,
    "gather": comm.gather,
    "scatter": lambda x: comm.scatter(x, x.new_empty(len(x) // md.size(), *x.shape[1:])),
}
FORMULAS: dict[str, Callable[[int, int, int], float]] = {
    "all_reduce": lambda n, size, rank: 2 * (n - 1) / n * size,
    "reduce_scatter": lambda n, size, rank: (n - 1) / n * size,
    "all_gather": lambda n, size, rank: (n - 1) * size,
    "all_to_all": lambda n, size, rank: (n - 1) / n * size,
    "gather": lambda n, size, rank: 0 if rank == 0 else size,
    "scatter": lambda n, size, rank: (n - 1) / n * size if rank == 0 else 0,
}


@on_ranks(1, 2, 3, 4, dtype=(torch.float64, torch.bfloat16))
def test_the_ledger_counts_the_formula(dtype: torch.dtype) -> None:
    size = 24 * 5 * dtype.itemsize
    for name, call in CALLS.items():
        with comm.ledger() as ledger:
            call(torch.ones(24, 5, dtype=dtype))
        (entry,) = ledger.calls
        by_torch = name in ("gather", "scatter") or md.size() == 1
        assert (entry.name, entry.algorithm) == (name, "torch" if by_torch else "shared_memory")
        assert entry.dtype == str(dtype).removeprefix("torch.")
        assert entry.seconds >= entry.waited >= 0
        assert ledger.bytes_sent == FORMULAS[name](md.size(), size, md.rank())


@pytest.mark.parametrize(
    ("ranks", "children"),
    [
        # As counted at each rank's sockets while gloo broadcast 16 MB from rank 0.
        (4, [2, 1, 0, 0]),
        (5, [3, 1, 0, 0, 0]),
        (8, [3, 2, 1, 1, 0, 0, 0, 0]),
    ],
)
def test_a_broadcast_tree_is_gloos(ranks: int, children: list[int]) -> None:
    assert [tree_children(place, ranks) for place in range(ranks)] == children


@on_ranks(1, 2)
def test_results_go_where_out_says() -> None:
    share, whole = torch.full((2,), -1.0), torch.full((2 * md.size(),), -1.0)
    assert comm.reduce_scatter(torch.arange(2.0 * md.size()), out=share) is share
    assert comm.all_gather(torch.arange(2.0), out=whole) is whole
    exact(share, (torch.arange(2.0) + 2 * md.rank()) * md.size())
    exact(whole, torch.arange(2.0).repeat(md.size()))


@on_ranks(3, op=("sum", "mean", "max"))
def test_large_reduce_scatters_over_sockets_go_in_chunks(op: str) -> None:
    from minidist.comm.transport import gloo_workarounds

    parts = inputs(3, (18, 5), torch.float64, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gloo_workarounds, "CHUNK", 64)
        share = comm.reduce_scatter(parts[md.rank()], op, algorithm="torch")
    torch.testing.assert_close(share, REDUCE[op](parts)[6 * md.rank() : 6 * md.rank() + 6])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_shard_may_take_the_place_of_ones_own_part(small_buffers: Clusters, ranks: int) -> None:
    """By every algorithm, in one chunk or several, whoever has its tensor in shared memory."""
    small_buffers(ranks).run(scatter_into_own_parts)


def scatter_into_own_parts() -> None:
    from minidist.comm.transport import gloo_workarounds

    rank, ranks = md.rank(), md.size()
    own = slice(6 * rank, 6 * rank + 6)
    parts = inputs(4, (6 * ranks, 5), torch.float64, ranks)
    memory = comm.empty_shared(parts[0].shape, parts.dtype)
    ways = product(ALGORITHMS["reduce_scatter"], ("sum", "mean", "max"), ("all", "one", "none"), (64, 2**23))
    for algorithm, op, sharing, chunk in ways:
        for is_async in (False, True):
            x = memory if sharing == "all" or (sharing == "one" and rank == 0) else parts[rank].clone()
            out = x.copy_(parts[rank])[own]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(gloo_workarounds, "CHUNK", chunk)
                found: Any = comm.reduce_scatter(x, op, algorithm, out=out, async_op=is_async)
                assert (found.wait() if is_async else found) is out
            wanted = parts[rank].clone()
            wanted[own] = REDUCE[op](parts)[own]
            torch.testing.assert_close(x, wanted)


ON_THE_WIRE = {
    **CALLS,
    "broadcast": comm.broadcast,
    "ring": lambda x: comm.all_reduce(x, algorithm="ring"),
    "halving and doubling": lambda x: comm.all_reduce(x, algorithm="halving_doubling"),
}


@pytest.mark.skipif(not Path("/proc/net/dev").exists(), reason="reads Linux's count of an interface's bytes")
@pytest.mark.parametrize("name", [*ON_THE_WIRE, "in memory"])
def test_the_ledger_counts_what_is_on_the_wire(cluster_of: Clusters, name: str) -> None:
    """The loopback interface's own counter, over 16 MB tensors, agrees with the ledger to 2%."""

    def bytes_on_loopback() -> int:
        lines = (line.strip() for line in Path("/proc/net/dev").read_text().splitlines())
        return int(next(line for line in lines if line.startswith("lo:")).split(":")[1].split()[8])

    def count() -> int:
        x = torch.ones(4 * 2**20)
        if name == "in memory":
            with comm.ledger() as ledger:
                comm.all_reduce(x)
            assert ledger.bytes_sent > 0
        else:
            with comm.ledger() as ledger, comm.using("torch"):
                ON_THE_WIRE[name](x)
            assert ledger.bytes_on_wire == ledger.bytes_sent
        return ledger.bytes_on_wire

    cluster = cluster_of(4)
    cluster.run(count)  # connections are made at the first call
    on_wire = []
    for _ in range(20):  # other programs may speak meanwhile, which only adds
        before = bytes_on_loopback()
        counted = sum(cluster.run(count))
        on_wire.append(bytes_on_loopback() - before)
        most = 1.02 * counted or 2**20  # 2%: the frames' headers; in memory: the launcher's own messages
        if on_wire[-1] <= most:
            break
    assert counted <= min(on_wire) <= most


@on_ranks(2)
def test_ledgers_nest_and_print() -> None:
    with comm.ledger() as outer:
        comm.all_reduce(torch.ones(4))
        with comm.ledger() as inner:
            comm.all_reduce(torch.ones(4))
            comm.barrier()
    comm.barrier()
    assert (len(outer.calls), len(inner.calls), outer.bytes_sent) == (3, 2, 32)
    _, first, *_, last = outer.table().splitlines()
    assert first.split()[:6] == ["all_reduce", "shared_memory", "float32", "2", "2", "32"]
    assert last.split()[:3] == ["total", "3", "32"]


Calls = dict[str, Callable[[], object]]
WRONG_TYPES: Calls = {
    "all_reduce takes a torch tensor, not a list": lambda: comm.all_reduce([1.0]),
    "cannot average torch.int32": lambda: comm.all_reduce(torch.ones(2).int(), "mean"),
    "takes a dense tensor": lambda: comm.all_reduce(torch.ones(2).to_sparse()),
    "source is '0'; give a rank": lambda: comm.broadcast(torch.ones(2), source="0"),
    "the sum of torch.int16 by algorithm 'torch': gloo cannot do it; give algorithm='auto'": (
        lambda: comm.all_reduce(torch.ones(2).short(), algorithm="torch")
    ),
    "cannot take the max of torch.complex64: complex numbers have no order": (
        lambda: comm.all_reduce(torch.ones(1, dtype=torch.complex64), "max")
    ),
    "not a tensor on the meta": lambda: comm.send(torch.ones(2, device="meta"), 1 - md.rank()),
    "not the quantized torch.qint8; x.dequantize": (
        lambda: comm.all_gather(torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8))
    ),
}
WRONG_VALUES: Calls = {
    "unknown op 'avg': known are sum, mean": lambda: comm.all_reduce(torch.ones(2), "avg"),
    "did you mean 'max'": lambda: comm.all_reduce(torch.ones(2), "maxx"),
    "did you mean 'torch'": lambda: comm.all_reduce(torch.ones(2), algorithm="torhc"),
    "the 2 ranks divide, not 3; pad it to 4": lambda: comm.reduce_scatter(torch.ones(3, 2)),
    "not a scalar; x.view(1) makes one": lambda: comm.all_gather(torch.tensor(1.0)),
    "float32[3] on cpu and has to be": lambda: comm.all_gather(torch.ones(2), out=torch.ones(3)),
    "source is 2; the group's ranks are 0 to 1": lambda: comm.broadcast(torch.ones(2), source=2),
    "this rank itself": lambda: comm.send(torch.ones(2), md.rank()),
    "source is -1": lambda: comm.recv(torch.ones(2), -1),
    "add up to 3, and x has 4 rows": lambda: comm.all_to_all(torch.ones(4), [1, 2], [2, 2]),
    "give 2 counts of rows": lambda: comm.all_to_all(torch.ones(4), [4]),
    "x needs 2 times the rows": lambda: comm.scatter(torch.ones(3), torch.ones(2), md.rank()),
    "writes into x, and elements of x share memory (its strides are (0,))": (
        lambda: comm.all_reduce(torch.ones(1).expand(3))
    ),
    "elements of x share memory": lambda: comm.broadcast(torch.ones(2, 1).expand(2, 3)),
    "x.contiguous() makes a copy": lambda: comm.recv(torch.ones(1).expand(3), 1 - md.rank()),
    "out is a conjugate or negative view": (
        lambda: comm.all_gather(torch.ones(1) + 1j, out=(torch.ones(2) + 1j).conj())
    ),
}


@on_ranks(2)
def test_wrong_arguments_are_told_in_a_sentence() -> None:
    for error, calls in ((TypeError, WRONG_TYPES), (ValueError, WRONG_VALUES)):
        for text, call in calls.items():
            with pytest.raises(error, match=re.escape(text)):
                call()


def test_a_call_that_a_rank_skips_ends_at_the_time_limit(tmp_path: Path) -> None:
    given_up = tmp_path / "given up"

    def skip() -> str:
        if md.rank() == 0:
            until(given_up.exists)
            return ""
        try:
            comm.all_reduce(torch.ones(5), "max")
        except comm.CollectiveError as error:
            return str(error)
        finally:
            given_up.touch()
        return "no error"

    from minidist.comm.launching import cluster as cluster_module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster_module, "COLLECTIVE_TIMEOUT", 0.5)
        with md.Cluster(ranks=2, timeout=None) as cluster:
            _, message = cluster.run(skip)
    assert "all_reduce of float32[5] on rank 1 with ranks 0, 1: the other ranks did not all" in message


def test_a_dead_peer_is_told(cluster_of: Clusters, capsys: pytest.CaptureFixture[str]) -> None:
    def leave() -> str:
        if md.rank() == 0:
            os._exit(1)
        try:
            for _ in range(100):
                comm.all_reduce(torch.ones(5))
        except comm.CollectiveError as error:
            print(error)
        return ""

    with pytest.raises(md.RankDied, match="rank 0 ended with exit code 1"):
        cluster_of(2).run(leave)
    assert "another rank's process has ended" in capsys.readouterr().out


def test_help_shows_arguments_and_docstring() -> None:
    """The decorator that gives `async_op` its two types returns the function itself."""
    for function in (comm.all_reduce, comm.gather, comm.barrier):
        shown = pydoc.render_doc(function)
        assert "async_op: 'bool' = False" in shown
        assert "Returns:" in shown
