"""Programs that tests start in processes of their own, forked from one that has imported torch already.

A fresh interpreter takes two seconds of a core to import torch, and four if it makes an optimizer; a fork
takes 20 ms. `run` and `Popen` here are those of subprocess, for commands that begin with `sys.executable`.
Some tests of each kind of program start an interpreter all the same, as users do. `warm_server.py` has what
runs in the warm process and in its forks.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

RECORDER = "judge.recorder"
"""In the command of the judge's recorder, which is forked from a process that has loaded the compiler."""
COLD = subprocess.Popen  # also while tests put the class below in its place
START = COLD._execute_child  # type: ignore[attr-defined]
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
CHILDREN = "WARM_CHILDREN"
"""A variable in a program's environment: how many of its children are warm, 1 without. They are forks that
have run nothing yet, and stand in for the first interpreters that the program starts, such as the supervisor
of `md.launch` and the ranks of torchrun. With "3,2" each of three warm children has two of its own."""
MOST = 2**20  # bytes of a request: a command, and the environment


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """A process with a program, forked by the warm one. Signals, pipes and exit codes are as ever."""

    _status: socket.socket

    def _execute_child(self, *given: Any) -> None:
        start = named(self, given)
        assert start["args"][0] == sys.executable, start["args"]
        self._status, status = channel()
        send(server(RECORDER in str(start["args"][-1])), start, [status.fileno()])
        status.close()
        self._close_pipe_fds(*(start[name] for name in PIPES))  # type: ignore[attr-defined]
        self.pid = int(self._status.recv(20))
        self._child_created = True

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self._wait(None)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = int(self._status.recv(20))
            self._status.close()
        return self.returncode


def run(command: list[str], *, timeout: float, **given: Any) -> Any:
    """`subprocess.run` with capture_output and text."""
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **given}
    with Popen(command, **given) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@contextlib.contextmanager
def kernels() -> Iterator[None]:
    """Jupyter's kernels are forked too in this context, and so are programs that their cells start."""
    from jupyter_client import launcher

    with mock.patch.object(launcher, "Popen", Popen), mock.patch.dict(os.environ, {CHILDREN: "3,2"}):
        yield


def named(process: Any, given: tuple[Any, ...]) -> dict[str, Any]:
    """The arguments by name, of which newer Pythons have more."""
    return inspect.signature(START).bind(process, *given).arguments


def send(to: socket.socket, start: dict[str, Any], more: list[int]) -> None:
    """Send what a process is to be, and the descriptors that it gets."""
    # Where the caller gives no pipe, the program has the caller's stream.
    streams = [start[name] for name in ("p2cread", "c2pwrite", "errwrite")]
    streams = [own if each == -1 else each for own, each in enumerate(streams)]
    passed = [*start["pass_fds"]]
    request = {
        "words": list(map(str, start["args"][1:])),
        "environment": dict(os.environ if start["env"] is None else start["env"]),
        "folder": str(start["cwd"] or os.getcwd()),
        "session": start["start_new_session"],
        "blocked": list(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
        "numbers": [0, 1, 2, *passed],
    }
    socket.send_fds(to, [json.dumps(request).encode()], [*streams, *passed, *more])


def channel() -> tuple[socket.socket, socket.socket]:
    """Two ends, between which each message stays one."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST)
    return ends


def receive(end: socket.socket) -> tuple[Any, list[int]]:
    """A request and its descriptors; None at the end."""
    text, descriptors, _, _ = socket.recv_fds(end, MOST, 8)
    return json.loads(text) if text else None, descriptors


@functools.cache
def server(records: bool) -> socket.socket:
    """The channel to this process's warm one, or to its one for the judge's recorder, which ends with it."""
    ours, theirs = channel()
    process = COLD(
        [sys.executable, "-m", "tests.helpers.warm_server", str(theirs.fileno()), *[RECORDER] * records],
        pass_fds=[theirs.fileno()],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        # A process that forks may have one thread only, also in the libraries that it loads.
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
    )
    theirs.close()
    atexit.register(process.wait)
    atexit.register(ours.close)
    return ours
