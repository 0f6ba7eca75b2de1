"""Exceptions for what goes wrong between ranks, and the words for a call that the backend gave up.

The words for a rank that was killed are in launching/collect_results.py.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a program that only launches ranks imports no torch
    import torch

FOLLOWS = "; its own error says why"
"""The end of an error that only follows from another rank's failure, and so is not the first cause."""


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
    """A launcher started more or fewer ranks than the program asks for. Every rank raises it."""


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
    """A call was not completed: a peer is gone, did not make the call in time, or made a different one.

    Attributes:
        peer_ended: whether the process of another rank has ended, rather than, say, being late.
    """

    def __init__(self, message: str, peer_ended: bool = False) -> None:
        super().__init__(message)
        self.peer_ended = peer_ended


out_of_step: list[str] = []
"""The first error of a call that had begun in this process, if any. Other ranks may still be in that call, or
its messages on the way, so a `Cluster` runs nothing more here."""


def note_out_of_step(text: str) -> None:
    """Note that the ranks are out of step from now on."""
    if not out_of_step:
        out_of_step.append(text)


def failed(
    what: str, ranks: Sequence[int], error: RuntimeError, leaves_traces: bool = True
) -> CollectiveError:
    """Return the error for a call that the backend could not complete, with the reason in words.

    leaves_traces: note that the ranks are out of step from now on.
    """
    import torch.distributed as dist

    text, peer_ended = str(error), False
    if "imed out" in text:
        reason = (
            "the other ranks did not all make this call within the time limit; one may have skipped it, "
            "or still be computing: look there, or give a longer timeout="
        )
        here = os.environ.get("LOCAL_WORLD_SIZE", "")  # a launcher says how many ranks it started here
        if here.isdigit() and dist.is_initialized() and int(here) < dist.get_world_size():
            reason += "; or their hosts may no longer reach each other: try ping from one to the other"
    elif any(sign in text for sign in ("closed by peer", "reset by peer", "Broken pipe", "refused")):
        reason, peer_ended = f"another rank's process has ended{FOLLOWS}", True
    else:
        reason = text
    text = f"{what} on rank {dist.get_rank()} with ranks {', '.join(map(str, ranks))}: {reason}"
    if leaves_traces:
        note_out_of_step(text)
    return CollectiveError(text, peer_ended)


def described(x: torch.Tensor) -> str:
    """Return how an error names a tensor: float32[3x4]."""
    return describe_tensor(str(x.dtype).removeprefix("torch."), x.shape)


def describe_tensor(dtype: str, shape: Sequence[int]) -> str:
    """Return how an error names a tensor of this dtype and shape: float32[3x4]."""
    return f"{dtype}[{'x'.join(map(str, shape)) or 'scalar'}]"
