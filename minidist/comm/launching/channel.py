"""Messages over a socket, as between the caller and a rank: a length of 8 bytes, then that many bytes.

A rank sends and receives with blocking calls. The caller must not block, or a rank that is stopped in the
middle of a message would stop the caller. So it queues what it sends, takes what has arrived, and waits for
either with its own time limit.
"""

from __future__ import annotations

import select
import socket
import struct
from collections import deque
from collections.abc import Iterable, Iterator

LENGTH = struct.Struct("!Q")


class Connection:
    """One end of a connection. largest: bytes of the longest message; one that announces more ends it."""

    def __init__(self, end: socket.socket, *, blocking: bool, largest: int = 2**63) -> None:
        end.setblocking(blocking)
        self._largest = largest
        self.socket = end  # to wait for
        self.ended = False  # the other end is closed: nothing more arrives, and what is sent is dropped
        self._outgoing: deque[memoryview] = deque()
        # For the length, or for the message of that length.
        self._incoming = memoryview(bytearray(LENGTH.size))
        self._filled = 0
        self._in_message = False

    @property
    def unsent(self) -> bool:
        """Whether queued messages wait for room in the socket."""
        return bool(self._outgoing)

    def send(self, message: bytes | memoryview) -> None:
        """Send a message. A non-blocking connection queues what the socket has no room for."""
        self._outgoing.extend((memoryview(LENGTH.pack(len(message))), memoryview(message)))
        self.flush()

    def flush(self) -> None:
        """Send as much of the queue as there is room for."""
        try:
            while self._outgoing:
                sent = self.socket.send(self._outgoing[0])
                rest = self._outgoing.popleft()[sent:]
                if rest:
                    self._outgoing.appendleft(rest)
        except BlockingIOError:
            return
        except OSError:
            self.ended = True
            self._outgoing.clear()

    def messages(self) -> Iterator[bytearray]:
        """Yield the messages that have arrived; on a blocking connection, all until the other end closes."""
        while not self.ended:
            try:
                count = self.socket.recv_into(self._incoming[self._filled :]) if self._incoming else 0
            except BlockingIOError:
                return
            except OSError:
                count = 0
            if self._incoming and not count:
                self.ended = True
                return
            self._filled += count
            if self._filled < len(self._incoming):
                continue
            complete, self._filled, self._in_message = self._incoming, 0, not self._in_message
            if self._in_message:
                (length,) = LENGTH.unpack(complete)
                if length > self._largest:
                    self.ended = True
                    return
                self._incoming = memoryview(bytearray(length))
            else:
                self._incoming = memoryview(bytearray(LENGTH.size))
                yield complete.obj  # type: ignore[misc] # the whole of it

    def close(self) -> None:
        """Close this end."""
        self.ended = True
        self.socket.close()


def wait_for(connections: Iterable[Connection], limit: float | None) -> list[Connection]:
    """Wait up to `limit` seconds, None for ever; return the connections with news, [] when the time is over.

    News is a message, or that the other end is closed, or room for what is queued, which is then sent.
    """
    poll, known = select.poll(), dict[int, Connection]()
    for each in connections:
        known[each.socket.fileno()] = each
        poll.register(each.socket, select.POLLIN | select.POLLOUT * each.unsent)
    ready = poll.poll(None if limit is None else 1e3 * max(0.0, limit))
    found = [known[descriptor] for descriptor, _ in ready]
    for connection in found:
        connection.flush()
    return found
