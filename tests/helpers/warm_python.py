"""Programs that tests start in processes of their own, forked from one that has imported torch already.

A fresh interpreter takes two seconds of a core to import torch, and four if it makes an optimizer; a fork takes
20 ms. `run` and `Popen` here are those of subprocess, for commands that begin with `sys.executable`. Some tests
of each kind of program start an interpreter all the same, as users do.

Each program also has a warm child, which has run nothing yet: a second fork, which stands in for the first
interpreter that the program starts, as `md.launch` does for its supervisor; or more of them, see `CHILDREN`.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import gc
import importlib
import inspect
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from typing import Any, ClassVar

IMPORTED = ("torch._dynamo", "pytest", "minidist.cli.commands", "minidist.cli.train", "minidist.model.gpt", "minidist.comm.launching.worker")
START = subprocess.Popen._execute_child  # type: ignore[attr-defined]
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
CHILDREN = "WARM_CHILDREN"  # a variable in the environment of a program: how many of its children are warm
MOST = 2**20  # bytes of a request: a command, and the environment


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """A process with a program, forked by the warm one. Signals, pipes and exit codes are as ever."""

    _status: socket.socket

    def _execute_child(self, *given: Any) -> None:
        start = _named(self, given)
        assert start["args"][0] == sys.executable, start["args"]
        self._status, status = socket.socketpair()
        _request(_server(), start, [status.fileno()])
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


def run(command: list[str], *, timeout: float, check: bool = False, **given: Any) -> Any:
    """`subprocess.run` with capture_output, in a warm process."""
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **given}
    with Popen(command, **given) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def _named(process: Any, given: tuple[Any, ...]) -> dict[str, Any]:
    """The arguments by name, of which newer Pythons have more."""
    return inspect.signature(START).bind(process, *given).arguments


def _request(channel: socket.socket, start: dict[str, Any], more: list[int]) -> None:
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
    socket.send_fds(channel, [json.dumps(request).encode()], [*streams, *passed, *more])


def _channel() -> tuple[socket.socket, socket.socket]:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST)
    return ends


def _receive(channel: socket.socket) -> tuple[Any, list[int]]:
    """A request and its descriptors; None at the end."""
    text, descriptors, _, _ = socket.recv_fds(channel, MOST, 8)
    return json.loads(text) if text else None, descriptors


@functools.cache
def _server() -> socket.socket:
    """The channel to this process's warm one, which ends with it."""
    ours, theirs = _channel()
    process = subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        # A process that forks may have one thread only, also in the libraries that it loads.
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
    )
    theirs.close()
    atexit.register(process.wait)
    atexit.register(ours.close)
    return ours


# The rest runs in the warm process and its forks.


def serve(channel: socket.socket) -> list[str]:
    """Fork a process for each request until the channel ends. Return, in such a process, its command."""
    while True:
        request, descriptors = _receive(channel)
        if request is None:
            sys.exit()
        if os.fork() == 0:
            break
        os.wait()
        for each in descriptors:
            os.close(each)
    channel.close()
    status = descriptors.pop()
    # The process that waits for the program is a grandchild, since a child would have to be waited for here.
    if os.fork():
        os._exit(0)
    program = os.fork()
    if program:
        for each in (*descriptors, 1, 2):
            os.close(each)
        os.write(status, str(program).encode())
        ended = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
        os.write(status, str(ended).encode())
        os._exit(0)
    os.close(status)
    return _started(request, descriptors)


def _started(request: Any, descriptors: list[int]) -> list[str]:
    """In a new process: its streams, folder and environment. Return its command."""
    # Out of the way first: one may have come under a number that another is to have.
    above = [fcntl.fcntl(each, fcntl.F_DUPFD, 100) for each in descriptors]
    for each in descriptors:
        os.close(each)
    for number, each in zip(request["numbers"], above, strict=True):
        os.dup2(each, number)
        os.close(each)
    if request["session"]:
        os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    _become(request["environment"], request["folder"])
    words: list[str] = request["words"]
    return words


def _become(environment: dict[str, str], folder: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    tempfile.tempdir = None  # which names one of the variables
    sys.path[1:1] = [p for p in environment.get("PYTHONPATH", "").split(":") if p not in sys.path]
    for name, number in (("stdout", 1), ("stderr", 2)):
        raw = open(number, "wb", closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(raw, "utf-8", line_buffering=True, write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


class _WithSpares(subprocess.Popen):  # type: ignore[type-arg]
    """subprocess.Popen in a program: its first children with Python programs are the forks that wait for one."""

    parent = 0
    spares: ClassVar[list[tuple[int, socket.socket]]] = []  # processes and their channels

    def _execute_child(self, *given: Any) -> None:
        start = _named(self, given)
        if not self.spares or self.parent != os.getpid() or list(start["args"])[:1] != [sys.executable]:
            START(self, *given)
            return
        self.pid, channel = self.spares.pop()
        _request(channel, start, [])
        channel.close()
        self._close_pipe_fds(*(start[name] for name in PIPES))  # type: ignore[attr-defined]
        self._child_created = True


def fork_spares(count: int) -> list[str] | None:
    """Fork processes that become this one's children when they are told to; return, there, the command."""
    _WithSpares.parent = os.getpid()
    for _ in range(count):
        ours, theirs = _channel()
        process = os.fork()
        if process == 0:
            break
        theirs.close()
        _WithSpares.spares.append((process, ours))
    else:
        subprocess.Popen = _WithSpares  # type: ignore[misc]
        return None
    for _, channel in [*_WithSpares.spares, (0, ours)]:
        channel.close()
    request, descriptors = _receive(theirs)
    theirs.close()
    if request is None:
        os._exit(0)
    return _started(request, descriptors)


def main(words: list[str]) -> None:
    """Run a program as `python WORDS` would."""
    sys.orig_argv[:] = [sys.executable, *words]
    words = words[words[0] == "-u" :]  # as torchrun gives; no stream has a buffer here
    if words[0] in ("-c", "-m"):
        sys.argv[:] = [words[0], *words[2:]]
        sys.path[0] = "" if words[0] == "-c" else os.getcwd()
    else:
        sys.argv[:] = words
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
    if words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    module = type(sys)("__main__")
    if words[0] == "-c":
        name, text = "<string>", words[1]
    else:
        name = module.__file__ = words[0]
        with open(name) as file:
            text = file.read()
    sys.modules["__main__"] = module
    exec(compile(text, name, "exec"), module.__dict__)


def leave(code: Any) -> None:
    """End as Python does, without taking all of torch apart, for 0.2 s."""
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(code if isinstance(code, int) else bool(code))


if __name__ == "__main__":
    for imported in IMPORTED:
        importlib.import_module(imported)
    gc.collect()
    gc.freeze()
    command = serve(socket.socket(fileno=int(sys.argv[1])))
    try:
        main(fork_spares(int(os.environ.get(CHILDREN, "1"))) or command)
    except SystemExit as end:
        leave(end.code)
    leave(0)
