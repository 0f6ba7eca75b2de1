"""The process that starts ranks, notices their deaths, and kills them when the caller is gone.

The caller starts one supervisor. The supervisor imports torch once and then forks each rank in milliseconds;
a fresh interpreter would need a second of both cores. Forking is safe here and not in the caller, because
this process runs nothing: it has no thread pool, no CUDA context, and one thread.

It keeps two promises. It reports the exit status of each rank, signals included; collect_results.py words
the error. And when the caller is gone, however that came about, it kills every rank and the processes that
the rank started: it sees the end of its control socket. If the supervisor itself is killed, the kernel kills
its ranks (`prctl(PR_SET_PDEATHSIG)`; elsewhere a thread in each rank watches).

It blocks SIGTERM, which a scheduler sends to every process of a job at once: ranks that save before they
leave still need the supervisor. It ends with its caller.

macOS's frameworks do not survive a fork, so there `method="spawn"` starts each rank as a fresh interpreter.

`minidist.comm.launching.rank_processes.Supervisor` runs this file; do not run it by hand.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from types import FrameType

from minidist.comm.launching.channel import LENGTH
from minidist.comm.launching.safeguards import set_starting

REQUEST = struct.Struct("!Q?")
"""A request: the key of a rank, and whether to start it (with its file descriptors) or to kill it."""
MAX_DESCRIPTORS = 4

PRELOAD = "MINIDIST_PRELOAD"
"""Environment variable: modules, separated by commas, that the supervisor imports once for all ranks.

They must start no thread. torch imports `torch._dynamo` at a rank's first optimizer, which takes a second.
"""


def _preload(names: str) -> None:
    for name in filter(None, map(str.strip, names.split(","))):
        try:
            importlib.import_module(name)
        except ImportError as error:
            print(f"{PRELOAD} names {name!r}, which cannot be imported: {error}", file=sys.stderr)


def preload_optimizers() -> None:
    """Preload what an optimizer needs in ranks started from now on, unless PRELOAD names modules already."""
    os.environ.setdefault(PRELOAD, "torch._dynamo")


def main(control_descriptor: int, method: str) -> None:
    """Serve requests on `control_descriptor` until the caller closes it or dies."""
    set_starting(True)
    SupervisorServer(socket.socket(fileno=control_descriptor), method).serve()


class SupervisorServer:
    """Serves requests to start and kill ranks, and reports the exit status of each rank."""

    def __init__(self, control: socket.socket, method: str) -> None:
        self.control = control
        self.method = method
        self.caller = os.getppid()
        self.ranks: dict[int, tuple[int, int]] = {}  # the request's key -> (process id, status descriptor)
        if method == "fork":
            gc.disable()  # nearly all objects that the imports make stay
            # Imported before the fork, so that no rank has to.
            from minidist.comm import collectives, messages, world  # noqa: F401
            from minidist.comm.launching import worker  # noqa: F401

            _preload(os.environ.get(PRELOAD, ""))
            gc.enable()
            gc.freeze()  # spare the ranks collecting, and so copying the pages of, torch's objects

    def serve(self) -> None:
        """Start, kill and reap ranks until the caller is gone, then kill those that are left."""
        woken, wake = os.pipe()
        os.set_blocking(woken, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, _wake)
        try:
            poll = select.poll()
            for descriptor in (self.control.fileno(), woken):
                poll.register(descriptor, select.POLLIN)
            while os.getppid() == self.caller:
                # The caller's death normally ends the socket; the parent is looked at once a second as well.
                ready = [descriptor for descriptor, _ in poll.poll(1000)]
                if woken in ready:
                    os.read(woken, 4096)
                self.reap()
                if self.control.fileno() in ready and not self.handle():
                    break
        finally:
            for key in list(self.ranks):
                self.kill(key)
            deadline = time.monotonic() + 5.0
            while self.ranks and time.monotonic() < deadline:
                self.reap()
                time.sleep(0.005)
            gc.unfreeze()  # triton of torch 2.15 reports frozen objects as leaks when Python exits

    def handle(self) -> bool:
        """Read one request and act on it; False if the caller has closed the socket."""
        request, descriptors, _, _ = socket.recv_fds(self.control, REQUEST.size, MAX_DESCRIPTORS)
        if len(request) < REQUEST.size:
            return False
        key, start = REQUEST.unpack(request)
        if start:
            self.start(key, descriptors)
        else:
            self.kill(key)
        return True

    def start(self, key: int, descriptors: list[int]) -> None:
        """Start a rank. descriptors: its connection, status, stack file and perhaps a listening socket."""
        connection, status, *rest = descriptors
        with contextlib.ExitStack() as stack:
            for descriptor in (connection, *rest):
                stack.callback(os.close, descriptor)
            try:
                process = self.fork(connection, rest) if self.method == "fork" else _spawn(connection, rest)
            except OSError as error:  # too many processes, or too little memory
                _report(status, f"failed it could not be started ({error})")
                os.close(status)
                return
        self.ranks[key] = (process, status)
        _report(status, f"started {process}")

    def fork(self, connection: int, rest: list[int]) -> int:
        """Fork a rank. It closes other ranks' descriptors: a copy would hide that a rank has ended."""
        supervisor = os.getpid()
        process = os.fork()
        if process:
            return process
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            self.control.close()
            for _, status in self.ranks.values():
                os.close(status)
            from minidist.comm.launching import worker

            code = worker.serve(supervisor, connection, *rest)
        except BaseException:
            traceback.print_exc()
        finally:
            # Not sys.exit, which would run the supervisor's frames and exit handlers.
            os._exit(code)

    def kill(self, key: int) -> None:
        """Kill a rank and the processes that it started. `reap` reports its status."""
        if key in self.ranks:
            process, _ = self.ranks[key]
            _kill_group(process)
            os.kill(process, signal.SIGKILL)  # a young rank may not lead a process group yet

    def reap(self) -> None:
        """Report the exit status of each rank that has ended."""
        for key, (process, status) in list(self.ranks.items()):
            ended, wait_status = os.waitpid(process, os.WNOHANG)
            if ended:
                _kill_group(process)  # kills what the rank had started
                _report(status, f"exited {os.waitstatus_to_exitcode(wait_status)}")
                os.close(status)
                del self.ranks[key]


def _spawn(connection: int, rest: list[int]) -> int:
    """Start a rank as a fresh interpreter."""
    code = (
        "import sys; sys.path[:] = {!r}; "
        "from minidist.comm.launching import worker; sys.exit(worker.serve(*{!r}))"
    )
    arguments = [sys.executable, "-c", code.format(sys.path, (os.getpid(), connection, *rest))]
    child = subprocess.Popen(
        arguments, pass_fds=(connection, *rest), start_new_session=True, stdin=subprocess.DEVNULL
    )
    child.returncode = 0  # `reap` waits for it; Popen must neither wait nor warn
    return child.pid


def _kill_group(process: int) -> None:
    """Kill the process group that a rank leads, if there is one."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)


def _report(status: int, line: str) -> None:
    message = line.encode()
    with contextlib.suppress(BrokenPipeError):  # the caller no longer reads
        os.write(status, LENGTH.pack(len(message)) + message)


def _wake(number: int, frame: FrameType | None) -> None:
    """Do nothing: the signal has already written to the wake-up descriptor."""
