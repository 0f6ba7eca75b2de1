"""Communication: starting ranks, the world that they form, and the one door that every strategy calls.

>>> from minidist import comm
>>> with comm.ledger() as ledger:
...     comm.all_reduce(x)
>>> ledger.bytes_sent

`launching/launch.py` and `launching/cluster.py` start ranks (`launching/supervisor.py` and
`launching/worker.py` run in the processes that they start), `world.py` says who is who, `mesh.py` makes the
groups of a grid of ranks, `collectives.py` and `messages.py` are the door, `ledgers.py` counts what went
through it. With `check=True`, `checking/checking.py` has the ranks compare their calls;
`checking/callsite.py` knows where those were made, `checking/records.py` what contradicts what, and
`checking/deadlock_detection.py` why a rank does not come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minidist._lazy import lazy

if TYPE_CHECKING:
    from minidist.comm.collectives import all_gather as all_gather
    from minidist.comm.collectives import all_reduce as all_reduce
    from minidist.comm.collectives import all_to_all as all_to_all
    from minidist.comm.collectives import broadcast as broadcast
    from minidist.comm.collectives import reduce_scatter as reduce_scatter
    from minidist.comm.errors import CollectiveError as CollectiveError
    from minidist.comm.errors import RankDied as RankDied
    from minidist.comm.errors import RankError as RankError
    from minidist.comm.errors import RankTimeout as RankTimeout
    from minidist.comm.launching.cluster import Cluster as Cluster
    from minidist.comm.ledgers import Ledger as Ledger
    from minidist.comm.ledgers import ledger as ledger
    from minidist.comm.mesh import Mesh as Mesh
    from minidist.comm.messages import barrier as barrier
    from minidist.comm.messages import gather as gather
    from minidist.comm.messages import recv as recv
    from minidist.comm.messages import scatter as scatter
    from minidist.comm.messages import send as send
    from minidist.comm.transport.algorithm_choice import empty_shared as empty_shared
    from minidist.comm.transport.algorithm_choice import using as using
    from minidist.comm.work import Work as Work
    from minidist.comm.world import device as device
    from minidist.comm.world import init as init
    from minidist.comm.world import local_rank as local_rank
    from minidist.comm.world import rank as rank
    from minidist.comm.world import shutdown as shutdown
    from minidist.comm.world import size as size

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "minidist.comm.launching.cluster": ("Cluster",),
        "minidist.comm.collectives": (
            "all_gather",
            "all_reduce",
            "all_to_all",
            "broadcast",
            "reduce_scatter",
        ),
        "minidist.comm.errors": ("CollectiveError", "RankDied", "RankError", "RankTimeout"),
        "minidist.comm.ledgers": ("Ledger", "ledger"),
        "minidist.comm.mesh": ("Mesh",),
        "minidist.comm.messages": ("barrier", "gather", "recv", "scatter", "send"),
        "minidist.comm.transport.algorithm_choice": ("empty_shared", "using"),
        "minidist.comm.work": ("Work",),
        "minidist.comm.world": ("device", "init", "local_rank", "rank", "shutdown", "size"),
    },
)
