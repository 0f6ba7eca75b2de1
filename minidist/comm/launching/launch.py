"""`launch`: run a function on fresh local ranks, or on the ranks that torchrun has started."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from minidist.comm.launching.cluster import START_TIMEOUT, Cluster


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

    A script needs no `if __name__ == "__main__":`. Under torchrun no process is started: `fn` runs in this
    process, as the rank that torchrun gave it, so one program serves both.

    The environment variable MINIDIST_PRELOAD names modules to import once for all ranks of this process.
    "torch._dynamo" saves each rank a second at its first optimizer.

    Args:
        fn: any function: of a module, a script, a notebook cell, or a closure.
        ranks: number of processes, at least 1.
        args, kwargs: the arguments of `fn`, the same on each rank.
        timeout: seconds that `fn` may take. By default there is no limit, and a collective whose peers do not
            come still fails after 300 s.
        check, threads, start_timeout, may_fail: as of `Cluster`. Under torchrun, may_fail has no effect:
            torchrun stops all ranks when one fails.

    Returns:
        What each rank returned, in rank order. A rank of `may_fail` that failed has its RankError or RankDied
        there.

    Raises:
        RankError, RankDied, RankTimeout, TypeError: as `Cluster.run`.
        ValueError: an argument is out of range, or torchrun started another number of ranks.
    """
    if not isinstance(args, tuple):
        raise TypeError(f"args is {args!r}; give a tuple, such as ({args!r},)")
    if not isinstance(kwargs, Mapping | None):
        raise TypeError(f'kwargs is {kwargs!r}; give a dict of arguments by name, such as {{"steps": 100}}')
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return _run_under_torchrun(partial(fn, *args, **(kwargs or {})), ranks, timeout, check)
    options: dict[str, Any] = {"threads": threads, "start_timeout": start_timeout, "may_fail": may_fail}
    with Cluster(ranks, timeout, check, **options) as cluster:
        return cluster.run(fn, *args, **(kwargs or {}))


def _run_under_torchrun(fn: Callable[[], Any], ranks: int, timeout: float | None, check: bool) -> list[Any]:
    import torch.distributed as dist

    from minidist.comm import checking, returned_ranks, world

    world.init(timeout or world.DEFAULT_TIMEOUT, check)
    if world.size() != ranks:
        raise ValueError(
            f"torchrun started {world.size()} ranks and the program asks for {ranks}; make them equal"
        )
    results: list[Any] = [None] * ranks
    with checking.run(timeout):
        value = fn()
    returned_ranks.end_run()
    dist.all_gather_object(results, value)
    return results
