"""`launch`: run a function on fresh local ranks, or on those that torchrun, mpirun or srun has started."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from minidist.comm.errors import RankCountError
from minidist.comm.launching.cluster import START_TIMEOUT, Cluster
from minidist.comm.started_by import Started, started


def launch(
    fn: Callable[..., Any],
    ranks: int,
    args: tuple[Any, ...] = (),
    timeout: float | None = None,
    check: bool = False,
    *,
    kwargs: Mapping[str, Any] | None = None,
    threads: int | None = None,
    start_timeout: float = START_TIMEOUT,
    may_fail: Iterable[int] = (),
) -> list[Any]:
    """Run `fn(*args, **kwargs)` on `ranks` fresh local processes that have formed a world.

    A script needs no `if __name__ == "__main__":`. Under torchrun, mpirun or srun no process is started: `fn`
    runs in this process, as the rank that the launcher gave it, so one program serves all.

    `fn` may use a DataLoader with workers, however they are started, with a data set of any class. Under a
    launcher, workers that are not forked, as on macOS and from Python 3.14 on, run the script again: it then
    needs its `if __name__ == "__main__":`.

    The environment variable MINIDIST_PRELOAD names modules to import once for all ranks of this process.
    "torch._dynamo" saves each rank a second at its first optimizer.

    Args:
        fn: any function: of a module, a script, a notebook cell, or a closure.
        ranks: number of processes, at least 1.
        args, kwargs: the arguments of `fn`, the same on each rank.
        timeout: seconds that `fn` may take. By default there is no limit, and a collective whose peers do not
            come still fails after 300 s.
        check, threads, start_timeout, may_fail: as of `Cluster`. Under a launcher, may_fail has no effect:
            it stops all ranks when one fails.

    Returns:
        What each rank returned, in rank order. A rank of `may_fail` that failed has its RankError or RankDied
        there.

    Raises:
        RankError, RankDied, RankTimeout, TypeError: as `Cluster.run`.
        ValueError: an argument is out of range.
        RankCountError: a ValueError; the launcher started another number of ranks.
    """
    if not isinstance(args, tuple):
        raise TypeError(f"args is {args!r}; give a tuple, such as ({args!r},)")
    if not isinstance(kwargs, Mapping | None):
        raise TypeError(f'kwargs is {kwargs!r}; give a dict of arguments by name, such as {{"steps": 100}}')
    found = started()
    if found is not None:
        return _run_as_rank(found, partial(fn, *args, **(kwargs or {})), ranks, timeout, check)
    options: dict[str, Any] = {"threads": threads, "start_timeout": start_timeout, "may_fail": may_fail}
    with Cluster(ranks, timeout, check, **options) as cluster:
        return cluster.run(fn, *args, **(kwargs or {}))


def _run_as_rank(
    found: Started, fn: Callable[[], Any], ranks: int, timeout: float | None, check: bool
) -> list[Any]:
    import torch.distributed as dist

    from minidist.comm import returned_ranks, world
    from minidist.comm.checking import call_checker

    world.init(timeout or world.DEFAULT_TIMEOUT, check)
    if world.size() != ranks:
        raise RankCountError(
            f"{found.launcher} started {world.size()} ranks and the program asks for {ranks}; make them equal"
        )
    results: list[Any] = [None] * ranks
    with call_checker.run(timeout):
        value = fn()
    returned_ranks.end_run()
    dist.all_gather_object(results, value)
    return results
