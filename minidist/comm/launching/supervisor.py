"""The process that starts ranks, and lets none of them outlive the caller.

The caller starts one supervisor. It imports torch once and then forks a rank in milliseconds, where a fresh
interpreter would need a second of both cores each time. A fork is safe here, and not in the caller, since
this process never runs anything: no thread pool, no CUDA context, one thread.

It keeps two promises. Each rank's exit status is reported, signal included. And when the caller is gone, in
whatever way, every rank is killed with the processes that it started: the supervisor sees the end of its
control socket; should it be killed itself, the kernel kills its ranks (`prctl(PR_SET_PDEATHSIG)`; where
there is none, a thread in each rank watches).

It takes no SIGTERM, which a scheduler sends to every process of a job at once: ranks that save before they
leave need it until then. It ends with its caller.

macOS's frameworks do not survive a fork: with `method="spawn"` a rank is a fresh interpreter instead.

Run by `minidist.comm.launching.rank_processes.Supervisor`; not by hand.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
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

HEADER = struct.Struct("!I")
"""Each request is a header with the length of a JSON text, then the text; descriptors ride on the header."""
MAX_DESCRIPTORS = 4

PRELOAD = "MINIDIST_PRELOAD"
"""Modules, with commas between them, that ranks have from their first instruction, imported once for all.

They must start no thread. `torch._dynamo` is what torch imports at a rank's first optimizer, for a second.
"""

_PR_SET_PDEATHSIG = 1
_starting = False


def _preload(names: str) -> None:
    for name in filter(None, map(str.strip, names.split(","))):
        try:
            importlib.import_module(name)
        except ImportError as error:
            print(f"{PRELOAD} names {name!r}, which cannot be imported: {error}", file=sys.stderr)


def preload_optimizers() -> None:
    """Have ranks from now on start with what an optimizer needs, unless PRELOAD names modules already."""
    os.environ.setdefault(PRELOAD, "torch._dynamo")


def starting(now: bool) -> None:
    """Say whether this process is on its way to being a supervisor or a rank, and must not launch others."""
    global _starting
    _starting = now


def check_not_starting() -> None:
    """RuntimeError in a process that is being started: imports that launch would start ever more of them."""
    if not _starting:
        return
    own = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith((own, "<frozen")):
        frame = frame.f_back
    culprit = frame.f_code.co_filename if frame is not None else "a script"
    raise RuntimeError(
        f"{culprit} was imported while ranks were being started, and launches ranks itself; it probably has "
        "the name of a module that others import, such as one of the standard library's: rename it"
    )


def main(control_descriptor: int, method: str) -> None:
    """Serve requests on `control_descriptor` until the caller closes it or dies."""
    starting(True)
    Supervise(socket.socket(fileno=control_descriptor), method).serve()


class Supervise:
    """State of the supervisor: the control socket, and the ranks that live."""

    def __init__(self, control: socket.socket, method: str) -> None:
        self.control = control
        self.method = method
        self.caller = os.getppid()
        self.ranks: dict[int, tuple[int, int]] = {}  # key of the request -> (process id, status descriptor)
        if method == "fork":
            # Loaded here so that each rank has it from its first instruction.
            from minidist.comm import collectives, messages, world  # noqa: F401
            from minidist.comm.launching import worker  # noqa: F401

            _preload(os.environ.get(PRELOAD, ""))
            gc.freeze()  # a collection in a rank need not look at torch's objects, nor copy their pages

    def serve(self) -> None:
        """Start, kill and reap until the caller is gone, then kill what is left."""
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
                # A second between looks at the parent: its death normally shows as the end of the socket.
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

    def handle(self) -> bool:
        """Read one request and act on it; False where the caller has closed the socket."""
        header, descriptors, _, _ = socket.recv_fds(self.control, HEADER.size, MAX_DESCRIPTORS)
        if len(header) < HEADER.size:
            return False
        request = json.loads(_receive_exactly(self.control, HEADER.unpack(header)[0]))
        if request["kind"] == "start":
            self.start(request["key"], descriptors)
        else:
            self.kill(request["key"])
        return True

    def start(self, key: int, descriptors: list[int]) -> None:
        """Start a rank; descriptors are its connection, status, stack file and perhaps a listening socket."""
        connection, status, *rest = descriptors
        with contextlib.ExitStack() as stack:
            for descriptor in (connection, *rest):
                stack.callback(os.close, descriptor)
            try:
                process = self.fork(connection, rest) if self.method == "fork" else _spawn(connection, rest)
            except OSError as error:  # no process or memory left to start one
                _report(status, f"failed none could be started ({error})")
                os.close(status)
                return
        self.ranks[key] = (process, status)
        _report(status, f"started {process}")

    def fork(self, connection: int, rest: list[int]) -> int:
        """Fork a rank. The child keeps its own descriptors alone: a copy of another's would hide its end."""
        supervisor = os.getpid()
        process = os.fork()
        if process:
            return process
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            die_with_parent(supervisor)
            self.control.close()
            for _, status in self.ranks.values():
                os.close(status)
            from minidist.comm.launching import worker

            code = worker.serve(connection, *rest)
        except BaseException:
            traceback.print_exc()
        finally:
            # Not sys.exit: the supervisor's own frames and handlers are not this process's to run.
            os._exit(code)

    def kill(self, key: int) -> None:
        """Kill a rank and what it started; its status is reported when it is reaped."""
        if key in self.ranks:
            process, _ = self.ranks[key]
            _kill_group(process)
            os.kill(process, signal.SIGKILL)  # a rank so young that it has no group of its own yet

    def reap(self) -> None:
        """Report the exit status of each rank that has ended."""
        for key, (process, status) in list(self.ranks.items()):
            ended, wait_status = os.waitpid(process, os.WNOHANG)
            if ended:
                _kill_group(process)  # the processes that the rank had started
                _report(status, f"exited {os.waitstatus_to_exitcode(wait_status)}")
                os.close(status)
                del self.ranks[key]


def die_with_parent(parent: int) -> bool:
    """Ask the kernel to kill this process when its parent dies; False where the system has no such call."""
    if not sys.platform.startswith("linux"):
        return False
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)
    return True


def _spawn(connection: int, rest: list[int]) -> int:
    """Start a rank as a fresh interpreter."""
    code = (
        "import sys; sys.path[:] = {!r}; "
        "from minidist.comm.launching import worker; sys.exit(worker.serve(*{!r}))"
    )
    arguments = [sys.executable, "-c", code.format(sys.path, (connection, *rest))]
    child = subprocess.Popen(
        arguments, pass_fds=(connection, *rest), start_new_session=True, stdin=subprocess.DEVNULL
    )
    child.returncode = 0  # reaped by `reap`; Popen must not do it, nor warn that nobody did
    return child.pid


def _kill_group(process: int) -> None:
    """Kill the process group that a rank leads; no error where it has none (left)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)


def _report(status: int, line: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # a caller that no longer reads needs no report
        os.write(status, f"{line}\n".encode())


def _receive_exactly(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            raise EOFError("the caller closed its socket in the middle of a request")
        data += part
    return data


def _wake(number: int, frame: FrameType | None) -> None:
    """Do nothing: the signal has done its work by writing to the wake-up descriptor."""
