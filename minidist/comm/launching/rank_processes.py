"""The caller's side of its ranks: one supervisor per calling process, one `RankProcess` per rank."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

from minidist.comm.launching import supervisor as supervisor_process
from minidist.comm.launching.supervisor import HEADER
from minidist.comm.transport.channel import Connection

START_METHODS = ("fork", "spawn")


def signal_name(number: int) -> str:
    """SIGKILL for 9; a real-time signal has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Supervisor:
    """A running supervisor: takes requests to start and kill ranks. One serves all clusters of a process."""

    def __init__(self, method: str) -> None:
        supervisor_process.check_not_starting()
        self.method = method
        self.owner = os.getpid()
        self._keys = itertools.count()
        # Reentrant: the garbage collector may end a forgotten Cluster, and so come here, at any moment.
        self._lock = threading.RLock()
        self._control, theirs = socket.socketpair()
        code = (
            "import sys; sys.path[:] = {!r}; "
            "from minidist.comm.launching import supervisor; supervisor.main({}, {!r})"
        )
        path = [entry for entry in sys.path if isinstance(entry, str)]
        # The supervisor has this thread's mask from its first instruction: see its file.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code.format(path, theirs.fileno(), method)],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal is the caller's to handle
                # One thread in the process that forks; ranks set their own number when they start.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        theirs.close()

    def alive(self) -> bool:
        """True where this process owns the supervisor, and it runs."""
        return self.owner == os.getpid() and self._process.poll() is None

    def start(self, descriptors: list[int]) -> int:
        """Ask for a rank that gets these descriptors; its key for `kill`."""
        with self._lock:
            key = next(self._keys)
            self._send({"kind": "start", "key": key}, descriptors)
        return key

    def kill(self, key: int) -> None:
        """Ask for a rank to be killed; no error where it, or the supervisor, is gone."""
        with self._lock, contextlib.suppress(OSError):
            self._send({"kind": "kill", "key": key}, [])

    def _send(self, request: dict[str, object], descriptors: list[int]) -> None:
        text = json.dumps(request).encode()
        # In one call: a request that Ctrl-C cuts in two would garble all that follow.
        socket.send_fds(self._control, [HEADER.pack(len(text)) + text], descriptors)

    def end(self) -> str:
        """How it ended, now that it has closed its pipes."""
        subject = "the process that starts and watches ranks"
        with contextlib.suppress(subprocess.TimeoutExpired):
            if (code := self._process.wait(1.0)) < 0:
                return f"{subject} was killed by {signal_name(-code)}"
        return f"{subject} has ended; what it wrote is above"

    def abandon(self) -> None:
        """Kill the supervisor, where it does not answer; the kernel kills its ranks with it."""
        if self.alive():
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        """Close the socket, upon which the supervisor kills its ranks and ends."""
        self._control.close()
        if self.owner == os.getpid():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10.0)
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()


_supervisors: dict[str, Supervisor] = {}
_supervisors_lock = threading.Lock()


def supervisor() -> Supervisor:
    """This process's supervisor for the start method of now, started where there is none.

    It is kept between launches on purpose: it holds torch ready, which is most of what a launch costs.
    """
    method = os.environ.get("MINIDIST_START_METHOD") or _default_method()
    if method not in START_METHODS:
        raise ValueError(
            f"the start method is {method!r}; MINIDIST_START_METHOD is one of {', '.join(START_METHODS)}"
        )
    with _supervisors_lock:
        running = _supervisors.get(method)
        if running is None or not running.alive():
            if running is not None:
                running.stop()
            running = Supervisor(method)
            if method not in _supervisors:
                atexit.register(_stop_supervisor, method)
            _supervisors[method] = running
        return running


def _default_method() -> str:
    if sys.platform == "win32":
        raise RuntimeError("minidist starts ranks on Linux and macOS; on Windows, run it inside WSL 2")
    return "fork" if sys.platform.startswith("linux") else "spawn"


def _stop_supervisor(method: str) -> None:
    if _supervisors[method].owner == os.getpid():
        _supervisors[method].stop()


class RankProcess:
    """One rank's process: its channel, its exit status, and where it is when it is stuck.

    Attributes:
        rank: the rank.
        channel: messages to and from `minidist.comm.launching.worker.serve`.
        status: readable when the process has started, and again when it has ended.
        process: the process id, once known.
        exit_code: as `subprocess` gives it, once the process has ended: negative for a signal.
        failure: why there is no such process, where that is not the process's own doing.
    """

    def __init__(self, rank: int, supervisor: Supervisor, listener: socket.socket | None) -> None:
        self.rank = rank
        self.process: int | None = None
        self.exit_code: int | None = None
        self.failure: str | None = None
        ours, theirs = socket.socketpair()
        read, write = os.pipe()
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._text = ""
        descriptors = [theirs.fileno(), write, self._stacks.fileno()]
        if listener is not None:
            descriptors.append(listener.fileno())
        try:
            self._supervisor, self._key = supervisor, supervisor.start(descriptors)
        except BaseException:
            ours.close()
            os.close(read)
            self._stacks.close()
            raise
        finally:
            theirs.close()
            os.close(write)
        self.channel = Connection(ours, blocking=False)
        self.status = read

    def read_status(self) -> None:
        """Take in what the supervisor has reported; call it when `status` is readable."""
        part = os.read(self.status, 4096)
        self._text += part.decode()
        for word, value in re.findall(r"^(\w+) (.*)\n", self._text, re.MULTILINE):
            if word == "started":
                self.process = int(value)
            elif word == "exited":
                self.exit_code = int(value)
            else:
                self.failure, self.exit_code = value, 1
        if not part and self.exit_code is None:
            self.failure, self.exit_code = self._supervisor.end(), 1

    def wait(self, limit: float) -> bool:
        """Wait up to `limit` seconds for the process to end; True where it has."""
        deadline = time.monotonic() + limit
        while self.exit_code is None:
            poll = select.poll()
            poll.register(self.status, select.POLLIN)
            if not poll.poll(1e3 * max(0.0, deadline - time.monotonic())):
                return False
            self.read_status()
        return True

    def ask_stack(self) -> None:
        """Ask the process to write the stacks of its threads; `stack` reads them a moment later."""
        if self.process is not None and self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process, signal.SIGUSR1)

    def stack(self) -> str:
        """The main thread's stack as it was when asked, innermost call last; "" where it did not answer."""
        self._stacks.seek(0)
        blocks = re.split(r"\n(?=(?:Current )?[Tt]hread 0x)", self._stacks.read().decode(errors="replace"))
        lines = [line.strip() for line in blocks[-1].splitlines() if line.strip().startswith("File ")]
        own = re.compile(r"/minidist/comm/(worker|supervisor)\.py")
        user = [line for line in lines if not own.search(line) and 'File "<string>"' not in line]
        return "\n".join(f"  {line}" for line in reversed(user))

    def kill(self) -> None:
        """Kill the process and what it has started; `wait` sees it end."""
        if self.exit_code is None:
            self._supervisor.kill(self._key)

    def kill_without_help(self) -> None:
        """Kill the process where the supervisor does not: it is stopped, say. That is then killed too."""
        if self.exit_code is None:
            if self.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.process, signal.SIGKILL)
            self._supervisor.abandon()

    def close(self) -> None:
        """Close the descriptors; an idle process ends by that."""
        self.channel.close()
        os.close(self.status)
        self._stacks.close()
