"""The warm process: it has imported torch, and forks a process for each program that `warm_python.py` sends.

It runs nothing else and has one thread, so a fork is safe. A program is the fork's main program: its exit
code, its signals and its traceback are those of an interpreter that was started for it.

    python -m tests.helpers.warm_server DESCRIPTOR [judge.recorder]
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import io
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from typing import Any, ClassVar

from tests.helpers import warm_python

IMPORTED = (
    *("torch._dynamo", "pytest", "minidist.cli.commands", "minidist.cli.train"),
    *("minidist.model.gpt", "minidist.comm.launching.worker"),
)
ONLY_FOR = {"ipykernel_launcher": ("ipykernel.kernelapp", "matplotlib.figure", "numba")}
"""What is imported before the first fork for a program."""


def serve(channel: socket.socket) -> list[str]:
    """Fork a process for each request until the channel ends. Return, in such a process, its command."""
    while True:
        request, descriptors = warm_python.receive(channel)
        if request is None:
            sys.exit()
        for each in ONLY_FOR.get(request["words"][1], ()) if request["words"][0] == "-m" else ():
            importlib.import_module(each)
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
        # A program ends with the process that started it: killed tests would else leave a notebook's kernel.
        threading.Thread(target=lambda: os.read(status, 1) or os.kill(program, signal.SIGKILL)).start()
        ended = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
        os.write(status, str(ended).encode())
        os._exit(0)
    if request["session"]:  # before the caller knows the process, whose group it may ask for
        os.setsid()
    os.write(status, str(os.getpid()).encode())
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
    """subprocess.Popen in a program: its first children that run Python are the forks that wait for it."""

    parent = 0
    spares: ClassVar[list[tuple[int, socket.socket]]] = []  # processes and their channels

    def _execute_child(self, *given: Any) -> None:
        start = warm_python.named(self, given)
        if not self.spares or self.parent != os.getpid() or list(start["args"])[:1] != [sys.executable]:
            warm_python.START(self, *given)
            return
        self.pid, channel = self.spares.pop()
        warm_python.send(channel, start, [])
        channel.close()
        self._close_pipe_fds(*(start[name] for name in warm_python.PIPES))  # type: ignore[attr-defined]
        self._child_created = True


def with_spares(command: list[str]) -> list[str]:
    """Fork processes that become this one's children when they are told to; each returns its own command."""
    count, _, below = os.environ.get(warm_python.CHILDREN, "1").partition(",")
    os.environ[warm_python.CHILDREN] = below or "0"
    _WithSpares.parent = os.getpid()
    for _ in range(int(count)):
        ours, theirs = warm_python.channel()
        process = os.fork()
        if process == 0:
            break
        theirs.close()
        _WithSpares.spares.append((process, ours))
    else:
        subprocess.Popen = _WithSpares  # type: ignore[misc]
        return command
    for _, channel in [*_WithSpares.spares, (0, ours)]:
        channel.close()
    _WithSpares.spares.clear()
    # Ctrl-C is for the programs of its group; Jupyter interrupts a kernel's before it ends it.
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    request, descriptors = warm_python.receive(theirs)
    theirs.close()
    if request is None:
        os._exit(0)
    if request["session"]:
        os.setsid()
    signal.signal(signal.SIGINT, interrupt)
    return with_spares(_started(request, descriptors))


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
    gc.disable()  # nearly all objects that the imports make stay
    if warm_python.RECORDER in sys.argv:
        os.environ["MINIDIST_CUDA_BACKEND"] = "emulator"
        recorder = importlib.import_module("minidist.kernels.judge.recorder")
        recorder.warm_up()
        recorder.warm_up = lambda: None  # not again in each fork
    else:
        for imported in IMPORTED:
            importlib.import_module(imported)
    gc.freeze()
    gc.enable()
    command = serve(socket.socket(fileno=int(sys.argv[1])))
    try:
        main(with_spares(command))
    except SystemExit as end:
        leave(end.code)
    leave(0)
