"""The caller's handles: `Supervisor`, one per calling process, and `RankProcess`, one per rank."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

from minidist.comm.launching.channel import Connection, wait_for
from minidist.comm.launching.safeguards import check_not_starting
from minidist.comm.launching.supervisor import REQUEST

START_METHODS = ("fork", "spawn")
KILL_TIMEOUT = 3.0
"""Seconds that the supervisor has to kill ranks; then the caller kills the supervisor."""


def signal_name(number: int) -> str:
    """Return "SIGKILL" for 9, and "signal 40" for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Supervisor:
    """A running supervisor process, which starts and kills ranks for all clusters of this process."""

    def __init__(self, method: str) -> None:
        check_not_starting()
        self.method = method
        self.owner = os.getpid()
        self.answered = False  # whether it has started a rank; before, it may still be importing torch
        self._keys = itertools.count()
        # Reentrant: at any moment the garbage collector may end a forgotten Cluster, which comes here.
        self._lock = threading.RLock()
        self._control, theirs = socket.socketpair()
        code = (
            "import sys; sys.path[:] = {!r}; "
            "from minidist.comm.launching import supervisor; supervisor.main({}, {!r})"
        )
        path = [entry for entry in sys.path if isinstance(entry, str)]
        # The supervisor inherits this thread's signal mask, so it never takes SIGTERM; see supervisor.py.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code.format(path, theirs.fileno(), method)],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal reaches the caller alone
                # The process that forks has one thread; ranks set their number when they start.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        theirs.close()

    def alive(self) -> bool:
        """Whether this process owns the supervisor, and it runs."""
        return self.owner == os.getpid() and self._process.poll() is None

    def start(self, descriptors: list[int]) -> int:
        """Ask for a rank that gets these descriptors. Returns its key, for `kill`."""
        with self._lock:
            key = next(self._keys)
            # One call sends a request, so Ctrl-C cannot cut it in two and garble all later ones.
            socket.send_fds(self._control, [REQUEST.pack(key, True)], descriptors)
        return key

    def kill(self, key: int) -> None:
        """Ask for a rank to be killed. No error if the rank or the supervisor is gone."""
        with self._lock, contextlib.suppress(OSError):
            self._control.send(REQUEST.pack(key, False))

    def end(self) -> str:
        """Say how the supervisor ended, once it has closed its end of the connections."""
        subject = "the process that starts and watches ranks"
        with contextlib.suppress(subprocess.TimeoutExpired):
            if (code := self._process.wait(1.0)) < 0:
                return f"{subject} was killed by {signal_name(-code)}"
        return f"{subject} has ended; what it wrote is above"

    def abandon(self) -> None:
        """Kill a supervisor that does not respond; the kernel then kills its ranks."""
        if self.alive():
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        """Close the socket; the supervisor then kills its ranks and ends."""
        self._control.close()
        if self.owner == os.getpid():
            # Ctrl-C while the program ends: do not wait, and show no traceback of this place.
            with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                self._process.wait(10.0)
            self.abandon()


_supervisors: dict[str, Supervisor] = {}
_supervisors_lock = threading.Lock()


def supervisor() -> Supervisor:
    """Return this process's supervisor for the current start method, and start it if there is none.

    It stays up between launches, because it holds torch ready, which is most of what a launch costs.
    """
    if sys.platform == "win32":
        raise RuntimeError("minidist starts ranks on Linux and macOS; on Windows, run it inside WSL 2")
    default = "fork" if sys.platform.startswith("linux") else "spawn"
    method = os.environ.get("MINIDIST_START_METHOD") or default
    if method not in START_METHODS:
        raise ValueError(
            f"the start method is {method!r}; MINIDIST_START_METHOD is one of {', '.join(START_METHODS)}"
        )
    with _supervisors_lock:
        running = _supervisors.get(method)
        if running is None or not running.alive():
            if running is not None:
                running.stop()
            running = _supervisors[method] = Supervisor(method)
            atexit.register(running.stop)
        return running


