"""Communication: starts the ranks of a program, and holds every function through which they communicate.

>>> from minidist import comm
>>> with comm.ledger() as ledger:
...     comm.all_reduce(x)
>>> ledger.bytes_sent

collectives     all_reduce, reduce_scatter, all_gather, broadcast, all_to_all and barrier
differentiable  an all-to-all whose gradients travel back
messages        send, recv, gather and scatter
tensor_checks   which tensors, ranks and reductions they accept
work            a call under way: started, counted, waited for; groups, `using`, the thread that runs calls
stream_times    when a call on CUDA tensors ran, by the GPU's clock
opaque          torch.compile leaves these functions as they are; the types of one that takes async_op
returned_ranks  which ranks have returned from the function that all run, and join no more calls
world           which rank this process is; joining and leaving the world
mesh            ranks in a grid, and the groups along its axes
ledgers         the bytes and the time of every call
errors          the exceptions that name a rank, and why the backend could not complete a call, in words
started_by      the rank that torchrun, mpirun or srun gave this process
membership      processes that come and go, each with a connection to one coordinator
rendezvous      the store in which the ranks of a world find each other
launching/      starts processes for ranks, in a script, a notebook or under torchrun
transport/      how bytes travel between the ranks of a host: shared memory and mailboxes
algorithms/     ring, tree and other collectives as schedules of messages, and their execution
checking/       `check=True`: ranks compare their calls, and a deadlock is named
cost/           predicts the time of a collective from latency and bandwidth

| Where ... | Function | File |
|---|---|---|
| is an algorithm chosen for a call? | `choose` | collectives.py |
| is a call started, counted and waited for? | `run` | work.py |
| is it said which messages a ring all-reduce sends? | `ring_all_reduce` | algorithms/ring.py |
| are the messages of such an algorithm sent? | `execute` | algorithms/execute.py |
| do ranks of a host read each other's tensors? | `all_reduce` | transport/shared_memory.py |
| does a message go to a rank of the same host? | `Outgoing.put` | transport/mailbox.py |
| are the groups along tp, pp and dp made? | `Mesh` | mesh.py |
| do ranks form their world? | `join` | world.py |
| is it found out that torchrun, mpirun or srun started this rank? | `started` | started_by.py |
| are processes for ranks started? | `SupervisorServer.start` | launching/supervisor.py |
| does the death of a rank become known? | `SupervisorServer.reap` | launching/supervisor.py |
| is the rank named that failed first? | `collect` | launching/collect_results.py |
| are deadlocks and different calls found? | `Checker.enter` | checking/call_checker.py |
| is a dtype refused that a call cannot take? | `refusal` | tensor_checks.py |
| does a failed call become an error in words? | `failed` | errors.py |
| are bytes and seconds counted? | `Ledger` | ledgers.py |
| is the time of a collective predicted? | `predict` | cost/model.py |

To add an algorithm, write a generator like `ring_all_reduce`, and name it in `ALGORITHMS`
(algorithms/registry.py); give its bytes in algorithms/formulas.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minidist._lazy import lazy

if TYPE_CHECKING:
    from minidist.comm.checking import unordered as unordered
    from minidist.comm.collectives import all_gather as all_gather
    from minidist.comm.collectives import all_reduce as all_reduce
    from minidist.comm.collectives import all_to_all as all_to_all
    from minidist.comm.collectives import barrier as barrier
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
    from minidist.comm.messages import gather as gather
    from minidist.comm.messages import recv as recv
    from minidist.comm.messages import scatter as scatter
    from minidist.comm.messages import send as send
    from minidist.comm.transport.shared_memory import empty_shared as empty_shared
    from minidist.comm.work import Work as Work
    from minidist.comm.work import using as using
    from minidist.comm.world import device as device
    from minidist.comm.world import init as init
    from minidist.comm.world import local_rank as local_rank
    from minidist.comm.world import rank as rank
    from minidist.comm.world import shutdown as shutdown
    from minidist.comm.world import size as size

__getattr__, __dir__, __all__ = lazy(__name__)
