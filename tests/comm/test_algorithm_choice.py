"""How a collective runs: every algorithm through the communication API, and `comm.using`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import minidist as md
from minidist import comm
from minidist.comm import algorithms, work
from minidist.comm.work import ALGORITHMS
from tests.comm.one_process import exact
from tests.helpers.on_ranks import on_ranks


def test_the_api_knows_every_algorithm() -> None:
    for operation, known in algorithms.ALGORITHMS.items():
        assert set(known) <= set(ALGORITHMS[operation])
        assert set(ALGORITHMS[operation]) - set(known) == {"torch", "shared_memory"}


@on_ranks(2, 3, 4, dtype=(torch.float64, torch.bfloat16, torch.int16))
def test_every_algorithm_gives_the_same(dtype: torch.dtype) -> None:
    """Results equal torch's, for a shape that is not flat, and the bytes are those of the schedule."""
    rank, size = md.rank(), md.size()
    x = (torch.arange(5 * 3 * size).view(5 * size, 3) % 7 + rank).to(dtype)
    calls: dict[str, Callable[[str], torch.Tensor]] = {
        "all_reduce": lambda name: comm.all_reduce(x.clone(), "max", algorithm=name),
        "reduce_scatter": lambda name: comm.reduce_scatter(x, algorithm=name),
        "all_gather": lambda name: comm.all_gather(x, algorithm=name),
        "broadcast": lambda name: comm.broadcast(x.clone(), source=size - 1, algorithm=name),
        "all_to_all": lambda name: comm.all_to_all(x, algorithm=name),
    }
    for operation, call in calls.items():
        wanted = call("shared_memory")
        for name in ALGORITHMS[operation]:
            if name == "torch" and dtype == torch.int16:
                continue  # gloo cannot send this dtype
            with comm.ledger() as ledger:
                exact(call(name), wanted)
            assert ledger.calls[0].algorithm == name
            if name in algorithms.ALGORITHMS[operation] and name != "hierarchical":
                options = {"source": size - 1} if operation == "broadcast" else {}
                elements = x.numel() * (size if operation == "all_gather" else 1)
                steps = algorithms.schedule(operation, name, size, elements, **options).steps[rank]
                assert ledger.bytes_on_wire == algorithms.bytes_sent(steps, x.element_size(), rank)
    if dtype.is_floating_point:
        means = [comm.all_reduce(x.clone(), "mean", algorithm=name) for name in ("ring", "tree", "torch")]
        for mean in means:
            torch.testing.assert_close(mean, means[-1])
        share = comm.reduce_scatter(x, "mean", algorithm="ring")
        torch.testing.assert_close(share, means[-1][5 * rank : 5 * rank + 5])


@on_ranks(3)
def test_algorithms_run_in_the_background() -> None:
    parts = [torch.full((1000,), float(md.rank() + i)) for i in range(6)]
    works = [
        comm.all_reduce(part, algorithm=name, async_op=True)
        for part, name in zip(parts, ["ring", "tree", "shared_memory"] * 2, strict=True)
    ]
    for i, each in reversed(list(enumerate(works))):
        exact(each.wait(), torch.full((1000,), 3.0 * i + 3))


@on_ranks(2)
def test_using_reaches_what_names_no_algorithm() -> None:
    x = torch.ones(4)
    with comm.ledger() as ledger:
        comm.all_reduce(x)
        with comm.using("ring"):
            comm.all_reduce(x)
            comm.all_reduce(x, algorithm="torch")
            with comm.using("naive"):
                comm.all_reduce(x)
                comm.all_gather(x)
            comm.all_to_all(x)
        comm.all_reduce(x)
    wanted = ["shared_memory", "ring", "torch", "naive", "ring", "shared_memory", "shared_memory"]
    assert [call.algorithm for call in ledger.calls] == wanted


def test_unknown_names_are_told() -> None:
    with pytest.raises(ValueError, match="unknown algorithm 'rign': did you mean 'ring'"), comm.using("rign"):
        pass
    with pytest.raises(ValueError, match="unknown algorithm of all_gather 'naive'"):
        comm.all_gather(torch.ones(1), algorithm="naive")


def test_shared_memory_that_cannot_be_mapped_is_done_without() -> None:
    def without() -> tuple[list[str], str]:
        def nothing(size: int, ranges: object) -> int:
            return -1

        from minidist.comm.transport import ipc

        ipc.make_file = nothing
        with comm.ledger() as ledger:
            x = comm.all_reduce(comm.empty_shared((3,)) + 1)
            exact(x, torch.full((3,), 2.0))
            exact(comm.all_reduce(x.short()), torch.full((3,), 4).short())  # which gloo cannot add
        with pytest.raises(ValueError, match="cannot go through shared memory") as caught:
            comm.all_reduce(x, algorithm="shared_memory")
        return [call.algorithm for call in ledger.calls], str(caught.value)

    for names, message in md.launch(without, ranks=2):
        assert names == ["torch", "ring"]
        assert "too little is left, or it is not allowed; give algorithm='auto'" in message


def test_a_world_that_ends_takes_its_memory_with_it() -> None:
    def leave() -> int:
        comm.all_reduce(torch.ones(1))
        work.forget_groups()
        return len(work._known)

    assert md.launch(leave, ranks=2) == [0, 0]
