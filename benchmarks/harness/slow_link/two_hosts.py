"""Two hosts on one machine, `host0` and `host1`, joined by a wire with a chosen rate and delay.

A host is a set of Linux namespaces with its own network, process numbers and name. Its processes reach the
other host only through the wire, and share no memory with it. The hosts find each other's names in /etc/hosts
and share all files, like machines of a cluster that mount the same disk.

Nothing outlasts this process, however it ends. A host lives as long as its first process, which waits for the
end of a pipe from here. Then the kernel ends all other processes in the host and removes its network.

    with TwoHosts() as hosts:
        hosts.wire(rate=1e9, delay=5e-3)
        ranks = [hosts.start(host, command) for host in range(2)]

Needs Linux, iproute2, util-linux and root; root in a user namespace (unshare --user --map-root-user) will do.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minidist.benchmarks.harness.slow_link import slow_wire as wire

NAMES = "host0", "host1"
ADDRESSES = "10.213.0.1", "10.213.0.2"
PORT = 29500
"""Port of the rendezvous; any port is free in a new network."""
QUEUE = 5000
"""Maximal number of packets that wait in a card."""
LIMIT = 20.0
"""Time limit in seconds for a host or the wire to start or to stop."""

_NAMESPACES = ("--pid", "--mount", "--net", "--uts", "--ipc")
_HOLD = """
set -e
echo {name} > /proc/sys/kernel/hostname
mount --bind {hosts} /etc/hosts
ip link set lo up
echo ready
exec cat
"""


def why_not() -> str:
    """Return in a sentence why this machine cannot have two hosts; empty if it can."""
    if not sys.platform.startswith("linux"):
        return f"two hosts need network namespaces, which {sys.platform} lacks: use Linux"
    lacking = [name for name in ("unshare", "nsenter", "ip", "mount") if shutil.which(name) is None]
    if lacking:
        return f"{', '.join(lacking)} not found: install iproute2 and util-linux"
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        return f"/dev/net/tun cannot be opened ({error.strerror}): load the kernel's module tun"
    command = ["unshare", "--fork", *_NAMESPACES, "--mount-proc", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or ["unshare failed"]
        return f"cannot make namespaces ({said[0]}): be root, or run under unshare --user --map-root-user"
    return ""


class TwoHosts:
    """A context manager that makes two hosts and their wire, and removes them at its end.

    Args:
        names: names of the hosts.

    Attributes:
        firsts: the first process of each host.
        socket: path of the socket where the wire takes settings (see `slow_wire.ask`).

    Raises:
        OSError: the kernel refuses; call `why_not` first to find out.
    """

    def __init__(self, names: tuple[str, str] = NAMES) -> None:
        self.names = names

    def __enter__(self) -> TwoHosts:
        self._kept = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            folder = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="hosts-", ignore_cleanup_errors=True))
            )
            known = "".join(f"{a} {name}\n" for a, name in zip(ADDRESSES, self.names, strict=True))
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{known}")
            self.socket, self._logs = str(folder / "wire"), str(folder / "logs")
            self.firsts = [self._host(stack, name, folder / "hosts") for name in self.names]
            (folder / "hosts").unlink()  # it stays mounted, and the wire needs an empty folder to remove
            program = [sys.executable, "-E", "-S", wire.__file__, *map(str, self.firsts), self.socket]
            self._wait_for(self._held(stack, program), "the wire")
            for host, address in enumerate(ADDRESSES):
                script = (
                    f"ip address add {address}/24 dev {wire.CARD} && "
                    f"ip link set {wire.CARD} mtu {wire.MTU} txqueuelen {QUEUE} up"
                )
                self.run(host, ["sh", "-c", script])
            self._kept = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._kept.close()

    def wire(self, rate: float | None = None, delay: float = 0.0, cut: bool = False) -> None:
        """Change the wire's settings.

        Args:
            rate: bits per second in each direction; None for no limit.
            delay: seconds that each packet travels.
            cut: drop all packets.
        """
        wire.ask(self.socket, rate=rate, delay=delay, cut=cut)

    def command(self, host: int, words: Sequence[str]) -> list[str]:
        """Return the command that runs `words` on a host."""
        return ["nsenter", "--target", str(self.firsts[host]), *_NAMESPACES, *words]

    def run(self, host: int, words: Sequence[str]) -> str:
        """Run a short command on a host, and return its output.

        Raises:
            OSError: the command fails.
        """
        done = subprocess.run(self.command(host, words), capture_output=True, text=True, timeout=LIMIT)
        if done.returncode:
            raise OSError(f"{' '.join(words)} failed on {self.names[host]}: {done.stderr.strip()}")
        return done.stdout

    def start(
        self, host: int, words: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a command on a host. It ends with the host at the latest; stdout and stderr share a pipe."""
        return subprocess.Popen(
            self.command(host, words),
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def torchrun(
        self, ranks: int, words: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> list[subprocess.Popen[str]]:
        """Start torchrun on both hosts, with `ranks` ranks on each, as one would by hand on two machines."""
        shared = ("--nnodes", "2", "--nproc-per-node", str(ranks), "--log-dir", self._logs)
        meeting = ("--master-addr", self.names[0], "--master-port", str(PORT))
        program = [sys.executable, "-m", "torch.distributed.run", *shared, *meeting]
        return [
            self.start(host, [*program, "--node-rank", str(host), *words], environment)
            for host in range(len(self.names))
        ]

    def _host(self, stack: contextlib.ExitStack, name: str, hosts: Path) -> int:
        """Make a host, and return its first process."""
        script = _HOLD.format(name=name, hosts=hosts)
        command = ["unshare", "--fork", "--kill-child", *_NAMESPACES, "--mount-proc", "sh", "-c", script]
        holder = self._held(stack, command)
        self._wait_for(holder, name)
        return int(Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text())

    def _held(self, stack: contextlib.ExitStack, command: Sequence[str]) -> subprocess.Popen[str]:
        """Start a process that ends when its input pipe closes. Ctrl-C does not reach it."""
        options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, start_new_session=True, **options)
        stack.callback(_ended, process)
        return process

    def _wait_for(self, process: subprocess.Popen[str], what: str) -> None:
        assert process.stdout is not None
        told, _, _ = select.select([process.stdout], [], [], LIMIT)
        if not told or process.stdout.readline() != "ready\n":
            raise OSError(f"{what} could not be started: {str(process.args)[:300]} failed")


def _ended(process: subprocess.Popen[str]) -> None:
    """Close a process's input pipe, and wait for its end."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.stdout.close()
    try:
        process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def counter() -> int:
    """Return the bytes, headers included, that this process's host has sent through the wire so far."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == wire.CARD:
            return int(figures.split()[8])
    raise OSError(f"this process has no card {wire.CARD}")
