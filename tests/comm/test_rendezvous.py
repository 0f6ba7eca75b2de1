"""The ranks of each life agree on a part of torchrun's store that no earlier life has used."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from minidist.comm.rendezvous import fresh_part
from tests.comm.programs import torchrun
from tests.helpers.clocks import HANG


def life(store: dist.Store, ranks: int, late: int | None = None) -> set[str]:
    """The names that the ranks of one life agree on; rank `late` comes after the others."""

    def rank(own: int) -> str:
        if own == late:
            time.sleep(0.05)
        return fresh_part(store, own, ranks, timeout=HANG)

    with ThreadPoolExecutor(ranks) as pool:
        return set(pool.map(rank, range(ranks)))


def test_each_life_has_a_part_of_its_own() -> None:
    store = dist.HashStore()
    names = [
        life(store, ranks, late) for ranks, late in ((3, None), (3, 0), (3, 2), (2, 1), (4, 3), (1, None))
    ]
    assert all(len(each) == 1 for each in names)
    assert len(set.union(*names)) == len(names)


def test_a_rank_that_died_while_it_asked_is_not_waited_for() -> None:
    """Its question stays in the store, and rank 0 of the next life may answer it before the new rank asks."""
    store = dist.HashStore()
    store.set("minidist/question/1", "of the dead")
    assert len(life(store, 2, late=1)) == 1


def test_ranks_that_do_not_come_are_given_up() -> None:
    with pytest.raises(dist.DistStoreError):
        fresh_part(dist.HashStore(), 0, 2, timeout=0.02)


@pytest.mark.deep
def test_torchrun_restarts_ranks_that_were_killed(tmp_path: Path) -> None:
    """In its first life rank 1 is killed after a collective, and in its second before it joins."""
    program = """
        import os, signal, torch
        import minidist as md
        from minidist import comm

        life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

        def die(when):
            if md.rank() == 1 and life == when or when == 1 == life and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)

        die(1)
        md.init(timeout=20)
        total = comm.all_reduce(torch.ones(1)).item()
        comm.barrier()
        die(0)
        comm.barrier()
        if md.rank() == 0:
            print(f"life {life}: {total:g}")
    """
    options = ("--monitor-interval", "0.1", "--max-restarts", "2")
    done = torchrun(tmp_path, program, *options, children="6", without="TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "life 2: 2\n"


def test_a_rank_that_asks_twice_is_one_rank() -> None:
    """Its agent has restarted it while rank 3 was still to come, which must get its answer."""
    store = dist.HashStore()
    with ThreadPoolExecutor(5) as pool:
        begun = [pool.submit(fresh_part, store, own, 4, HANG) for own in (0, 1, 2)]
        begun[2].result(HANG)
        begun.append(pool.submit(fresh_part, store, 2, 4, HANG))
        begun[3].result(HANG)
        begun.append(pool.submit(fresh_part, store, 3, 4, HANG))
        assert len({each.result(HANG) for each in begun}) == 1
