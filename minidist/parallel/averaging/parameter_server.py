"""The parameter server: workers pull parameters, push gradients, and need not wait for each other.

Servers hold the parameters and the optimizer. A worker pulls the parameters, computes gradients on its own
rows and pushes them; the server updates the parameters as soon as they arrive. Nobody waits for a slow or
dead worker. The price is staleness: while a worker computes, other workers' updates change the parameters.
Staleness is measured, and bounded on request. With bound 0 this is the classical synchronous parameter
server.

Sources: Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server" (OSDI), sections 3
and 5; Dean et al. 2012, "Large Scale Distributed Deep Networks" (NeurIPS), section 4.1 (Downpour SGD).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from minidist import comm
from minidist._arguments import check_whole
from minidist.parallel.averaging.parameter_assignment import deal_parameters, trainable
from minidist.parallel.averaging.serving import Ask, ServerReport, Serving, Tag
from minidist.parallel.contract.user_functions import MakeOptimizer
from minidist.parallel.guards.refusals import require_model


class ParameterServer:
    """Trains with workers that do not wait for each other, in a loop that the user writes.

    Every rank makes one. The first `servers` ranks then serve, and the others work:

    >>> server = md.ParameterServer(model, partial(torch.optim.SGD, lr=0.1))
    >>> if server.is_server:
    ...     report = server.serve()
    ... else:
    ...     for inputs, targets in batches:
    ...         server.pull()
    ...         cross_entropy(model(inputs), targets).backward()
    ...         server.push(rows=len(inputs))
    ...     server.done()

    `Sampler(rows, batch, rank=server.worker, ranks=server.workers)` deals a worker its rows. To let fast
    workers do more than their share, loop `while server.pull() < updates`. At the end all living ranks hold
    the same parameters; buffers are each rank's own.

    Nobody waits longer than the world's time limit, so no step may take longer, and no worker may be done so
    much earlier than the others. A worker that dies does not stop the others if the launcher allows it, as in
    `md.launch(work, 3, may_fail=(1, 2))`. What it had pushed counts, and the report names it; with several
    servers, its last push may have reached only some. A server that dies stops all ranks, and so does a rank
    that dies before all have made their ParameterServer.

    For P trainable parameters of S bytes and K servers, one step of a worker sends 32 K + P + S bytes from
    the worker and 16 K + S from the servers. The constructor broadcasts parameters and buffers from rank 0,
    and the end costs one more pull. Messages go through the CPU even if the model is on a GPU.

    Args:
        model: the same architecture on all ranks.
        optimizer: a function from parameters to a torch optimizer. Each server calls it for its own part, so
            an optimizer that looks at all parameters together, say at their global norm, needs `servers=1`.
        servers: how many ranks serve. Each holds whole parameters, of about the same number of bytes.
        max_staleness: the most updates between a worker's pull and the update that contains its push. Workers
            that are ahead wait in `pull`, and pushes that would become too old share an update, which takes
            their mean over rows. 0: each update takes one push of every worker, as one process would. None:
            no bound, and each push is an update by itself.

    Raises TypeError or ValueError if an argument is wrong, or the world is too small.
    """

    def __init__(
        self, model: nn.Module, optimizer: MakeOptimizer, servers: int = 1, max_staleness: int | None = None
    ) -> None:
        _check(model, optimizer, servers, max_staleness)
        rank, ranks = comm.rank(), comm.size()
        self.model = model
        self.is_server = rank < servers
        self.worker = -1 if self.is_server else rank - servers  # index among the workers; -1 on a server
        self.workers = ranks - servers  # how many there are
        self.max_staleness = max_staleness
        self._parts = deal_parameters(trainable(model), servers)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                comm.broadcast(tensor, source=0)
        self.optimizer = optimizer(self._parts[rank].parameters) if self.is_server else None
        self._finished = self._pulled = False
        self._sending: list[comm.Work] = []

    def pull(self) -> int:
        """Load the newest parameters into the model, on a worker. Sends 16 bytes to each server.

        With a bound on staleness, this waits until the worker's last push is in an update. Returns how many
        updates these parameters contain; with several servers, the fewest on any of them. Raises RuntimeError
        on a server, or after `done`.
        """
        self._check_working("pull")
        updates = self._ask(Ask.PULL)
        self._pulled = True
        return updates

    def push(self, rows: int) -> None:
        """Send the model's gradients to the servers and clear them, without waiting for the update.

        Sends 16 K + P + S bytes. `rows`, at least 1, is how many rows the gradients are the mean over; it is
        the weight of this push in a shared update. Raises TypeError or ValueError if `rows` is not a positive
        integer, RuntimeError on a server, after `done`, or without a `pull` since the last push.
        """
        self._check_working("push")
        check_whole("rows", rows, 1)
        if not self._pulled:
            raise RuntimeError("push was called without a pull before it; call pull before each step")
        self._pulled = False
        self._request(Ask.PUSH, rows)
        for server, part in enumerate(self._parts):
            self._send(part.pack_gradients(), server, Tag.GRADIENTS)
        for parameter in self.model.parameters():
            parameter.grad = None

    def done(self) -> None:
        """Tell the servers that this worker is done, wait for the others, and load the final parameters.

        Sends 32 bytes to each server. Raises RuntimeError on a server, or when called a second time.
        """
        self._check_working("done")
        self._ask(Ask.DONE)
        self._finished = True
        self._request(Ask.LEAVE)
        self._wait_until_sent()

    def serve(self, after_update: Callable[[int], object] | None = None) -> ServerReport:
        """Make updates until every worker is done or dead, on a server. Sends 16 + S_k bytes for each pull.

        S_k is the bytes of this server's part; at the end it also sends the part to each other server.
        `after_update` is called after each update with the number of updates so far, say to change the
        learning rate or to evaluate the model; workers that pull wait for it. Raises RuntimeError on a
        worker, or when called a second time.
        """
        if self.optimizer is None:
            raise RuntimeError(
                f"serve was called on rank {comm.rank()}, which works: call pull, push and done there"
            )
        if self._finished:
            raise RuntimeError("serve was called a second time; make a new ParameterServer")
        self._finished = True
        workers = range(len(self._parts), comm.size())
        return Serving(self._parts, self.optimizer, workers, self.max_staleness).run(after_update)

    def _ask(self, what: int) -> int:
        """Send a request to all servers, and load their replies into the model."""
        self._request(what)
        values = [comm.recv(part.empty_values(), k, Tag.VALUES) for k, part in enumerate(self._parts)]
        self._wait_until_sent()
        return min(part.load_values(v) for part, v in zip(self._parts, values, strict=True))

    def _request(self, what: int, rows: int = 0) -> None:
        for server in range(len(self._parts)):
            self._send(torch.tensor([what, rows]), server, Tag.REQUEST)

    def _send(self, message: Tensor, server: int, tag: int) -> None:
        self._sending.append(comm.send(message, server, tag, async_op=True))

    def _wait_until_sent(self) -> None:
        """Wait until all messages have left. The servers have answered them, or this worker is leaving."""
        while self._sending:
            self._sending.pop().wait()

    def _check_working(self, name: str) -> None:
        if self.is_server:
            raise RuntimeError(f"{name} was called on rank {comm.rank()}, which serves; call serve() there")
        if self._finished:
            raise RuntimeError(f"{name} was called after done; call done once, after the last push")


def _check(model: nn.Module, optimizer: MakeOptimizer, servers: int, max_staleness: int | None) -> None:
    require_model(model, optimizer)
    check_whole("servers", servers, 1)
    if max_staleness is not None:
        check_whole("max_staleness", max_staleness, 0, ", or None for no bound")
    if servers >= comm.size():
        raise ValueError(
            f"servers is {servers}, but the world has {comm.size()} ranks; start at least {servers + 1}, so "
            "that one of them works"
        )
