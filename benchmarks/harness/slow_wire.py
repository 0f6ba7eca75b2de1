"""The wire between two hosts of `two_hosts.py`, as slow as it is told to be: a program of its own.

Each side is a network card of the kernel's that hands its packets to this program (a TUN device), which hands
them to the other side later: a packet of B bits keeps the wire busy for B / rate seconds, and is there
`delay` seconds after that. Packets that wait for the wire wait in the card. A wire that is cut swallows them,
as a switch does that has lost its power: nobody is told. (The kernel's own way to delay, netem, is missing in
many kernels.)

    python slow_wire.py PROCESS PROCESS SOCKET

The cards are made in the namespaces of the two processes. It takes settings on the Unix socket, in JSON, and
ends with its standard input, whose other end the program that started it has. The socket goes with it, and
the folder of the socket too where nothing else lies in it: who started it may have been killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import socket
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

CARD = "wire0"
MTU = 30_000
"""Bytes of a packet at most. At 1 Gbit/s it takes 0.24 ms: little beside the delays that are asked for, and
enough of them go through one Python process."""
AHEAD = 1e-3
"""Seconds of packets that are taken from a card before the wire is free, so that it is never idle."""

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


@dataclass
class Settings:
    """How the wire is now."""

    rate: float | None = None  # bits a second, in each direction; None for as many as come
    delay: float = 0.0  # seconds
    cut: bool = False


class Direction:
    """Packets that go one way."""

    def __init__(self, source: int, target: int) -> None:
        self.source, self.target = source, target
        self.free_at = 0.0  # when the wire has sent what was taken
        self.under_way: deque[tuple[float, bytes]] = deque()  # when each arrives

    def take(self, settings: Settings, now: float) -> None:
        """Take the packets that can go, and say when they arrive."""
        while self.free_at <= now + AHEAD:
            try:
                packet = os.read(self.source, MTU + 100)
            except BlockingIOError:
                return
            if settings.cut:
                continue
            begun = max(now, self.free_at)
            self.free_at = begun + (8 * len(packet) / settings.rate if settings.rate else 0.0)
            self.under_way.append((self.free_at + settings.delay, packet))

    def deliver(self, now: float) -> None:
        """Hand over the packets that have arrived."""
        while self.under_way and self.under_way[0][0] <= now:
            with contextlib.suppress(OSError):  # a card that is down, or full: the packet is lost
                os.write(self.target, self.under_way.popleft()[1])


def card_of(process: int) -> int:
    """Make a card in the network namespace of a process."""
    namespace = os.open(f"/proc/{process}/ns/net", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot enter the network namespace")
    os.close(namespace)
    card = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(card, _TUNSETIFF, struct.pack("16sH22x", CARD.encode(), _IFF_TUN | _IFF_NO_PI))
    return card


def carry(cards: tuple[int, int], control: socket.socket) -> None:
    """Carry packets until the standard input ends."""
    settings, directions = Settings(), [Direction(*cards), Direction(*reversed(cards))]
    while True:
        now = time.monotonic()
        wanted, wake = [0, control.fileno()], 1.0
        for direction in directions:
            if direction.free_at <= now + AHEAD:
                wanted.append(direction.source)
            else:
                wake = min(wake, direction.free_at - AHEAD - now)
            if direction.under_way:
                wake = min(wake, direction.under_way[0][0] - now)
        ready, _, _ = select.select(wanted, [], [], max(0.0, wake))
        if 0 in ready and not os.read(0, 1):
            return
        now = time.monotonic()
        for direction in directions:
            if direction.source in ready:
                direction.take(settings, now)
            direction.deliver(now)
        if control.fileno() in ready:
            settings = answer(control)


def answer(control: socket.socket) -> Settings:
    """Read new settings, and say that they hold from now on."""
    connection, _ = control.accept()
    with connection:
        settings = Settings(**json.loads(connection.recv(4096)))
        connection.sendall(b"done")
    return settings


def ask(path: str, **settings: Any) -> None:
    """Set a wire, from any process that sees its socket; see `Settings`.

    Raises:
        TimeoutError: it does not answer.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10.0)
        connection.connect(path)
        connection.sendall(json.dumps(settings).encode())
        if connection.recv(4) != b"done":
            raise ConnectionError(f"the wire at {path} does not take {settings}")


def main() -> None:
    """Make the cards, say so, and carry."""
    *processes, path = sys.argv[1:]
    # Both cards have the same name, each in its namespace. Files are the same in all of them.
    first, second = (card_of(int(process)) for process in processes)
    with socket.socket(socket.AF_UNIX) as control:
        control.bind(path)
        control.listen()
        print("ready", flush=True)
        try:
            carry((first, second), control)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)
                os.rmdir(os.path.dirname(path))


if __name__ == "__main__":
    main()