class RankProcess:
    """One rank's process: its channel, its exit status, and its stack when it is stuck.

    Attributes:
        supervisor: the process that starts and kills it.
        channel: messages to and from `minidist.comm.launching.worker.serve`.
        status: messages of the supervisor: that the process has started, and that it has ended.
        process: the process id, once known.
        exit_code: as `subprocess` gives it, once the process has ended: negative for a signal.
        failure: why the process does not exist, if the process did not cause that itself.
    """

    def __init__(self, rank: int, supervisor: Supervisor, listener: socket.socket | None) -> None:
        self.rank = rank
        self.process: int | None = None
        self.exit_code: int | None = None
        self.failure: str | None = None
        ours, theirs = socket.socketpair()
        status, report = socket.socketpair()
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        descriptors = [theirs.fileno(), report.fileno(), self._stacks.fileno()]
        if listener is not None:
            descriptors.append(listener.fileno())
        try:
            self.supervisor, self._key = supervisor, supervisor.start(descriptors)
        except BaseException:
            ours.close()
            status.close()
            self._stacks.close()
            raise
        finally:
            theirs.close()
            report.close()
        self.channel, self.status = (Connection(each, blocking=False) for each in (ours, status))

    def read_status(self) -> None:
        """Read what the supervisor has reported."""
        for message in self.status.messages():
            word, _, value = message.decode().partition(" ")
            self.supervisor.answered = True
            if word == "started":
                self.process = int(value)
            elif word == "exited":
                self.exit_code = int(value)
            else:
                self.failure, self.exit_code = value, 1
        if self.status.ended and self.exit_code is None:
            self.failure, self.exit_code = self.supervisor.end(), 1

    def wait(self, limit: float) -> bool:
        """Wait up to `limit` seconds for the process to end; True if it has."""
        deadline = time.monotonic() + limit
        while self.exit_code is None:
            if not wait_for([self.status], deadline - time.monotonic()):
                return False
            self.read_status()
        return True

    def signal(self, number: int) -> None:
        """Send the process a signal if it runs. SIGUSR1 has it write its stacks, for `stack`."""
        if self.process is not None and self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process, number)

    def stack(self) -> str:
        """Return the main thread's stack, innermost call last; "" if the process did not write it."""
        self._stacks.seek(0)
        blocks = re.split(r"\n(?=(?:Current )?[Tt]hread 0x)", self._stacks.read().decode(errors="replace"))
        lines = [line.strip() for line in blocks[-1].splitlines() if line.strip().startswith("File ")]
        own = re.compile(r"/comm/launching/(worker|supervisor)\.py")
        user = [line for line in lines if not own.search(line) and 'File "<string>"' not in line]
        return "\n".join(f"  {line}" for line in reversed(user))

    def kill(self) -> None:
        """Kill the process and the processes that it started; then `wait` for it."""
        if self.exit_code is None:
            self.supervisor.kill(self._key)

    def close(self) -> None:
        """Close the descriptors, which ends an idle process."""
        self.channel.close()
        self.status.close()
        self._stacks.close()


def stop(processes: list[RankProcess], owner: int, grace: float) -> None:
    """Stop processes and empty the list: give them `grace` seconds to end, then kill them."""
    if os.getpid() != owner:  # a fork of the caller must not stop the ranks
        return
    stopping, processes[:] = processes[:], []
    deadline = time.monotonic() + grace
    for process in stopping:
        process.channel.close()  # an idle rank ends by itself
    for process in stopping:
        if not process.wait(max(0.0, deadline - time.monotonic())):
            process.kill()
    # A supervisor that has never answered has no ranks to lose, and would answer only once it has torch.
    answered = any(process.supervisor.answered for process in stopping)
    deadline = time.monotonic() + (KILL_TIMEOUT if answered else 0.0)
    for process in stopping:
        if not process.wait(max(0.0, deadline - time.monotonic())):
            process.supervisor.abandon()
        process.close()
