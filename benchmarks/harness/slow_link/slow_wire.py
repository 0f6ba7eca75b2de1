"""A program that is the wire between the two hosts of `two_hosts.py`, with a chosen rate and delay.

Each end is a TUN device, a network card whose packets the kernel hands to this program. The program passes
them to the other end later: a packet of B bits keeps the wire busy for B / rate seconds and arrives `delay`
seconds after that. Packets that wait for the wire queue in the card. A cut wire drops packets silently, like
a switch without power. (The kernel's own means to delay packets, netem, is missing in many kernels.)

    python slow_wire.py PROCESS PROCESS SOCKET

It makes the cards in the namespaces of the two processes, takes settings as JSON on the Unix socket, and ends
when its standard input closes. Then it removes the socket, and the socket's folder if that is empty, since
the program that started it may have been killed.
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
"""Maximal bytes of a packet. At 1 Gbit/s it takes 0.24 ms, which is little compared with the delays in use,
and one Python process can forward enough packets of this size."""
AHEAD = 5e-3
"""Take packets from a card so many seconds before the wire is free, so that the wire never idles, even where
this program wakes up late: with 1 ms, a wire of 100 Mbit/s carried 87 to 92 on a busy machine."""

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


@dataclass
class Settings:
    """The current settings of the wire."""

    rate: float | None = None  # bits per second in each direction; None for no limit
    delay: float = 0.0  # seconds
    cut: bool = False


class Direction:
    """The packets in one direction."""

    def __init__(self, source: int, target: int) -> None:
        self.source, self.target = source, target
        self.free_at = 0.0  # time when the wire has sent all taken packets
        self.under_way: deque[tuple[float, bytes]] = deque()  # arrival time and packet

    def take(self, settings: Settings, now: float) -> None:
        """Take the packets that can be sent now, and compute when they arrive."""
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
        """Write the packets that have arrived to the other card."""
        while self.under_way and self.under_way[0][0] <= now:
            with contextlib.suppress(OSError):  # if the card is down or full, the packet is lost
                os.write(self.target, self.under_way.popleft()[1])


def card_of(process: int) -> int:
    """Make a card in the network namespace of a process, and return its file descriptor."""
    namespace = os.open(f"/proc/{process}/ns/net", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot enter the network namespace")
    os.close(namespace)
    card = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(card, _TUNSETIFF, struct.pack("16sH22x", CARD.encode(), _IFF_TUN | _IFF_NO_PI))
    return card


def carry(cards: tuple[int, int], control: socket.socket) -> None:
    """Carry packets until the standard input closes."""
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
    """Read new settings from a client, and confirm them."""
    connection, _ = control.accept()
    with connection:
        settings = Settings(**json.loads(connection.recv(4096)))
        connection.sendall(b"done")
    return settings


def ask(path: str, **settings: Any) -> None:
    """Change a wire's `Settings`, from any process that can reach its socket.

    Raises:
        TimeoutError: the wire does not answer within 10 s.
        ConnectionError: the wire rejects the settings.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10.0)
        connection.connect(path)
        connection.sendall(json.dumps(settings).encode())
        if connection.recv(4) != b"done":
            raise ConnectionError(f"the wire at {path} rejects the settings {settings}")


def main() -> None:
    """Make the cards, print "ready", and carry packets."""
    *processes, path = sys.argv[1:]
    # Both cards have the same name, each in its own namespace. The namespaces share all files.
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
