"""Exceptions for what goes wrong between ranks; they name the rank."""

from __future__ import annotations

FOLLOWS = "; its own error says why"
"""The end of an error that only follows from another rank's failure, and is thus not the first cause."""


class RankError(RuntimeError):
    """A rank failed, and the others were stopped.

    Attributes:
        rank: the rank that failed first; the others' failures only follow from it.
        traceback: the text of that rank's traceback, or of its stack if it was stuck; empty if it was killed.
    """

    # pickle makes an error from its message alone, and then restores its attributes.
    def __init__(self, message: str, *, rank: int = -1, traceback: str = "") -> None:
        super().__init__(f"{message}\n\n{traceback.rstrip()}" if traceback else message)
        self.summary = message
        self.rank = rank
        self.traceback = traceback


class RankDied(RankError):
    """A rank's process ended before it returned: killed by a signal, or by `os._exit`.

    Attributes:
        signal: the signal's name, such as "SIGKILL"; None if the process ended by itself.
        exit_code: the exit code, as `subprocess` gives it: negative for a signal.
    """

    def __init__(
        self, message: str, *, rank: int = -1, exit_code: int = 0, signal: str | None = None
    ) -> None:
        super().__init__(message, rank=rank)
        self.exit_code = exit_code
        self.signal = signal


class RankTimeout(RankError, TimeoutError):
    """One or more ranks had not returned within the time limit; `traceback` says where each one was."""


class RankCountError(ValueError):
    """A launcher started another number of ranks than the program asks for. Every rank raises it."""


class OutOfSync(RuntimeError):
    """The ranks' copies of a model differ.

    Attributes:
        rank: the first rank of the world whose value differs from that of most.
        name: the first tensor that differs, without the word for what it is.
    """

    def __init__(self, message: str, rank: int = -1, name: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.name = name


class CollectiveError(RuntimeError):
    """A call was not completed: a peer is gone, did not make the call in time, or made another one."""
