"""A rank's process: join the world, then run the functions that the caller sends.

The caller's first message is a `Setup`; each later one is a pickled call. The rank sends tuples back:
("print", stream, text), ("ready",), ("returned", Returned) or ("raised", Raised).
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import io
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta
from typing import Any, NamedTuple

from minidist.comm.launching.channel import Connection
from minidist.comm.launching.safeguards import die_with_parent, set_starting

_OWN_FILES = (__file__, os.path.join(os.path.dirname(__file__), "sending.py"))
"""Files whose frames the user does not need in a traceback."""

LONGEST_LINE = 2**16
"""Characters after which an unfinished line is sent."""


class Setup(NamedTuple):
    """The settings that a rank needs before it can run anything."""

    rank: int
    ranks: int
    port: int  # of the store on 127.0.0.1; rank 0 has its listening socket
    threads: int  # each library's threads in this rank
    timeout: float  # seconds that a collective may wait for the other ranks
    check: bool  # whether the ranks compare their calls before they begin
    run_timeout: float | None  # seconds that a run may take
    environment: dict[str, str]
    directory: str
    path: list[str]


class Returned(NamedTuple):
    """The result of a function in a rank."""

    value: bytes  # pickled
    caught: str = ""  # the error of a call that began and failed, if the function has caught one


class Raised(NamedTuple):
    """An exception that a function raised in a rank."""

    when: float  # time.monotonic(), which all processes of a machine share
    summary: str  # "ValueError: ..."
    traceback: str
    exception: bytes | None  # pickled, if it can be


def serve(
    parent: int, connection_descriptor: int, stacks_descriptor: int, listener: int | None = None
) -> int:
    """Serve the caller until it closes the connection. Returns the exit code."""
    set_starting(True)
    die_with_parent(parent)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # blocked in the supervisor, and so here
    channel = Connection(socket.socket(fileno=connection_descriptor), blocking=True)
    received = channel.messages()
    faulthandler.register(signal.SIGUSR1, file=stacks_descriptor, all_threads=True)
    setup: Setup = pickle.loads(next(received))
    lock = threading.Lock()

    def send(*message: object) -> None:
        with lock:
            channel.send(pickle.dumps(message))

    streams = RankStream(send, "stdout", 1), RankStream(send, "stderr", 2)
    sys.stdout, sys.stderr = streams
    try:
        _prepare(setup)
        _join(setup, listener)
    except BaseException as error:
        send("raised", _raised(error))
        return 1
    set_starting(False)
    send("ready")
    for call in received:
        outcome: tuple[str, object]
        try:
            outcome = ("returned", _run(call, setup.run_timeout))
        except BaseException as error:
            outcome = ("raised", _raised(error))
        del call
        sys.stdout, sys.stderr = streams  # the function may have replaced them
        for stream in streams:
            stream.finish_line()
        send(*outcome)
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    return 0


def _run(call: bytearray, limit: float | None) -> Returned:
    """Run what `pickle_call` pickled in at most `limit` seconds, and pickle what it returns."""
    import cloudpickle
    import torch.distributed as dist

    from minidist.comm import errors, returned_ranks, work
    from minidist.comm.checking import call_checker
    from minidist.comm.launching.sending import forget

    joined = dist.group.WORLD
    function, args, kwargs, forgotten = pickle.loads(call)
    forget(forgotten)
    with call_checker.run(limit):
        value = function(*args, **kwargs)
        if dist.group.WORLD is not joined:
            raise RuntimeError(
                "the function left this rank's world or made another; call minidist.shutdown() instead, "
                "which leaves only what minidist.init() joined"
            )
        work.finish()
    returned_ranks.end_run()
    try:
        return Returned(bytes(cloudpickle.dumps(value)), *errors.out_of_step[:1])
    except Exception as error:
        name = getattr(function, "__qualname__", repr(function))
        raise TypeError(
            f"{name} returned a {type(value).__name__} that cannot be sent back ({error}); "
            "return tensors, arrays or plain Python values"
        ) from error


def _prepare(setup: Setup) -> None:
    """Take over the caller's environment, and use this rank's share of the cores."""
    threads = str(setup.threads)
    os.environ.clear()
    os.environ.update(setup.environment)
    os.environ.update(
        RANK=str(setup.rank),
        LOCAL_RANK=str(setup.rank),
        WORLD_SIZE=str(setup.ranks),
        LOCAL_WORLD_SIZE=str(setup.ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(setup.port),
        OMP_NUM_THREADS=threads,
        MKL_NUM_THREADS=threads,
        OPENBLAS_NUM_THREADS=threads,
        NUMBA_NUM_THREADS=threads,
    )
    # Without it gloo looks up the host's name, and may bind an address that other machines can reach.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform.startswith("linux") else "lo0")
    os.chdir(setup.directory)
    sys.path[:] = setup.path

    import torch
    from threadpoolctl import threadpool_limits

    from minidist.comm.launching.sending import send_to_workers

    send_to_workers()
    torch.set_num_threads(setup.threads)
    threadpool_limits(setup.threads)  # for libraries loaded before the variables above were set


def _join(setup: Setup, listener: int | None) -> None:
    """Form the world with the other ranks: a store in rank 0, then gloo (and NCCL with GPUs)."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from minidist.comm import world

    # torch asks a name server who 127.0.0.1 is, from all ranks at once. When a question is lost, the resolver
    # waits for 5 seconds before it asks again; this lets it wait for one.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")
    limit = timedelta(seconds=setup.timeout)
    store = TCPStore(
        "127.0.0.1",
        setup.port,
        is_master=setup.rank == 0,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=listener,
    )
    world.join(store, setup.rank, setup.ranks, limit, setup.check)


def _raised(error: BaseException) -> Raised:
    frames = traceback.TracebackException.from_exception(error)
    while frames.stack and frames.stack[0].filename in _OWN_FILES:
        del frames.stack[0]
    text = "".join(frames.format())
    try:
        import cloudpickle

        exception = cloudpickle.dumps(error)
        pickle.loads(exception)  # some exceptions can be pickled and not unpickled
    except BaseException:
        exception = None
    return Raised(time.monotonic(), "".join(frames.format_exception_only()).strip(), text, exception)


class RankStream(io.TextIOBase):
    """A rank's stdout or stderr. Sends whole lines to the caller, which labels them with the rank."""

    def __init__(self, send: Any, name: str, descriptor: int) -> None:
        self._send, self._name, self._descriptor = send, name, descriptor
        self._parts: list[str] = []  # of the unfinished line
        self._length = 0

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """UTF-8."""
        return "utf-8"

    def writable(self) -> bool:
        """True."""
        return True

    def fileno(self) -> int:
        """Return the process's own descriptor, for libraries that write past Python."""
        return self._descriptor

    def write(self, text: str) -> int:
        """Send the complete lines; keep the rest until its line ends or grows very long."""
        complete, newline, rest = text.rpartition("\n")
        if newline:
            self._parts.append(complete)
            self.finish_line(newline)
        self._parts.append(rest)
        self._length += len(rest)
        if self._length > LONGEST_LINE:
            self.finish_line("\n")
        return len(text)

    def finish_line(self, end: str = "") -> None:
        """Send the unfinished line, if there is one, or if it ends here."""
        if line := "".join(self._parts) + end:
            self._send("print", self._name, line)
        self._parts, self._length = [], 0
