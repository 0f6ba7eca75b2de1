"""Processes that come and go: each has a connection to one coordinator on the same machine.

A process group of torch can neither lose a rank nor gain one. Here every process is alone with the
coordinator. When it is killed, the kernel closes its connection, and the coordinator learns that at once. If
that happens in the middle of a message, the message is dropped: only a whole one counts. No side ever blocks
on the other, and every wait has a limit.

Messages are tensors of bytes. They travel through sockets of 127.0.0.1 and count in the ledger.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

import torch
from torch import Tensor

from minidist._arguments import check_seconds, check_whole
from minidist.comm import ledgers
from minidist.comm.errors import CollectiveError
from minidist.comm.launching.channel import Connection, wait_for

LOOPBACK = "127.0.0.1"


def check_port(port: int) -> None:
    """Refuse what is no port to listen on."""
    check_whole("port", port, 0)
    if port > 65535:
        raise ValueError(f"port is {port}; give at most 65535, or 0 for a free one")


class Members:
    """The coordinator's side: a connection to each member. Members are numbered as they come, from 0.

    largest: bytes of the longest message that a member sends; one that announces more is dropped.
    """

    def __init__(self, largest: int, port: int = 0) -> None:
        listener = socket.create_server((LOOPBACK, port), backlog=64)
        self.address = f"{LOOPBACK}:{listener.getsockname()[1]}"
        self._listener = Connection(listener, blocking=False)  # only to wait for
        self._largest, self._came = largest, 0
        self._connections: dict[int, Connection] = {}

    def wait(self, limit: float) -> list[tuple[int, bytearray | None]]:
        """Wait up to `limit` seconds; return (member, message) for what came, and None for who has gone."""
        arrived: list[tuple[int, bytearray | None]] = []
        ready = wait_for([self._listener, *self._connections.values()], limit)
        for member, connection in [*self._connections.items()]:
            if connection in ready:
                arrived += [(member, message) for message in connection.messages()]
                if connection.ended:
                    self.drop(member)
                    arrived.append((member, None))
        if self._listener in ready:
            self._accept()
        return arrived

    def send(self, member: int, message: Tensor) -> None:  # (k,) uint8
        """Queue a message for a member, which may be gone by now. Sends the message's bytes."""
        if member in self._connections:
            _note("send", message, 0.0)
            self._connections[member].send(message.numpy().data)

    def drop(self, member: int) -> None:
        """Close the connection to a member."""
        if member in self._connections:
            self._connections.pop(member).close()

    def close(self, limit: float) -> None:
        """Send what is queued, for up to `limit` seconds, and close all connections."""
        deadline = time.monotonic() + limit
        try:
            while any(each.unsent for each in self._connections.values()) and time.monotonic() < deadline:
                self.wait(deadline - time.monotonic())
        finally:
            for member in [*self._connections]:
                self.drop(member)
            self._listener.close()

    def _accept(self) -> None:
        try:
            end, _ = self._listener.socket.accept()
        except OSError:  # it is gone already
            return
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections[self._came] = Connection(end, blocking=False, largest=self._largest)
        self._came += 1


class Membership:
    """A member's side: its connection to the coordinator at `address`, such as "127.0.0.1:29400".

    timeout: seconds that an answer may take. Raises ConnectionError if nobody listens there.
    """

    def __init__(self, address: str, timeout: float) -> None:
        host, _, port = address.rpartition(":")
        if host != LOOPBACK or not port.isdecimal() or not 0 < int(port) <= 65535:
            raise ValueError(f"coordinator is {address!r}; give its address, such as '{LOOPBACK}:29400'")
        check_seconds("timeout", timeout)
        self.address, self.timeout = address, timeout
        try:
            end = socket.create_connection((host, int(port)), timeout)
        except ConnectionError as error:
            raise type(error)(f"no coordinator listens at {address}: {error}; start it first") from error
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = Connection(end, blocking=False)
        self._receiving = threading.RLock()

    def exchange(self, message: Tensor) -> Tensor:  # (k,) uint8 -> (m,) uint8
        """Send a message, and return the coordinator's answer. Sends the message's bytes.

        Raises CollectiveError if the coordinator has ended or left this member out, or does not answer.
        """
        begun = time.perf_counter()
        self._connection.send(message.numpy().data)
        answer = self.receive()
        _note("exchange", message, time.perf_counter() - begun)
        return answer

    def receive(self) -> Tensor:  # (m,) uint8
        """Return the coordinator's next message; raises as `exchange` does, and then this member has left."""
        with self._receiving:
            try:
                return self._receive()
            except BaseException:
                self.close()
                raise

    def _receive(self) -> Tensor:
        connection, begun = self._connection, time.perf_counter()
        while not connection.ended:
            left = self.timeout - (time.perf_counter() - begun)
            if left <= 0 or not wait_for([connection], left):
                text = f"the coordinator at {self.address} did not answer within {self.timeout:g} s"
                raise CollectiveError(text)
            for answer in connection.messages():
                return torch.frombuffer(answer, dtype=torch.uint8)
        why = "has ended, or has left this process out because it took too long"
        raise CollectiveError(f"the coordinator at {self.address} {why}", peer_ended=True)

    def close(self) -> None:
        """Leave; the coordinator waits for this member no longer, and a thread in `receive` raises."""
        with suppress(OSError):  # it is closed already
            self._connection.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which still has the socket
        with self._receiving:
            self._connection.close()


def _note(name: str, message: Tensor, seconds: float) -> None:
    """Write a call into every open ledger."""
    sent = len(message)
    ledgers.count(ledgers.Call(name, "socket", "uint8", (sent,), (), sent, sent, seconds, seconds))
