"""What can go wrong between ranks, as exceptions that name the rank."""

from __future__ import annotations

from typing import Any

FOLLOWS = "; its own error says why"
"""How a sentence ends that tells of another rank's failure: whose error has it is not the first cause."""


def _restored(kind: type[RankError], args: tuple[Any, ...], attributes: dict[str, Any]) -> RankError:
    """An error that has travelled to another process."""
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(attributes)
    return error


class RankError(RuntimeError):
    """A rank failed, and the others were stopped.

    Attributes:
        rank: the rank whose failure came first; the others' failures only follow from it.
        traceback: that rank's traceback (or stack, where it was stuck), as text; empty where it was killed.
    """

    def __init__(self, message: str, *, rank: int, traceback: str = "") -> None:
        super().__init__(f"{message}\n\n{traceback.rstrip()}" if traceback else message)
        self.summary = message
        self.rank = rank
        self.traceback = traceback

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args, self.__dict__)


class RankDied(RankError):
    """A rank's process ended before it returned: killed by a signal, or by `os._exit`.

    Attributes:
        signal: the signal's name, such as "SIGKILL", or None where the process ended by itself.
        exit_code: the exit code, as `subprocess` gives it: negative for a signal.
    """

    def __init__(self, message: str, *, rank: int, exit_code: int, signal: str | None) -> None:
        super().__init__(message, rank=rank)
        self.exit_code = exit_code
        self.signal = signal


class RankTimeout(RankError, TimeoutError):
    """One or more ranks had not returned within the time limit; `traceback` says where each one was."""


class OutOfSync(RuntimeError):
    """The ranks' copies of a model differ.

    Attributes:
        rank: the first rank, of the world, that has another value than most.
        name: of the first tensor that differs, without the word for what it is.
    """

    def __init__(self, message: str, rank: int = -1, name: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.name = name


class CollectiveError(RuntimeError):
    """A collective could not be completed: a peer is gone, did not call it in time, or called another one."""
