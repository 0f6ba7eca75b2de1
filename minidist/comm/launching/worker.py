"""What runs in a rank: join the world, then run the functions that the caller sends.

The caller's first message is a `Setup`; each later one is a pickled call. Answers are tuples:
("print", stream, text), ("ready",), ("returned", pickled value) or ("raised", Raised).
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
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from minidist.comm.transport.channel import Connection

LONGEST_LINE = 2**16
"""Characters after which a line is sent that has not ended."""


@dataclass(frozen=True)
class Setup:
    """What a rank has to know before it can run anything."""

    rank: int
    ranks: int
    port: int  # of the store on 127.0.0.1, whose listening socket rank 0 was given
    threads: int  # each library's threads in this rank
    timeout: float  # seconds that a collective may wait for the other ranks
    check: bool  # whether the ranks compare their calls before they begin
    run_timeout: float | None  # seconds that a run may take
    environment: dict[str, str]
    directory: str
    path: list[str]


@dataclass(frozen=True)
class Raised:
    """An exception as it left a rank."""

    when: float  # time.monotonic(), which the processes of one machine share
    summary: str  # "ValueError: ..."
    traceback: str
    exception: bytes | None  # pickled, where it can be


def serve(connection_descriptor: int, stacks_descriptor: int, listener: int | None = None) -> int:
    """Serve the caller until it closes the connection; the exit code."""
    from minidist.comm.launching import supervisor

    supervisor.starting(True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # the supervisor's, and so this process's
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
    supervisor.starting(False)
    send("ready")
    for call in received:
        answer: tuple[str, object]
        try:
            answer = ("returned", _run(call, setup.run_timeout))
        except BaseException as error:
            answer = ("raised", _raised(error))
        del call
        sys.stdout, sys.stderr = streams  # the function may have put others in their place
        for stream in streams:
            stream.finish_line()
        send(*answer)
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    return 0


def _run(call: bytearray, limit: float | None) -> bytes:
    """Run a pickled (function, args, kwargs), in `limit` seconds at most, and pickle what it returns."""
    import cloudpickle
    import torch.distributed as dist

    from minidist.comm import checking, work

    joined = dist.group.WORLD
    function, args, kwargs = pickle.loads(call)
    with checking.run(limit):
        value = function(*args, **kwargs)
        if dist.group.WORLD is not joined:
            raise RuntimeError(
                "the function left this rank's world or made another; call minidist.shutdown() instead, "
                "which leaves only what minidist.init() joined"
            )
        work.finish()
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        name = getattr(function, "__qualname__", repr(function))
        raise TypeError(
            f"{name} returned a {type(value).__name__} that cannot be sent back ({error}); "
            "return tensors, arrays or plain Python values"
        ) from error


def _prepare(setup: Setup) -> None:
    """Take over the caller's environment, and this rank's share of the cores."""
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
    # Without it gloo looks up this host's name, and may bind an address that others can reach.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform.startswith("linux") else "lo0")
    with contextlib.suppress(OSError):  # a directory that has been removed since
        os.chdir(setup.directory)
    sys.path[:] = setup.path

    from minidist.comm.launching.supervisor import die_with_parent

    if not die_with_parent(os.getppid()):
        threading.Thread(
            target=_end_with_parent, args=(os.getppid(),), daemon=True, name="minidist-parent"
        ).start()

    import torch
    from threadpoolctl import threadpool_limits

    torch.set_num_threads(setup.threads)
    threadpool_limits(setup.threads)  # libraries that were loaded before the variables above were set


def _join(setup: Setup, listener: int | None) -> None:
    """Form the world with the other ranks: a store in rank 0, then gloo (and NCCL where there are GPUs)."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from minidist.comm import world

    limit = timedelta(seconds=setup.timeout)
    store = TCPStore(
        "127.0.0.1",
        setup.port,
        setup.ranks,
        is_master=setup.rank == 0,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=listener,
    )
    world.join(store, setup.rank, setup.ranks, limit, setup.check)


def _end_with_parent(parent: int) -> None:
    """End this process within a second of its parent: for systems whose kernel does not see to it."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _raised(error: BaseException) -> Raised:
    frames = traceback.TracebackException.from_exception(error)
    while frames.stack and frames.stack[0].filename == __file__:
        del frames.stack[0]  # this file's own frames tell the reader nothing
    text = "".join(frames.format())
    try:
        import cloudpickle

        exception = cloudpickle.dumps(error)
        pickle.loads(exception)  # some exceptions pickle, but cannot be made again
    except BaseException:
        exception = None
    return Raised(time.monotonic(), "".join(frames.format_exception_only()).strip(), text, exception)


class RankStream(io.TextIOBase):
    """A rank's stdout or stderr: whole lines go to the caller, which prints them with the rank's label."""

    def __init__(self, send: Any, name: str, descriptor: int) -> None:
        self._send, self._name, self._descriptor = send, name, descriptor
        self._parts: list[str] = []  # of the line that is not complete
        self._length = 0

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Always UTF-8."""
        return "utf-8"

    def writable(self) -> bool:
        """True."""
        return True

    def fileno(self) -> int:
        """The process's own descriptor, for those who must write past Python."""
        return self._descriptor

    def write(self, text: str) -> int:
        """Send the lines that are complete; keep the rest until it is, or has grown very long."""
        complete, newline, rest = text.rpartition("\n")
        if newline:
            self._send("print", self._name, "".join((*self._parts, complete, newline)))
            self._parts, self._length = [], 0
        self._parts.append(rest)
        self._length += len(rest)
        if self._length > LONGEST_LINE:
            self.finish_line()
        return len(text)

    def finish_line(self) -> None:
        """Send what is left of a line that was never ended."""
        if self._length:
            self._send("print", self._name, "".join((*self._parts, "\n")))
        self._parts, self._length = [], 0
