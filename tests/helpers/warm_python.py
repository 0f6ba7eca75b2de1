"""Programs that tests start in processes of their own, forked from one that has imported torch already.

A fresh interpreter takes two seconds of a core to import torch, and four if it makes an optimizer; a fork takes
20 ms. `run` and `Popen` here are those of subprocess, for commands that begin with `sys.executable`. Some tests
of each kind of program start an interpreter all the same, as users do.

Each program also has a warm supervisor: a second fork, which stands in for the interpreter that the first
`md.launch` would start. What a program does with it is the same: it is a child that has run nothing yet.
"""

from __future__ import annotations

import atexit
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
from collections.abc import Mapping
from typing import Any

IMPORTED = ("torch._dynamo", "pytest", "minidist.cli.commands", "minidist.cli.train", "minidist.model.gpt", "minidist.comm.launching.worker")
START = subprocess.Popen._execute_child  # type: ignore[attr-defined]
MOST = 2**20  # bytes of a request: a command, and the environment


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """A process with a program, forked by the warm one. Signals, pipes and exit codes are as ever."""

    _status: socket.socket

    def _execute_child(self, *given: Any) -> None:
        start = _named(self, given)
        assert start["args"][0] == sys.executable, start["args"]
        # Where the caller gives no pipe, the program has the caller's stream.
        streams = [start[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = [own if given == -1 else given for own, given in enumerate(streams)]
        self._status, status = socket.socketpair()
        request = {
            "words": list(map(str, start["args"][1:])),
            "environment": dict(os.environ if start["env"] is None else start["env"]),
            "folder": str(start["cwd"] or os.getcwd()),
            "session": start["start_new_session"],
        }
        _send(_server(), request, [*streams, status.fileno()])
        status.close()
        self._close_pipe_fds(*(start[n] for n in list(start) if n[:3] in ("p2c", "c2p", "err")))  # type: ignore[attr-defined]
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


def _send(channel: socket.socket, request: Mapping[str, Any], descriptors: list[int]) -> None:
    socket.send_fds(channel, [json.dumps(request).encode()], descriptors)


def _receive(channel: socket.socket) -> tuple[Any, list[int]]:
    """A request and its descriptors; None at the end."""
    text, descriptors, _, _ = socket.recv_fds(channel, MOST, 8)
    return json.loads(text) if text else None, descriptors


@functools.cache
def _server() -> socket.socket:
    """The channel to this process's warm one, which ends with it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST)
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
    for number, each in enumerate(descriptors):
        os.dup2(each, number)
        os.close(each)
    if request["session"]:
        os.setsid()
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
        stream = io.TextIOWrapper(raw, "utf-8", line_buffering=number == 2, write_through=number == 2)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


class _WithSupervisor(subprocess.Popen):  # type: ignore[type-arg]
    """subprocess.Popen in a program: the first supervisor is the fork that waits to be one."""

    spare: tuple[int, int, socket.socket] | None = None  # whose child it is; its process; its channel

    def _execute_child(self, *given: Any) -> None:
        start = _named(self, given)
        spare = _WithSupervisor.spare
        wanted = "supervisor.main(" in " ".join(map(str, start["args"]))
        if spare is None or spare[0] != os.getpid() or not wanted:
            START(self, *given)
            return
        _WithSupervisor.spare = None
        _, self.pid, channel = spare
        number = start["pass_fds"][0]
        request = {"code": start["args"][2], "environment": dict(start["env"]), "number": number}
        _send(channel, request, [number])
        channel.close()
        self._child_created = True


def fork_supervisor() -> None:
    """Fork the process that becomes the supervisor of this one's ranks when it is told to, if ever."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST)
    process = os.fork()
    if process:
        theirs.close()
        _WithSupervisor.spare = os.getpid(), process, ours
        subprocess.Popen = _WithSupervisor  # type: ignore[misc]
        return
    ours.close()
    os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    request, descriptors = _receive(theirs)
    theirs.close()
    if request is None:
        os._exit(0)
    if descriptors[0] != request["number"]:
        os.dup2(descriptors[0], request["number"])
        os.close(descriptors[0])
    _become(request["environment"], os.getcwd())
    sys.argv[:] = ["-c"]
    exec(compile(request["code"], "<string>", "exec"), {"__name__": "__main__"})
    os._exit(0)


def main(words: list[str]) -> None:
    """Run a program as `python WORDS` would."""
    sys.orig_argv[:] = [sys.executable, *words]
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
    fork_supervisor()
    try:
        main(command)
    except SystemExit as end:
        leave(end.code)
    leave(0)
